"""One pass over a network by torch.fx: which layers it calls, what they are, and what follows what."""

import operator
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize

from plures.calling import batch_of, call, each_batched, rows_of
from plures.tensors import canonical, shell

RELU: tuple[Any, ...] = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
ADD: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
ELEMENTWISE: tuple[Any, ...] = (
    *(*RELU, *ADD, operator.mul, operator.imul, operator.sub, operator.isub, torch.mul, torch.sub, "mul", "sub"),
    *(F.gelu, F.silu, F.sigmoid, torch.sigmoid, torch.tanh, F.hardswish, F.relu6, F.leaky_relu, F.elu),
)
ELEMENTWISE_LAYERS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.ReLU6, nn.LeakyReLU, nn.ELU)
NOTHING_LAYERS = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Graph:
    """The nodes of a traced network, the layer that each one calls, and what follows it.

    A network whose control flow depends on values cannot be traced: torch.fx raises an error of its own. Layers are
    known by their exact type: a class derived from one of torch's may do anything.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.graph = trace(network)
        self.nodes = list(self.graph.nodes)
        called = [node for node in self.nodes if node.op == "call_module"]
        self.layers = {node: network.get_submodule(cast(str, node.target)) for node in called}
        self._calls = Counter(map(id, self.layers.values()))

    def is_layer(self, node: fx.Node, *kinds: type[nn.Module]) -> bool:
        """Return whether a node calls a layer of one of these exact types, with a `forward` of its class."""
        layer = self.layers.get(node)
        return type(layer) in kinds and "forward" not in vars(layer)

    def is_called_once(self, node: fx.Node) -> bool:
        """Return whether no other node calls the same layer."""
        return self._calls[id(self.layers[node])] == 1

    def is_relu(self, node: fx.Node) -> bool:
        """Return whether a node is a ReLU: a layer, a function or a method."""
        return self.is_layer(node, nn.ReLU) or (_calls_function(node) and node.target in RELU)

    def is_sum(self, node: fx.Node) -> bool:
        """Return whether a node adds two others, and does nothing else."""
        two = len(node.args) == 2 and not node.kwargs and all(isinstance(one, fx.Node) for one in node.args)
        return two and _calls_function(node) and node.target in ADD

    def is_elementwise(self, node: fx.Node) -> bool:
        """Return whether a node works on each number apart, so that any layout of the images will do."""
        return self.is_layer(node, *ELEMENTWISE_LAYERS) or (_calls_function(node) and node.target in ELEMENTWISE)

    def does_nothing(self, node: fx.Node) -> bool:
        """Return whether a node returns what it is given, in eval mode."""
        return self.is_layer(node, *NOTHING_LAYERS) and len(node.args) == 1

    def only_user(self, node: fx.Node) -> fx.Node | None:
        """Return the node that alone uses the output of another one."""
        return next(iter(node.users)) if len(node.users) == 1 else None

    def relu_after(self, node: fx.Node) -> fx.Node | None:
        """Return the ReLU that alone uses the output of a node."""
        user = self.only_user(node)
        return user if user is not None and self.is_relu(user) else None

    def folds(self) -> dict[str, str]:
        """Return the convolutions whose output goes to one batch norm and nowhere else: one name -> the other.

        Both are called once, the norm layer has running statistics, and none of their tensors is used elsewhere.
        """
        first_names = canonical(self.network)
        tied = {first for name, first in first_names.items() if name != first}
        read = {cast(str, node.target) for node in self.nodes if node.op == "get_attr"}
        pairs = {}
        for node in self.layers:
            norm = self.only_user(node)
            layer = None if norm is None or norm.kwargs else self.layers.get(norm)
            if not self.is_layer(node, *CONVOLUTIONS) or norm is None or not has_statistics(layer):
                continue
            names = cast(str, node.target), cast(str, norm.target)
            inside = [name for name in first_names if name.rpartition(".")[0] in names]
            alone = self.is_called_once(node) and self.is_called_once(norm)
            if alone and not any(first_names[name] in tied or name in read for name in inside):
                pairs[names[0]] = names[1]
        return pairs


def is_of_torch(layer: nn.Module | None) -> bool:
    """Return whether a layer is of a class of torch and runs its code: a derived class may do anything."""
    return type(layer).__module__.startswith("torch.nn.") and "forward" not in vars(layer)


def has_statistics(layer: nn.Module | None) -> bool:
    """Return whether a layer is one of torch's batch norms, with running statistics."""
    return isinstance(layer, _BatchNorm) and is_of_torch(layer) and layer.running_mean is not None


def is_plain_convolution(layer: nn.Module, grouped: bool = False) -> bool:
    """Return whether a layer is a convolution of the kind that the native kernels know, in groups if they may be."""
    whole = isinstance(layer, nn.Conv2d) and (grouped or layer.groups == 1) and layer.dilation == (1, 1)
    return whole and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _calls_function(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method")


def graph_of(network: nn.Module) -> Graph | None:
    """Trace a copy of a network's structure; return None if torch.fx cannot, or if hooks would be lost."""
    if is_hooked(network):
        return None
    try:
        return Graph(shell(network))
    except Exception:  # tracing runs the network's own code, which may raise anything
        return None


def is_hooked(network: nn.Module) -> bool:
    """Return whether a network has hooks, or torch has some for all modules."""
    return any(map(has_hooks, network.modules())) or _has_any_global_hook()  # type: ignore[no-untyped-call]


def why_joined(network: nn.Module, inputs: Any) -> str | None:
    """Return what makes the course of a network depend on the numbers or the length of a batch; None if nothing does.

    It runs on tensors without numbers, whose first axis has a length that torch does not know but asks about.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    lengths = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(shape_env=lengths, allow_non_fake_inputs=True)
    twice = rows_of(inputs, torch.arange(2 * len(cast(Tensor, batch_of(inputs)))) // 2)

    def faked(one: Tensor) -> Tensor:
        axes = [DimDynamic.DUCK, *[DimDynamic.STATIC] * (one.dim() - 1)]
        return mode.from_tensor(one, symbolic_context=StatelessSymbolicContext(axes))

    try:
        with torch.inference_mode(False), torch.no_grad(), mode:
            call(shell(network), each_batched(twice, faked))
    except Exception as refused:  # whatever the network's own code raises, or torch for a number that is asked for
        return f"it cannot run without numbers ({type(refused).__name__})"
    return f"its course depends on the length of the batch ({lengths.guards[0].expr})" if lengths.guards else None


def has_hooks(layer: nn.Module) -> bool:
    """Return whether a layer has hooks, which a trace leaves out."""
    forward = layer._forward_hooks or layer._forward_pre_hooks
    return bool(forward or layer._backward_hooks or layer._backward_pre_hooks)


class _OfThisThread(fx.Tracer):
    """Trace what this thread calls; the modules that other threads call meanwhile run as always."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: int | None = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return parametrize.is_parametrized(m) or super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


_turn = threading.RLock()  # one trace at a time; a network may make an engine of another one while it is traced


if hasattr(os, "register_at_fork"):  # the thread that held it is not in the child
    os.register_at_fork(after_in_child=lambda: globals().update(_turn=threading.RLock()))


def trace(network: nn.Module) -> fx.Graph:
    """Trace a network by torch.fx, which changes how modules are called; other threads predict meanwhile."""
    with _turn:
        tracer = _OfThisThread()
        try:
            return tracer.trace(network)
        finally:
            tracer.thread = None  # a trace of somebody else may leave our changes behind: they pass everything by
