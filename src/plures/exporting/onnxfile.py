"""Write a traced ensemble as one ONNX file."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from plures.errors import PluresError
from plures.exporting.program import quiet
from plures.exporting.trouble import brief, unwritable

OPSET = 20
LARGEST = 2**31 - 1  # bytes that one protobuf message can have
FOLD_BELOW = 64  # entries: shapes are computed once and for all, members' weights are left to the runtime


def onnx_bytes(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], about: Mapping[str, str]
) -> bytes:
    """Return the contents of an ONNX file that computes a program, with all weights inside."""
    import onnx
    import onnxscript.optimizer

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
            )
            assert made is not None  # only with dynamo=False
            onnxscript.optimizer.optimize_ir(made.model, input_size_limit=FOLD_BELOW)
            model = made.model_proto
        except Exception as error:  # whatever the exporter could not do
            raise unwritable(program, error) from error
    for part in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]  # lines of the code that was traced, with the paths of this machine
        part.doc_string = ""
    _name_batch(model.graph)
    model.producer_name, model.doc_string = "plures", ""
    onnx.helper.set_model_props(model, dict(about))
    if model.ByteSize() > LARGEST:
        raise PluresError(
            f"an ONNX file has at most 2 GB, but this ensemble takes {model.ByteSize():,} bytes: use format='pt2'"
        )
    contents: bytes = model.SerializeToString()
    return contents


def onnx_run(contents: bytes, inputs: Sequence[str]) -> Callable[[Sequence[Tensor]], dict[str, Tensor]]:
    """Return a function that runs a file on tensors in the order of `inputs`.

    onnx_run(Path("birds.onnx").read_bytes(), ["inputs"])([images])["label"]
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(contents, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class of errors for each reason
        raise PluresError(f"onnxruntime cannot run the exported network ({brief(error)}); use format='pt2'") from error
    names = [output.name for output in session.get_outputs()]

    def run(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        given = {name: tensor.detach().cpu().numpy() for name, tensor in zip(inputs, tensors, strict=True)}
        return {name: torch.from_numpy(value) for name, value in zip(names, session.run(names, given), strict=True)}

    return run


def _name_batch(graph: Any) -> None:
    """Call the axis of any length "batch", for those who look into the file: torch numbers it."""
    axes = [axis.dim_param for one in graph.input for axis in one.type.tensor_type.shape.dim if axis.dim_param]
    for one in (*graph.value_info, *graph.input, *graph.output):
        for axis in one.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = re.sub(rf"\b{axes[0]}\b", "batch", axis.dim_param)
