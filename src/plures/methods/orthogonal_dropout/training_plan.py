"""How each layer of a traced network trains: on blocked images, side by side, or in a chain of linear layers."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize

from plures.graph import CONVOLUTIONS, Graph, is_plain_convolution
from plures.methods.orthogonal_dropout.alone import Alone
from plures.methods.orthogonal_dropout.together import Members
from plures.native.library import why_unavailable
from plures.native.training import MemberKernels, kernels_of

MOST_KEPT = 0.7  # of the kernels: with more, torch's dense convolutions of a wide network are faster
GROUPED: dict[type[nn.Module], Callable[..., Tensor]] = dict(
    zip(CONVOLUTIONS, (F.conv1d, F.conv2d, F.conv3d), strict=True)
)


class Plan:
    """What becomes of the nodes of a network.

    - `split`: layers whose weight is split by whole kernels or single weights, and can run for all members at once
    - `kernels`: convolutions that the native library runs, with the kernels that each member has
    - `blocked`: nodes whose values are blocked images; `waiting`: those that run with the node that follows
    - `norms`: batch norms of blocked images
    - `apart`: nodes whose values differ between members; `own`: nodes whose tensors do
    - `of_batch`: nodes that depend on what the network is called with
    - `chains`: linear layers that are one call of the library, by the first; `chained`: all nodes that run with them
    """

    def __init__(self, subject: Members | Alone) -> None:
        self.subject, self.traced = subject, Graph(subject.network)
        self.on_cpu = is_on_cpu(subject.network)
        several, with_library = subject.members > 1, self.on_cpu and why_unavailable() is None
        nodes, layers = self.traced.nodes, self.traced.layers
        plain = [node for node in layers if len(node.args) == 1 and not node.kwargs]
        images = [node for node in plain if with_library and self._is_convolution(node)]
        linear = [node for node in plain if several and self.traced.is_layer(node, nn.Linear)]
        grouped = [node for node in plain if several and not self.on_cpu and self.is_grouped(node)]
        whole = (node for node in (*images, *linear, *grouped) if subject.kernels(f"{node.target}.weight") is not None)
        self.split = set(whole)
        self.kernels = {node: self._kernels(node) for node in images if several or node in self.split}
        named = [node for node in nodes if several and node.op in ("call_module", "get_attr")]
        self.own = {node for node in named if subject.within(str(node.target), 0)}
        self.blocked, self.apart, self.of_batch = set[fx.Node](), set[fx.Node](), set[fx.Node]()
        for node in nodes:
            if node.op == "placeholder" or not self.of_batch.isdisjoint(node.all_input_nodes):
                self.of_batch.add(node)
            if self._stays_blocked(node):
                self.blocked.add(node)
            if self._is_apart(node):
                self.apart.add(node)
        self.waiting = set(filter(self._waits, nodes))
        self.norms = [layer for node, layer in layers.items() if self._norms_blocked(node)]
        self.chains: dict[fx.Node, list[tuple[fx.Node, MemberKernels, bool]]] = {}  # and whether a ReLU follows
        self.chained: set[fx.Node] = set()
        runs = self.own.intersection(linear) if with_library else set[fx.Node]()
        for node in linear:
            if node in runs and node not in self.chained:
                self._chain(node, runs)

    def pays(self) -> bool:
        """Return whether much is left out, and few layers need their inputs in another layout."""
        marks = len(self.subject.marks())
        if not self.kernels:
            return bool(self.split) and 2 * len(self.split) >= marks
        split = self.split & self.kernels.keys()
        converted = sum(node.args[0] not in self.blocked for node in self.kernels)
        kept = sum(self.kernels[node].forward.places.numel() for node in split)
        every = sum(self.kernels[node].outputs * self.kernels[node].inputs for node in split) * self.subject.members
        most = 2 * len(split) >= marks
        return bool(split) and most and converted <= max(2, 1 + len(split) // 4) and kept <= MOST_KEPT * every

    def mine(self, node: fx.Node) -> Tensor:
        """Return which kernels of a split layer each member has, in dimensions that fit its weight."""
        name = f"{node.target}.weight"
        mine = cast(Tensor, self.subject.kernels(name))
        return mine.view(*mine.shape, *[1] * (self.subject.split(name).dim() - 2))

    def is_grouped(self, node: fx.Node) -> bool:
        """Return whether a layer is a convolution that can be one of several in one call."""
        return self.traced.is_layer(node, *GROUPED) and self.traced.layers[node].padding_mode == "zeros"

    def _is_convolution(self, node: fx.Node) -> bool:
        """Return whether a layer is a convolution that the native library can run."""
        layer = self.traced.layers[node]
        base = type(layer).__mro__[1] if parametrize.is_parametrized(layer) else type(layer)
        return base is nn.Conv2d and is_plain_convolution(layer) and "forward" not in vars(layer)

    def _kernels(self, node: fx.Node) -> MemberKernels:
        """List the kernels that each member has of a layer; all of them if each has a weight of its own."""
        name = f"{node.target}.weight"
        if node in self.split:
            return kernels_of(cast(Tensor, self.subject.kernels(name)))
        return kernels_of(torch.ones(self.subject.rows(name).shape[:3], dtype=torch.bool), private=True)

    def _chain(self, node: fx.Node, runs: set[fx.Node]) -> None:
        """Note a linear layer, and the ReLUs and linear layers that follow and stand alone."""
        self.chains[node], following = [], cast(fx.Node | None, node)
        while following in runs:
            relu = self.traced.relu_after(following)
            self.chains[node].append((following, self._kernels(following), relu is not None))
            last = relu or following
            self.chained |= {following, last}
            following = self.traced.only_user(last)

    def _is_apart(self, node: fx.Node) -> bool:
        if node.op == "get_attr" and node in self.own:
            raise TypeError(f"{node.target} is used outside of a layer and differs between members")
        drawn = isinstance(self.traced.layers.get(node), _DropoutNd)
        return node in self.kernels or drawn or node in self.own or not self.apart.isdisjoint(node.all_input_nodes)

    def _stays_blocked(self, node: fx.Node) -> bool:
        if node in self.kernels:
            return True
        given = [one for one in node.args if isinstance(one, fx.Node)]
        if node.kwargs or not given or not self.blocked.issuperset(given):
            return False
        fits = self.traced.is_elementwise(node) or self.traced.is_layer(node, nn.Identity)
        return fits or (self.traced.is_layer(node, nn.BatchNorm2d) and can_norm(self.traced.layers[node]))

    def _norms_blocked(self, node: fx.Node | None) -> bool:
        return node in self.blocked and self.traced.is_layer(node, nn.BatchNorm2d)

    def _waits(self, node: fx.Node) -> bool:
        """Return whether a norm layer, or the addition after one, is run with what follows: an addition, a ReLU.

        A convolution waits for its norm layer.
        """
        user = self.traced.only_user(node)
        if user is None or node not in self.blocked or user not in self.blocked:
            return False
        if node in self.kernels:
            return self._norms_blocked(user)
        then_relu = self.traced.is_relu(user)
        if self._norms_blocked(node):
            once = self.traced.is_called_once(node)  # statistics have an order
            return once and (then_relu or self._first_to_wait(user) is node)
        return then_relu and self._first_to_wait(node) is not None

    def _first_to_wait(self, node: fx.Node) -> fx.Node | None:
        """Return one of two norm layers that are added; None if there is none, or nothing is added."""
        graph = self.traced
        added = graph.is_sum(node) and len(node.all_input_nodes) == 2
        norms = [one for one in node.all_input_nodes if graph.is_layer(one, nn.BatchNorm2d) and graph.only_user(one)]
        return norms[0] if added and norms else None


def is_on_cpu(network: nn.Module) -> bool:
    """Return whether a network's parameters are on the CPU."""
    return next(iter(network.parameters())).is_cpu


def can_norm(layer: nn.Module) -> bool:
    """Return whether a layer is a batch norm with all that it usually has."""
    usual = isinstance(layer, _BatchNorm) and layer.affine and layer.track_running_stats and layer.momentum is not None
    return usual and layer.bias is not None
