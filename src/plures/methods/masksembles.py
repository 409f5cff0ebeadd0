"""Masksembles: one network, a fixed set of channel masks whose overlap is chosen (Durasov et al., 2021)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plures.checks import check_members, unknown
from plures.errors import PluresError
from plures.losses import Loss
from plures.methods import building
from plures.methods.building import Init, ManyInOne, Rows, Tiled, layers_of, widths
from plures.seeding import generator

LARGEST_SCALE = 6.0  # as in the authors' package: beyond it the masks hardly overlap, and each is almost empty
ATTEMPTS = 100_000  # about one draw of ten has the width that is needed


class Masksembles(ManyInOne):
    """Assign each member a fixed mask of the channels that it uses at each layer.

        ensemble = plures.Masksembles(network, members=5, scale=2.0)
        ensemble = plures.Masksembles(network, layers=["head.hidden", "head.fc"])

    - `scale`: how much the masks differ. 1 makes them all the same, 6 leaves hardly any overlap; the more they differ,
      the fewer channels each mask has.
    - `layers`: the layers whose input is masked; by default, every Linear and convolution except the first, including
      the classifier as in the authors' code. `nn.MultiheadAttention` has no masks inside.

    In training, each sample trains one member, as in the authors' code: the batch is divided into one group per member,
    and the groups differ by at most one sample. At prediction, each sample goes through all members. The masks are
    saved with the weights.
    """

    def __init__(
        self,
        network: nn.Module,
        members: int = 5,
        scale: float = 2.0,
        *,
        layers: Sequence[str] | None = None,
        init: Init = "fresh",
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        check_members(members)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 1 <= scale <= LARGEST_SCALE:
            raise PluresError(f"scale={scale!r}; use a number from 1 (all masks the same) to {LARGEST_SCALE:g}")
        names = _chosen(network, layers)
        rows = Rows()
        built = building.started(network, init, seed)
        for name in names:
            layer = layers_of(built)[name]
            values = masks(widths(layer)[0], members, scale, generator(seed, "mask", name))
            own = Masks(values.to(layer.weight.device), rows)
            layer.add_module("members", own)
            layer.register_forward_pre_hook(own.before)
        super().__init__(network, loss, Grouped(built, members, rows))
        self.members, self.scale, self.layers, self._init, self.seed = members, scale, names, init, seed


class Grouped(Tiled):
    """Run a network with one mask per sample in training, [1, batch, classes], and with all of them in prediction."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits, [members, batch, classes], or in training [1, batch, classes]."""
        if not self.training:
            return super().forward(*args, **kwargs)
        inputs = building.batched(args, kwargs)
        self.rows.count = len(inputs)
        self.rows.owner = torch.arange(len(inputs), device=inputs.device) * self.members // len(inputs)
        if len(inputs) % self.members:  # chance says whose group is short, or else small batches would starve a member
            shift = torch.randint(self.members, (1,), device=inputs.device)
            self.rows.owner = (self.rows.owner + shift) % self.members
        return building.run(self.network, self.rows, *args, **kwargs).unsqueeze(0)


class Masks(nn.Module):
    """Hold the masks of one layer's input, [members, channels]."""

    masks: Tensor

    def __init__(self, values: Tensor, rows: Rows) -> None:
        super().__init__()
        self.rows = rows
        self.register_buffer("masks", values)

    def before(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Mask the inputs."""
        x, *others = args
        return (x * self.rows.spread(self.masks, x, layer), *others)


def masks(channels: int, members: int, scale: float, random: torch.Generator) -> Tensor:
    """Draw masks of equally many channels that together use them all, as booleans [members, channels].

    Each mask is drawn from about `scale` times as many positions as it has ones, until exactly `channels` are used.
    """
    expected = scale * (1 - (1 - 1 / scale) ** members)  # positions in use for each one in a mask
    ones = max(math.floor(channels / expected), math.ceil(channels / members))
    positions = channels  # of which masks with that many ones are expected to use `channels`
    while positions < LARGEST_SCALE * ones and positions * (1 - (1 - ones / positions) ** members) < channels - 0.5:
        positions += 1
    for _ in range(ATTEMPTS):
        ranks = torch.rand(members, positions, generator=random).argsort(1)
        drawn = ranks < ones
        used = drawn.any(0)
        if int(used.sum()) == channels:
            return drawn[:, used]
    raise PluresError(
        f"found no {members} masks of {ones} ones that use exactly {channels} channels; change scale={scale} slightly"
    )


def _chosen(network: nn.Module, given: Sequence[str] | None) -> list[str]:
    known = layers_of(network)
    names = list(known)[1:] if given is None else list(given)
    for name in names:
        if name not in known:
            raise unknown("Linear or convolution for layers=", name, known)
    if not names or len(set(names)) < len(names):
        raise PluresError(
            f"layers={names} leave no layer to mask or name one twice: name some of {list(known)}, each once"
        )
    return names
