"""Write a traced ensemble as one ONNX file, in float32 or int8."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.export import ExportedProgram

from plures.calling import arguments, chunks
from plures.errors import PluresError
from plures.exporting.answers import named_tensors
from plures.exporting.program import quiet
from plures.exporting.trouble import unwritable

OPSET = 20
LARGEST = 2**31 - 1  # bytes that one protobuf message can have
FOLD_BELOW = 64  # entries: shapes are computed once and for all, members' weights are left to the runtime
CALIBRATION_BATCH = 32


def onnx_bytes(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], about: Mapping[str, str]
) -> bytes:
    """Turn a program into an ONNX file with everything in it."""
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
    return _serialised(model, about)


def int8_bytes(contents: bytes, calibration: Any, about: Mapping[str, str]) -> bytes:
    """Quantise the layers of an ONNX file to int8 by onnxruntime, with the ranges that calibration inputs show.

        int8_bytes(contents, images[:256], about)

    Members are taken apart first, because a weight that is cut out when the file is loaded cannot be quantised before.
    """
    import onnx
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = _batches(calibration)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.batches, None)

    with TemporaryDirectory() as folder, quiet():
        apart, small = Path(folder) / "apart.onnx", Path(folder) / "int8.onnx"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # plain ONNX stays
        options.optimized_model_filepath = str(apart)
        options.log_severity_level = 3
        onnxruntime.InferenceSession(contents, options, providers=["CPUExecutionProvider"])
        quantize_static(
            apart,
            small,
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],  # not the softmax and the entropies
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return _serialised(onnx.load(small), about)


def _batches(calibration: Any) -> Iterator[dict[str, Any]]:
    for batch in chunks(calibration, CALIBRATION_BATCH):
        yield {name: tensor.cpu().numpy() for name, tensor in named_tensors(arguments(batch)).items()}


def _serialised(model: Any, about: Mapping[str, str]) -> bytes:
    import onnx

    model.producer_name, model.doc_string = "plures", ""
    onnx.helper.set_model_props(model, dict(about))
    if model.ByteSize() > LARGEST:
        raise PluresError(
            f"an ONNX file holds at most 2 GB, and this ensemble takes {model.ByteSize():,} bytes: use format='pt2'"
        )
    contents: bytes = model.SerializeToString()
    return contents
