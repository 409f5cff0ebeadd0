"""Train without multiplying by zero: members run side by side over the kernels and weights that each of them owns."""

import copy
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.node import map_aggregate, map_arg
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize

from plures.graph import CONVOLUTIONS, Graph, has_hooks, is_of_torch, is_plain_convolution
from plures.methods.orthogonal_dropout.masks import Keep, mask_of
from plures.methods.orthogonal_dropout.together import Members
from plures.native.library import load, why_unavailable
from plures.native.rows import LinearLayer, linear
from plures.native.training import (
    Convolved,
    MemberKernels,
    Memory,
    blocked,
    convolution,
    kernels_of,
    norm,
    unblocked,
)

MOST_KEPT = 0.7  # of the kernels: with more, torch's dense convolutions of a wide network are faster
CLOSE = 1e-3  # of the length of an output: how far sums in another order may lie apart
FAR = 0.02  # of the length of a gradient, in which rounding errors of norm layers over few samples grow
GROUPED: dict[type[nn.Module], Callable[..., Tensor]] = dict(
    zip(CONVOLUTIONS, (F.conv1d, F.conv2d, F.conv3d), strict=True)
)
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
log = logging.getLogger("plures")


class TrainingEngine:
    """Run the network of a stage in training, of one member or of all.

    It uses the tensors of the stage, so gradients arrive where they always do, and agree to rounding. Convolutions run
    over the kernels that members own, by the native library on batches that fill the vectors; on a GPU, as one grouped
    convolution. Large linear layers run over the weights that members own, by the native library; others, or without
    it, as one batched product. The network must be one of float32 that torch.fx can trace. The first batch is compared
    with the network itself, gradients included. In all other cases the network itself is called.
    """

    def __init__(self) -> None:
        self._prepared: _Prepared | None = None
        self._refused: nn.Module | None = None  # a network that cannot be run here
        self._running = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainingEngine":
        return TrainingEngine()  # of another network

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingEngine, ()

    def output(self, network: nn.Module, inputs: Any) -> Any:
        """Return what the network returns for a batch, or None if the network must be called itself."""
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled():
            return None
        floats = isinstance(inputs, Tensor) and inputs.dim() > 1 and inputs.is_floating_point()
        if not floats or inputs.device.type not in ("cpu", "cuda"):
            return None
        if not network.training or torch._C._are_functorch_transforms_active():
            return None
        if not self._running.acquire(blocking=False):  # by another thread
            return None
        try:
            return self._output(network, inputs)
        finally:
            self._running.release()

    def _output(self, network: nn.Module, inputs: Tensor) -> Any:
        if not self.takes(network, len(inputs)):
            return None
        prepared = cast(_Prepared, self._prepared)
        if not prepared.compared:
            agrees = _agrees(network, inputs)
            if agrees is None:  # nothing can be learned from this batch
                return None
            if not agrees:
                self._refused, self._prepared = network, None
                return None
            prepared.compared = True
        return prepared.run(inputs) if prepared.is_up_to_date() else None

    def takes(self, network: nn.Module, samples: int) -> bool:
        """Return whether batches of this many samples can be run, in float32, if a comparison agrees."""
        if self._refused is network:
            return False
        known = self._prepared
        if known is None or known.stage_network is not network or known.others_own():
            self._prepared = _prepared(network)
            self._refused = network if self._prepared is None else None
            if self._prepared is not None and known is not None:
                self._prepared.compared = known.compared and known.stage_network is network
        if self._prepared is None or not samples:
            return False
        return not self._prepared.kernels or samples % load().lanes == 0


def _prepared(network: nn.Module) -> "_Prepared | None":
    subject = network if isinstance(network, Members) else _Alone(network)
    if any(map(has_hooks, network.modules())) or not _is_float32(network):
        return None
    before, drawn = list(_plain_attributes(subject.network)), _random_states()
    try:
        with torch.random.fork_rng(devices=[]):
            prepared = _Prepared(network, subject)
            same = drawn == _random_states()
    except Exception:  # whatever code does that cannot be traced, and layers whose tensors are not known
        return None
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
    if not same or before != list(_plain_attributes(subject.network)):
        return None  # what forward draws or changes, a trace would leave as it is
    return prepared if prepared.pays() else None


def _random_states() -> tuple[Any, Any, list[int]]:
    """Return the states of the generators that code may draw its choices from."""
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state().tolist()


def _is_on_cpu(network: nn.Module) -> bool:
    return next(iter(network.parameters())).is_cpu


def _is_float32(network: nn.Module) -> bool:
    return all(one.dtype == torch.float32 for one in network.parameters())


def _agrees(network: nn.Module, inputs: Tensor) -> bool | None:
    """Return whether a network gives the same outputs, gradients and statistics by both ways, but for its dropout.

    None if the batch says nothing, because its outputs are NaN or infinite.
    """
    results = []
    cuda = [inputs.device] if inputs.is_cuda else []
    with torch.random.fork_rng(devices=cuda), torch.autocast(inputs.device.type, enabled=False):
        for fast in (False, True):
            trial = _trial(network)
            try:
                run = cast(_Prepared, _prepared(trial)).run if fast else trial
                output = run(inputs.clone(memory_format=torch.contiguous_format))
                weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
                (output * weights.to(output)).sum().backward()
            except Exception as error:
                if not fast:
                    raise
                return _differs(network, f"{type(error).__name__}: {error}")
            gradients = {name: one.grad for name, one in trial.named_parameters() if one.grad is not None}
            results.append({"output": output.detach(), **gradients, **dict(trial.named_buffers())})
    slow, quick = results
    if not all(bool(one.isfinite().all()) for one in slow.values()):
        return None
    if slow.keys() != quick.keys():
        return _differs(network, "other parameters get gradients")
    # What a norm layer takes away again has a gradient of rounding errors alone: small is what the largest makes small.
    largest = max(float(slow[name].norm()) for name in gradients)
    for name, expected in slow.items():
        close = (FAR, FAR * largest / 4) if name in gradients else (CLOSE, 0.0)
        if not _close(quick[name], expected, *close):
            return _differs(network, f"{name} differs")
    return True


def _trial(network: nn.Module) -> nn.Module:
    """Copy a network for the comparison: without dropout, and with other biases.

    Outputs that a member owns no input of are constant. With a bias of zero they would lie at the kink of a ReLU, and
    rounding would decide about their gradients. In channels_last, torch's batch norm on a CPU would round too much.
    """
    trial, draw = copy.deepcopy(network), torch.Generator().manual_seed(0)
    trial.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    for layer in trial.modules():
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0
    with torch.no_grad():
        for one in trial.parameters():
            if one.requires_grad:
                one.add_(0.01 * torch.randn(one.shape, generator=draw).to(one))
    return trial


def _close(one: Tensor, expected: Tensor, share: float, least: float) -> bool:
    """Return whether two tensors agree, as vectors: a single ReLU may fall to the other side of zero."""
    if not expected.is_floating_point() or one.shape != expected.shape:
        return one.equal(expected)
    return float((one - expected).norm()) <= max(share * float(expected.norm()), least) + 1e-6


def _differs(network: nn.Module, what: str) -> bool:
    inner = network.network if isinstance(network, Members) else network
    log.info(
        "%s trains by torch alone: run side by side, its samples influence each other or choices are made that a "
        "trace does not follow (%s)",
        type(inner).__name__,
        what,
    )
    return False


def _plain_attributes(network: nn.Module) -> Iterator[dict[str, Any]]:
    """Return what the user's own modules hold beside tensors and modules: a trace has taken it as it was."""
    for module in network.modules():
        if not is_of_torch(module):
            yield {name: _plain(value) for name, value in vars(module).items() if name not in OF_MODULES}


def _plain(value: Any) -> Any:
    """Return what can be compared of a value: numbers and words, also in lists and dicts; of others, who they are."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return id(value)


class _Subject(Protocol):
    """What is trained: a network, and the tensors of its members."""

    members: int
    network: nn.Module

    def kernels(self, name: str) -> Tensor | None:
        """Return the kernels of a split weight that each member has, [members, outputs, inputs]; None if only parts."""

    def split(self, name: str) -> Tensor:
        """Return a split weight."""

    def rows(self, name: str) -> Tensor:
        """Return a tensor that is not split, [members, ...]."""

    def is_private(self, name: str) -> bool:
        """Return whether each member has such a tensor for itself."""

    def within(self, path: str, member: int) -> dict[str, Tensor]:
        """Return the tensors of a layer of a member."""

    def marks(self) -> list[Tensor]:
        """Return the tensors that say what is whose."""


class _Alone:
    """One member in a stage of its own: a network under masks."""

    members = 1

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self._masked = [one for one in network.modules() if parametrize.is_parametrized(one)]

    def kernels(self, name: str) -> Tensor | None:
        path, _, attribute = name.rpartition(".")
        layer = self.network.get_submodule(path)
        if not parametrize.is_parametrized(layer, attribute):
            return None
        chain = cast(nn.ModuleDict, layer.parametrizations)[attribute]
        mask = mask_of(self.network, name)
        if not isinstance(mask, Keep) or len(cast(nn.ModuleList, chain)) > 1 or mask.mask[0, 0].numel() > 1:
            return None
        return mask.mask.flatten(1)[None] != 0

    def split(self, name: str) -> Tensor:
        path, _, attribute = name.rpartition(".")
        chain = cast(nn.ModuleDict, self.network.get_submodule(path).parametrizations)[attribute]
        return cast(Tensor, chain.original)

    def rows(self, name: str) -> Tensor:
        path, _, attribute = name.rpartition(".")
        return cast(Tensor, getattr(self.network.get_submodule(path), attribute))[None]

    def is_private(self, name: str) -> bool:
        return False

    def within(self, path: str, member: int) -> dict[str, Tensor]:
        return {}

    def marks(self) -> list[Tensor]:
        return [one.mask for one in self.network.modules() if isinstance(one, Keep)]


class _Blocked:
    """Blocked images; after a layer that waits for what follows it, what comes before it.

    `after` is a convolution that waits for its norm layer.
    """

    def __init__(
        self,
        values: Tensor,
        finish: Callable[..., Tensor] | None = None,
        shortcut: Any = None,
        after: Convolved | None = None,
    ) -> None:
        self.values, self.finish, self.shortcut, self.after = values, finish, shortcut, after

    def shape(self) -> tuple[int, ...]:
        """Return the shape that it will have."""
        return self.values.shape if self.after is None else self.after.shape(self.values)

    def now(self, relu: bool = False) -> Tensor:
        """Normalise, if a norm layer still waits."""
        return self.values if self.finish is None else self.finish(self.values, self.shortcut, relu=relu)

    def plain(self) -> Tensor:
        """Return the samples one after the other, member after member."""
        return unblocked(self.now())


class _LinearRun(NamedTuple):
    """Linear layers that follow one another: their nodes, what each member has of them, whether a ReLU follows each."""

    layers: list[tuple[fx.Node, MemberKernels, bool]]
    last: fx.Node


class _Prepared(fx.Interpreter):
    """Run a traced network for all members, blocked where it can be, and side by side in the batch elsewhere."""

    def __init__(self, stage_network: nn.Module, subject: _Subject) -> None:
        traced = Graph(subject.network)
        super().__init__(subject.network, graph=traced.graph)
        self.extra_traceback = False  # an error is the layer's own
        self.stage_network, self.subject, self.traced = stage_network, subject, traced
        self.compared = False  # with the network itself, on a batch
        self.batch, self.memory = 0, Memory()
        self.known = list(stage_network.modules())
        self.attributes = list(_plain_attributes(subject.network))
        self.split: set[fx.Node] = set()  # layers whose weights are split, by whole kernels
        self.on_cpu = _is_on_cpu(stage_network)
        self.with_library = self.on_cpu and why_unavailable() is None
        known = traced.layers if self.with_library else ()
        self.kernels = {node: found for node in known if (found := self._kernels(node)) is not None}
        self.batched = set(filter(self._is_batched, traced.layers))  # split layers that run as one product
        self.masks: dict[fx.Node, Tensor] = {}
        self.chains: dict[fx.Node, _LinearRun] = {}  # by their first node
        self.chained: set[fx.Node] = set()  # nodes that run with the chain that they are in
        self.versions = [mark._version for mark in subject.marks()]
        self.copies = [mark.clone() for mark in subject.marks()]
        self.blocked: set[fx.Node] = set()  # nodes whose values are blocked
        self.apart: set[fx.Node] = set()  # nodes whose values differ between members
        self.own = {node for node in traced.nodes if subject.members > 1 and self._has_own(node)}
        self.of_batch: set[fx.Node] = set()  # nodes that depend on what the network is called with
        for node in traced.nodes:
            if node.op == "placeholder" or not self.of_batch.isdisjoint(node.all_input_nodes):
                self.of_batch.add(node)
            if self._stays_blocked(node):
                self.blocked.add(node)
            if self._is_apart(node):
                self.apart.add(node)
        for node in traced.layers:
            if self.with_library and subject.members > 1 and node not in self.chained and self._is_linear(node):
                self._chain(node)
        self.norms = [node for node in traced.layers if node in self.blocked and traced.is_layer(node, nn.BatchNorm2d)]
        self.waiting = set(filter(self._waits, traced.nodes))
        self.direct = {node: traced.layers[node] for node in filter(self._is_direct, traced.layers)}

    def _kernels(self, node: fx.Node) -> MemberKernels | None:
        """List the kernels of a layer that the native library can run."""
        layer, weight = self.traced.layers[node], f"{node.target}.weight"
        base = type(layer).__mro__[1] if parametrize.is_parametrized(layer) else type(layer)
        fits = base is nn.Conv2d and is_plain_convolution(layer)
        if not fits or len(node.args) != 1 or node.kwargs or "forward" in vars(layer):
            return None
        mine = self.subject.kernels(weight)
        if mine is not None:
            self.split.add(node)
            return kernels_of(mine)
        if self.subject.members == 1:
            return None
        stack = self.subject.rows(weight)
        return kernels_of(torch.ones(stack.shape[:3], dtype=torch.bool), private=True)

    def _is_batched(self, node: fx.Node) -> bool:
        """Return whether a layer whose weight is split can run as one product of all members."""
        fits = self.traced.is_layer(node, nn.Linear) or (not self.on_cpu and self._is_grouped(node))
        plain = fits and len(node.args) == 1 and not node.kwargs and self.subject.members > 1
        return plain and self.subject.kernels(f"{node.target}.weight") is not None

    def _is_linear(self, node: fx.Node) -> bool:
        """Return whether a node is a linear layer whose weights differ between members, by single weights if at all."""
        plain = self.traced.is_layer(node, nn.Linear) and len(node.args) == 1 and not node.kwargs
        return plain and (node in self.batched or self.subject.is_private(f"{node.target}.weight"))

    def _chain(self, node: fx.Node) -> None:
        """Note a linear layer, and the ReLUs and linear layers that follow and stand alone: they are one call."""
        layers, last, following = [], node, cast(fx.Node | None, node)
        while following is not None and self._is_linear(following):
            relu = self.traced.relu_after(following)
            layers.append((following, self._member_weights(following), relu is not None))
            last = relu or following
            self.chained |= {following, last}
            following = self.traced.only_user(last)
        self.chains[node] = _LinearRun(layers, last)

    def _member_weights(self, node: fx.Node) -> MemberKernels:
        if node in self.batched:
            return kernels_of(self._mine(node))
        return kernels_of(torch.ones_like(self.subject.rows(f"{node.target}.weight"), dtype=torch.bool), private=True)

    def _mine(self, node: fx.Node) -> Tensor:
        """Return which weights each member has, [members, *weight]."""
        name = f"{node.target}.weight"
        mine = cast(Tensor, self.subject.kernels(name))
        return mine.view(*mine.shape, *[1] * (self.subject.split(name).dim() - 2))

    def _is_grouped(self, node: fx.Node) -> bool:
        """Return whether a layer is a convolution that can be one of several in one call."""
        layer = self.traced.layers[node]
        return self.traced.is_layer(node, *GROUPED) and layer.padding_mode == "zeros"

    def pays(self) -> bool:
        """Return whether much is left out, and few layers need their inputs in another layout."""
        split = self.split
        if not self.kernels:
            return bool(self.batched) and 2 * len(self.batched) >= len(self.copies)
        converted = sum(node.args[0] not in self.blocked for node in self.kernels)
        kept = sum(self.kernels[node].forward.places.numel() for node in split)
        every = sum(self.kernels[node].outputs * self.kernels[node].inputs for node in split) * self.subject.members
        most = 2 * len(split) >= len(self.copies)
        return bool(split) and most and converted <= max(2, 1 + len(split) // 4) and kept <= MOST_KEPT * every

    def is_up_to_date(self) -> bool:
        """Return whether the network is as it was: not all of its layers are called here."""
        modules = list(self.stage_network.modules())
        if len(modules) != len(self.known) or _has_any_global_hook():  # type: ignore[no-untyped-call]
            return False
        for layer, known in zip(modules, self.known, strict=True):
            if layer is not known or not layer.training or has_hooks(layer) or "forward" in vars(layer):
                return False
            if any(one is not None and one.dtype != torch.float32 for one in layer._parameters.values()):
                return False
        norms = all(_can_norm(self.traced.layers[node]) for node in self.norms)
        return norms and self.attributes == list(_plain_attributes(self.subject.network))

    def others_own(self) -> bool:
        """Return whether masks or owners have changed since the kernels were listed."""
        marks = self.subject.marks()
        versions = [mark._version for mark in marks]
        if versions != self.versions and all(map(torch.equal, marks, self.copies)):
            self.versions = versions  # written again with the same values, by a run that resumes or by DDP
        return versions != self.versions

    def run(self, *args: Any, **_: Any) -> Any:
        """Run the network."""
        if self.batch != len(args[0]):
            self.batch, self.memory = len(args[0]), Memory()
        self.args_iter = iter(args)
        try:
            for node in self.traced.nodes:
                layer, chain = self.direct.get(node), self.chains.get(node)
                if chain is not None:
                    self.env[chain.last] = self._linear(chain, self.env[node.args[0]])
                elif node not in self.chained:
                    result = self.run_node(node) if layer is None else layer(self.env[node.args[0]])
                    self.env[node] = result
                for unused in self.user_to_last_uses.get(node, ()):
                    self.env.pop(unused, None)
            return result
        finally:
            self.env = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node on blocked values, if it can, and on plain ones if not."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "output" and self.subject.members > 1:
            return torch.unflatten(self._side_by_side(args[0]), 0, (self.subject.members, -1))
        layer = self.traced.layers.get(n)
        if n in self.kernels:
            return self._convolved(n, args[0])
        if n not in self.blocked:
            return self._on_plain(n, args, kwargs)
        if isinstance(layer, nn.BatchNorm2d):
            values = args[0].now() if args[0].after is None else args[0].values
            return self._finished(n, _Blocked(values, self._norm(n, args[0].after), None, args[0].after))
        if isinstance(layer, nn.Identity):
            return args[0]
        if self.traced.is_relu(n) and args[0].finish is not None:
            return _Blocked(args[0].now(relu=True))
        if self.traced.is_sum(n) and not self.waiting.isdisjoint(n.all_input_nodes):
            waiting, other = args if n.all_input_nodes[0] in self.waiting else args[::-1]
            shortcut = other.now()
            if shortcut.shape != waiting.shape():  # they broadcast
                return _Blocked(waiting.now() + shortcut)
            whole = _Blocked(waiting.values, waiting.finish, shortcut, waiting.after)
            return self._finished(n, whole)
        return _Blocked(self._call(n, args, kwargs, lambda value: value.now()))

    def _convolved(self, node: fx.Node, given: Any) -> _Blocked:
        image, subject = cast(nn.Conv2d, self.traced.layers[node]), self.subject
        members = subject.members if node.args[0] in self.apart else 1
        values = given.now() if isinstance(given, _Blocked) else blocked(given, members)
        weight = (subject.split if node in self.split else subject.rows)(f"{node.target}.weight")
        bias = None if image.bias is None else subject.rows(f"{node.target}.bias")
        after = Convolved(weight, bias, self.kernels[node], image.stride, cast(tuple[int, int], image.padding))
        user = self.traced.only_user(node)
        if user in self.blocked and self.traced.is_layer(user, nn.BatchNorm2d):
            return _Blocked(values, lambda x, *_, **__: convolution(x, *after, self.memory), None, after)
        return _Blocked(convolution(values, *after, self.memory))

    def _norm(self, node: fx.Node, after: Convolved | None) -> Callable[..., Tensor]:
        layer = cast(nn.BatchNorm2d, self.traced.layers[node])
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        weight, bias, mean, variance, batches = (self.subject.rows(f"{node.target}.{name}") for name in names)
        momentum, memory = cast(float, layer.momentum), self.memory

        def finish(x: Tensor, shortcut: Tensor | None, relu: bool) -> Tensor:
            running = mean, variance, batches, momentum
            return norm(x, weight, bias, *running, layer.eps, shortcut, relu=relu, memory=memory, after=after)

        return finish

    def _on_plain(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run a node on plain samples: once, side by side for all members, or for each member with its tensors."""
        if self.subject.members == 1 or node not in self.apart:
            return self._call(node, args, kwargs, _Blocked.plain)
        if node in self.own and len(args) == 1 and not kwargs:
            if self.traced.is_layer(node, nn.Linear):
                return self._product(node, args[0])
            if not self.on_cpu and self._is_grouped(node):
                return self._grouped(node, args[0])
        args, kwargs = map_arg((node.args, node.kwargs), self._repeated)
        if node not in self.own:
            return self._call(node, args, kwargs, _Blocked.plain)
        layer, members = self.traced.layers[node], self.subject.members
        path = str(node.target)
        if isinstance(layer, _BatchNorm) and is_of_torch(layer) and _can_norm(layer):
            return self._batch_norm(node, args[0])

        def alone(member: int) -> Any:
            rows = slice(member * self.batch, (member + 1) * self.batch)

            def cut(value: Any) -> Any:
                return value[rows] if isinstance(value, Tensor) and value.dim() else value

            own = map_aggregate((args, kwargs), cut)
            return functional_call(layer, self.subject.within(path, member), *own, tie_weights=False)

        return _joined([alone(member) for member in range(members)])

    def _weight(self, node: fx.Node) -> Tensor:
        """Return the weight of each member, zero where it owns nothing, [members, ...]."""
        name = f"{node.target}.weight"
        if node not in self.batched:
            return self.subject.rows(name)
        weight = self.subject.split(name)
        if node not in self.masks:
            self.masks[node] = self._mine(node).to(weight.dtype)
        return weight * self.masks[node]

    def _linear(self, chain: "_LinearRun", given: Any) -> Tensor:
        """Run a chain of linear layers of all members, over the weights that each has."""
        x: Tensor = given.plain() if isinstance(given, _Blocked) else given
        layers, (first, *_) = [], chain.layers[0]
        for node, kernels, relu in chain.layers:
            weight = (self.subject.split if node in self.batched else self.subject.rows)(f"{node.target}.weight")
            bias = None if self.traced.layers[node].bias is None else self.subject.rows(f"{node.target}.bias")
            layers.append(LinearLayer(weight, bias, kernels, relu))
        apart = first.args[0] in self.apart
        rows = x.reshape(self.subject.members if apart else 1, -1, x.shape[-1])
        result = linear(rows, *layers, memory=self.memory)
        return result.view(len(x) * (1 if apart else self.subject.members), *x.shape[1:-1], result.shape[-1])

    def _product(self, node: fx.Node, x: Tensor) -> Tensor:
        """Run a linear layer of all members as one batched product."""
        members, layer = self.subject.members, cast(nn.Linear, self.traced.layers[node])
        apart = node.args[0] in self.apart
        rows, weight = x.reshape(members if apart else 1, -1, x.shape[-1]), self._weight(node).transpose(1, 2)
        rows = rows.expand(members, -1, -1)
        bias = None if layer.bias is None else self.subject.rows(f"{node.target}.bias")
        result = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias[:, None], rows, weight)
        return result.view(len(x) * (1 if apart else members), *x.shape[1:-1], layer.out_features)

    def _grouped(self, node: fx.Node, given: Any) -> Tensor:
        """Run a convolution of all members as one of as many groups."""
        layer: Any = self.traced.layers[node]
        shared = node.args[0] not in self.apart and layer.groups == 1
        x = given if shared else self._in_channels(self._side_by_side(given))
        bias = None if layer.bias is None else self.subject.rows(f"{node.target}.bias").flatten()
        groups = 1 if shared else layer.groups * self.subject.members
        settings = (layer.stride, layer.padding, layer.dilation, groups)
        return self._in_batch(GROUPED[type(layer)](x, self._weight(node).flatten(0, 1), bias, *settings))

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
        return self._side_by_side(self.env[node]) if node in self.of_batch else self.env[node]

    def _side_by_side(self, value: Any) -> Any:
        """Return a value of all members as samples one after the other; what all members share is repeated."""
        if isinstance(value, _Blocked):
            return value.plain()
        if isinstance(value, Tensor) and value.dim() and len(value) == self.batch:
            return value.repeat(self.subject.members, *[1] * (value.dim() - 1))
        return value

    def _call(self, node: fx.Node, args: Any, kwargs: Any, take: Callable[[_Blocked], Tensor]) -> Any:
        """Run a node as it is, on what is taken from blocked values."""
        args, kwargs = map_aggregate((args, kwargs), lambda v: take(v) if isinstance(v, _Blocked) else v)
        return getattr(self, node.op)(node.target, args, kwargs)

    def _finished(self, node: fx.Node, value: _Blocked) -> _Blocked:
        """Leave a norm layer waiting for its only user, which takes it along; otherwise run it."""
        return value if node in self.waiting else _Blocked(value.now())

    def _waits(self, node: fx.Node) -> bool:
        """Return whether a norm layer, or the addition after one, is run with what follows: an addition, a ReLU."""
        user = self.traced.only_user(node)
        if user is None or node not in self.blocked or user not in self.blocked:
            return False
        then_relu = self.traced.is_relu(user)
        if self.traced.is_layer(node, nn.BatchNorm2d):
            once = self.traced.is_called_once(node)  # statistics have an order
            return once and (then_relu or self._first_to_wait(user) is node)
        return then_relu and self._first_to_wait(node) is not None

    def _first_to_wait(self, node: fx.Node) -> fx.Node | None:
        """Return one of two norm layers that are added; None if there is none, or nothing is added."""
        graph = self.traced
        added = graph.is_sum(node) and len(node.all_input_nodes) == 2
        norms = [one for one in node.all_input_nodes if graph.is_layer(one, nn.BatchNorm2d) and graph.only_user(one)]
        return norms[0] if added and norms else None

    def _stays_blocked(self, node: fx.Node) -> bool:
        """Return whether the output of a node is blocked."""
        if node in self.kernels:
            return True
        given = [one for one in node.args if isinstance(one, fx.Node)]
        if node.kwargs or not given or not self.blocked.issuperset(given):
            return False
        fits = self.traced.is_elementwise(node) or self.traced.is_layer(node, nn.Identity)
        return fits or (self.traced.is_layer(node, nn.BatchNorm2d) and _can_norm(self.traced.layers[node]))

    def _is_apart(self, node: fx.Node) -> bool:
        if node.op == "get_attr" and node in self.own:
            raise TypeError(f"{node.target} is used outside of a layer and differs between members")
        drawn = isinstance(self.traced.layers.get(node), _DropoutNd)
        return node in self.kernels or drawn or node in self.own or not self.apart.isdisjoint(node.all_input_nodes)

    def _is_direct(self, node: fx.Node) -> bool:
        """Return whether a layer is called as it is, on a value as it is."""
        given = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(given, fx.Node) or node in self.own or node in self.kernels:
            return False
        laid_out = node in self.blocked or given in self.blocked
        return not laid_out and (given in self.apart) == (node in self.apart)

    def _has_own(self, node: fx.Node) -> bool:
        """Return whether a node uses tensors that differ between members."""
        return node.op in ("call_module", "get_attr") and bool(self.subject.within(str(node.target), 0))


def _can_norm(layer: nn.Module) -> bool:
    """Return whether a layer is a batch norm with all that it usually has."""
    usual = isinstance(layer, _BatchNorm) and layer.affine and layer.track_running_stats and layer.momentum is not None
    return usual and layer.bias is not None


def _joined(results: list[Any]) -> Any:
    """Put the outputs of all members one after the other."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat(results)
    if isinstance(first, tuple | list):
        return type(first)(map(_joined, map(list, zip(*results, strict=True))))
    return first
