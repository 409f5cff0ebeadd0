"""Deterministic: the plain network, as an ensemble of one."""

import copy
from typing import Any

from torch import Tensor, nn

from plures.calling import logits_of
from plures.losses import Loss
from plures.methods.building import Init, OneStage, started


class Deterministic(OneStage):
    """Use a single network as an ensemble of one: the baseline of every method.

        ensemble = plures.Deterministic(network)
        for stage in ensemble.stages():
            train(stage)

    With `init="given"` it starts from the weights of the network, and can predict before it is trained. `init="fresh"`
    draws new weights from `seed`, at the scale of the given network.
    """

    def __init__(self, network: nn.Module, *, init: Init = "given", loss: Loss | None = None, seed: int = 0) -> None:
        super().__init__(network, loss, started(network, init, seed), member=0, ready=init == "given")
        self._init, self.seed = init, seed

    def checkout(self, member: int = 0) -> nn.Module:
        """Return the network as a plain network of your own class, in eval mode.

        network = ensemble.checkout()
        """
        self._ready(member)
        return copy.deepcopy(self.network).eval()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of the network, [1, batch, classes]."""
        self._all_ready()
        return logits_of(self.network(*args, **kwargs)).unsqueeze(0)
