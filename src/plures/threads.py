"""How many threads torch uses: one on request, or one for each of several things that run side by side."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_making = threading.Lock()
_here = threading.local()


def side_by_side(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int, device: str = "cpu"
) -> list[Result]:
    """Call a function on every item, as many at a time as `threads`; inside, torch uses one thread.

        logits = side_by_side(network, batches, threads=2)

    Gradients, inference mode and the autocast of the device are on or off in there as they are here: torch keeps
    them apart for each thread.
    """
    if getattr(_here, "in_pool", False):  # whoever waited here for a thread might wait for itself
        return [function(item) for item in items]
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def run(item: Item) -> Result:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(gradients),
            torch.autocast(device, dtype, enabled=autocast),
        ):
            return function(item)

    with _making:
        pool = _pool(max(1, min(threads, len(items))))
    return list(pool.map(run, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Keep threads between calls: to start them takes longer than a small network runs."""
    before = torch.get_num_threads()
    all_there = threading.Barrier(threads)

    def prepare() -> None:
        _here.in_pool = True
        torch.set_num_threads(1)
        torch.get_num_threads()  # without this, torch takes the number of the whole process on the first operation
        all_there.wait()

    pool = ThreadPoolExecutor(threads, "plures", prepare)
    try:
        for started in [pool.submit(int) for _ in range(threads)]:
            started.result()
    except BaseException:
        all_there.abort()  # those that came need not wait for the one that could not
        raise
    finally:
        torch.set_num_threads(before)  # what a thread tells torch holds for all threads that are new later, too
    return pool


def _forget() -> None:
    """Start anew in a forked process, which has neither its parent's threads nor whoever held the lock."""
    global _making
    _making = threading.Lock()
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
