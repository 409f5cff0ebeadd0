"""Run small things side by side, on one thread each, where one alone cannot keep several cores busy."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_MAKING = threading.Lock()


def side_by_side(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int, device: str = "cpu"
) -> list[Result]:
    """Call a function on every item, as many at a time as `threads`; inside, torch uses one thread.

        logits = side_by_side(network, batches, threads=2)

    Gradients, inference mode and the autocast of the device are on or off in there as they are here: torch keeps
    them apart for each thread.
    """
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def run(item: Item) -> Result:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(gradients),
            torch.autocast(device, dtype, enabled=autocast),
        ):
            return function(item)

    with _MAKING:
        pool = _pool(threads)
    return list(pool.map(run, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Keep threads between calls: to start them takes longer than a small network runs."""
    before = torch.get_num_threads()
    all_there = threading.Barrier(threads)

    def prepare() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # without this, torch takes the number of the whole process on the first operation
        all_there.wait()

    pool = ThreadPoolExecutor(threads, "plures", prepare)
    try:
        for started in [pool.submit(int) for _ in range(threads)]:
            started.result()
    finally:
        torch.set_num_threads(before)  # what a thread tells torch holds for all threads that are new later, too
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process does not have its parent's threads
