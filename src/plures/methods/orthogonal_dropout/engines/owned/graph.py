"""Rewrite the graph of a network so that one pass runs all members, over the weights that each owns."""

import operator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from plures.methods.orthogonal_dropout.engines.owned.apart import EachCall, MembersTensor
from plures.methods.orthogonal_dropout.engines.owned.layers import Into, MembersNorm, OwnedConvolution, OwnedLinear
from plures.methods.orthogonal_dropout.engines.owned.parts import Parts
from plures.methods.orthogonal_dropout.engines.owned.tree import Substitutes
from plures.methods.orthogonal_dropout.roles import Role

CONSTANT, SHARED, TILED, BLOCKED, APART = "constant", "shared", "tiled", "blocked", "apart"
RELU: tuple[Any, ...] = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
ADD: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
ELEMENTWISE: tuple[Any, ...] = (
    *RELU,
    *ADD,
    operator.mul,
    operator.imul,
    operator.sub,
    operator.isub,
    torch.mul,
    torch.sub,
    "mul",
    "sub",
)
ELEMENTWISE += (F.gelu, F.silu, F.sigmoid, torch.sigmoid, torch.tanh, F.hardswish, F.relu6, F.leaky_relu, F.elu)
ELEMENTWISE_LAYERS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.ReLU6, nn.LeakyReLU, nn.ELU)
NOTHING_LAYERS = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class Value(NamedTuple):
    """What stands for a node of the old graph in the new one: a node, and how the members lie in it."""

    layout: str
    node: Any


class Rewriter:
    """Go through a traced network node by node and write the graph that runs all members.

    rewriter = Rewriter(network, traced, parts, pairs)
    module = rewriter.rewritten()
    rewriter.substitutes.one_by_one  # the layers that run member by member
    """

    def __init__(self, network: nn.Module, traced: fx.Graph, parts: Parts, pairs: dict[str, str]) -> None:
        self.network, self.traced, self.parts, self.pairs = network, traced, parts, pairs
        self.modules = dict(network.named_modules())
        self.graph = fx.Graph()
        self.holder = nn.Module()
        self.values: dict[fx.Node, Value] = {}
        self.batch: fx.Node | None = None
        self.substitutes = Substitutes(parts)
        self._made: dict[str, str] = {}
        self._converted: dict[tuple[fx.Node, str], fx.Node] = {}

    def rewritten(self) -> fx.GraphModule:
        """Give the module that takes what the network takes and returns the members one after the other."""
        for node in self.traced.nodes:
            if node not in self.values:
                getattr(self, f"_{node.op}")(node)
        self.graph.lint()
        return fx.GraphModule(self.holder, self.graph)

    # ---- what nodes become ----

    def _placeholder(self, node: fx.Node) -> None:
        default = node.args if node.args else ()
        made = (
            self.graph.placeholder(cast(str, node.target), default_value=default[0] if default else None)
            if default
            else (self.graph.placeholder(cast(str, node.target)))
        )
        self.batch = self.batch or made
        self.values[node] = Value(SHARED, made)

    def _get_attr(self, node: fx.Node) -> None:
        name = cast(str, node.target)
        role = self.parts.role(name)
        if role in (None, Role.SHARED):
            owner, _, attribute = name.rpartition(".")
            tensor = getattr(self.network.get_submodule(owner), attribute)
            if isinstance(tensor, Tensor):
                self.values[node] = Value(CONSTANT, self._call(f"constant {name}", lambda: Constant(tensor)))
                return
            self.values[node] = Value(CONSTANT, tensor)
            return
        layers = [self.parts.tensor(name, index) for index in range(len(self.parts.members))]
        made = self._call(f"tensor {name}", lambda: MembersTensor(torch.stack(layers), self.parts.running))
        self.values[node] = Value(APART, made)

    def _output(self, node: fx.Node) -> None:
        self.graph.output(fx.node.map_arg(node.args[0], self._tiled))

    def _call_function(self, node: fx.Node) -> None:
        self._call_anything(node, node.target)

    _call_method = _call_function

    def _call_anything(self, node: fx.Node, target: Any) -> None:
        given = [self.values[argument] for argument in node.all_input_nodes]
        layouts = {value.layout for value in given}
        if APART in layouts:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._apart)
            self.values[node] = Value(APART, self._call(f"call {node.name}", lambda: EachCall(target), *args, **kwargs))
        elif layouts == {BLOCKED} and target in ELEMENTWISE:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n].node)
            self.values[node] = Value(BLOCKED, self.graph.create_node(node.op, node.target, args, kwargs))
        elif layouts <= {CONSTANT}:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n].node)
            self.values[node] = Value(CONSTANT, self.graph.create_node(node.op, node.target, args, kwargs))
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._tiled)
            self.values[node] = Value(TILED, self.graph.create_node(node.op, node.target, args, kwargs))

    def _call_module(self, node: fx.Node) -> None:
        name = cast(str, node.target)
        layer = self.modules[name]
        if self._does_nothing(node):
            self.values[node] = self.values[cast(fx.Node, node.args[0])]
        elif OwnedConvolution.fits(layer, self.parts, name):
            self._convolution(node, name, cast(nn.Conv2d, layer))
        elif isinstance(layer, nn.Linear) and self.parts.role(f"{name}.weight") is Role.SPLIT:
            self._linear(node, name, layer)
        elif (
            isinstance(layer, _BatchNorm)
            and self._layout(node) == BLOCKED
            and MembersNorm.fits(layer, self.parts, name)
        ):
            end = self._followed_by_relu(node)
            path = self._add(f"{name} relu {end is not node}", lambda: MembersNorm(layer, self.parts, name))
            norm = cast(MembersNorm, self.holder.get_submodule(path))
            norm.relu = end is not node
            blocked = self._add(f"blocked {path}", lambda: Blocked(norm))
            self.values[node] = self.values[end] = Value(
                BLOCKED, self.graph.call_module(blocked, (self._blocked(node.args[0]),))
            )
        elif isinstance(layer, ELEMENTWISE_LAYERS) and self._layout(node) == BLOCKED:
            path = self._add(name, lambda: layer)
            self.values[node] = Value(BLOCKED, self.graph.call_module(path, (self._blocked(node.args[0]),)))
        else:
            path = self._add(name, lambda: self.substitutes.of(name, layer))
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._tiled)
            self.values[node] = Value(TILED, self.graph.call_module(path, args, kwargs))

    def _convolution(self, node: fx.Node, name: str, layer: nn.Conv2d) -> None:
        """Write a convolution, and with it the batch norm, the addition and the ReLU that follow and stand alone."""
        chain = [node]
        if name in self.pairs:
            chain += list(node.users)
        self._skip_nothing(chain)
        shortcut = None
        following = self._only_user(chain[-1])
        if following is not None and following.target in ADD and len(following.args) == 2 and not following.kwargs:
            other = next((a for a in following.args if a is not chain[-1]), None)
            value = self._known(other)
            if value is not None and value.layout == BLOCKED:
                chain.append(following)
                shortcut = value.node
        end = self._followed_by_relu(chain[-1])
        chain.append(end)
        uses = sum(other.target == name for other in self.traced.nodes if other.op == "call_module")
        path = self._add(f"{name} {node.name}" if uses > 1 else name, lambda: OwnedConvolution(layer, self.parts, name))
        cast(OwnedConvolution, self.holder.get_submodule(path)).relu = end is not chain[-2]
        args = (self._blocked(node.args[0]),) if shortcut is None else (self._blocked(node.args[0]), shortcut)
        value = Value(BLOCKED, self.graph.call_module(path, args))
        self.values |= dict.fromkeys(chain, value)

    def _linear(self, node: fx.Node, name: str, layer: nn.Linear) -> None:
        end = self._followed_by_relu(node)
        made = lambda: OwnedLinear(self.parts, f"{name}.weight", f"{name}.bias", layer.out_features)  # noqa: E731
        path = self._add(f"{name} relu {end is not node}", made)
        cast(OwnedLinear, self.holder.get_submodule(path)).relu = end is not node
        source = self.values[cast(fx.Node, node.args[0])]
        shared = source.layout == SHARED
        given = source.node if shared else self._tiled(cast(fx.Node, node.args[0]))
        value = Value(TILED, self.graph.call_module(path, (given, shared)))
        self.values[node] = self.values[end] = value

    # ---- what follows what ----

    def _only_user(self, node: fx.Node) -> fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None

    def _known(self, node: Any) -> Value | None:
        """Give the value of a node that has been written already, seen through layers that do nothing."""
        while isinstance(node, fx.Node) and node not in self.values and self._does_nothing(node):
            node = node.args[0]
        return self.values.get(node) if isinstance(node, fx.Node) else None

    def _does_nothing(self, node: fx.Node) -> bool:
        called = node.op == "call_module" and len(node.args) == 1
        return called and isinstance(self.modules[cast(str, node.target)], NOTHING_LAYERS)

    def _skip_nothing(self, chain: list[fx.Node]) -> None:
        while (following := self._only_user(chain[-1])) is not None and self._does_nothing(following):
            chain.append(following)

    def _followed_by_relu(self, node: fx.Node) -> fx.Node:
        """Give the ReLU that alone uses a node, or the node itself."""
        following = self._only_user(node)
        if following is None:
            return node
        is_layer = following.op == "call_module" and type(self.modules[cast(str, following.target)]) is nn.ReLU
        return following if is_layer or (following.op != "call_module" and following.target in RELU) else node

    # ---- layouts ----

    def _layout(self, node: fx.Node) -> str:
        return self.values[cast(fx.Node, node.args[0])].layout

    def _blocked(self, given: Any) -> fx.Node:
        value = self.values[given]
        if value.layout == BLOCKED:
            return cast(fx.Node, value.node)
        if value.layout == SHARED:
            return self._convert(value.node, "blocked", shared=True)
        return self._convert(self._tiled(given), "blocked")

    def _tiled(self, given: fx.Node) -> Any:
        value = self.values[given]
        if value.layout == SHARED:
            return self._convert(value.node, "tiled")
        if value.layout == BLOCKED:
            return self._convert(value.node, "plain")
        return self._convert(value.node, "joined") if value.layout == APART else value.node

    def _apart(self, given: fx.Node) -> Any:
        value = self.values[given]
        if value.layout in (APART, CONSTANT):
            return value.node
        return self._convert(self._tiled(given), "apart")

    def _convert(self, node: fx.Node, layout: str, shared: bool = False) -> fx.Node:
        """Write a conversion, once for each node."""
        key = (node, layout)
        if key not in self._converted:
            path = self._add(f"into {layout} {shared}", lambda: Into(layout, self.parts.running, shared))
            args = (node, self.batch) if layout in ("tiled", "plain") else (node,)
            self._converted[key] = self.graph.call_module(path, args)
        return self._converted[key]

    def _call(self, name: str, make: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_module(self._add(name, make), args, kwargs)

    def _add(self, name: str, make: Any) -> str:
        """Put a module into the new network, once for each name."""
        if name not in self._made:
            self._made[name] = f"part{len(self._made)}"
            self.holder.add_module(self._made[name], make())
        return self._made[name]


class Constant(nn.Module):
    """Give a tensor that all members share."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value.detach(), persistent=False)

    def forward(self) -> Tensor:
        """Give it."""
        return self.value


class Blocked(nn.Module):
    """A norm layer on blocked activations."""

    def __init__(self, norm: MembersNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return self.norm.blocked(x)
