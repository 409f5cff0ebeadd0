"""Rewrite the graph of a network so that one pass runs all members, over the weights that each owns."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from plures.graph import Graph, has_statistics
from plures.methods.orthogonal_dropout.engines.apart import Apart, EachCall, MembersTensor, Substitutes
from plures.methods.orthogonal_dropout.engines.layers import MembersNorm, OwnedConvolution, OwnedLinear
from plures.methods.orthogonal_dropout.engines.parts import OfMembers, Parts
from plures.methods.orthogonal_dropout.roles import Role
from plures.native import operators
from plures.native.library import load

CONSTANT, SHARED, TILED, BLOCKED, APART = "constant", "shared", "tiled", "blocked", "apart"


class Value(NamedTuple):
    """What stands for a node of the old graph in the new one: a node, and how the members lie in it."""

    layout: str
    node: Any


class Rewriter:
    """Go through a traced network node by node and write the graph that runs all members."""

    def __init__(self, traced: Graph, parts: Parts, pairs: dict[str, str]) -> None:
        self.traced, self.parts, self.pairs = traced, parts, pairs
        self.members = len(parts.members)
        self.graph = fx.Graph()
        self.holder = nn.Module()
        self.values: dict[fx.Node, Value] = {}
        self.batch: fx.Node | None = None
        self.substitutes = Substitutes(parts)
        self._made: dict[str, str] = {}
        self._converted: dict[tuple[fx.Node, str], fx.Node] = {}

    def rewritten(self) -> fx.GraphModule:
        """Return the module that takes what the network takes and returns the members one after the other."""
        for node in filter(self.traced.does_nothing, self.traced.nodes):
            node.replace_all_uses_with(cast(fx.Node, node.args[0]))
            self.traced.graph.erase_node(node)
        for node in self.traced.graph.nodes:
            if node not in self.values:
                getattr(self, f"_{node.op}")(node)
        self.graph.lint()
        return fx.GraphModule(self.holder, self.graph)

    # ---- what nodes become ----

    def _placeholder(self, node: fx.Node) -> None:
        made = self.graph.create_node("placeholder", node.target, node.args)
        self.batch = self.batch or made
        self.values[node] = Value(SHARED, made)

    def _get_attr(self, node: fx.Node) -> None:
        name = cast(str, node.target)
        role = self.parts.role(name)
        if role in (None, Role.SHARED):
            owner, _, attribute = name.rpartition(".")
            tensor = getattr(self.traced.network.get_submodule(owner), attribute)
            if isinstance(tensor, Tensor):
                path = f"constant{len(self.values)}"
                self.holder.register_buffer(path, tensor.detach())
                tensor = self.graph.get_attr(path)
            self.values[node] = Value(CONSTANT, tensor)
            return
        self.substitutes.one_by_one.append(name.rpartition(".")[0] or name)
        stack = torch.stack([self.parts.tensor(name, index) for index in range(self.members)])
        self.values[node] = Value(APART, self._call(f"tensor {name}", lambda: MembersTensor(self.members, stack=stack)))

    def _output(self, node: fx.Node) -> None:
        self.graph.output(fx.node.map_arg(node.args[0], self._tiled))

    def _call_function(self, node: fx.Node) -> None:
        layouts = {self.values[argument].layout for argument in node.all_input_nodes}
        if APART in layouts:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._apart)
            make = lambda: EachCall(self.members, node.target)  # noqa: E731
            self.values[node] = Value(APART, self._call(f"call {node.name}", make, *args, **kwargs))
            return
        layout = TILED
        if layouts <= {CONSTANT}:
            layout = CONSTANT
        elif layouts == {BLOCKED} and self.traced.is_elementwise(node):
            layout = BLOCKED
        take = self._tiled if layout == TILED else lambda given: self.values[given].node
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), take)
        self.values[node] = Value(layout, self.graph.create_node(node.op, node.target, args, kwargs))

    _call_method = _call_function

    def _call_module(self, node: fx.Node) -> None:
        name, layer = cast(str, node.target), self.traced.layers[node]
        plain = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
        blocked = plain and self.values[cast(fx.Node, node.args[0])].layout == BLOCKED
        if plain and OwnedConvolution.fits(layer, self.parts, name):
            self._convolution(node, name, cast(nn.Conv2d, layer))
        elif plain and self.traced.is_layer(node, nn.Linear) and self.parts.role(f"{name}.weight") is Role.SPLIT:
            self._linear(node, name, cast(nn.Linear, layer))
        elif blocked and has_statistics(layer):
            relu = self.traced.relu_after(node)
            make = lambda: MembersNorm(layer, self.parts, name, blocked=True, relu=relu is not None)  # noqa: E731
            path = self._add(f"blocked {name} {relu is not None}", make)
            value = Value(BLOCKED, self.graph.call_module(path, (self._blocked(node.args[0]),)))
            self.values[node] = self.values[relu or node] = value
        elif blocked and self.traced.is_elementwise(node):
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
        shortcut = None
        following = self.traced.only_user(chain[-1])
        if following is not None and self.traced.is_sum(following):
            other = next((one for one in following.args if one is not chain[-1]), None)
            value = self.values.get(cast(fx.Node, other))
            if value is not None and value.layout == BLOCKED:
                chain.append(following)
                shortcut = value.node
        relu = self.traced.relu_after(chain[-1])
        make = lambda: OwnedConvolution(layer, self.parts, name, relu is not None)  # noqa: E731
        path = self._add(f"{name} {node.name}", make)
        args = (self._blocked(node.args[0]),) if shortcut is None else (self._blocked(node.args[0]), shortcut)
        value = Value(BLOCKED, self.graph.call_module(path, args))
        self.values |= dict.fromkeys([*chain, relu or node], value)

    def _linear(self, node: fx.Node, name: str, layer: nn.Linear) -> None:
        relu = self.traced.relu_after(node)
        given = (f"{name}.weight", f"{name}.bias", layer.out_features, relu is not None)
        path = self._add(f"{name} relu {relu is not None}", lambda: OwnedLinear(self.parts, *given))
        source = self.values[cast(fx.Node, node.args[0])]
        shared = source.layout == SHARED
        rows = source.node if shared else self._tiled(cast(fx.Node, node.args[0]))
        value = Value(TILED, self.graph.call_module(path, (rows, shared)))
        self.values[node] = self.values[relu or node] = value

    # ---- layouts ----

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
            path = self._add(f"into {layout} {shared}", lambda: Into(self.members, layout, shared))
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


class Into(OfMembers):
    """Bring a batch into another layout: tiled, blocked, plain (from blocked), apart, or joined (from apart)."""

    def __init__(self, count: int, layout: str, shared: bool = False) -> None:
        super().__init__(count)
        self.layout, self.shared = layout, shared
        self.lanes = load().lanes

    def forward(self, x: Any, batch: Any = None) -> Any:
        """Convert a value; `batch` is what the network was given, and has one row per sample."""
        if self.layout == "tiled":
            whole = isinstance(x, Tensor) and x.dim() and len(x) == len(batch)
            return x.repeat(self.count, *[1] * (x.dim() - 1)) if whole else x
        if self.layout == "blocked":
            held = 1 if self.shared else self.count
            # Vectors that are half full of images are still faster than vectors of pixels.
            return operators.block(x, held, self.lanes if 2 * (len(x) // held) > self.lanes else 1)
        if self.layout == "plain":
            return operators.unblock(x, len(batch))
        return Apart(x.chunk(self.count)) if self.layout == "apart" else torch.cat(x.values)
