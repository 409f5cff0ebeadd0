"""Trace an ensemble: from Python to a program of operators that does not need plures."""

import io
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from plures.calling import arguments, rows_of
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.exporting.inference import Inference, named_tensors

ADVICE = "write it with torch operations whose shapes and branches do not depend on numbers in the batch"
_NOT_THE_NETWORK = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


def program_of(
    ensemble: Ensemble, example_inputs: Any, preprocess: nn.Module | None = None
) -> tuple[Inference, ExportedProgram]:
    """Trace what a file computes, for any number of samples; return it as a module and as a program.

    The first axis of every tensor that is as long as that of the first tensor is the batch.
    """
    given = arguments(example_inputs)
    first = next(iter(named_tensors(given).values()), None)
    if first is None or not first.dim() or not len(first):
        raise PluresError("example_inputs are empty: give inputs for ensemble.predict with at least one sample")
    if len(first) == 1:  # torch takes an axis of length one for one that always has this length
        given = rows_of(given, torch.tensor([0, 0]))
    inference = Inference(ensemble, given, preprocess)
    with suppress(RuntimeError, TypeError, ValueError):  # an error of the network is reported with its line below
        inference.live(ensemble, given)
    tensors = tuple(named_tensors(given).values())
    batch = Dim("batch", min=1)
    axes = tuple({0: batch} if tensor.dim() and len(tensor) == len(tensors[0]) else {} for tensor in tensors)
    with quiet(), torch.no_grad():
        return inference, _trace(inference, tensors, (axes,))


def _trace(inference: nn.Module, tensors: tuple[Tensor, ...], axes: tuple[Any, ...]) -> ExportedProgram:
    # Non-strict tracing is faster; strict tracing takes more code, for example len(x) of a batch of any length.
    with suppress(Exception):  # tracing runs the network's own code, which may raise anything
        return torch.export.export(inference, tensors, dynamic_shapes=axes, strict=False)
    try:
        return torch.export.export(inference, tensors, dynamic_shapes=axes, strict=True)
    except Exception as error:
        raise _untraceable(inference, tensors, error) from error


def _untraceable(inference: nn.Module, tensors: tuple[Tensor, ...], failure: Exception) -> PluresError:
    """Return the error for a network that cannot be traced, with the line of its code where tracing stopped."""
    try:
        torch.export.export(inference, tensors, strict=False)
    except Exception as error:  # not of the number of samples, which is fixed here
        frames = [(one.filename, str(one.lineno), one.line or "") for one in traceback.extract_tb(error.__traceback__)]
        return PluresError(f"cannot export the network: {line_of(frames)} cannot be traced ({brief(error)}); {ADVICE}")
    return PluresError(
        f"cannot export the network: its code works only for a fixed number of samples ({brief(failure)}); {ADVICE}"
    )


def line_of(frames: Sequence[tuple[str, str, str]]) -> str:
    """Return the last line of the network's code among frames of files, line numbers and lines."""
    own = [frame for frame in frames if not frame[0].startswith(_NOT_THE_NETWORK)]
    return f"{Path(own[-1][0]).name}, line {own[-1][1]}, `{own[-1][2]}`," if own else "it"


def brief(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Keep exporters from printing, logging and warning, and torch from the fused operators that only torch has."""
    level, fused = logging.root.manager.disable, torch.backends.mha.get_fastpath_enabled()
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            logging.disable(level)
            torch.backends.mha.set_fastpath_enabled(fused)
