"""Rewrite the graph of a network so that one pass runs all members, over the weights that each owns."""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from plures.calling import Arguments, call, each_batched, rows_of
from plures.graph import Graph, has_statistics, is_of_torch
from plures.methods.orthogonal_dropout.engines.engine import size_of
from plures.methods.orthogonal_dropout.engines.layers import (
    ChangedLinear,
    LinearNames,
    MembersEmbedding,
    MembersNorm,
    OfMembers,
    OwnedAttention,
    OwnedConvolution,
    OwnedLinear,
    Parts,
    RunsOnce,
    for_each_sample,
    running,
    spread_out,
)
from plures.methods.orthogonal_dropout.roles import Role
from plures.native import operators
from plures.native.library import load

CONTAINERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.ModuleList, nn.ModuleDict, nn.Sequential)
CONSTANT, SHARED, TILED, BLOCKED, APART = "constant", "shared", "tiled", "blocked", "apart"


class Value(NamedTuple):
    """What stands for a node of the old graph in the new one: a node, and how the members lie in it."""

    layout: str
    node: Any


class Replacer:
    """Put layers that run all members in the place of a network's own, on a batch that holds one after the other."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.one_by_one: list[str] = []  # the layers that run member by member
        self.shares_weights = False  # whether layers with weights run once for all members
        self._replaced: dict[int, tuple[nn.Module, nn.Module]] = {}

    def whole(self, network: nn.Module) -> nn.Module:
        """Replace the layers of a network that torch.fx cannot trace, and return what runs all members."""
        for name, layer in network.named_modules():
            inside = self.parts.inside(f"{name}." if name else "")
            if inside and not any(map(self.parts.differs, inside)) and "forward" not in vars(layer):
                layer.forward = RunsOnce(layer)
        return AllMembers(len(self.parts.members), self.substitute("", network))

    def substitute(self, name: str, layer: nn.Module) -> nn.Module:
        """Return what runs in a layer's place; layers that are not known run once for each member."""
        if not any(map(self.parts.differs, self.parts.inside(f"{name}." if name else ""))):
            return layer
        if not self.is_leaf(name, layer):
            for child, inner in layer._modules.items():
                if inner is not None:
                    layer._modules[child] = self.substitute(f"{name}.{child}".lstrip("."), inner)
            if type(layer) is nn.TransformerEncoderLayer and layer.activation is F.gelu:
                layer.activation = cast(Any, torch._C._nn).gelu_  # in place of what the first linear layer returns
            return layer
        if id(layer) not in self._replaced:
            self._replaced[id(layer)] = layer, self._known(name, layer) or self._each(name, layer)
        return self._replaced[id(layer)][1]

    def is_leaf(self, name: str, layer: nn.Module) -> bool:
        """Return whether a layer is replaced as a whole: torch's own, and those that hold tensors that differ."""
        own = (*layer._parameters, *layer._buffers)
        scripted = isinstance(layer, torch.jit.ScriptModule)
        opaque = is_of_torch(layer) and type(layer) not in CONTAINERS
        return scripted or opaque or any(self.parts.differs(f"{name}.{tensor}".lstrip(".")) for tensor in own)

    def _each(self, name: str, layer: nn.Module) -> nn.Module:
        self.one_by_one.append(name)
        return EachMember(
            [self._copy(layer, f"{name}." if name else "", index) for index in range(len(self.parts.members))]
        )

    def _copy(self, layer: nn.Module, prefix: str, index: int) -> nn.Module:
        """Copy a layer with a member's tensors in it."""
        made = copy.deepcopy(layer)
        for name, tensor in made.state_dict().items():
            if self.parts.own(f"{prefix}{name}") is not None:
                tensor.copy_(self.parts.tensor(f"{prefix}{name}", index))
        return made.requires_grad_(False).eval()

    def _known(self, name: str, layer: nn.Module) -> nn.Module | None:
        parts = self.parts
        if OwnedAttention.fits(layer, parts, name):
            return OwnedAttention(cast(nn.MultiheadAttention, layer), parts, name)
        if MembersNorm.fits(layer):
            return MembersNorm(layer, parts, name)
        embeds = type(layer) is nn.Embedding and is_of_torch(layer) and layer.max_norm is None and not parts.changes
        if embeds and parts.role(f"{name}.weight") is Role.SPLIT:
            return MembersEmbedding(cast(nn.Embedding, layer), parts, name)
        if isinstance(layer, nn.Linear) and is_of_torch(layer) and parts.differs(f"{name}.weight"):
            kind = ChangedLinear if parts.changes else OwnedLinear
            return kind(parts, LinearNames(f"{name}.weight", f"{name}.bias", layer.out_features))
        return None


class Rewriter(Replacer):
    """Go through a traced network node by node and write the graph that runs all members."""

    def __init__(self, traced: Graph, parts: Parts, pairs: dict[str, str]) -> None:
        super().__init__(parts)
        self.traced, self.pairs = traced, pairs
        self.members = len(parts.members)
        self.graph = fx.Graph()
        self.holder = nn.Module()
        self.once = same_for_all(traced, parts)
        self.shares_weights = any(parts.inside(f"{node.target}.") for node in self.once if node in traced.layers)
        self.values: dict[fx.Node, Value] = {}
        self.batch: fx.Node | None = None
        self.lanes = lanes_of(traced, parts)
        self._made: dict[str, str] = {}
        self._converted: dict[tuple[fx.Node, str], fx.Node] = {}

    def whole(self, network: nn.Module) -> nn.Module:
        """Write the module that takes what the network takes and returns the members one after the other."""
        for node in filter(self.traced.does_nothing, self.traced.nodes):
            node.replace_all_uses_with(cast(fx.Node, node.args[0]))
            self.traced.graph.erase_node(node)
        for node in self.traced.graph.nodes:
            if node in self.once and node.op != "placeholder":
                self._run_once(node)
            elif node not in self.values:
                getattr(self, f"_{node.op}")(node)
        self.graph.lint()
        return fx.GraphModule(self.holder, self.graph)

    # ---- what nodes become ----

    def _run_once(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: self.values[given].node)
        if node.op == "call_module":
            made = self._call(f"once {node.target}", lambda: self.traced.layers[node], *args, **kwargs)
        else:
            made = self.graph.create_node(node.op, node.target, args, kwargs)
        self.values[node] = Value(SHARED, made)

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
        self.one_by_one.append(name.rpartition(".")[0] or name)
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
        elif self._is_linear(node):
            self._linear(node)
        elif blocked and has_statistics(layer):
            relu, kind = self._relu_after(node)
            make = lambda: MembersNorm(layer, self.parts, name, blocked=True, relu=kind)  # noqa: E731
            made = self._call(f"blocked {name} {kind}", make, self._blocked(node.args[0]))
            self.values[node] = self.values[relu or node] = Value(BLOCKED, made)
        elif blocked and self.traced.is_elementwise(node):
            self.values[node] = Value(BLOCKED, self._call(name, lambda: layer, self._blocked(node.args[0])))
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._tiled)
            made = self._call(name, lambda: self.substitute(name, layer), *args, **kwargs)
            self.values[node] = Value(TILED, made)

    def _convolution(self, node: fx.Node, name: str, layer: nn.Conv2d) -> None:
        """Write a convolution, and with it the batch norm, the addition and the ReLU that follow and stand alone."""
        chain, shortcut = [node, *(node.users if name in self.pairs else ())], None
        following = self.traced.only_user(chain[-1])
        if following is not None and self.traced.is_sum(following):
            other = next((one for one in following.args if one is not chain[-1]), None)
            value = self.values.get(cast(fx.Node, other))
            if value is not None and value.layout == BLOCKED:
                chain, shortcut = [*chain, following], value.node
        relu, kind = self._relu_after(chain[-1])
        make = lambda: OwnedConvolution(layer, self.parts, name, kind)  # noqa: E731
        made = self._call(f"{name} {node.name}", make, self._blocked(node.args[0]), shortcut)
        self.values |= dict.fromkeys([*chain, relu or node], Value(BLOCKED, made))

    def _relu_after(self, node: fx.Node) -> tuple[fx.Node | None, int]:
        """Return the ReLU or ReLU6 that alone uses a node, and which: 1 or 6, or 0 if there is none."""
        relu, user = self.traced.relu_after(node), self.traced.only_user(node)
        six = user is not None and (self.traced.is_layer(user, nn.ReLU6) or user.target is F.relu6)
        return (user, 6) if six else (relu, int(relu is not None))

    def _linear(self, node: fx.Node) -> None:
        """Write a linear layer, and with it the ReLUs and linear layers that follow and stand alone."""
        source = self.values[cast(fx.Node, node.args[0])]
        shared = source.layout == SHARED
        rows = source.node if shared else self._tiled(cast(fx.Node, node.args[0]))
        chain, covered, following = [], [], cast(fx.Node | None, node)
        while following is not None and self._is_linear(following):
            name, layer = str(following.target), cast(nn.Linear, self.traced.layers[following])
            relu = self.traced.relu_after(following)
            chain.append(LinearNames(f"{name}.weight", f"{name}.bias", layer.out_features, relu is not None))
            covered += [following] if relu is None else [following, relu]
            following = self.traced.only_user(covered[-1])
        made = self._call(str(chain), lambda: OwnedLinear(self.parts, *chain), rows, shared)
        self.values |= dict.fromkeys(covered, Value(TILED, made))

    def _is_linear(self, node: fx.Node) -> bool:
        """Return whether the kernels can run a node, as a linear layer of all members."""
        plain = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
        return plain and self.traced.is_layer(node, nn.Linear) and self.parts.differs(f"{node.target}.weight")

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
            make = lambda: Into(self.members, layout, shared, self.lanes)  # noqa: E731
            self._converted[key] = self._call(f"into {layout} {shared}", make, node, self.batch)
        return self._converted[key]

    def _call(self, name: str, make: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write a call of a module, which is put into the new network once for each name."""
        if name not in self._made:
            self._made[name] = f"part{len(self._made)}"
            self.holder.add_module(self._made[name], make())
        return self.graph.call_module(self._made[name], args, kwargs)


def same_for_all(traced: Graph, parts: Parts) -> set[fx.Node]:
    """Return the nodes that compute the same for all members: their tensors are shared, and so is what they are given.

    The first is a layer with tensors, or flattens for one: others could change the batch of the caller in place.
    """
    found: set[fx.Node] = set()
    for node in traced.graph.nodes:
        inside = parts.inside(f"{node.target}.") if node in traced.layers else []
        shared = all(parts.role(name) is Role.SHARED for name in inside)
        flat = traced.is_layer(node, nn.Flatten) and all(traced.is_layer(user, nn.Linear) for user in node.users)
        fits = bool(inside) or flat or not any(one.op == "placeholder" for one in node.all_input_nodes)
        once = shared and fits and (node in traced.layers or traced.is_elementwise(node))
        if node.op == "placeholder" or (once and node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def lanes_of(traced: Graph, parts: Parts) -> tuple[int, ...]:
    """Return how many images may lie side by side: half of 16 only if most weights are kernels that fill vectors."""
    filling = total = 0
    for node, layer in traced.layers.items():
        if isinstance(layer, nn.Conv2d):
            owners = parts.owners.get(parts.first(f"{node.target}.weight"))
            whole = owners is not None and owners.numel() < layer.weight.numel()
            filling += layer.weight.numel() * (whole and (layer.kernel_size, layer.stride) == ((3, 3), (1, 1)))
            total += layer.weight.numel()
    lanes = load().layouts
    return lanes if 2 * filling > total else (lanes[0], lanes[-1])


class AllMembers(OfMembers):
    """Run a network whose layers were replaced on a batch that holds the samples once for each member."""

    def __init__(self, count: int, network: nn.Module) -> None:
        super().__init__(count)
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the network returns, the members one after the other."""
        given = Arguments(args, kwargs)
        if torch.is_inference_mode_enabled():  # there, tensors do not tell whether they were changed
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(*args, **kwargs)
        before = running.set((self.count, self.count * size_of(given)))
        try:
            return call(self.network, each_batched(given, spread_out))
        finally:
            running.reset(before)


class EachMember(OfMembers):
    """Run a layer once for each member, as the unfolded engine does: for layers that the kernels do not know."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(len(layers))
        self.layers = nn.ModuleList(layers)

    def choose(self, indices: list[int]) -> None:
        """Keep the layers of some members."""
        super().choose(indices)
        self.layers = nn.ModuleList(self.layers[index] for index in indices)

    def __getattr__(self, name: str) -> Any:
        """Return what torch's encoders ask a layer for, such as its dtype, from the first member's."""
        layers = self.__dict__.get("_modules", {}).get("layers")
        if name == "layers" or name.startswith("__") or layers is None:
            return super().__getattr__(name)
        return getattr(layers[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cut the batch into members, run each, and join what comes out."""
        given = each_batched(Arguments(args, kwargs), for_each_sample)
        size = size_of(given) // self.count
        parts = [rows_of(given, slice(turn * size, (turn + 1) * size)) for turn in range(self.count)]
        results = map(call, self.layers, parts)
        return tree_map(lambda *each: torch.cat(each) if isinstance(each[0], Tensor) else each[0], *results)


class Apart:
    """What each of the running members has, one after the other."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)


class MembersTensor(OfMembers):
    """Return a tensor that each member has for itself."""

    stack: Tensor

    def forward(self) -> Apart:
        """Return the tensors of the members that run."""
        return Apart(self.stack)


class EachCall(OfMembers):
    """Call a function, or a method by name, once for each member."""

    def __init__(self, count: int, function: Any) -> None:
        super().__init__(count)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Apart:
        """Return what comes out for each member."""
        return Apart(self._of(index, (args, kwargs)) for index in range(self.count))

    def _of(self, index: int, given: Any) -> Any:
        args, kwargs = map_aggregate(given, lambda value: value.values[index] if isinstance(value, Apart) else value)
        if isinstance(self.function, str):
            return getattr(args[0], self.function)(*args[1:], **kwargs)
        return self.function(*args, **kwargs)


class Into(OfMembers):
    """Bring a batch into another layout: tiled, blocked, plain (from blocked), apart, or joined (from apart)."""

    def __init__(self, count: int, layout: str, shared: bool, lanes: tuple[int, ...]) -> None:
        super().__init__(count)
        self.layout, self.shared, self.lanes = layout, shared, lanes

    def forward(self, x: Any, batch: Any = None) -> Any:
        """Convert a value; `batch` is what the network was given, and has one row per sample."""
        if self.layout == "tiled":
            whole = isinstance(x, Tensor) and x.dim() and len(x) == len(batch)
            return x.repeat(self.count, *[1] * (x.dim() - 1)) if whole else x
        if self.layout == "blocked":
            held = 1 if self.shared else self.count
            # Vectors that are half full of images are still faster than vectors of pixels.
            return operators.block(x, held, max(n for n in self.lanes if n < 2 * max(1, len(x) // held)))
        if self.layout == "plain":
            return operators.unblock(x, len(batch))
        return Apart(x.chunk(self.count)) if self.layout == "apart" else torch.cat(x.values)
