"""Write a traced ensemble as one ONNX file, and run the file."""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

import torch
from torch import Tensor
from torch.export import ExportedProgram

from plures.errors import MissingExtraError, PluresError
from plures.exporting.program import brief, line_of, quiet

OPSET = 20
LARGEST = 2**31 - 1  # bytes that one protobuf message can have
FOLD_BELOW = 64  # entries: shapes are computed once and for all, members' weights are left to the runtime
_OPERATOR = re.compile(r"OpOverload\(op='([^']+)', overload='([^']+)'\)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n *([^\n]+)')


def need_onnx() -> None:
    """Raise an error that names the extra if a package that ONNX needs is missing."""
    try:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"writing ONNX needs {error.name}: pip install 'plures[export]'") from error


def onnx_bytes(
    program: ExportedProgram, inputs: Mapping[str, Tensor], outputs: Sequence[str], about: Mapping[str, str]
) -> bytes:
    """Return the contents of an ONNX file that computes a program, with all weights inside."""
    import onnx
    import onnxscript.optimizer

    length = len(next(iter(inputs.values())))
    with quiet():
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
            raise _unwritable(program, error) from error
    for part in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]  # lines of the code that was traced, with the paths of this machine
        part.doc_string = ""
    model.producer_name, model.doc_string = "plures", ""
    onnx.helper.set_model_props(model, dict(about))
    if model.ByteSize() > LARGEST:
        raise PluresError(
            f"an ONNX file has at most 2 GB, but this ensemble takes {model.ByteSize():,} bytes: use format='pt2'"
        )
    contents: bytes = model.SerializeToString()
    return contents


def onnx_run(contents: bytes) -> Callable[..., dict[str, Tensor]]:
    """Return a function that runs a file on tensors in the order of its inputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(contents, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class of errors for each reason
        raise PluresError(f"onnxruntime cannot run the exported network ({brief(error)}); use format='pt2'") from error
    inputs = [one.name for one in session.get_inputs()]
    outputs = [one.name for one in session.get_outputs()]

    def run(*tensors: Tensor) -> dict[str, Tensor]:
        given = {name: tensor.detach().cpu().numpy() for name, tensor in zip(inputs, tensors, strict=True)}
        found = map(torch.from_numpy, session.run(outputs, given))
        return dict(zip(outputs, found, strict=True))

    return run


def _unwritable(program: ExportedProgram, error: Exception) -> PluresError:
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
    caller = line_of([found for trace in traces for found in _FRAME.findall(trace)]).removesuffix(",")
    return PluresError(f"cannot export the network: ONNX has no {operator}, which {caller} calls; use format='pt2'")
