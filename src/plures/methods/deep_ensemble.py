"""Deep ensemble: k networks, trained independently (Lakshminarayanan, Pritzel and Blundell, 2017)."""

import copy
from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

from plures.calling import Arguments
from plures.checks import check_members, one_of
from plures.errors import PluresError
from plures.losses import Loss
from plures.methods.building import AnyOrder, Init
from plures.methods.orthogonal_dropout.roles import check_head, classifier_tensors
from plures.seeding import check_seed
from plures.stage import Stage, Step, refuse_other_shared
from plures.tensors import copied_around, moments, restart, tensors
from plures.trunk import of_networks

Classifier = Literal["private", "fixed"]


class DeepEnsemble(AnyOrder):
    """Train several copies of a network, each from its own random weights.

        ensemble = plures.DeepEnsemble(network, members=5)
        for stage in ensemble.stages():
            train(stage)
        network = ensemble.checkout(2)

    Parameters that are frozen (`requires_grad=False`) are shared by all members. `classifier="fixed"` freezes the
    classifier of the network.
    `init="given"` starts every member from the network's weights, so that only the training makes them differ.

    Members are independent, so any open step can be trained at any time, also in another process that builds the same
    ensemble. There, train `stage = ensemble.open(step)`; here, call `ensemble.open(step)`,
    `stage.load_state_dict(theirs)` and `stage.commit()`.
    """

    def __init__(
        self,
        network: nn.Module,
        members: int = 5,
        *,
        classifier: Classifier = "private",
        init: Init = "fresh",
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(network, loss, range(check_members(members)))
        seed = check_seed(seed)
        one_of("init", init, get_args(Init))
        self.members, self.classifier, self._init, self.seed = members, classifier, init, seed
        self._shared = _shared(network, classifier)  # names of tensors that all members have in common
        if init == "given":
            check_head(network, self._shared)
        self.networks = nn.ModuleList(self._starts(network))
        self.eval()

    @property
    def trained(self) -> list[int]:
        """The members that can predict."""
        return [member for member, done in enumerate(self._committed) if done]

    def checkout(self, member: int) -> nn.Module:
        """Return one trained member as a plain network of your own class, in eval mode.

        network = ensemble.checkout(2)
        """
        return copy.deepcopy(self.networks[self._ready(member)])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all trained members, [members, batch, classes]."""
        return self._outputs([Arguments(args, kwargs)])

    def _outputs(self, batches: list[Any], chosen: Sequence[int] | None = None) -> Tensor:
        return of_networks(self, self.networks, self._all_ready(chosen), batches)

    def _stage(self, step: Step) -> Stage:
        network = copied_around(self.networks[self._number(step.member)], self._shared)
        for name, tensor in tensors(network).items():
            if name in self._shared:
                tensor.requires_grad_(False)
        return Stage(network, step, self.loss, self._write)

    def _starts(self, network: nn.Module) -> list[nn.Module]:
        known = moments(network)
        drawn = [name for name in known if name not in self._shared] if self._init == "fresh" else []
        first = copy.deepcopy(network)
        # Shared tensors are one object in all copies: they are stored once, and moved once.
        one_for_all = {id(tensor): tensor for name, tensor in tensors(first).items() if name in self._shared}
        copies = [first, *(copy.deepcopy(first, dict(one_for_all)) for _ in range(1, self.members))]
        for member, start in enumerate(copies):
            restart(start, known, drawn, self.seed, "member", member)
        return copies

    def _take(self, stage: Stage) -> None:
        values, own = tensors(stage.network), tensors(self.networks[self._number(stage.member)])
        refuse_other_shared(stage, {name: own[name] for name in self._shared}, values)
        for name, tensor in own.items():
            if name not in self._shared:
                tensor.copy_(values[name])


def _shared(network: nn.Module, classifier: str) -> set[str]:
    one_of("classifier", classifier, get_args(Classifier))
    frozen = {name for name, t in tensors(network).items() if isinstance(t, nn.Parameter) and not t.requires_grad}
    if classifier == "private":
        return frozen
    classifier_of_all = set(classifier_tensors(network))
    if not classifier_of_all:
        raise PluresError(
            f"{type(network).__name__} has no trainable Linear and no last 1x1 convolution that could be the "
            "classifier: freeze what all members share, and leave out classifier='fixed'"
        )
    return classifier_of_all | frozen
