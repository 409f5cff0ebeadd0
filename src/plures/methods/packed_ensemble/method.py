"""Packed-Ensembles: narrow members side by side, run in one pass by grouped layers (Laurent et al., 2023)."""

from torch import nn

from plures.checks import nearest
from plures.ensemble import Loss
from plures.errors import PluresError
from plures.methods.building import Layer, ManyInOne, check_members, layers_of, rehearse
from plures.methods.packed_ensemble.layers import Packing
from plures.methods.tiling import Tiled


class PackedEnsemble(ManyInOne):
    """Run members of a fraction of the width side by side, in one pass; each has the depth of the network.

        ensemble = plures.PackedEnsemble(network, members=4)
        ensemble = plures.PackedEnsemble(network, members=4, alpha=3.0, gamma=2)

    All members together are `alpha` times as wide as the network, so that each has alpha / members of its channels;
    alpha = sqrt(members) makes as many weights as the network has. Left out, alpha is the value nearest to that which
    makes every width whole; one that does not is refused, never rounded. `gamma` cuts each member's layers into so many
    groups, for fewer weights, all but the first and the last. Every member sees the whole input and has a classifier of
    its own. `first` and `last` name the layers that take the input and give the logits, by default the first layer and
    the last Linear.

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
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        check_members(members)
        if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0):
            raise PluresError(f"alpha={alpha!r}; use a number above 0, or leave it out for about sqrt(members)")
        if isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 1:
            raise PluresError(f"gamma={gamma!r}; use a whole number, 1 or more")
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
        self.seed = seed


def _ends(known: dict[str, Layer], first: str | None, last: str | None) -> tuple[str, str]:
    """Find the layer that takes the input and the one that gives the logits."""
    linear = [name for name, layer in known.items() if isinstance(layer, nn.Linear)]
    found = {
        "first": next(iter(known)) if first is None else first,
        "last": (linear or list(known))[-1] if last is None else last,
    }
    for end, name in found.items():
        if name not in known:
            raise PluresError(f"{end}={name!r} is no Linear or convolution of the network{nearest(name, known)}")
    return found["first"], found["last"]
