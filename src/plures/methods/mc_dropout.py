"""MC dropout: one network, many passes with dropout on (Gal and Ghahramani, 2016)."""

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from plures.calling import Arguments, call_with, logits_of
from plures.checks import nearest, whole_number
from plures.errors import PluresError
from plures.losses import Loss
from plures.methods.building import Init, OneStage, started
from plures.seeding import seed_of
from plures.stage import Stage, Step
from plures.tensors import layers, shell
from plures.trunk import Run, Trunk

USUAL_RATE = 0.1
MOST_PASSES = 10_000
ALPHA = 1.7580993408473766  # where the SELU of torch saturates, times -1: what alpha dropout puts for a dropped entry


class MCDropout(OneStage):
    """Predict with dropout on, several times; each pass is a member.

        ensemble = plures.MCDropout(network, rate=0.1, passes=30)
        ensemble = plures.MCDropout(network, sites=["head.hidden", "head.fc"])

    - `rate`: the dropout rate. By default, the network's own dropout layers keep their rate, and other sites get 0.1.
    - `passes`: the number of passes.
    - `sites`: the names of dropout layers, or of other modules whose input is dropped; as a dict, with one rate each.
      By default, these are the network's own dropout layers; if it has none, the last convolution of each residual
      block; if it has no such blocks, every layer except the first. A residual block is the smallest part of a network
      with two or more convolutions, up to three of them larger than 1x1, and no Linear.
    - `init`: "given" starts from the network's weights, and can predict at once; "fresh" draws new weights.
    - `seed`: determines the dropout of the passes, so the same batch gets the same prediction twice. torch's own
      generators do not change.

    All other layers, including batch norm, predict in eval mode.
    """

    def __init__(
        self,
        network: nn.Module,
        rate: float | None = None,
        passes: int = 30,
        *,
        sites: Mapping[str, float] | Sequence[str] | None = None,
        init: Init = "given",
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(network, loss, started(network, init, seed), ready=init == "given")
        whole_number("passes", passes, most=MOST_PASSES)
        self.members = self.passes = passes
        self._init, self.seed = init, seed
        self.sites = _rates(self.network, rate, sites)  # the dropout rate of each site, by name
        self._hooks = [_hook(self.network, site, rate) for site, rate in self.sites.items()]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all passes, [passes, batch, classes]."""
        self._all_ready()
        run = self._run_passes
        # The compiler knows no generator but torch's own. To import it takes a second: only if somebody has.
        if "torch._dynamo" in sys.modules:
            run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
        return run([Arguments(args, kwargs)])

    def _run_passes(self, batches: list[Any]) -> Tensor:
        """Run batches several times, with dropout that follows from the seed; return [passes, ...]."""
        values = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        device = next((tensor.device for tensor in values.values()), torch.device("cpu"))
        random = None if device.type == "meta" else torch.Generator(device)

        def run(structure: tuple[nn.Module, list[_Hook], Trunk]) -> Tensor:
            network, hooks, trunk = structure
            for hook in hooks:
                hook.random = random

            def ready(number: int) -> Run:
                if random is not None and not number:  # passes may run again, to be compared
                    random.manual_seed(seed_of(self.seed, "passes"))
                return lambda batch: logits_of(call_with(network, values, self._places, batch))

            return trunk.outputs(batches, [partial(ready, number) for number in range(self.passes)])

        def make() -> tuple[nn.Module, list[_Hook], Trunk]:
            network, hooks = shell((self.network, self._hooks))
            return network, hooks, Trunk([network], (), hooks)  # sites have hooks: what comes before them runs once

        # A structure of its own for each call: its hooks draw from the generator of the call.
        return self._lender.lend(self, make, run)

    def _stage(self, step: Step) -> Stage:
        network, hooks = copy.deepcopy((self.network, self._hooks))  # together: the hooks that this copy has
        for hook in hooks:
            hook.always = False  # dropout follows `train()` and `eval()` as usual
        return Stage(network, step, self.loss, self._write)

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON values, so that the ensemble can be rebuilt from a file."""
        return {"passes": self.passes, "sites": self.sites, "init": self._init, "seed": self.seed}


@dataclass(eq=False)
class _Hook:
    """Drop entries of a module's input: always when the ensemble predicts, in training mode when a stage trains.

    A hook, not a layer: names in the state dict stay those of the plain network, and the training flags of the network,
    which batch norm obeys, need not be touched. It draws from `random`; without one, as in training, from torch's own
    generator.
    """

    site: str
    rate: float
    inserted: bool = True  # the network's own dropout layers need no hook to train
    by_channel: bool = False  # drop whole channels of each sample
    alpha: bool = False  # keep mean and variance, for networks that normalise themselves
    always: bool = True
    random: torch.Generator | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.always and not (self.inserted and module.training):
            return None
        if not args:
            raise PluresError(f"site {self.site!r} gets its input as a named argument: name a layer inside it instead")
        return (self._dropped(args[0]), *args[1:])

    def _dropped(self, x: Tensor) -> Tensor:
        """Drop as torch's dropout layers do."""
        like = x.new_empty([*x.shape[:2], *[1] * (x.dim() - 2)]) if self.by_channel else x
        kept = torch.empty_like(like).bernoulli_(1 - self.rate, generator=self.random)
        if not self.alpha:
            return x * kept.div_(1 - self.rate)
        a = 1 / math.sqrt((ALPHA**2 * self.rate + 1) * (1 - self.rate))
        return a * (x * kept + (kept - 1) * ALPHA) + a * ALPHA * self.rate


def _hook(network: nn.Module, site: str, rate: float) -> _Hook:
    module = network.get_submodule(site)
    hook = _Hook(site, rate)
    if isinstance(module, _DropoutNd):
        module.p, hook.inserted = rate, False
        hook.by_channel = isinstance(module, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.FeatureAlphaDropout)
        hook.alpha = isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout)
    module.register_forward_pre_hook(hook)
    return hook


def _rates(
    network: nn.Module, rate: float | None, sites: Mapping[str, float] | Sequence[str] | None
) -> dict[str, float]:
    """Return the dropout rate of each site."""
    modules = dict(network.named_modules())
    own = {name: one.p for name, one in modules.items() if isinstance(one, _DropoutNd) and one.p > 0}
    if sites is None:
        sites = list(own) or _last_convolutions(network) or list(layers(network))[1:]
    if isinstance(sites, Mapping):
        result = dict(sites)
    else:
        names = [sites] if isinstance(sites, str) else sites
        result = {name: own.get(name, USUAL_RATE) if rate is None else rate for name in names}
    if not result:
        raise PluresError(
            f"{type(network).__name__} has no place for dropout: no dropout layer, no residual block, no second "
            "layer; name the modules whose input to drop with sites=[...]"
        )
    for site, value in result.items():
        if site not in modules:
            raise PluresError(f"sites name {site!r}, which is not a module of the network{nearest(site, modules)}")
        if not isinstance(value, int | float) or not 0 < value < 1:
            raise PluresError(f"the dropout rate of {site!r} is {value!r}; use a number above 0 and below 1")
    return result


def _last_convolutions(network: nn.Module) -> list[str]:
    """Return the name of the last convolution larger than 1x1 of each residual block."""
    found: dict[str, str] = {}
    for path, _ in network.named_modules():
        inside = {name: layer for name, layer in layers(network).items() if path and name.startswith(f"{path}.")}
        large = [n for n, layer in inside.items() if isinstance(layer, _ConvNd) and max(layer.kernel_size) > 1]
        all_convolutions = not any(isinstance(layer, nn.Linear) for layer in inside.values())
        if all_convolutions and len(inside) >= 2 and 1 <= len(large) <= 3:
            found[path] = large[-1]
    smallest = [path for path in found if not any(other.startswith(f"{path}.") for other in found)]
    return [found[path] for path in smallest]
