"""Export: one file with the same outputs as `predict`, without plures and without Python."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from plures.checks import one_of
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.exporting.agreement import check_agreement
from plures.exporting.inference import Inference, named_tensors
from plures.exporting.members import SplitMembers
from plures.exporting.onnxfile import onnx_bytes, onnx_run
from plures.exporting.program import program_of, quiet
from plures.files import replacing
from plures.version import __version__

Format = Literal["onnx", "pt2"]


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
    chosen = _format(path, format)
    if not path.parent.is_dir():
        raise PluresError(f"cannot write {path}: there is no folder {path.parent}")
    if chosen == "onnx":
        _need_onnx()
    inference, program = program_of(ensemble, example_inputs, preprocess)
    stored = _stored(inference.members)
    calibration = "not calibrated" if ensemble.calibration is None else ensemble.calibration.summary()
    about = _about(ensemble, inference, stored, calibration, classes, metadata)
    if chosen == "pt2":
        check_agreement(inference, ensemble, program, lambda tensors: program.module()(*tensors), str(path))
        with replacing(path) as beside, quiet():
            torch.export.save(program, beside, extra_files=about)
    else:
        names = list(named_tensors(inference.like))
        contents = onnx_bytes(program, names, inference.outputs, about)
        check_agreement(inference, ensemble, program, onnx_run(contents, names), str(path))
        with replacing(path) as beside:
            beside.write_bytes(contents)
    return Exported(path, chosen, path.stat().st_size, stored, calibration)


def _format(path: Path, given: str | None) -> Format:
    found = given or path.suffix.removeprefix(".")
    if given is None and found not in get_args(Format):
        raise PluresError(f"{path} ends neither in .onnx nor in .pt2: change the name, or give the format")
    one_of("format", found, get_args(Format))
    return "onnx" if found == "onnx" else "pt2"


def _need_onnx() -> None:
    """Raise an error that names the extra if a package that ONNX needs is missing."""
    try:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            import_module(name)
    except ModuleNotFoundError as error:
        raise PluresError(f"writing ONNX needs {error.name}: pip install 'plures[export]'") from error


def _stored(members: nn.Module) -> str:
    if not isinstance(members, SplitMembers):
        return "one network that all members share"
    return "one network with the owners of its weights" if members.owners else f"{members.count} networks"


def _about(
    ensemble: Ensemble,
    inference: Inference,
    stored: str,
    calibration: str,
    classes: Sequence[str] | None,
    metadata: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Return the file's description of itself, as JSON by name."""
    about: dict[str, Any] = {
        "plures": {
            "version": __version__,
            "method": type(ensemble).__name__,
            "outputs": list(inference.outputs),
            "uncertainty": "variance" if inference.numbers else "nats",
            "stored": stored,
            "calibration": calibration,
        }
    }
    if classes is not None:
        about["classes"] = list(classes)
    return {name: json.dumps(value) for name, value in {**about, **(metadata or {})}.items()}
