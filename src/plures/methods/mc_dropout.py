"""MC dropout: one network, many passes with dropout on (Gal and Ghahramani, 2016)."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from plures.calling import logits_of
from plures.checks import nearest
from plures.ensemble import Loss, Stage, Step
from plures.errors import PluresError
from plures.methods.building import Init, OneStage, layers, started
from plures.seeding import generator

Granularity = Literal["element", "channel"]
USUAL_RATE = 0.1


class MCDropout(OneStage):
    """Predict with dropout on, several times; each pass is a member.

        ensemble = plures.MCDropout(network, rate=0.1, passes=30)
        ensemble = plures.MCDropout(network, sites=["head.hidden", "head.fc"])

    Dropout acts at the network's own dropout layers; where it has none, on the input of the last convolution of each
    residual block; where it has no such blocks, on the input of every layer but the first; or at `sites`: dropout
    layers by name, or any other modules, whose input is dropped. `rate` holds at all of them; left out, the network's
    own dropout layers keep theirs and the others get 0.1. Give `sites` as a dict for one rate each. A residual block is
    the smallest part of a network with two or more convolutions, up to three of them larger than 1x1, and no Linear.

    Everything else predicts in eval mode, batch norm too. The passes follow from `seed`: the same batch gets the same
    answer twice, and torch's own generators stay where they were. `init="given"` starts from the network's weights, and
    can predict with them at once; `init="fresh"` draws them anew.
    """

    def __init__(
        self,
        network: nn.Module,
        rate: float | None = None,
        passes: int = 30,
        *,
        granularity: Granularity = "element",
        sites: Mapping[str, float] | Sequence[str] | None = None,
        init: Init = "given",
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(network, loss, started(network, init, seed), ready=init == "given")
        if not isinstance(passes, int) or passes < 1:
            raise PluresError(f"passes={passes!r}; predict with 1 pass or more")
        if granularity not in get_args(Granularity):
            raise PluresError(f"granularity={granularity!r}; use one of {', '.join(get_args(Granularity))}")
        self.passes = passes
        self.granularity = granularity
        self.init = init
        self.seed = seed
        self.sites = _rates(self.network, rate, sites)  # the dropout rate of each site, by name
        self._hooks = [_hook(self.network, site, rate, granularity) for site, rate in self.sites.items()]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all passes, [passes, batch, classes]."""
        self.require_trained()
        device = next((parameter.device for parameter in self.parameters()), torch.device("cpu"))
        with _seeded(generator(self.seed, "passes").initial_seed(), device):
            return torch.stack([logits_of(self.network(*args, **kwargs)) for _ in range(self.passes)])

    def stage(self, step: Step) -> Stage:
        """Make the stage that `open` checks out: its dropout follows `train()` and `eval()` as usual."""
        network, hooks = copy.deepcopy((self.network, self._hooks))  # together: the hooks that this copy has
        for hook in hooks:
            hook.always = False
        return Stage(network, step, self.loss, self.write)

    def options(self) -> dict[str, Any]:
        """Give the constructor's arguments as JSON values, so that a file can build the ensemble again."""
        return {
            "passes": self.passes,
            "granularity": self.granularity,
            "sites": self.sites,
            "init": self.init,
            "seed": self.seed,
        }


class _Hook:
    """Drop entries of a module's input: always when the ensemble predicts, in training mode when a stage trains.

    A hook, not a layer: names in the state dict stay those of the plain network, and the training flags of the network,
    which batch norm obeys, need not be touched.
    """

    def __init__(self, site: str, dropout: nn.Module, inserted: bool) -> None:
        self.site = site
        self.dropout = dropout.train()  # belongs to no network, so that no eval() reaches it
        self.inserted = inserted  # the network's own dropout layers need no hook to train
        self.always = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.always and not (self.inserted and module.training):
            return None
        if not args:
            raise PluresError(f"site {self.site!r} gets its input by name: name a layer inside of it instead")
        return (self.dropout(args[0]), *args[1:])


class _ChannelDropout(nn.Module):
    """Drop whole channels, each sample its own."""

    def __init__(self, rate: float, axis: int) -> None:
        super().__init__()
        self.rate = rate
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[0], shape[self.axis] = x.shape[0], x.shape[self.axis]
        return x * F.dropout(x.new_ones(shape), self.rate)


def _hook(network: nn.Module, site: str, rate: float, granularity: Granularity) -> _Hook:
    module = network.get_submodule(site)
    if isinstance(module, _DropoutNd):
        module.p = rate
        hook = _Hook(site, copy.deepcopy(module), inserted=False)
    elif granularity == "element":
        hook = _Hook(site, nn.Dropout(rate), inserted=True)
    elif isinstance(module, nn.Linear | _ConvNd):
        hook = _Hook(site, _ChannelDropout(rate, -1 if isinstance(module, nn.Linear) else 1), inserted=True)
    else:
        kind = type(module).__name__
        raise PluresError(f"site {site!r} is a {kind}: channels are dropped before Linear and convolution layers only")
    module.register_forward_pre_hook(hook)
    return hook


def _rates(
    network: nn.Module, rate: float | None, sites: Mapping[str, float] | Sequence[str] | None
) -> dict[str, float]:
    """Say where dropout acts, and with which rate."""
    modules = dict(network.named_modules())
    if sites is None:
        result = _found(network, rate)
    elif isinstance(sites, Mapping):
        result = dict(sites)
    else:
        result = {site: _rate(modules.get(site), rate) for site in ([sites] if isinstance(sites, str) else sites)}
    if not result:
        raise PluresError(
            f"{type(network).__name__} has no place for dropout: no dropout layer, no residual block and no second "
            "layer; name the modules whose input shall be dropped with sites=[...]"
        )
    for site, value in result.items():
        if site not in modules:
            raise PluresError(f"sites name {site!r}, which is no module of the network{nearest(site, modules)}")
        if not isinstance(value, int | float) or not 0 < value < 1:
            raise PluresError(f"the dropout rate of {site!r} is {value!r}; it lies between 0 and 1, both excluded")
    return result


def _rate(module: nn.Module | None, rate: float | None) -> float:
    if rate is None:
        return module.p if isinstance(module, _DropoutNd) and module.p > 0 else USUAL_RATE
    return rate


def _found(network: nn.Module, rate: float | None) -> dict[str, float]:
    own = {name: m for name, m in network.named_modules() if isinstance(m, _DropoutNd) and m.p > 0}
    if own:
        return {name: _rate(module, rate) for name, module in own.items()}
    places = _last_convolutions(network) or list(layers(network))[1:]
    return {name: _rate(None, rate) for name in places}


def _last_convolutions(network: nn.Module) -> list[str]:
    """Name the last convolution larger than 1x1 of each residual block."""
    found: dict[str, str] = {}
    for path, _ in network.named_modules():
        inside = {name: layer for name, layer in layers(network).items() if path and name.startswith(f"{path}.")}
        large = [n for n, layer in inside.items() if isinstance(layer, _ConvNd) and max(layer.kernel_size) > 1]
        all_convolutions = not any(isinstance(layer, nn.Linear) for layer in inside.values())
        if all_convolutions and len(inside) >= 2 and 1 <= len(large) <= 3:
            found[path] = large[-1]
    smallest = [path for path in found if not any(other.startswith(f"{path}.") for other in found)]
    return [found[path] for path in smallest]


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let everything random inside follow from a seed, and nothing outside."""
    has_states = device.type not in ("cpu", "meta", "mps")  # mps has one generator, which is seeded and not given back
    with torch.random.fork_rng([device] if has_states else [], device_type=device.type):
        torch.default_generator.manual_seed(seed)
        if has_states or device.type == "mps":
            torch.get_device_module(device).manual_seed(seed)
        yield
