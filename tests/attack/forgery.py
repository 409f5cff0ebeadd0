"""Files made on purpose: valid checksums around headers and tensors that no ensemble has."""

import copy
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from plures.files import digest
from plures.methods import METHODS

RAW = "raw JSON follows:"  # what json.dumps cannot write
RAW_VALUES = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "[" * 100_000,
    "9" * 4000,
    "9" * 5000,
    "-0.0",
    "1e-320",
]
DEEP = "[" * 50_000
TEXTS = [
    "",
    "x",
    "0",
    "0.weight",
    "split",
    "\x1b[31mred\x1b[0m",
    "a\nb",
    "a\rb",
    "\0",
    "\ud800",
    "\u202e",
    "x" * 10_000,
]
NUMBERS = [0, 1, -1, 2, 3, 4, 5, 100, 255, 256, 1000, 1001, 10**4, 10**6, 10**9, 2**31, 2**63, 2**64, 10**400]
FRACTIONS = [0.0, 0.5, 1.0, 1.5, -1.0, 3.0, 6.0, 1e-300, 1e300]
DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.complex64: "C64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


class Forgery:
    """A file taken apart: its document and its tensors, to be changed at will."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            self.tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
            self.document: dict[str, Any] = json.loads(file.metadata()["plures"].partition(" ")[2])
        self.true_sums = True
        self.renamed_keys: dict[str, str] = {}  # a name that the header gives twice
        self.metadata: Any = None

    def file(self) -> bytes:
        """Write the file by hand: a library would refuse half of what is tried here."""
        if self.true_sums and isinstance(self.document, dict):
            self.document["checksums"] = {name: _checksum(tensor) for name, tensor in self.tensors.items()}
        text = _text(self.document)
        header: list[str] = []
        metadata = self.metadata or {"plures": f"{digest(text.encode())} {text}"}
        header.append(f'"__metadata__":{json.dumps(metadata)}')
        data = b""
        for name, tensor in self.tensors.items():
            contents = _bytes(tensor)
            entry = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [len(data), len(data) + len(contents)],
            }
            header.append(f"{json.dumps(self.renamed_keys.get(name, name))}:{json.dumps(entry)}")
            data += contents
        joined = ("{" + ",".join(header) + "}").encode()
        return struct.pack("<Q", len(joined)) + joined + data


def forged(path: Path, others: list[Path], chance: Random) -> bytes:
    """Make a malicious file from a good one, in one to three ways."""
    forgery = Forgery(path)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        if forgery.tensors and isinstance(forgery.document, dict):
            chance.choice(KINDS)(forgery, chance, others)
    return forgery.file()


def change_value(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    holder, key = _somewhere(forgery.document, chance)
    holder[key] = _weird(chance, holder[key])


def change_option(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    part = forgery.document.get(chance.choice(["options", "options", "state"]))
    if isinstance(part, dict) and part:
        key = chance.choice(list(part))
        part[key] = _weird(chance, part[key])


def remove_key(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    holder, key = _somewhere(forgery.document, chance)
    del holder[key]


def add_key(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    holder, _key = _somewhere(forgery.document, chance)
    if isinstance(holder, dict):
        names = [*TEXTS, "network", "loss", "self", "members", "seed", "roles", "layers", "sites"]
        holder[chance.choice(names)] = _weird(chance, 1)
    else:
        holder.insert(chance.randint(0, len(holder)), _weird(chance, 1))


def rename_key(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    holder, key = _somewhere(forgery.document, chance)
    if isinstance(holder, dict):
        holder[chance.choice(TEXTS)] = holder.pop(key)


def rearrange(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    holder, key = _somewhere(forgery.document, chance)
    value = holder[key]
    if isinstance(value, list):
        holder[key] = chance.choice([value * 2, value[::-1], value[:-1], [value], value * 1000])
    elif isinstance(value, dict):
        pairs = list(value.items())
        holder[key] = chance.choice([dict(pairs[::-1]), dict(pairs[:-1]), pairs, {**value, "": value}])
    else:
        holder[key] = [value]


def other_method(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    forgery.document["method"] = chance.choice([*METHODS, "Ensemble", "os.system", "OneStage", *TEXTS])


def other_parts(forgery: Forgery, chance: Random, others: list[Path]) -> None:
    other = Forgery(chance.choice(others))
    for part in chance.sample(["options", "state", "method", "shapes"], chance.randint(1, 3)):
        forgery.document[part] = other.document[part]


def other_tensors(forgery: Forgery, chance: Random, others: list[Path]) -> None:
    other = Forgery(chance.choice(others))
    if chance.random() < 0.5:
        forgery.tensors = other.tensors
    else:
        forgery.tensors |= other.tensors


def reshape(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    name, tensor = chance.choice(list(forgery.tensors.items()))
    flat = tensor.reshape(-1)
    shapes: list[Callable[[], Tensor]] = [
        lambda: flat[:1],
        lambda: flat[:1].reshape([1] * tensor.dim()) if len(flat) else flat,
        lambda: flat[:0],
        lambda: flat[0] if len(flat) else flat,
        lambda: flat,
        lambda: tensor.unsqueeze(chance.randint(0, tensor.dim())),
        lambda: tensor[:-1] if tensor.dim() else tensor,
        lambda: torch.cat([flat, flat]),
        lambda: torch.stack([tensor] * 3),
        lambda: tensor.transpose(0, -1) if tensor.dim() > 1 else flat[[*range(len(flat))][::-1]],
        lambda: flat[:1].repeat(1_000_000) if len(flat) else flat,
        lambda: tensor.reshape(0, 10**9) if not len(flat) else flat[:0].reshape(0, 10**9),
    ]
    forgery.tensors[name] = chance.choice(shapes)().contiguous()


def retype(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    chosen = chance.choice(DTYPES)
    for name in chance.choice([list(forgery.tensors), [chance.choice(list(forgery.tensors))]]):
        tensor = forgery.tensors[name]
        if chance.random() < 0.5 and not tensor.is_complex():
            forgery.tensors[name] = tensor.to(torch.float32).to(chosen)
        else:
            forgery.tensors[name] = torch.ones_like(tensor, dtype=torch.float32).to(chosen)


def refill(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    name, tensor = chance.choice(list(forgery.tensors.items()))
    raw = bytearray(_bytes(tensor))
    if not raw:
        return
    if tensor.is_floating_point() and chance.random() < 0.7:
        value = chance.choice([float("inf"), float("-inf"), float("nan"), 3e38, -3e38, 1e-40, 0.0, -1.0])
        forgery.tensors[name] = torch.full_like(tensor.float(), value).to(tensor.dtype)
        return
    start = chance.randrange(len(raw))
    length = chance.choice([1, 8, len(raw)])
    raw[start : start + length] = chance.randbytes(len(raw[start : start + length]))
    if tensor.dtype != torch.bool:
        forgery.tensors[name] = torch.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape)


def rename(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    name = chance.choice(list(forgery.tensors))
    others = [*TEXTS, *forgery.tensors, "__metadata__x", f"{name}.", name.replace("0", "1"), "free/0.weight", "draft/x"]
    forgery.tensors[chance.choice(others)] = forgery.tensors.pop(name)


def drop(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    del forgery.tensors[chance.choice(list(forgery.tensors))]


def add(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    copied = forgery.tensors[chance.choice(list(forgery.tensors))].clone()
    names = [
        *TEXTS,
        "networks.3.0.weight",
        "networks.9.0.weight",
        "member 7/0.weight",
        "free/0.weight",
        "given/0.weight",
    ]
    forgery.tensors[chance.choice(names)] = copied


def exchange(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    one, other = chance.choice(list(forgery.tensors)), chance.choice(list(forgery.tensors))
    forgery.tensors[one], forgery.tensors[other] = forgery.tensors[other], forgery.tensors[one]


def name_twice(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    one, other = chance.choice(list(forgery.tensors)), chance.choice(list(forgery.tensors))
    forgery.renamed_keys[one] = other


def other_sums(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    forgery.true_sums = False
    forgery.document["checksums"] = _weird(chance, forgery.document.get("checksums", {}))


def other_metadata(forgery: Forgery, chance: Random, _: list[Path]) -> None:
    text = _text(forgery.document)
    true = f"{digest(text.encode())} {text}"
    short = [_text(one) for one in ([], {}, None, 7, "x", {"format": 1}, f"{RAW}{DEEP}", f"{RAW}1e999")]
    forgery.metadata = chance.choice(
        [
            {"other": "x"},
            {"plures": true, "other": "x", "\x1b[31m": "\n"},
            {"plures": true.partition(" ")[2]},
            {"plures": ""},
            {"plures": f"{digest(b'')} "},
            *({"plures": f"{digest(one.encode())} {one}"} for one in short),
        ]
    )


KINDS = (
    *(change_value, change_value, change_value, change_option, change_option, change_option),
    *(remove_key, add_key, rename_key, rearrange, other_method, other_parts, other_tensors),
    *(reshape, reshape, retype, refill, refill, rename, drop, add, exchange, name_twice, other_sums, other_metadata),
)


def _somewhere(document: dict[str, Any], chance: Random) -> tuple[Any, Any]:
    """Choose a place in the document, at any depth."""
    holder: Any = document
    if not holder:
        holder["options"] = {}
    while True:
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.25:
            return holder, key
        holder = inner


def _weird(chance: Random, value: Any) -> Any:
    """Give another value: sometimes of the same kind, often of none that belongs there."""
    kinds: list[Callable[[], Any]] = [
        lambda: chance.choice(NUMBERS),
        lambda: chance.choice(NUMBERS),
        lambda: chance.choice(FRACTIONS),
        lambda: RAW + chance.choice(RAW_VALUES),
        lambda: chance.choice(TEXTS),
        lambda: chance.choice([None, True, False]),
        lambda: chance.choice([[], {}, [[]], [0], ["0"], {"0": 1}, {"": []}, [None] * 3, list(range(100_000))]),
        lambda: [copy.deepcopy(value)],
        lambda: {"0": copy.deepcopy(value)},
        lambda: -value if isinstance(value, int | float) else str(value),
        lambda: chance.choice(
            ["fresh", "given", "private", "fixed", "split", "weight", "kernel", "channel", "sum", "0"]
        ),
    ]
    return chance.choice(kinds)()


def _text(document: Any) -> str:
    text = json.dumps(document, separators=(",", ":"))
    return re.sub(f'"{RAW}([^"]*)"', r"\1", text)


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def _checksum(tensor: Tensor) -> str:
    return digest(f"{tensor.dtype}{list(tensor.shape)}".encode(), _bytes(tensor))
