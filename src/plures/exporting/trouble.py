"""Errors of export: which line of the network cannot be traced, or which operator ONNX lacks."""

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from plures.errors import PluresError

ADVICE = "write it with torch operations whose shapes and branches do not depend on numbers in the batch"
_OPERATOR = re.compile(r"OpOverload\(op='([^']+)', overload='([^']+)'\)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n *([^\n]+)')
_NOT_THE_NETWORK = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def untraceable(inference: nn.Module, tensors: Sequence[Tensor], failures: Sequence[Exception]) -> PluresError:
    """Return the error for a network that cannot be traced, with the line of its code where tracing stopped."""
    own = next((error for error in failures if isinstance(error, PluresError)), None)
    if own is not None:
        return own
    try:
        torch.export.export(inference, tuple(tensors), strict=False)
    except Exception as error:  # not of the number of samples, which is fixed here
        frames = [(one.filename, str(one.lineno), one.line or "") for one in traceback.extract_tb(error.__traceback__)]
        return PluresError(f"cannot export the network: {_line(frames)} cannot be traced ({brief(error)}); {ADVICE}")
    return PluresError(
        f"cannot export the network: its code works only for a fixed number of samples ({brief(failures[-1])}); "
        f"{ADVICE}"
    )


def unwritable(program: ExportedProgram, error: Exception) -> PluresError:
    """Return the error for an operator that ONNX lacks, with the line of the network that calls it."""
    reasons: list[BaseException] = [error]
    while (before := reasons[-1].__cause__ or reasons[-1].__context__) is not None and len(reasons) < 10:
        reasons.append(before)
    missing = _OPERATOR.findall("\n".join(map(str, reversed(reasons))))
    if not missing:
        return PluresError(f"cannot export the network to ONNX: {brief(reasons[-1])}; use format='pt2'")
    operator = ".".join(missing[0])
    plain = missing[0][0].partition(".")[2]  # the exporter takes some apart first: special_bessel_j0 into bessel_j0
    traces = [node.meta.get("stack_trace") or "" for node in program.graph.nodes if plain in str(node.target)]
    caller = _line([found for trace in traces for found in _FRAME.findall(trace)]).removesuffix(",")
    return PluresError(f"cannot export the network: ONNX has no {operator}, which {caller} calls; use format='pt2'")


def _line(frames: Sequence[tuple[str, str, str]]) -> str:
    """Return the last line of the network's code among frames of files, line numbers and lines."""
    own = [frame for frame in frames if not frame[0].startswith((*_NOT_THE_NETWORK, "<"))]
    return f"{Path(own[-1][0]).name}, line {own[-1][1]}, `{own[-1][2]}`," if own else "it"


def brief(error: BaseException) -> str:
    """Return the class and the first line of an error.

    >>> brief(ValueError("too large"))
    'ValueError: too large'
    """
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
