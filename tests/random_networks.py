"""Small random networks, each made again from its number, and the comparison of every engine with their members."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plures
from plures.calling import arguments

CLASSES = 4
SIZES = (1, 2, 3, 5, 9, 17, 40, 70)
ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    *(F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.hardswish, F.leaky_relu),
    *(lambda x: F.relu(x, inplace=True), lambda x: x.relu(), lambda x: x * 0.5 + x, lambda x: x.clamp(min=-1)),
]
ACTIVATION_LAYERS = (nn.ReLU, nn.GELU, nn.SiLU, nn.ReLU6, nn.ELU, nn.PReLU, nn.Dropout, nn.Identity, nn.Softplus)


class RandomNetwork(nn.Module):
    """A network drawn from a number: images, rows or tokens, through some steps, to logits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.steps: list[tuple[str, Any]] = []
        self.parts = nn.ModuleList()
        self.kind = self.random.choices(("images", "rows", "tokens"), (6, 2, 2))[0]
        self.traced = self.random.random() < 0.8
        self.argument = self.random.choice((None, None, None, "scale", "table"))
        self.shape: tuple[int, ...] = {
            "images": (3, *self.random.choice(((8, 8), (9, 7), (12, 12)))),
            "rows": (self.random.choice((6, 17)),),
            "tokens": (self.random.choice((3, 5)),),
        }[self.kind]
        self.given = self.shape
        if self.kind == "tokens":
            self._add("layer", nn.Embedding(20, 16))
            self.shape = (*self.shape, 16)
        for _ in range(self.random.randint(1, 6)):
            before = len(self.steps)
            getattr(self, f"_draw_{self.kind}")()
            if self.kind != "tokens" and len(self.steps) > before:
                self._measure(before)
        if self.kind != "tokens" and self.random.random() < 0.1:
            self.steps.insert(0, ("mutate", None))
        if self.kind == "images" and self.random.random() < 0.5:
            self._add("pool", None)
        elif self.kind == "tokens":
            self._add("mean", None)
        else:
            self._add("flatten", None)
        width = self.shape[0] if ("pool", None) in self.steps else self.shape[-1] if self.kind == "tokens" else 0
        self.head = nn.Linear(width or int(torch.Size(self.shape).numel()), CLASSES, bias=self.random.random() < 0.8)
        if self.random.random() < 0.05:
            self.head.register_forward_hook(_doubled)

    def _add(self, step: str, what: Any) -> None:
        if isinstance(what, nn.Module):
            self.parts.append(what)
            what = len(self.parts) - 1
        self.steps.append((step, what))

    def _draw_any(self) -> None:
        step = self.random.choice(("activation", "activation", "layer", "mix", "double", "scale"))
        if step == "activation":
            self._add(step, self.random.randrange(len(ACTIVATIONS)))
        elif step == "layer":
            self._add(step, self.random.choice(ACTIVATION_LAYERS)())
        elif step == "mix" and self.random.random() < 0.3:
            self._add(step, self.random.randrange(4))
        elif step == "scale":
            scale = nn.ParameterList([nn.Parameter(torch.rand(self.shape[:1] + (1,) * (len(self.shape) - 1)) + 0.5)])
            self._add(step, scale)
        elif step == "double" and self.random.random() < 0.3 and self.kind != "images":
            self._add(step, nn.Linear(self.shape[-1], self.shape[-1]).double())

    def _draw_images(self) -> None:
        channels, height, width = self.shape
        step = self.random.choice(("conv",) * 5 + ("norm", "norm", "residual", "block", "gate", "other", "pool", "any"))
        if step == "conv":
            self._add("layer", self._convolution(channels, self.random.choice((8, 8, 12, 16))))
        elif step == "norm":
            norms = (nn.BatchNorm2d(channels), nn.BatchNorm2d(channels, affine=False), nn.InstanceNorm2d(channels))
            norms += (nn.InstanceNorm2d(channels, affine=True), nn.LayerNorm([channels, height, width]))
            norms += (nn.BatchNorm2d(channels, track_running_stats=self.random.random() < 0.8),)
            norms += (nn.GroupNorm(channels, channels), nn.GroupNorm(1, channels, affine=False))
            self._add("layer", self.random.choice(norms))
        elif step in ("residual", "block"):
            inner = [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
            inner += [nn.Identity()] if self.random.random() < 0.3 else []
            self._add(step, nn.Sequential(*inner))
        elif step == "gate":
            self._add(step, nn.Conv2d(channels, channels, 1))
        elif step == "other":
            self._add("layer", self.random.choice((_Functional(channels), nn.ConvTranspose2d(channels, 8, 2))))
        elif step == "pool" and min(height, width) > 3:
            self._add("layer", self.random.choice((nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(3, 1, 1))))
        else:
            self._draw_any()

    def _convolution(self, inputs: int, outputs: int) -> nn.Conv2d:
        size = self.random.choice((1, 1, 3, 3, 3, 5, (3, 1), (1, 3)))
        kind = self.random.choices(("plain", "grouped", "depthwise", "dilated"), (6, 1, 1, 1))[0]
        groups = inputs if kind == "depthwise" else 2 if kind == "grouped" and inputs % 2 == 0 else 1
        outputs = inputs if kind == "depthwise" else outputs
        dilation = 2 if kind == "dilated" else 1
        padding = self.random.choice((0, 1, 2, "same")) if min(self.shape[1:]) > 5 else 2
        stride = 1 if padding == "same" else self.random.choice((1, 1, 1, 2))
        mode = self.random.choice(("zeros",) * 5 + ("reflect",))
        mode = mode if min(self.shape[1:]) > 5 else "zeros"  # a small image reflects less than a kernel of 5 needs
        padding = 1 if mode == "reflect" and padding in (0, 2) else padding
        return nn.Conv2d(
            *(inputs, outputs, size),
            stride,
            padding=padding if dilation == 1 or padding == "same" else 4,
            dilation=dilation,
            groups=groups,
            bias=self.random.random() < 0.5,
            padding_mode=mode if dilation == 1 else "zeros",
        )

    def _draw_rows(self) -> None:
        (width,) = self.shape
        step = self.random.choice(("linear", "linear", "norm", "any", "again"))
        if step == "linear":
            self._add("layer", nn.Linear(width, self.random.choice((8, 16, 24)), bias=self.random.random() < 0.7))
        elif step == "norm":
            self._add("layer", self.random.choice((nn.BatchNorm1d, nn.LayerNorm))(width))
        elif step == "again":
            self._add("again", nn.Linear(width, width))
        else:
            self._draw_any()

    def _draw_tokens(self) -> None:
        width = self.shape[-1]
        step = self.random.choice(("linear", "norm", "encoder", "attention", "any", "position"))
        if step == "linear":
            self._add("again", nn.Linear(width, width))
        elif step == "norm":
            self._add("layer", nn.LayerNorm(width, bias=self.random.random() < 0.5))
        elif step == "encoder":
            first = self.random.random() < 0.8
            layer = nn.TransformerEncoderLayer(width, 2, 24, batch_first=first, norm_first=self.random.random() < 0.5)
            self._add(
                "layer",
                layer if self.random.random() < 0.5 else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            )
        elif step == "attention":
            self._add(step, nn.MultiheadAttention(width, 2, batch_first=self.random.random() < 0.7))
        elif step == "position":
            self._add("scale", nn.ParameterList([nn.Parameter(torch.rand(self.shape))]))
        else:
            self._draw_any()

    def _measure(self, before: int) -> None:
        """Follow the shape through the steps that were added."""
        steps, self.steps = self.steps, self.steps[before:]
        with torch.no_grad():
            self.shape = tuple(self.eval()._run(torch.rand(2, *self.shape)).shape[1:])
        self.steps = steps

    def _run(self, x: Tensor) -> Tensor:
        for step, what in self.steps:
            part = self.parts[what] if isinstance(what, int) and step != "mix" and step != "activation" else None
            if step == "activation":
                x = ACTIVATIONS[what](x)
            elif step == "mutate":
                x = x.add_(1)
            elif step == "layer":
                x = part(x)
            elif step == "again":
                x = part(F.relu(part(x))) if part is not None else x
            elif step == "residual":
                x = x + part(x)
            elif step == "block":
                x = F.relu(part(x) + x)
            elif step == "gate":
                x = x * torch.sigmoid(part(x.mean((2, 3), keepdim=True)))
            elif step == "scale":
                x = x * part[0]
            elif step == "attention":
                x = x + part(x, x, x, need_weights=False)[0]
            elif step == "double":
                x = part(x.double()).float()
            elif step == "mix":
                x = MIXES[what](x)
            elif step == "pool":
                x = x.mean((2, 3))
            elif step == "mean":
                x = x.mean(1)
            elif step == "flatten":
                x = x.flatten(1)
        return x

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        if not self.traced and bool(x.sum() > 1e9):
            x = x - 1
        x = self.head(self._run(x))
        return x @ others[0] if self.argument == "table" else x * others[0] if self.argument == "scale" else x


class _Functional(nn.Module):
    """A layer of the user's own, whose weight a function takes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, 1, 1) / channels**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight)


MIXES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x - x.mean(0),
    lambda x: x / (1 + x.abs().max()),
    lambda x: x + x.flip(0),
    lambda x: x + torch.roll(x, 1, 0) * 0.1,
]


def _doubled(_layer: nn.Module, _given: Any, output: Tensor) -> Tensor:
    return output * 2


def inputs_of(network: RandomNetwork, size: int, seed: int) -> tuple[Any, ...]:
    """Draw a batch that the network takes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size, *network.given)
    tokens = network.kind == "tokens"
    x = torch.randint(20, shape, generator=generator) if tokens else torch.randn(shape, generator=generator)
    others = {"scale": (0.5,), "table": (torch.eye(CLASSES) + 0.1,), None: ()}
    return (x, *others[network.argument])


def ensemble_of(seed: int, changes: bool = False) -> plures.OrthogonalDropout:
    """Split a random network, or let members change it; raise PluresError if that cannot be done."""
    draw = random.Random(-seed)
    network = RandomNetwork(seed)
    options = {
        "classifier": draw.choice((None, "private", "split")),
        "granularity": draw.choice(("kernel", "weight", "block")),
    }
    members = draw.choice((2, 3, 5))
    if changes:
        ensemble = plures.adapt(network, members, share=draw.choice((None, 0.1)), last=draw.choice((None, 1, 2)))
    else:
        ensemble = plures.OrthogonalDropout(network, members, optimize_masks=False, **options)
    generator = torch.Generator().manual_seed(seed)
    for stage in ensemble.stages():
        with torch.no_grad():
            tensors = {**dict(stage.network.named_parameters()), **dict(stage.network.named_buffers())}
            for name, tensor in tensors.items():
                own = "parametrizations" not in name or (changes and name.endswith("original"))
                if tensor.is_floating_point() and own and tensor.dim() < 2:
                    tensor.add_(torch.rand(tensor.shape, generator=generator).to(tensor) * 0.3)
    return ensemble


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return how much outputs differ, relative to their size."""
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).double().norm() / expected.double().norm().clamp_min(1e-30))


def wrong_answers(seed: int, compiled: bool = False, exported: bool = False, changes: bool = False) -> Iterator[str]:
    """Compare every engine of a random network, and copies of it, with its members; yield what is wrong.

    What is refused by a PluresError is right.
    """
    try:
        ensemble = ensemble_of(seed, changes)
    except plures.PluresError:
        return
    network, draw = ensemble.network, random.Random(seed)
    sizes = draw.sample(SIZES, 3)
    batches = [inputs_of(network, size, seed) for size in sizes]
    members = [ensemble.checkout(member) for member in ensemble.trained]

    def expected_of(batch: Any, convert: Callable[[Any], Any] = lambda one: one) -> Tensor:
        with torch.no_grad():
            given = [convert(one.clone()) if isinstance(one, Tensor) else one for one in batch]
            return torch.stack([convert(copy.deepcopy(member))(*copy.deepcopy(given)) for member in members])

    expected = [expected_of(batch) for batch in batches]

    def asked(name: str, predictor: Any, indices: list[int]) -> Iterator[str]:
        for index in indices:
            try:
                with torch.no_grad():
                    found = predictor(*copy.deepcopy(batches[index]))
            except plures.PluresError:
                continue
            error = error_of(found, expected[index])
            if not error <= 1e-5:
                yield f"{seed} {name} batch {sizes[index]}: {error:.2g}"

    for kind in ("owned", "unfolded", None):
        try:
            engine = ensemble.engine(kind)
        except plures.PluresError:
            continue
        yield from asked(f"{kind} copied", copy.deepcopy(engine), [0])
        yield from asked(f"{kind}", engine, [0, 1])
        yield from asked(f"{kind} pickled", pickle.loads(pickle.dumps(engine)), [2, 0])
        yield from asked(f"{kind} copied", copy.deepcopy(engine), [1, 2])
        if compiled:
            torch.compiler.reset()
            yield from asked(f"{kind} compiled", torch.compile(engine, backend="aot_eager"), [0, 1])
        yield from _converted(f"{seed} {kind} in float64", engine, batches[1], expected_of)
        yield from asked(f"{kind}", engine, [2, 1])
    if exported:
        yield from _exported(f"{seed} exported", ensemble, batches[0], expected[0])


def _converted(name: str, engine: Any, batch: Any, expected_of: Callable[..., Tensor]) -> Iterator[str]:
    def convert(one: Any) -> Any:
        return one.double() if isinstance(one, nn.Module) or one.is_floating_point() else one

    try:
        expected = expected_of(batch, convert)
    except RuntimeError:  # a network of two types, or one that asks for float32
        return
    try:
        with torch.no_grad():
            found = copy.deepcopy(engine).double()(*(convert(one) if isinstance(one, Tensor) else one for one in batch))
    except plures.PluresError:
        return
    error = error_of(found, expected)
    if not error <= 1e-5:
        yield f"{name}: {error:.2g}"


def _exported(name: str, ensemble: plures.OrthogonalDropout, batch: Any, expected: Tensor) -> Iterator[str]:
    import tempfile
    from pathlib import Path

    given = arguments(copy.deepcopy(batch))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.pt2"
        try:
            plures.export(ensemble, path, tuple(given.args))
        except plures.PluresError:
            return
        program = torch.export.load(path).module()
        with torch.no_grad():
            tensors = [one for one in given.args if isinstance(one, Tensor)]
            found = program(*tensors)
    error = error_of(found["members"], expected.softmax(-1))
    if not error <= 1e-5:
        yield f"{name}: {error:.2g}"
