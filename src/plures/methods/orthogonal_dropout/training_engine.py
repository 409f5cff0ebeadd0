"""Train a stage without multiplying the zeros of its masks: convolutions run over the kernels that they have."""

import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize

from plures.graph import ELEMENTWISE_LAYERS, Graph, has_hooks, is_plain_convolution
from plures.methods.orthogonal_dropout.masks import MASKS, Keep, mask_of
from plures.native.library import load, why_unavailable
from plures.native.training import MemberKernels, blocked, convolution, kernels_of, norm, unblocked

log = logging.getLogger("plures")
MOST_KEPT = 0.7  # of the kernels: with more, torch's dense convolutions of a wide network are faster
# Networks of these layers alone do nothing that a trace would lose. Other code may: gradients that it defines, changes
# in place, choices that depend on the step. A class says that it does not by `traceable = True`.
LAYERS = (
    *(nn.Sequential, nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, *ELEMENTWISE_LAYERS),
    *(nn.ModuleDict, parametrize.ParametrizationList, *MASKS),
)


class TrainingEngine:
    """Run the network of a stage in training.

    It uses the tensors of the network's own layers, so gradients arrive where they always do, and agree to rounding. It
    needs a CPU with the native library, float32, and batches that fill the vectors. The network consists of torch's
    layers, or of classes that say `traceable = True`. Masks of whole kernels leave out much, and little else than batch
    norms, additions and activations stands between the convolutions. In all other cases the network itself is called.
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
        """Return what the network returns for a batch of images, or None if the network must be called itself."""
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled():
            return None
        images = isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.is_cpu and inputs.dtype == torch.float32
        if not images or not network.training or torch._C._are_functorch_transforms_active():
            return None
        if not self._running.acquire(blocking=False):  # by another thread
            return None
        try:
            usable = self.takes(network, len(inputs)) and cast(_Prepared, self._prepared).is_up_to_date()
            return cast(_Prepared, self._prepared).run(inputs) if usable else None
        finally:
            self._running.release()

    def takes(self, network: nn.Module, images: int) -> bool:
        """Return whether batches of this many images of a network in training can be run, on the CPU and in float32."""
        if self._refused is network:
            return False
        if self._prepared is None or self._prepared.module is not network:
            self._prepared = _prepare(network)
            self._refused = network if self._prepared is None else None
        return self._prepared is not None and images > 0 and images % load().lanes == 0


def _prepare(network: nn.Module) -> "_Prepared | None":
    if why_unavailable() is not None or not all(map(_is_known, network.modules())):
        return None
    try:
        prepared = _Prepared(network, Graph(network))
    except Exception as error:  # whatever code does that cannot be traced
        log.warning("the network says that it is traceable, but torch.fx cannot trace it: %s", error)
        return None
    return prepared if prepared.pays() else None


def _is_known(layer: nn.Module) -> bool:
    kind = type(layer).__mro__[1] if parametrize.is_parametrized(layer) else type(layer)
    return (kind in LAYERS or vars(kind).get("traceable") is True) and "forward" not in vars(layer)


def _mask(network: nn.Module, name: str) -> Tensor | None:
    """Return the mask of a convolution if it is of whole kernels and the library has all that the layer needs."""
    layer = network.get_submodule(name)
    if not is_plain_convolution(layer) or not parametrize.is_parametrized(layer, "weight"):
        return None
    chain = cast(nn.ModuleDict, layer.parametrizations)["weight"]
    mask = mask_of(network, f"{name}.weight")
    if not isinstance(mask, Keep) or len(cast(nn.ModuleList, chain)) > 1:
        return None
    return mask.mask if mask.mask.shape[2:] == (1, 1) else None


def _can_norm(layer: nn.Module) -> bool:
    """Return whether a layer is a batch norm with all that it usually has."""
    usual = type(layer) is nn.BatchNorm2d and layer.affine and layer.track_running_stats and layer.momentum is not None
    return usual and layer.bias is not None


class _Blocked:
    """Blocked images; after a norm layer that waits for what follows it, the images before it."""

    def __init__(self, images: Tensor, norm: nn.BatchNorm2d | None = None, shortcut: Tensor | None = None) -> None:
        self.images, self.norm, self.shortcut = images, norm, shortcut

    def now(self, relu: bool = False) -> Tensor:
        """Normalise, if a norm layer still waits."""
        return self.images if self.norm is None else norm(self.images, self.norm, self.shortcut, relu=relu)


class _Prepared(fx.Interpreter):
    """Run a traced network, blocked where it can be."""

    def __init__(self, network: nn.Module, traced: Graph) -> None:
        super().__init__(network, graph=traced.graph)
        self.extra_traceback = False  # an error is the layer's own
        self.traced = traced
        self.known = list(network.modules())
        masks = {node: _mask(network, cast(str, node.target)) for node in traced.layers if len(node.args) == 1}
        self.masks = {node: mask for node, mask in masks.items() if mask is not None}
        self.kernels: dict[fx.Node, MemberKernels] = {
            node: kernels_of(mask.flatten(1)[None] != 0) for node, mask in self.masks.items()
        }
        self.versions = [mask._version for mask in self.masks.values()]
        self.copies = [mask.clone() for mask in self.masks.values()]
        self.blocked: set[fx.Node] = set()  # nodes whose values are blocked
        for node in traced.nodes:
            if self._stays_blocked(node):
                self.blocked.add(node)
        self.waiting = set(filter(self._waits, traced.nodes))

    def pays(self) -> bool:
        """Return whether much is left out, and few convolutions need their inputs in another layout."""
        converted = sum(node.args[0] not in self.blocked for node in self.kernels)
        kept = sum(kernels.forward.places.numel() for kernels in self.kernels.values())
        every = sum(mask.numel() for mask in self.masks.values())
        return 0 < converted <= 1 + len(self.kernels) // 4 and kept <= MOST_KEPT * every

    def is_up_to_date(self) -> bool:
        """Return whether the network is as it was: not all of its layers are called here."""
        modules = list(self.module.modules())
        same = list(map(id, modules)) == list(map(id, self.known))
        norms = all(_can_norm(layer) for layer in modules if isinstance(layer, nn.BatchNorm2d))
        plain = all(layer.training and _is_known(layer) and not has_hooks(layer) for layer in modules)
        versions = [mask._version for mask in self.masks.values()]
        if versions != self.versions and all(map(torch.equal, self.masks.values(), self.copies)):
            self.versions = versions  # written again with the same values, by a run that resumes or by DDP
        hooked = _has_any_global_hook()  # type: ignore[no-untyped-call]
        return same and norms and plain and not hooked and versions == self.versions

    def run(self, *args: Any, **_: Any) -> Any:
        """Run the network."""
        try:
            return super().run(*args, enable_io_processing=False)
        finally:
            self.env = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node on blocked images, if it can, and on plain ones if not."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n not in self.blocked:
            return self._run_on(n, args, kwargs, lambda value: unblocked(value.now()))
        layer = self.traced.layers.get(n)
        if n in self.kernels:
            images = args[0].now() if isinstance(args[0], _Blocked) else blocked(args[0])
            convolved = cast(nn.Conv2d, layer)
            bias = None if convolved.bias is None else convolved.bias[None]
            settings = (self.kernels[n], convolved.stride, cast(tuple[int, int], convolved.padding))
            return _Blocked(convolution(images, convolved.weight, bias, *settings))
        if isinstance(layer, nn.BatchNorm2d):
            return self._finished(n, _Blocked(args[0].now(), layer))
        if isinstance(layer, nn.Identity):
            return args[0]
        if self.traced.is_relu(n) and args[0].norm is not None:
            return _Blocked(args[0].now(relu=True))
        if self.traced.is_sum(n) and not self.waiting.isdisjoint(n.all_input_nodes):
            waiting, other = args if n.all_input_nodes[0] in self.waiting else args[::-1]
            shortcut = other.now()
            if shortcut.shape != waiting.images.shape:  # they broadcast
                return _Blocked(waiting.now() + shortcut)
            return self._finished(n, _Blocked(waiting.images, waiting.norm, shortcut))
        return _Blocked(self._run_on(n, args, kwargs, lambda value: value.now()))

    def _run_on(self, node: fx.Node, args: Any, kwargs: Any, take: Callable[[_Blocked], Tensor]) -> Any:
        """Run a node as it is, on images that are taken from the blocked ones."""
        args, kwargs = map_aggregate((args, kwargs), lambda v: take(v) if isinstance(v, _Blocked) else v)
        return getattr(self, node.op)(node.target, args, kwargs)

    def _finished(self, node: fx.Node, value: _Blocked) -> _Blocked:
        """Leave a norm layer waiting for its only user, which takes it along; otherwise run it."""
        return value if node in self.waiting else _Blocked(value.now())

    def _waits(self, node: fx.Node) -> bool:
        """Return whether a norm layer, or the addition after one, is run with what follows: an addition, a ReLU."""
        user = self.traced.only_user(node)
        if user is None or user not in self.blocked:
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
        """Return whether the output of a node is blocked images."""
        given = [argument in self.blocked for argument in node.args if isinstance(argument, fx.Node)]
        if node.kwargs or not given or node in self.masks:
            return bool(given) and not node.kwargs
        fits = self.traced.is_elementwise(node) or self.traced.is_layer(node, nn.Identity)
        return all(given) and (fits or (node in self.traced.layers and _can_norm(self.traced.layers[node])))
