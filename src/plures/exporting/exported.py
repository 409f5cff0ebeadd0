"""Export: one file with the same outputs as `predict`, without plures and without Python."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plures.calling import rows_of
from plures.checks import one_of
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.exporting.inference import Inference, SplitMembers, named_tensors
from plures.exporting.onnxfile import need_onnx, onnx_bytes, onnx_run
from plures.exporting.program import program_of, quiet
from plures.files import replacing, write
from plures.methods.mc_dropout import MCDropout
from plures.version import __version__

TOLERANCE = 5e-3  # of the largest output: other runtimes sum in another order, and a softmax of large logits shows it
COARSE = 5e-2  # in half precision, or on a device that rounds as it likes

Format = Literal["onnx", "pt2"]
Run = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class Exported:
    """The file that `export` has written.

    exported = plures.export(ensemble, "birds.pt2", images)
    exported.path, exported.bytes, exported.stored, exported.calibration
    """

    path: Path
    format: Format
    bytes: int
    stored: str
    """How the file stores the members' weights, which determines its size."""
    calibration: str
    """The calibration that is part of the outputs, in words, or "not calibrated"."""


def export(
    ensemble: Ensemble,
    path: str | Path,
    example_inputs: Any,
    *,
    format: Format | None = None,
    classes: Sequence[str] | None = None,
    preprocess: nn.Module | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Exported:
    """Write an ensemble as one self-contained file that runs without plures.

        plures.export(ensemble, "birds.onnx", images)

        import onnxruntime  # the file needs neither plures nor torch
        session = onnxruntime.InferenceSession("birds.onnx")
        probabilities, label, confidence, *_ = session.run(None, {"inputs": images.numpy()})

    The file takes the inputs of the network, for any number of samples: `inputs`, or the names in `example_inputs`. It
    returns probabilities, label, confidence, total, aleatoric, epistemic and members, like `predict`; for a regression
    ensemble mean, std, aleatoric, epistemic and members, like `regress`. The outputs are calibrated if the ensemble is.
    A split ensemble takes about the size of one network, because its members are extracted when the file is loaded.

    - `format`: "onnx" (extra [export]) or "pt2", a program for torch.export.load; by default, the ending of the path.
    - `preprocess`: a module that becomes the first step; `example_inputs` are then its inputs, such as uint8 pixels.
    - `classes`, `metadata`: stored in the file as JSON.

    Before the file is written, it is run on `example_inputs` and on two other batch sizes; if its outputs differ from
    the ensemble's, an error is raised. The passes of MC dropout are drawn once at export, so the file always gives the
    same outputs.
    """
    path = Path(path)
    chosen = format or path.suffix.removeprefix(".")
    if format is None and chosen not in ("onnx", "pt2"):
        raise PluresError(f"{path} ends neither in .onnx nor in .pt2: change the name, or give the format")
    one_of("format", chosen, ("onnx", "pt2"))
    if not path.parent.is_dir():
        raise PluresError(f"cannot write {path}: there is no folder {path.parent}")
    if chosen == "onnx":
        need_onnx()
    inference, program = program_of(ensemble, example_inputs, preprocess)
    traced = program.module()
    stored, calibration = "one network that all members share", "not calibrated"
    if isinstance(inference.members, SplitMembers):
        count = inference.members.count
        stored = "one network with the owners of its weights" if inference.members.owners else f"{count} networks"
    if ensemble.calibration is not None:
        calibration = ensemble.calibration.summary()
    described = {
        "version": __version__,
        "method": type(ensemble).__name__,
        "outputs": list(inference.outputs),
        "uncertainty": "variance" if inference.numbers else "nats",
        "stored": stored,
        "calibration": calibration,
    }
    named = {} if classes is None else {"classes": list(classes)}
    about = {name: json.dumps(value) for name, value in {"plures": described, **named, **(metadata or {})}.items()}
    if chosen == "pt2":
        _check_agreement(inference, ensemble, traced, traced, path)
        with replacing(path) as beside, quiet():
            torch.export.save(program, beside, extra_files=about)
    else:
        contents = onnx_bytes(program, named_tensors(inference.like), inference.outputs, about)
        _check_agreement(inference, ensemble, traced, onnx_run(contents), path)
        write(path, contents)
    return Exported(path, "onnx" if chosen == "onnx" else "pt2", path.stat().st_size, stored, calibration)


def _check_agreement(inference: Inference, ensemble: Ensemble, traced: nn.Module, run: Run, path: Path) -> None:
    """Raise an error if a file returns other numbers than the ensemble, for the example and two other batch sizes.

    The passes of MC dropout are drawn when it is traced, so its file is compared with the traced program.
    """
    drawn = isinstance(ensemble, MCDropout)
    coarse = any(one.device.type != "cpu" or one.dtype.itemsize < 4 for one in ensemble.parameters())
    like = inference.like
    count = len(next(iter(named_tensors(like).values())))
    for given in (like, rows_of(like, torch.tensor([0])), rows_of(like, torch.arange(count + 1) % count)):
        tensors = list(named_tensors(given).values())
        with torch.no_grad():
            try:
                expected = traced(*tensors) if drawn else inference.live(ensemble, given)
            except Exception:
                if given is like:
                    raise
                continue  # a network that cannot take this batch size need not take it in a file
            found = run(*tensors)
        tolerance = (COARSE if coarse else TOLERANCE) * max(float(expected["members"].abs().max()), 1e-30)
        for name in ("members", inference.outputs[0], "std" if inference.numbers else "total"):
            gap = float((found[name].cpu() - expected[name].cpu()).abs().max())
            if not gap <= tolerance:
                raise PluresError(
                    f"{path} is not written: for {len(tensors[0])} samples its {name} differ from the ensemble's by "
                    f"{gap:.3g}; write the network without random numbers and without Python values that change "
                    "between calls"
                )
