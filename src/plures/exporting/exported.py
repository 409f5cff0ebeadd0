"""Export: one file with the same outputs as `predict`, without plures and without Python."""

import io
import json
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from plures.calling import arguments, rows_of
from plures.ensemble import Ensemble
from plures.errors import MissingExtraError, PluresError, brief
from plures.exporting.inference import Inference, named_tensors
from plures.files import replacing, write
from plures.methods.mc_dropout import MCDropout
from plures.version import __version__

TOLERANCE = 5e-3  # of the largest output: other runtimes sum in another order, and a softmax of large logits shows it
COARSE = 5e-2  # in half precision, or on a device that rounds as it likes
OPSET = 20
LARGEST = 2**31 - 1  # bytes that one protobuf message can have
FOLD_BELOW = 64  # entries: shapes are computed once and for all, members' weights are left to the runtime
ADVICE = "write it with torch operations whose shapes and branches do not depend on numbers in the batch"
_NOT_THE_NETWORK = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")

Run = Callable[..., dict[str, Tensor]]


def export(
    ensemble: Ensemble,
    path: str | Path,
    example_inputs: Any,
    *,
    classes: Sequence[str] | None = None,
    preprocess: nn.Module | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write an ensemble as one self-contained file that runs without plures, and return its path.

        plures.export(ensemble, "birds.onnx", images)

        import onnxruntime  # the file needs neither plures nor torch
        session = onnxruntime.InferenceSession("birds.onnx")
        probabilities, label, confidence, *_ = session.run(None, {"inputs": images.numpy()})

    The file takes the inputs of the network, for any number of samples: `inputs`, or the names in `example_inputs`. It
    returns probabilities, label, confidence, total, aleatoric, epistemic and members, like `predict`; for a regression
    ensemble mean, std, aleatoric, epistemic and members, like `regress`. The outputs are calibrated if the ensemble is.
    A split ensemble takes about the size of one network, because its members are extracted when the file is loaded.

    - `path`: ends in .onnx (extra [export]), or in .pt2 for torch.export.load.
    - `preprocess`: a module that becomes the first step; `example_inputs` are then its inputs, such as uint8 pixels.
    - `classes`, `metadata`: stored in the file as JSON.

    Before the file is written, it is run on `example_inputs` and on two other batch sizes; if its outputs differ from
    the ensemble's, an error is raised. MC dropout is refused: its passes draw other numbers each time.
    """
    path = Path(path)
    if path.suffix not in (".onnx", ".pt2"):
        raise PluresError(f"{path} ends neither in .onnx nor in .pt2, which name the formats: change the name")
    if not path.parent.is_dir():
        raise PluresError(f"cannot write {path}: there is no folder {path.parent}")
    if isinstance(ensemble, MCDropout):
        raise PluresError("MCDropout draws random numbers to predict, which a file cannot: export another method")
    if path.suffix == ".onnx":
        _need_onnx()
    inference, program = program_of(ensemble, example_inputs, preprocess)
    described = {
        "version": __version__,
        "method": type(ensemble).__name__,
        "outputs": list(inference.outputs),
        "uncertainty": "variance" if inference.numbers else "nats",
        "calibration": ensemble.calibration.summary() if ensemble.calibration else "not calibrated",
    }
    named = {} if classes is None else {"classes": list(classes)}
    about = {name: json.dumps(value) for name, value in {"plures": described, **named, **(metadata or {})}.items()}
    if path.suffix == ".pt2":
        _check_agreement(inference, ensemble, program.module(), path)
        with replacing(path) as beside, _quiet():
            torch.export.save(program, beside, extra_files=about)
    else:
        contents = _onnx_bytes(program, named_tensors(inference.like), inference.outputs, about)
        _check_agreement(inference, ensemble, _onnx_run(contents), path)
        write(path, contents)
    return path


def _check_agreement(inference: Inference, ensemble: Ensemble, run: Run, path: Path) -> None:
    """Raise an error if a file returns other numbers than the ensemble, for the example and two other batch sizes."""
    coarse = any(one.device.type != "cpu" or one.dtype.itemsize < 4 for one in ensemble.parameters())
    like = inference.like
    count = len(next(iter(named_tensors(like).values())))
    for given in (like, rows_of(like, torch.tensor([0])), rows_of(like, torch.arange(count + 1) % count)):
        tensors = list(named_tensors(given).values())
        with torch.no_grad():
            try:
                expected = inference.live(ensemble, given)
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


def _need_onnx() -> None:
    """Raise an error that names the extra if a package that ONNX needs is missing."""
    try:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"writing ONNX needs {error.name}: pip install 'plures[export]'") from error


def _onnx_bytes(
    program: ExportedProgram, inputs: Mapping[str, Tensor], outputs: Sequence[str], about: Mapping[str, str]
) -> bytes:
    """Return the contents of an ONNX file that computes a program, with all weights inside."""
    import onnx
    import onnxscript.optimizer

    length = len(next(iter(inputs.values())))
    with _quiet():
        try:
            made = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=OPSET,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_shapes=[{0: "batch"} if one.dim() and len(one) == length else {} for one in inputs.values()],
            )
            assert made is not None  # only with dynamo=False
            onnxscript.optimizer.optimize_ir(made.model, input_size_limit=FOLD_BELOW)
            model = made.model_proto
        except Exception as error:  # whatever the exporter could not do
            raise _unwritable(error) from error
    for part in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]  # lines of the code that was traced, with the paths of this machine
        part.doc_string = ""
    model.producer_name, model.doc_string = "plures", ""
    onnx.helper.set_model_props(model, dict(about))
    if model.ByteSize() > LARGEST:
        raise PluresError(
            f"an ONNX file has at most 2 GB, but this ensemble takes {model.ByteSize():,} bytes: write a .pt2 file"
        )
    contents: bytes = model.SerializeToString()
    return contents


def _onnx_run(contents: bytes) -> Run:
    """Return a function that runs a file on tensors in the order of its inputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(contents, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class of errors for each reason
        raise PluresError(f"onnxruntime cannot run the exported network ({brief(error)}); write a .pt2 file") from error
    inputs = [one.name for one in session.get_inputs()]
    outputs = [one.name for one in session.get_outputs()]

    def run(*tensors: Tensor) -> dict[str, Tensor]:
        given = {name: tensor.detach().cpu().numpy() for name, tensor in zip(inputs, tensors, strict=True)}
        return dict(zip(outputs, map(torch.from_numpy, session.run(outputs, given)), strict=True))

    return run


def _unwritable(error: BaseException) -> PluresError:
    """Return the error for a network that ONNX cannot express: the first reason, which names the operator."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return PluresError(f"cannot export the network to ONNX: {brief(error)}; write a .pt2 file")


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
    with _quiet(), torch.no_grad():
        return inference, _trace(inference, tensors, (axes,))


def _trace(inference: nn.Module, tensors: tuple[Tensor, ...], axes: tuple[Any, ...]) -> ExportedProgram:
    # Non-strict tracing is faster; strict tracing takes more code, for example len(x) of a batch of any length.
    try:
        return torch.export.export(inference, tensors, dynamic_shapes=axes, strict=False)
    except Exception as error:  # tracing runs the network's own code, which may raise anything
        with suppress(Exception):
            return torch.export.export(inference, tensors, dynamic_shapes=axes, strict=True)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_NETWORK)]
        where = f"{Path(own[-1].filename).name}, line {own[-1].lineno}, `{own[-1].line}`," if own else "it"
        raise PluresError(f"cannot export the network: {where} cannot be traced ({brief(error)}); {ADVICE}") from error


@contextmanager
def _quiet() -> Iterator[None]:
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
