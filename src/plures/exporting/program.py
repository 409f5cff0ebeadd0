"""Trace an ensemble: from Python to a program of operators that does not need plures."""

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from plures.calling import Arguments, arguments, rows_of
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.exporting.inference import Inference, named_tensors
from plures.exporting.trouble import untraceable
from plures.seeding import generator

_DRAWS = (torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p)


def program_of(
    ensemble: Ensemble, example_inputs: Any, preprocess: nn.Module | None = None
) -> tuple[Inference, ExportedProgram]:
    """Trace what a file computes, for any number of samples; return it as a module and as a program.

        inference, program = program_of(ensemble, images)
        program.module()(images)["probabilities"]

    The first axis of every tensor that is as long as that of the first tensor is the batch. Random numbers follow from
    the ensemble's seed.
    """
    inference = Inference(ensemble, _with_two_samples(arguments(example_inputs)), preprocess)
    with suppress(RuntimeError, TypeError, ValueError):  # an error of the network's own is told with its line below
        inference.live(ensemble, inference.like)
    tensors = list(named_tensors(inference.like).values())
    batch = Dim("batch", min=1)
    axes = tuple({0: batch} if _batched(tensor, tensors) else {} for tensor in tensors)
    with quiet(), _plain_attention(), torch.no_grad():
        program = _trace(inference, tuple(tensors), (axes,))
        drawn = _with_drawn_masks(program.module(), getattr(ensemble, "seed", 0))
        return inference, program if drawn is None else _trace(drawn, tuple(tensors), axes)


def _trace(inference: nn.Module, tensors: tuple[Tensor, ...], axes: tuple[Any, ...]) -> ExportedProgram:
    failures = []
    # Non-strict tracing is faster; strict tracing takes more code, for example len(x) of a batch of any length.
    for strict in (False, True):
        try:
            return torch.export.export(inference, tensors, dynamic_shapes=axes, strict=strict)
        except Exception as error:  # tracing runs the network's own code, which may raise anything
            failures.append(error)
    raise untraceable(inference, tensors, failures) from failures[0]


def _with_two_samples(given: Arguments) -> Arguments:
    """Repeat a single sample: torch takes an axis of length one for one that always has this length."""
    tensors = list(named_tensors(given).values())
    if not tensors or not tensors[0].dim() or not len(tensors[0]):
        raise PluresError("example_inputs are empty: give inputs for ensemble.predict with at least one sample")
    return given if len(tensors[0]) > 1 else rows_of(given, torch.tensor([0, 0]))


def _batched(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return bool(tensor.dim()) and len(tensor) == len(tensors[0])


def _with_drawn_masks(module: fx.GraphModule, seed: int) -> fx.GraphModule | None:
    """Make every active dropout drop the same entries of every sample, in every run of the program.

    A file has no random numbers that follow from a seed: each pass of MC dropout becomes a fixed member. None is
    returned if nothing is random.
    """
    graph, random = module.graph, generator(seed, "exported passes")
    draws = [node for node in graph.nodes if node.target in _DRAWS]
    for number, node in enumerate(draws):
        like, chance = node.args
        shape = [int(length) for length in like.meta["val"].shape[1:]]
        name = f"drawn_mask_{number}"
        module.register_buffer(name, torch.rand([1, *shape], generator=random) < chance)
        with graph.inserting_before(node):
            one = graph.call_function(torch.ops.aten.ones_like.default, (like,))
            zero = graph.call_function(torch.ops.aten.zeros_like.default, (like,))
            kept = graph.call_function(torch.ops.aten.where.self, (graph.get_attr(name), one, zero))
        node.replace_all_uses_with(kept)
        graph.erase_node(node)
    module.recompile()
    return module if draws else None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep exporters from printing, logging and warning: a failure is reported by one error."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.__trace", "onnxscript", "onnx_ir", "onnxruntime")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Disable the fused operator of torch's own transformer layers, which exists only in torch."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
