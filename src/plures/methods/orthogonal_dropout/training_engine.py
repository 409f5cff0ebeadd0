"""Train a stage without multiplying the zeros of its masks: convolutions run over the kernels that they have."""

import logging
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from plures.methods.orthogonal_dropout.engines.owned.graph import ADD, ELEMENTWISE, ELEMENTWISE_LAYERS, RELU
from plures.methods.orthogonal_dropout.engines.tracing import trace
from plures.methods.orthogonal_dropout.masks import Keep, mask_of
from plures.native.library import load, why_unavailable
from plures.native.training import Kernels, blocked, convolution, kernels_of, norm, unblocked

log = logging.getLogger("plures")
MOST_KEPT = 0.7  # of the kernels: with more, torch's dense convolutions of a wide network are faster


class TrainingEngine:
    """Run the network of a stage in training.

        engine = TrainingEngine()
        output = engine.output(stage.network, images)  # None: call the network

    It uses the tensors of the network's own layers, so gradients arrive where they always do, and agree to rounding. It
    needs a CPU with the native library, float32, batches that fill the vectors, and a network that torch.fx can trace:
    one whose convolutions have masks of whole kernels, which leave out much, with little else between them than batch
    norms, additions and activations. In all other cases the network itself is called.
    """

    def __init__(self) -> None:
        self._prepared: _Prepared | None = None
        self._refused: nn.Module | None = None  # a network that cannot be run here

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainingEngine":
        return TrainingEngine()  # of another network

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingEngine, ()

    def output(self, network: nn.Module, inputs: Any) -> Any:
        """Give what the network returns for a batch of images, or None where the network must be called itself."""
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled():
            return None
        images = isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.is_cpu and inputs.dtype == torch.float32
        if not images or not network.training or not self.takes(network, len(inputs)):
            return None
        prepared = cast(_Prepared, self._prepared)
        return None if prepared.is_disturbed() else prepared.run(inputs)

    def takes(self, network: nn.Module, images: int) -> bool:
        """Say whether batches of so many images of a network in training can be run here, on the CPU and in float32.

        engine.takes(stage.network, 128)
        """
        if self._refused is network:
            return False
        if self._prepared is None or self._prepared.module is not network:
            self._prepared = _prepare(network)
            self._refused = network if self._prepared is None else None
        return self._prepared is not None and images > 0 and images % load().lanes == 0


def _prepare(network: nn.Module) -> "_Prepared | None":
    if why_unavailable() is not None or not any(_kernels(network, name) for name, _ in network.named_modules()):
        return None
    try:
        prepared = _Prepared(network, trace(network))
    except Exception as error:  # whatever a network does that cannot be traced
        log.debug("torch.fx cannot trace the network: %s", error)
        return None
    return prepared if prepared.pays() else None


def _kernels(network: nn.Module, name: str) -> Kernels | None:
    """List the kernels of a convolution, if it has a mask of whole kernels and nothing that the library lacks."""
    layer = network.get_submodule(name)
    if not isinstance(layer, nn.Conv2d) or not parametrize.is_parametrized(layer, "weight"):
        return None
    mask = mask_of(network, f"{name}.weight")
    simple = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    simple = simple and layer.stride[0] == layer.stride[1] and not isinstance(layer.padding, str)
    if not simple or not isinstance(mask, Keep) or mask.mask[0, 0].numel() != 1:
        return None
    return kernels_of(mask.mask.flatten(1) != 0)


class _Blocked:
    """Blocked images; after a norm layer that waits for what follows it, the images before it."""

    def __init__(self, images: Tensor, norm: nn.BatchNorm2d | None = None, shortcut: Tensor | None = None) -> None:
        self.images, self.norm, self.shortcut = images, norm, shortcut

    def now(self, relu: bool = False) -> Tensor:
        """Normalise, if a norm layer still waits."""
        return self.images if self.norm is None else norm(self.images, self.norm, self.shortcut, relu=relu)


class _Prepared(fx.Interpreter):
    """Run a traced network, blocked where it can be."""

    def __init__(self, network: nn.Module, graph: fx.Graph) -> None:
        super().__init__(network, graph=graph)
        self.layers = dict(network.named_modules())
        called = [cast(str, node.target) for node in graph.nodes if node.op == "call_module"]
        self.kernels = {name: found for name in called if (found := _kernels(network, name))}
        self.blocked: set[fx.Node] = set()  # nodes whose values are blocked
        for node in graph.nodes:
            if self._stays_blocked(node, lambda given: given in self.blocked):
                self.blocked.add(node)

    def pays(self) -> bool:
        """Say whether much is left out, and few convolutions need their inputs laid out anew, as the first one does."""
        convolutions = [node for node in self.graph.nodes if node.target in self.kernels]
        converted = sum(node.args[0] not in self.blocked for node in convolutions)
        kept = sum(kernels.places.numel() for kernels in self.kernels.values())
        every = sum(cast(Tensor, self.layers[name].weight)[:, :, 0, 0].numel() for name in self.kernels)
        return 0 < converted <= 1 + len(convolutions) // 4 and kept <= MOST_KEPT * every

    def is_disturbed(self) -> bool:
        """Say whether a layer is not in training, or has hooks: here not all layers are called."""
        return any(
            not layer.training
            or layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
            for layer in self.layers.values()
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network."""
        try:
            return super().run(*args, enable_io_processing=False)
        finally:
            self.env = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node on blocked images, if it can, and on plain ones if not."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n not in self.blocked:
            args, kwargs = _each((args, kwargs), lambda value: unblocked(value.now()))
            return getattr(self, n.op)(n.target, args, kwargs)
        layer = self.layers.get(cast(str, n.target)) if n.op == "call_module" else None
        if isinstance(layer, nn.Conv2d):
            return self._convolved(cast(str, n.target), layer, args[0])
        if isinstance(layer, nn.BatchNorm2d):
            return self._finished(n, _Blocked(args[0].now(), layer))
        if self._is(n, nn.ReLU, RELU) and args[0].norm is not None:
            return _Blocked(args[0].now(relu=True))
        if n.target in ADD and any(self._waits(given) for given in n.all_input_nodes):
            waiting, other = args if self._waits(n.args[0]) else args[::-1]
            shortcut = other.now()
            if shortcut.shape != waiting.images.shape:  # they broadcast
                return _Blocked(waiting.now() + shortcut)
            return self._finished(n, _Blocked(waiting.images, waiting.norm, shortcut))
        if layer is not None and isinstance(layer, nn.Identity):
            return args[0]
        args, kwargs = _each((args, kwargs), lambda value: value.now())
        return _Blocked(getattr(self, n.op)(n.target, args, kwargs))

    def _convolved(self, name: str, layer: nn.Conv2d, given: Any) -> _Blocked:
        images = given.now() if isinstance(given, _Blocked) else blocked(given)
        padding = cast(tuple[int, int], layer.padding)
        return _Blocked(convolution(images, layer.weight, layer.bias, self.kernels[name], layer.stride[0], padding))

    def _finished(self, node: fx.Node, value: _Blocked) -> _Blocked:
        """Leave a norm layer waiting for its only user, which takes it along; otherwise run it."""
        return value if self._waits(node) else _Blocked(value.now())

    def _waits(self, node: Any) -> bool:
        """Say whether a norm layer, or the addition after one, is run with what follows: an addition, a ReLU."""
        user = next(iter(node.users)) if len(node.users) == 1 else None
        if user is None or user not in self.blocked:
            return False
        if self._is(node, nn.BatchNorm2d):
            return self._is(user, nn.ReLU, RELU) or (_adds(user) and self._first_to_wait(user) is node)
        return _adds(node) and self._first_to_wait(node) is not None and self._is(user, nn.ReLU, RELU)

    def _first_to_wait(self, addition: fx.Node) -> fx.Node | None:
        """Choose one of two norm layers that are added."""
        # An addition in place changes its first value, which may be used elsewhere: then it is not left out.
        values = addition.all_input_nodes[: 1 if addition.target in (operator.iadd, "add_") else 2]
        return next((node for node in values if self._is(node, nn.BatchNorm2d) and len(node.users) == 1), None)

    def _is(self, node: fx.Node, layer: type[nn.Module], functions: tuple[Any, ...] = ()) -> bool:
        if node.op == "call_module":
            return type(self.layers[cast(str, node.target)]) is layer
        return node.target in functions

    def _stays_blocked(self, node: fx.Node, is_blocked: Callable[[Any], bool]) -> bool:
        """Say whether a node gives blocked images."""
        if node.op == "call_module":
            layer = self.layers[cast(str, node.target)]
            if node.target in self.kernels:
                return len(node.args) == 1
            fits = isinstance(layer, (*ELEMENTWISE_LAYERS, nn.Identity)) or _can_norm(layer)
            return fits and len(node.args) == 1 and is_blocked(node.args[0])
        inputs = node.all_input_nodes
        called = node.op in ("call_function", "call_method") and node.target in ELEMENTWISE
        return called and bool(inputs) and all(map(is_blocked, inputs))


def _adds(node: fx.Node) -> bool:
    """Say whether a node adds two values that are not the same."""
    return node.target in ADD and len(node.args) == len(node.all_input_nodes) == 2 and not node.kwargs


def _can_norm(layer: nn.Module) -> bool:
    usual = type(layer) is nn.BatchNorm2d and layer.affine and layer.track_running_stats and layer.momentum is not None
    return usual and layer.weight.dtype == torch.float32


def _each(values: Any, change: Callable[[_Blocked], Any]) -> Any:
    """Change blocked images wherever they stand among the arguments of a call."""
    if isinstance(values, _Blocked):
        return change(values)
    if isinstance(values, tuple | list):
        return type(values)([_each(value, change) for value in values])
    return {name: _each(value, change) for name, value in values.items()} if isinstance(values, dict) else values
