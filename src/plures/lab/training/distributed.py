"""The processes that train together: one, or several on one machine or on many."""

import atexit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import broadcast, broadcast_object_list, gather_object, parse_flag_from_env
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from plures.errors import PluresError
from plures.lab.recipes import Recipe
from plures.stage import Stage

Result = TypeVar("Result")
LARGE = 2**24  # bytes of a stage that are not left for Python to collect some day
TRACKED = ("loss", "train_accuracy", "validation_accuracy", "learning_rate", "images_per_second")


class Processes:
    """The processes that train together; with one process, nothing is sent.

    processes = Processes("bf16")
    contents = processes.on_main(path.read_bytes)  # one reads, all get the bytes
    """

    def __init__(self, precision: str, trackers: Sequence[Any] = (), folder: str | Path | None = None) -> None:
        _refuse_missing(trackers, folder)
        # Accelerate keeps the precision of its first use for the whole process; another run may want another one.
        AcceleratorState._reset_state()
        # With this, accelerate also sees the several processes that torchrun started on a machine without a GPU.
        cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
        alone = not torch.distributed.is_initialized()
        device = PartialState(cpu=cpu).device
        self.precision = resolve(precision, device)
        if self.precision == "fp16" and device.type == "cpu":
            raise PluresError("precision='fp16' needs a GPU: use auto, bf16 or no on a CPU")
        self.accelerator = Accelerator(
            cpu=cpu,
            mixed_precision=self.precision,
            log_with=list(trackers) or None,
            project_dir=None if folder is None else str(folder),
        )
        self.rank: int = self.accelerator.process_index
        self.world: int = self.accelerator.num_processes
        self.main: bool = self.accelerator.is_main_process
        self.device: torch.device = self.accelerator.device
        if alone and self.world > 1:
            atexit.register(_leave)  # threads of the group must not outlive the interpreter

    def prepare(self, stage: Stage, optimizer: Optimizer) -> tuple[nn.Module, AcceleratedOptimizer]:
        """Wrap a stage and its optimizer for mixed precision and for exchanging gradients."""
        # Buffers are not exchanged at every step: masks never change, and batch-norm statistics are averaged once an
        # epoch, which lets them see the images of all processes instead of those of the first.
        names = [name for name, _ in stage.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, names)  # type: ignore[no-untyped-call]
        model, stepper = self.accelerator.prepare(stage, optimizer)
        return model, stepper

    def let_go(self, size: int) -> None:
        """Release what was prepared: a stage of `size` bytes, its gradients and its momentum."""
        if size >= LARGE:
            self.accelerator.free_memory()
        else:  # which also collects garbage: it takes longer than to train a small stage
            self.accelerator._models.clear()
            self.accelerator._optimizers.clear()

    @contextmanager
    def tracking(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Start the trackers, if any were asked for, and finish them at the end."""
        plain = {name: value for name, value in settings.items() if isinstance(value, int | float | str)}
        if self.accelerator.log_with:
            self.accelerator.init_trackers("plures", config=plain)
        try:
            yield
        finally:
            # Not accelerator.end_training, which would also end the group of processes.
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def track(self, record: Mapping[str, Any], step: int) -> None:
        """Hand the numbers of an epoch to the trackers."""
        if self.accelerator.trackers:
            numbers = {f"{record['stage']}/{key}": record[key] for key in TRACKED if record[key] is not None}
            self.accelerator.log(numbers, step=step)

    def loss_scale(self) -> dict[str, float]:
        """Return the state of the loss scale of fp16; with other precisions, an empty dict."""
        scaler = self.accelerator.scaler
        return {} if scaler is None else scaler.state_dict()

    def set_loss_scale(self, state: Mapping[str, float]) -> None:
        """Continue with the loss scale that `loss_scale` gave."""
        if self.accelerator.scaler is not None and state:
            self.accelerator.scaler.load_state_dict(dict(state))

    def batch_size(self, recipe: Recipe) -> int:
        """Return the images per step of one process."""
        if recipe.batch_size % self.world:
            raise PluresError(
                f"batch_size={recipe.batch_size} cannot be divided among {self.world} processes: use a multiple"
            )
        return recipe.batch_size // self.world

    def on_main(self, action: Callable[[], Result]) -> Result:
        """Run on the main process alone; its result, or its error, is everybody's."""
        if self.world == 1:
            return action()
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = action()
            except PluresError as error:
                outcome[1] = str(error)
        result, failure = broadcast_object_list(outcome)
        if failure is not None:
            raise PluresError(failure)
        return result  # type: ignore[no-any-return]

    def check_equal(self, value: str, complaint: str) -> None:
        """Refuse a value that is not the same in all processes."""
        if self.world > 1 and len(set(gather_object([value]))) > 1:
            raise PluresError(complaint)

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of the values of all processes."""
        return self.accelerator.reduce(value, reduction="sum") if self.world > 1 else value

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace floating-point tensors by their mean over all processes, in place."""
        self._together(tensors, lambda flat: self.accelerator.reduce(flat, reduction="mean"))

    def take_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Replace floating-point tensors by those of the main process, in place."""
        self._together(tensors, broadcast)

    def _together(self, tensors: Iterable[Tensor], exchange: Callable[[Tensor], Tensor]) -> None:
        """Send many tensors as one: the wait for the network is the cost."""
        chosen = [tensor for tensor in tensors if tensor.is_floating_point()]
        if self.world == 1 or not chosen:
            return
        with torch.no_grad():
            flat = exchange(torch.cat([tensor.reshape(-1) for tensor in chosen]))
            start = 0
            for tensor in chosen:
                tensor.copy_(flat[start : start + tensor.numel()].reshape(tensor.shape))
                start += tensor.numel()


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _refuse_missing(trackers: Sequence[Any], folder: str | Path | None) -> None:
    for tracker in trackers:
        if isinstance(tracker, str):
            if tracker not in LOGGER_TYPE_TO_CLASS:
                raise PluresError(f"there is no tracker {tracker!r}; use one of {', '.join(LOGGER_TYPE_TO_CLASS)}")
            if tracker not in [str(available) for available in get_available_trackers()]:
                raise PluresError(f"the tracker {tracker!r} is not installed: install its package, or leave it out")
            if folder is None and LOGGER_TYPE_TO_CLASS[tracker].requires_logging_directory:
                raise PluresError(f"the tracker {tracker!r} writes files: give a run folder")


def resolve(precision: str, device: torch.device) -> Literal["no", "bf16", "fp16"]:
    """Return the precision that "auto" stands for: bf16 if the device is made to multiply in it, else full precision.

    A processor is if it has tiles (AMX). Others compute in bf16, too, but more slowly than in float32: many times
    without bf16 instructions, and by a quarter with those of AVX-512, on the one that was measured.
    """
    if precision != "auto":
        return precision  # type: ignore[return-value]
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    if device.type == "cpu":
        return "bf16" if torch.cpu._is_amx_tile_supported() else "no"
    return "no"
