"""Packed-Ensembles: narrow members side by side, run in one pass by grouped layers (Laurent et al., 2023)."""

from typing import get_args

from torch import nn

from plures.checks import number, one_of, whole_number
from plures.ensemble import Stored
from plures.losses import Loss
from plures.methods.building import (
    Layer,
    ManyInOne,
    Reduction,
    check_members,
    inside,
    layers_of,
    named_layer,
    rehearse,
)
from plures.methods.packed_ensemble.layers import Packing
from plures.methods.tiling import Tiled
from plures.seeding import check_seed
from plures.tensors import canonical


class PackedEnsemble(ManyInOne):
    """Run members of a fraction of the width side by side, in one pass; each has the depth of the network.

        ensemble = plures.PackedEnsemble(network, members=4)
        ensemble = plures.PackedEnsemble(network, members=4, alpha=3.0, gamma=2)

    All members together are `alpha` times as wide as the network, so that each has alpha / members of its channels;
    alpha = sqrt(members) makes as many weights as the network has. Left out, alpha is the value nearest to that which
    makes every width whole; one that does not is refused, never rounded. `gamma` cuts a member's layers into that many
    groups, for fewer weights, all but the first and the last. Every member sees the whole input and has a classifier of
    its own. `first` and `last` name the layers that take the input and give the logits, by default the first layer and
    the last Linear.

    Members know nothing of each other: with `reduction="sum"` each trains on its own loss, as it would alone. The
    authors' code averages the losses ("mean"), so that each member learns at a fraction of the rate.

    Weights always start afresh, at the scale of the given network's. It may consist of Linear, Conv1d to Conv3d, batch,
    instance, group and layer norm, and of modules without parameters; with others it is refused.
    """

    def __init__(
        self,
        network: nn.Module,
        members: int = 4,
        alpha: float | None = None,
        gamma: int = 1,
        *,
        first: str | None = None,
        last: str | None = None,
        reduction: Reduction = "sum",
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        _check(members, alpha, gamma, seed)
        one_of("reduction", reduction, get_args(Reduction))
        first, last = _ends(layers_of(network), first, last)
        packing = Packing(network, members, alpha, gamma, first, last, seed)
        tiled = Tiled(packing.pack(network), members, packing.rows, interleave=True)
        rehearse(
            network,
            tiled,
            members,
            f"PackedEnsemble cannot run {type(network).__name__} with a fraction of its width (if {first!r} does not "
            f"take the input or {last!r} does not give the logits, name the layers that do with first= and last=)",
        )
        super().__init__(network, loss, tiled)
        self.members = members
        self.alpha = packing.alpha
        self.gamma = gamma
        self.first = first
        self.last = last
        self.reduction = reduction
        self.seed = seed

    @classmethod
    def check_stored(cls, network: nn.Module, stored: Stored) -> None:
        """Refuse a number of members that the file does not hold."""
        known, options = layers_of(network), stored.options
        _check(options["members"], options["alpha"], options["gamma"], options["seed"])
        first, last = _ends(known, options["first"], options["last"])
        packing = Packing(network, options["members"], options["alpha"], options["gamma"], first, last, options["seed"])
        first_names = canonical(network)
        for name, layer in known.items():
            weight = f"{name}.weight".lstrip(".")
            if first_names.get(weight) == weight:  # tied ones are stored once
                stored.check(inside(name, "weight"), packing.weight_shape(name, layer))


def _check(members: int, alpha: float | None, gamma: int, seed: int) -> None:
    check_members(members)
    if alpha is not None:
        number("alpha", alpha, "a number above 0, or leave it out for about sqrt(members)", above=0)
    whole_number("gamma", gamma)
    check_seed(seed)


def _ends(known: dict[str, Layer], first: str | None, last: str | None) -> tuple[str, str]:
    """Find the layer that takes the input and the one that gives the logits."""
    linear = [name for name, layer in known.items() if isinstance(layer, nn.Linear)]
    found = {
        "first": next(iter(known)) if first is None else first,
        "last": (linear or list(known))[-1] if last is None else last,
    }
    for end, name in found.items():
        named_layer(end, name, known)
    return found["first"], found["last"]
