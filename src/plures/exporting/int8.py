"""Quantise an ONNX file to int8 with onnxruntime; split weights are still stored only once."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from plures.calling import arguments, chunks
from plures.exporting.answers import named_tensors
from plures.exporting.onnxfile import serialised
from plures.exporting.program import quiet

CALIBRATION_BATCH = 32


def int8_bytes(contents: bytes, calibration: Any, about: Mapping[str, str]) -> bytes:
    """Quantise the layers of an ONNX file, with the ranges that calibration inputs show.

        int8_bytes(contents, images[:256], about)

    Members are taken apart first, because a weight that is cut out when the file is loaded cannot be quantised before,
    and put together again afterwards.
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
        model = onnx.load(small)
        put_together(model, onnx.load_from_string(contents))
        return serialised(model, about)


def put_together(small: Any, original: Any) -> None:
    """Store the int8 weights of all members as one, with the owners of the file that they were taken out of.

        put_together(int8_model, float_model)

    Zero is zero in int8, too, and members are disjoint: their sum holds each number unchanged, and each member's part
    is cut out when the file is loaded. Weights that are not found again stay as they are.
    """
    from onnx import TensorProto, helper, numpy_helper

    cuts = _cuts(original)
    masks = _run(_what_computes(original, {mask for _, mask in cuts}))
    wholes: dict[str, npt.NDArray[np.int8]] = {}
    owners, added = set(), []
    for initializer in [one for one in small.graph.initializer if one.data_type == TensorProto.INT8]:
        part, name = numpy_helper.to_array(initializer), initializer.name
        # A linear layer's weight may stand in the file as its transpose.
        ways = [(cut, turned) for cut in cuts for turned in (False, True)]
        way = next((way for way in ways if _is_zero_outside(masks[way[0][1]], part.T if way[1] else part)), None)
        if way is None:
            continue
        (weight, mask), turned = way
        cuts.remove((weight, mask))
        owners.add(mask)
        wholes[weight] = wholes.get(weight, 0) + (part.T if turned else part)
        small.graph.initializer.remove(initializer)
        # Runtimes choose among int32, not among int8.
        added.append(helper.make_node("Where", [mask, f"{weight}_int32", "int32_zero"], [f"{name}_int32"]))
        cut = f"{name}_turned" if turned else name
        added.append(helper.make_node("Cast", [f"{name}_int32"], [cut], to=TensorProto.INT8))
        if turned:
            added.append(helper.make_node("Transpose", [cut], [name]))
    for weight, whole in wholes.items():
        small.graph.initializer.append(numpy_helper.from_array(whole, f"{weight}_int8"))
        added.insert(0, helper.make_node("Cast", [f"{weight}_int8"], [f"{weight}_int32"], to=TensorProto.INT32))
    if wholes:
        small.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.int32), "int32_zero"))
    known = {one.name for one in small.graph.initializer}
    decoding = _what_computes(original, owners).graph
    small.graph.initializer.extend(one for one in decoding.initializer if one.name not in known)
    rest = list(small.graph.node)
    del small.graph.node[:]
    small.graph.node.extend([*decoding.node, *added, *rest])


def _cuts(model: Any) -> list[tuple[str, str]]:
    """Find where members' weights are cut out: the names of the whole weight and of the mask."""
    stored = {one.name for one in model.graph.initializer}
    computed = {one.name for one in model.graph.input}
    for node in model.graph.node:
        if computed.intersection(node.input):
            computed.update(node.output)
    choices = [node for node in model.graph.node if node.op_type == "Where" and node.input[1] in stored]
    return [(node.input[1], node.input[0]) for node in choices if node.input[0] not in computed]


def _is_zero_outside(mask: npt.NDArray[np.bool_], part: npt.NDArray[np.int8]) -> bool:
    fits = part.ndim == mask.ndim and all(own in (1, whole) for own, whole in zip(mask.shape, part.shape, strict=True))
    return fits and not np.where(mask, 0, part).any()


def _what_computes(model: Any, names: set[str]) -> Any:
    """Cut the part out of a model that computes some masks."""
    from onnx import TensorProto, helper

    needed = set(names)
    nodes: list[Any] = []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            nodes.insert(0, node)
    kept = [one for one in model.graph.initializer if one.name in needed]
    outputs = [helper.make_tensor_value_info(name, TensorProto.BOOL, None) for name in sorted(names)]
    graph = helper.make_graph(nodes, "owners", [], outputs, kept)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _run(model: Any) -> dict[str, npt.NDArray[np.bool_]]:
    import onnxruntime

    names = [output.name for output in model.graph.output]
    if not names:
        return {}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, {}), strict=True))


def _batches(calibration: Any) -> Iterator[dict[str, Any]]:
    for batch in chunks(calibration, CALIBRATION_BATCH):
        yield {name: tensor.cpu().numpy() for name, tensor in named_tensors(arguments(batch)).items()}
