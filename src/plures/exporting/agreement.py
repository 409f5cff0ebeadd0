"""Compare an exported file with the ensemble before it is written: a file is never wrong in silence."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram

from plures.calling import Arguments, batch_of, rows_of
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.exporting.inference import Inference, named_tensors
from plures.methods.mc_dropout import MCDropout

TOLERANCE = 5e-3  # of the largest output: other runtimes sum in another order, and a softmax of large logits shows it
COARSE = 5e-2  # in half precision, or on a device that rounds as it likes

Run = Callable[[Sequence[Tensor]], dict[str, Tensor]]


def check_agreement(inference: Inference, ensemble: Ensemble, program: ExportedProgram, run: Run, file: str) -> None:
    """Raise an error if a file returns other numbers than the ensemble, for the example and two other batch sizes.

        check_agreement(inference, ensemble, program, program.module(), "the pt2 file")

    The passes of MC dropout are drawn when it is traced, so its file is compared with the traced program.
    """
    drawn = isinstance(ensemble, MCDropout)
    traced = program.module()
    coarse = any(
        tensor.device.type != "cpu" or tensor.dtype in (torch.float16, torch.bfloat16)
        for tensor in ensemble.parameters()
    )
    tolerance = COARSE if coarse else TOLERANCE
    for given in _batches(inference.like):
        tensors = list(named_tensors(given).values())
        with torch.no_grad():
            try:
                expected = traced(*tensors) if drawn else inference.live(ensemble, given)
            except Exception:
                if given is inference.like:
                    raise
                continue  # a network that cannot take this batch size need not take it in a file
            found = run(tensors)
        scale = float(expected["members"].abs().max())
        for name in ("members", inference.outputs[0], "std" if inference.numbers else "total"):
            gap = float((found[name].cpu() - expected[name].cpu()).abs().max())
            if not gap <= tolerance * max(scale, 1e-30):
                raise PluresError(
                    f"{file} is not written: for {len(tensors[0])} samples its {name} differ from the ensemble's by "
                    f"{gap:.3g}; write the network without random numbers and without Python values that change "
                    "between calls"
                )


def _batches(like: Arguments) -> Iterator[Arguments]:
    """Yield the example, one sample of it, and one sample more than it has."""
    yield like
    batch = batch_of(like)
    assert batch is not None  # the program was traced with it
    yield rows_of(like, torch.tensor([0]))
    yield rows_of(like, torch.arange(len(batch) + 1) % len(batch))
