"""The processes that train together: one, or several on one machine or on many."""

import atexit
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, broadcast_object_list, parse_flag_from_env, reduce
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plures.errors import PluresError
from plures.lab.recipes import Recipe
from plures.stage import Stage

Result = TypeVar("Result")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Processes:
    """The processes that train together; with one process, nothing is sent."""

    def __init__(self, precision: str) -> None:
        # With this, accelerate also sees the several processes that torchrun started on a machine without a GPU.
        cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
        alone = not torch.distributed.is_initialized()
        state = PartialState(cpu=cpu)
        self.rank: int = state.process_index
        self.world: int = state.num_processes
        self.main: bool = state.is_main_process
        self.device: torch.device = state.device
        self.precision = resolve(precision, self.device)
        if self.precision == "fp16" and self.device.type == "cpu":
            raise PluresError("precision='fp16' needs a GPU: use auto, bf16 or no on a CPU")
        if alone and self.world > 1:
            atexit.register(_leave)  # threads of the group must not outlive the interpreter

    def wrap(self, stage: Stage) -> nn.Module:
        """Return the module that trains a stage: with several processes, it exchanges gradients."""
        if self.world == 1:
            return stage
        # Buffers are not exchanged at every step: masks never change, and batch-norm statistics are averaged once an
        # epoch, which lets them see the images of all processes instead of those of the first.
        names = [name for name, _ in stage.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, names)  # type: ignore[no-untyped-call]
        return DistributedDataParallel(stage, device_ids=None if self.device.type == "cpu" else [self.device])

    def autocast(self) -> torch.autocast:
        """Return the context in which a stage computes."""
        return torch.autocast(self.device.type, DTYPES.get(self.precision), enabled=self.precision in DTYPES)

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

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of the values of all processes."""
        total: Tensor = reduce(value, "sum")
        return total

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace floating-point tensors by their mean over all processes, in place."""
        self._replace(tensors, reduce)

    def take_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Replace floating-point tensors by those of the main process, in place."""
        self._replace(tensors, broadcast)

    @torch.no_grad()
    def _replace(self, tensors: Iterable[Tensor], exchange: Callable[[Tensor], Tensor]) -> None:
        if self.world > 1:
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.copy_(exchange(tensor.contiguous()))


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def resolve(precision: str, device: torch.device) -> str:
    """Return the precision that "auto" stands for: bf16 if the device is made to multiply in it, else full precision.

    A processor is if it has tiles (AMX). Others compute in bf16, too, but more slowly than in float32: many times
    without bf16 instructions, and by a quarter with those of AVX-512, on the one that was measured.
    """
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    if device.type == "cpu":
        return "bf16" if torch.cpu._is_amx_tile_supported() else "no"
    return "no"
