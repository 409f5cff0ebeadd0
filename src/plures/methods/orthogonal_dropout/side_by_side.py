"""Run a traced network for all members: on blocked images where it can be, and side by side in the batch elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.node import map_aggregate, map_arg
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from plures.graph import is_of_torch
from plures.methods.orthogonal_dropout.training_plan import GROUPED, Plan, can_norm
from plures.native.rows import LinearLayer, linear
from plures.native.training import Convolved, Memory, Normed, blocked, run_layers, unblocked


@dataclass(eq=False)
class Blocked:
    """Blocked images, and the layers that wait for what follows them."""

    values: Tensor
    memory: Memory
    convolved: Convolved | None = None
    normed: Normed | None = None
    shortcut: Tensor | None = None

    def shape(self) -> tuple[int, ...]:
        """Return the shape that it will have."""
        return self.values.shape if self.convolved is None else self.convolved.shape(self.values)

    def now(self, relu: bool = False) -> Tensor:
        """Run the layers that wait."""
        if self.convolved is None and self.normed is None:
            return self.values
        return run_layers(self.values, self.convolved, self.normed, self.shortcut, relu, self.memory)

    def plain(self) -> Tensor:
        """Return the samples one after the other, member after member."""
        return unblocked(self.now())


class SideBySide(fx.Interpreter):
    """Run a network as its plan says."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.subject.network, graph=plan.traced.graph)
        self.extra_traceback = False  # an error is the layer's own
        self.plan, self.subject, self.traced = plan, plan.subject, plan.traced
        self.batch, self.memory = 0, Memory()
        self.masks: dict[fx.Node, Tensor] = {}

    def run(self, *args: Any, **_: Any) -> Any:
        """Run the network."""
        if self.batch != len(args[0]):
            self.batch, self.memory = len(args[0]), Memory()
        self.args_iter = iter(args)
        try:
            for node in self.traced.nodes:
                self.env[node] = result = self.run_node(node)
                for unused in self.user_to_last_uses.get(node, ()):
                    self.env.pop(unused, None)
            return result
        finally:
            self.env = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node on blocked values, if it can, and on plain ones if not."""
        if n in self.plan.chained:  # all of a chain run with the first one
            given = self.env[cast(fx.Node, n.args[0])]
            return self._linear(n, given) if n in self.plan.chains else given
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "output" and self.subject.members > 1:
            return torch.unflatten(self._side_by_side(args[0]), 0, (self.subject.members, -1))
        if n in self.plan.kernels:
            return self._convolved(n, args[0])
        if n not in self.plan.blocked:
            return self._on_plain(n, args, kwargs)
        given = args[0]
        if self.traced.is_layer(n, nn.BatchNorm2d):
            images = given if given.normed is None else self._blocked(given.now())
            return self._finished(n, replace(images, normed=self._norm(n)))
        if self.traced.is_relu(n) and given.normed is not None:
            return self._blocked(given.now(relu=True))
        if self.traced.is_sum(n) and not self.plan.waiting.isdisjoint(n.all_input_nodes):
            waiting, other = args if n.all_input_nodes[0] in self.plan.waiting else args[::-1]
            shortcut = other.now()
            if shortcut.shape == waiting.shape():
                return self._finished(n, replace(waiting, shortcut=shortcut))
            return self._blocked(waiting.now() + shortcut)  # they broadcast
        return self._blocked(self._call(n, args, kwargs, Blocked.now))

    def _blocked(self, values: Tensor) -> Blocked:
        return Blocked(values, self.memory)

    def _convolved(self, node: fx.Node, given: Any) -> Blocked:
        image = cast(nn.Conv2d, self.traced.layers[node])
        members = self.subject.members if node.args[0] in self.plan.apart else 1
        values = given.now() if isinstance(given, Blocked) else blocked(given, members)
        padding = cast(tuple[int, int], image.padding)
        convolved = Convolved(*self._held(node), self.plan.kernels[node], image.stride, padding)
        return self._finished(node, Blocked(values, self.memory, convolved))

    def _norm(self, node: fx.Node) -> Normed:
        layer: Any = self.traced.layers[node]
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        tables = (self.subject.rows(f"{node.target}.{name}") for name in names)
        return Normed._make((*tables, layer.momentum, layer.eps))

    def _finished(self, node: fx.Node, value: Blocked) -> Blocked:
        """Leave layers waiting for their only user, which takes them along; otherwise run them."""
        return value if node in self.plan.waiting else self._blocked(value.now())

    def _held(self, node: fx.Node) -> tuple[Tensor, Tensor | None]:
        """Return the weight of a layer, of all members or of each, and each member's bias."""
        weight = (self.subject.split if node in self.plan.split else self.subject.rows)(f"{node.target}.weight")
        return weight, None if self.traced.layers[node].bias is None else self.subject.rows(f"{node.target}.bias")

    def _linear(self, first: fx.Node, given: Any) -> Tensor:
        """Run a chain of linear layers of all members, over the weights that each has."""
        x: Tensor = given.plain() if isinstance(given, Blocked) else given
        layers = [LinearLayer(*self._held(node), kernels, relu) for node, kernels, relu in self.plan.chains[first]]
        result = linear(self._rows(first, x), *layers, memory=self.memory)
        return result.view(-1, *x.shape[1:-1], result.shape[-1])

    def _rows(self, node: fx.Node, x: Tensor) -> Tensor:
        """Return what a linear layer is given as rows, [members or 1, rows, inputs]."""
        return x.reshape(self.subject.members if node.args[0] in self.plan.apart else 1, -1, x.shape[-1])

    def _on_plain(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run a node on plain samples: once, side by side for all members, or for each member with its tensors."""
        plan = self.plan
        if self.subject.members == 1 or node not in plan.apart:
            return self._call(node, args, kwargs, Blocked.plain)
        if node in plan.own and len(args) == 1 and not kwargs:
            if self.traced.is_layer(node, nn.Linear):
                return self._product(node, args[0])
            if not plan.on_cpu and plan.is_grouped(node):
                return self._grouped(node, args[0])
        args, kwargs = map_arg((node.args, node.kwargs), self._repeated)
        if node not in plan.own:
            return self._call(node, args, kwargs, Blocked.plain)
        layer = self.traced.layers[node]
        if isinstance(layer, _BatchNorm) and is_of_torch(layer) and can_norm(layer):
            return self._batch_norm(node, args[0])

        def alone(member: int) -> Any:
            rows = slice(member * self.batch, (member + 1) * self.batch)

            def cut(value: Any) -> Any:
                return value[rows] if isinstance(value, Tensor) and value.dim() else value

            own = map_aggregate((args, kwargs), cut)
            return functional_call(layer, self.subject.within(str(node.target), member), *own, tie_weights=False)

        def joined(first: Any, *others: Any) -> Any:
            return torch.cat([first, *others]) if isinstance(first, Tensor) else first

        return tree_map(joined, *(alone(member) for member in range(self.subject.members)))

    def _masked(self, node: fx.Node) -> tuple[Tensor, Tensor | None]:
        """Return the weight of each member, zero where it owns nothing, [members, ...], and its bias."""
        weight, bias = self._held(node)
        if node in self.plan.split:
            if node not in self.masks:
                self.masks[node] = self.plan.mine(node).to(weight.dtype)
            weight = weight * self.masks[node]
        return weight, bias

    def _product(self, node: fx.Node, x: Tensor) -> Tensor:
        """Run a linear layer of all members as one batched product."""
        weight, bias = self._masked(node)
        rows = self._rows(node, x).expand(self.subject.members, -1, -1)
        result = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
        return result.view(-1, *x.shape[1:-1], result.shape[-1])

    def _grouped(self, node: fx.Node, given: Any) -> Tensor:
        """Run a convolution of all members as one of as many groups."""
        layer: Any = self.traced.layers[node]
        shared = node.args[0] not in self.plan.apart and layer.groups == 1
        x = given if shared else self._in_channels(self._side_by_side(given))
        weight, bias = (None if one is None else one.flatten(0, 1) for one in self._masked(node))
        groups = 1 if shared else layer.groups * self.subject.members
        return self._in_batch(
            GROUPED[type(layer)](x, weight, bias, layer.stride, layer.padding, layer.dilation, groups)
        )

    def _batch_norm(self, node: fx.Node, x: Tensor) -> Tensor:
        """Normalise the samples of each member by their own statistics, and update the running ones."""
        layer: Any = self.traced.layers[node]
        names = ("running_mean", "running_var", "weight", "bias")
        mean, variance, weight, bias = (self.subject.rows(f"{node.target}.{name}").flatten() for name in names)
        self.subject.rows(f"{node.target}.num_batches_tracked").add_(1)
        result = F.batch_norm(self._in_channels(x), mean, variance, weight, bias, True, layer.momentum, layer.eps)
        return self._in_batch(result)

    def _in_channels(self, x: Tensor) -> Tensor:
        """Lay members side by side in the channels instead of in the batch."""
        return torch.unflatten(x, 0, (self.subject.members, -1)).transpose(0, 1).flatten(1, 2)

    def _in_batch(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, 1, (self.subject.members, -1)).transpose(0, 1).flatten(0, 1)

    def _repeated(self, node: fx.Node) -> Any:
        """Return the value of a node side by side, if it comes from the batch: a tensor of the network never does."""
        return self._side_by_side(self.env[node]) if node in self.plan.of_batch else self.env[node]

    def _side_by_side(self, value: Any) -> Any:
        """Return a value of all members as samples one after the other; what all members share is repeated."""
        if isinstance(value, Blocked):
            return value.plain()
        if isinstance(value, Tensor) and value.dim() and len(value) == self.batch:
            return value.repeat(self.subject.members, *[1] * (value.dim() - 1))
        return value

    def _call(self, node: fx.Node, args: Any, kwargs: Any, take: Callable[[Blocked], Tensor]) -> Any:
        """Run a node as it is, on what is taken from blocked values."""
        args, kwargs = map_aggregate((args, kwargs), lambda v: take(v) if isinstance(v, Blocked) else v)
        return getattr(self, node.op)(node.target, args, kwargs)
