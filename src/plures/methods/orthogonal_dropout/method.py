"""Orthogonal dropout: k disjoint subnetworks of one network, each trained on its own (Zhang, Gao and Sabuncu, 2021)."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from plures.calling import Arguments, call_with, logits_of
from plures.checks import one_of
from plures.ensemble import Ensemble, Stored, file_line
from plures.errors import PluresError
from plures.losses import Loss
from plures.methods.orthogonal_dropout import file, sequential, together
from plures.methods.orthogonal_dropout.engines.choosing import made
from plures.methods.orthogonal_dropout.engines.engine import Engine
from plures.methods.orthogonal_dropout.masks import put_on, unmasked
from plures.methods.orthogonal_dropout.owners import Granularity, Partition, Private, SplitNetwork, refilled, taken
from plures.methods.orthogonal_dropout.roles import (
    Classifier,
    Role,
    check_head,
    check_pretrained,
    check_roles,
    names_of_shared,
    resolve_roles,
    roles_for,
)
from plures.methods.orthogonal_dropout.training_engine import TrainingEngine
from plures.seeding import check_seed
from plures.stage import Stage, Step, due
from plures.tensors import Moments, copied_around, moments, own_tensors, places, restart, shell, tensors
from plures.trunk import Run, Trunk, apart, same

Init = Literal["fresh", "given"]
Background = Literal["zero", "given"]
Schedule = Literal["sequential", "together"]
Kind = Literal["owned", "unfolded"]
log = logging.getLogger("plures")


class OrthogonalDropout(Ensemble):
    """Split a network into members that share no weight.

        ensemble = plures.OrthogonalDropout(network, members=5)
        for stage in ensemble.stages():
            train(stage, epochs={"pretrain": 200, "prune": 20, "finetune": 200}[stage.phase])
        prediction = ensemble.predict(images)

    - `schedule`: "sequential" trains one member after the other, as in the paper. "together" divides the weights at
      random and trains all members in one `train` stage, with the memory of one network; the loss is the sum of theirs.
    - `optimize_masks`: pre-train each member on all free weights, prune it to its share by learned scores, and finetune
      it. If False, divide the weights at random and train each member once, in a `train` stage. By default True if
      sequential; members that are trained together have random masks.
    - `classifier`: "private" gives each member its own last layer, "split" divides its weights among the members, and
      "fixed" freezes it for all members, as in the paper. By default it is private if small and split if large.
    - `granularity`: the unit that has one owner: a convolution "kernel", a single "weight", or a "block" of eight
      outputs of one input in linear layers and 1x1 convolutions.
    - `init`: "fresh" draws new weights for each member, at the scale of the given network; "given" starts from the
      given weights, and the first member then needs no pre-training. The members divide the given weights among them
      and see zeros elsewhere, which loses most of what a pre-trained network knows: use `plures.adapt`.
    - `background`: what a member sees where it owns nothing. With "given", it sees the given network, of which it
      changes the weights that it owns: `plures.adapt`. It starts from the given weights; owners are random.
    - `share`: the share of each split tensor that a member owns, before a given background; by default 1/members.
    - `roles`: the role of each tensor, from `plures.roles`.
    - `loss`: a function of logits and targets; by default, cross-entropy.
    """

    def __init__(
        self,
        network: nn.Module,
        members: int = 5,
        *,
        schedule: Schedule = "sequential",
        optimize_masks: bool | None = None,
        classifier: Classifier | None = None,
        granularity: Granularity = "kernel",
        init: Init | None = None,
        background: Background = "zero",
        share: float | None = None,
        roles: Mapping[str, str] | None = None,
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(network, loss)
        one_of("background", background, get_args(Background))
        one_of("init", init, (None, *get_args(Init)))
        changes = background == "given"
        if changes and (optimize_masks or init == "fresh"):
            wrong = "optimize_masks=True" if optimize_masks else "init='fresh'"
            raise PluresError(f"members that change a network start from it and own weights at random: no {wrong}")
        if changes:
            check_pretrained(network)
        seed = check_seed(seed)
        self.members = members
        one_of("schedule", schedule, get_args(Schedule))
        self.schedule = schedule
        if optimize_masks and schedule == "together":
            raise PluresError("members trained together have random masks: use schedule='sequential' to optimize them")
        # Plain values, because a file holds them as JSON.
        learned = schedule == "sequential" and not changes
        self._optimize_masks = learned if optimize_masks is None else bool(optimize_masks)
        self.granularity = granularity
        self._init: Init = init or ("given" if changes else "fresh")
        self._background, self._share = background, share
        self.seed = seed
        roles = roles_for(network, members) if roles is None and schedule == "together" and not changes else roles
        self.roles, self.classifier = resolve_roles(network, roles, classifier)
        if changes:
            check_head(network, names_of_shared(self.roles))

        own = own_tensors(network)
        split = {name: tensor for name, tensor in own.items() if self.roles[name] is Role.SPLIT}
        private = {name: tensor for name, tensor in own.items() if self.roles[name] is Role.PRIVATE}
        self._partition = Partition({name: tensor.shape for name, tensor in split.items()}, members, granularity)
        self._private = Private(private, members)
        # Its split tensors hold the weights of all members; its private ones the values that each member starts from.
        try:
            self.network = copy.deepcopy(network)
        except Exception as error:  # whatever the network's own attributes raise
            raise PluresError(f"{type(network).__name__} cannot be copied: {error}") from error
        self._draft: nn.Module | None = None  # the member in training, between two of its stages
        self._progress = sequential.Progress(members)
        self._moments: Moments = moments(network) if self._init == "fresh" else {}
        self._places = places(network)
        self._ticket = object()  # a new one whenever an open stage gets out of date
        self._set_share()
        if not self._optimize_masks:
            self._partition.randomise(seed)
        self._partition.to(next(iter(own.values())).device)
        self._given = Private(taken(own_tensors(self.network), self.owners), 1) if changes else None
        self.eval()
        file.warn_if_large(self._split, self.given.name, self.given.nbytes)
        if self._init == "given" and not changes and not split:
            log.warning("all members start from the same weights and differ only in their batches: use init='fresh'")

    def _set_share(self) -> None:
        if self._share is not None and self._background == "zero":
            raise PluresError(f"share={self._share} leaves weights that no member uses: it needs background='given'")
        self._partition.set_share(self._share)

    # Training: Algorithm 1, or all members together

    def plan(self) -> list[Step]:
        """List all stages in order, with the committed ones marked."""
        if self.schedule == "together":
            return [Step("train", None, bool(self._progress.trained))]
        steps = []
        claimed = self._partition.claimed()
        for member, done in enumerate(self._progress.committed):
            ahead = self._progress.ahead(member, self._phases(claimed - {member}))
            steps += [Step(phase, member, True) for phase in done]
            steps += [Step(phase, member, False) for phase in ahead]
            claimed.add(member)
        return steps

    def open(self, step: Step) -> Stage:
        """Open the stage of one step of the plan: a copy of the network under the masks of its phase."""
        self._refuse_late(self._ticket, step)
        if step.member is None:
            return self._open_together(step)
        member = self._number(step.member)
        network = self._start(member) if self._draft is None else copy.deepcopy(self._draft)
        known = tensors(network)
        still = (Role.SHARED, Role.SPLIT) if step.phase == "prune" else (Role.SHARED,)  # pruning trains scores
        for name, tensor in known.items():
            if self.roles[name] in still:
                tensor.requires_grad_(False)
        before = sequential.statistics(network, known)
        make: Callable[..., nn.Module] = partial(sequential.mask, step.phase)
        under = known  # what the masks are put on
        if self._given is not None:
            make, under = sequential.change, self._split.given()
        put_on(network, {name: make(under[name], self._partition, name, member) for name in self.owners}, self._places)
        stage = Stage(network, step, self.loss, partial(self._commit, ticket=self._ticket, before=before))
        return self._prepared(stage, network)

    def _prepared(self, stage: Stage, network: nn.Module) -> Stage:
        """Set the engine and the pace of a stage, and keep the norms of its network that members share as they are."""
        stage.engine = None if self._background == "given" else TrainingEngine()
        stage.pace = self._pace(stage.phase)
        norms = [(f"{path}.running_mean", one) for path, one in network.named_modules() if isinstance(one, _NormBase)]
        stage.still = [norm for name, norm in norms if self.roles.get(name.lstrip(".")) is Role.SHARED]
        return stage.train()

    def _pace(self, phase: str) -> float:
        """Return how many times the learning rate of a plain network a stage needs.

        Measured on validation data: 3 for a fifth of the weights from scratch (digits); of the rate of fine-tuning,
        which is a tenth of that, 3 for a fifth and 30 for a fiftieth (TREC).
        """
        share = self._partition.share or 1 / self.members
        if self._background == "given":
            return float(0.1 * share**-0.85)
        return float(share**-0.7) if phase == "train" else 1.0

    def _open_together(self, step: Step) -> Stage:
        each = [self._start(member) for member in range(self.members if self._init == "fresh" else 1)]
        network = together.starts(self._split, each if len(each) > 1 else each * self.members)
        before = [sequential.statistics(network.network, network.private.rows(one)) for one in range(self.members)]
        commit = partial(self._commit_together, ticket=self._ticket, before=before)
        stage = together.MembersStage(network, step, self.loss, commit)
        return self._prepared(stage, network.network)

    def _commit_together(self, stage: Stage, ticket: object, before: Sequence[Mapping[str, Tensor]]) -> None:
        self._refuse_late(ticket, stage.step)
        together.write(stage, self._split, before)
        self._progress.committed = [["train"] for _ in range(self.members)]
        self._ticket = object()

    def _phases(self, claimed_by_others: set[int]) -> list[str]:
        """Return the phases of a member: the first may start from given weights, the last takes what is left."""
        if not self._optimize_masks or not self.owners:
            return ["train"]
        given_whole = self._init == "given" and not claimed_by_others
        takes_the_rest = len(claimed_by_others) == self.members - 1
        skipped = {"pretrain": given_whole, "prune": takes_the_rest, "finetune": False}
        return [phase for phase, skip in skipped.items() if not skip]

    def _start(self, member: int) -> nn.Module:
        given = [] if self._given is None else list(self.owners)
        network = copied_around(self.network, names_of_shared(self.roles) + given)
        if self._init == "fresh":
            names = [name for name, role in self.roles.items() if role is not Role.SHARED]
            restart(network, self._moments, names, self.seed, "member", member, 0)
        return network

    def _commit(self, stage: Stage, ticket: object, before: Mapping[str, Tensor]) -> None:
        self._refuse_late(ticket, stage.step)
        member = self._number(stage.member)
        values = unmasked(stage.network)
        sequential.refuse_other_start(stage, self._split, values)
        values |= sequential.settled(stage.network, values, before)
        sequential.claim(stage.phase, stage.network, self._partition, member)
        if stage.phase in sequential.COMPLETE:
            self._split.write(member, values)
            self._draft = None
        else:
            own = own_tensors(self.network)  # a stage may have rounded what is shared
            shared = {name: tensor for name, tensor in own.items() if self.roles[name] is Role.SHARED}
            self._draft = refilled(self.network, {**values, **shared})
        self._progress.committed[member].append(stage.phase)
        self._ticket = object()

    # Prediction

    @property
    def trained(self) -> list[int]:
        """The members that can predict."""
        return self._progress.trained

    @property
    def owners(self) -> dict[str, Tensor]:
        """The owners of each split tensor, by name: uint8, 255 if free; with kernel granularity, one per kernel."""
        return self._partition.owners()

    @property
    def _split(self) -> SplitNetwork:
        """The split network: its weights, their owners, and the members that can predict."""
        return SplitNetwork(self.network, self.roles, self._partition, self._private, self.trained, self._given)

    def checkout(self, member: int) -> nn.Module:
        """Return one trained member as a plain network of your own class, in eval mode.

        network = ensemble.checkout(2)
        """
        return self._split.checkout(self._ready(member))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all trained members, [members, batch, classes]."""
        return self._outputs([Arguments(args, kwargs)])

    def _outputs(self, batches: list[Any], chosen: Sequence[int] | None = None) -> Tensor:
        """Return the logits of several batches, joined; each member is masked once for all of them."""
        asked = self._all_ready(chosen)
        if torch.compiler.is_compiling():
            return apart(batches, [partial(self._ready_to_run, self.network, member) for member in asked])

        def run(trunk: Trunk) -> Tensor:
            given = self._split.given()
            runs = [partial(self._ready_to_run, trunk.networks[0], member, given) for member in asked]
            return trunk.outputs(batches, runs)

        return self._lender.lend(self, lambda: Trunk([shell(self.network)], self._differing()), run)

    def _ready_to_run(self, network: nn.Module, member: int, given: Mapping[str, Tensor] | None = None) -> Run:
        values = self._split.member(member, given)
        return lambda batch: logits_of(call_with(network, values, self._places, batch))

    def _differing(self) -> set[str]:
        """Return the places of tensors that members have for themselves; private ones may be equal."""
        own = {name for name, role in self.roles.items() if role is not Role.SHARED}
        stacks = {name: self._private.stack(name) for name in own}
        own -= {name for name, one in stacks.items() if one is not None and all(same(one[0], row) for row in one)}
        return {place for place, first in self._places.items() if first in own}

    def engine(self, kind: str | None = None, *, memory: int | None = None, fold: bool = True) -> Engine:
        """Return an engine, which predicts faster than the ensemble.

            engine = ensemble.engine()            # the faster one
            engine = ensemble.engine("owned")     # all members in one pass over the weights that each owns
            engine = ensemble.engine("unfolded")  # each member as a network of its own
            engine = ensemble.engine(memory=200_000_000)  # the fastest whose weights fit into this many bytes

        With `fold`, a batch norm is folded into the convolution before it if torch.fx finds such pairs. Without, the
        unfolded engine gives the bits of the ensemble. The owned engine adds in another order and agrees to about 1e-5;
        it needs the native library, a CPU and float32. The first batches are compared with the members: if the outputs
        differ, because samples of a batch influence each other for example, each member runs as a separate network.
        """
        one_of("kind", kind, (None, *get_args(Kind)))
        self._all_ready()
        engine = made(self._split, kind, memory, fold)
        engine.loss, engine.calibration = self.loss, self.calibration
        return engine

    # What a file holds

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON values, so that the ensemble can be rebuilt from a file."""
        return super().options() | {"roles": {name: role.value for name, role in self.roles.items()}}

    def _state(self) -> dict[str, Any]:
        """Return the state that a file needs beyond options and tensors, as JSON values."""
        return {"committed": self._progress.committed, "moments": self._moments}

    def _belongs_to(self) -> dict[str, Any]:
        return {} if self._given is None else {"base": file.base_of(self._split)}

    def _take_state(self, state: Mapping[str, Any]) -> None:
        self._progress.take(state["committed"])
        self._moments = file.moments_from(state["moments"], self.roles)
        self._draft = None if self._progress.in_training is None else copy.deepcopy(self.network)
        self._ticket = object()

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the tensors that a file holds: owners packed, weights by member."""
        return file.to_tensors(self._split, self._draft, dtype)

    def _base(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        return {} if self._given is None else file.base_tensors(self._split, dtype)

    @classmethod
    def _restore(cls, network: nn.Module, stored: Stored) -> "OrthogonalDropout":
        roles = check_roles(network, stored.options["roles"])
        file.check_stored(network, roles, stored.options["members"], stored)
        one_of("classifier", stored.options["classifier"], (None, *get_args(Classifier)))
        one_of("init", stored.options["init"], get_args(Init))
        one_of("background", stored.options.get("background", "zero"), get_args(Background))
        one_of("schedule", stored.options.get("schedule", "sequential"), get_args(Schedule))
        now, later = file.options_to_build(stored.options)
        ensemble = cls(network, **now)
        for name, value in later.items():
            setattr(ensemble, name if hasattr(ensemble, name) else f"_{name}", value)
        ensemble._set_share()
        ensemble._fill(stored)
        return ensemble

    def _fill(self, stored: Stored) -> None:
        """Restore tensors and progress from a file."""
        self._take_state(stored.state)
        if self._background == "given":
            file.base_from(self._split, stored)
        file.owners_from(self._split, stored)
        if self._background == "given":
            self._given = Private(taken(own_tensors(self.network), self.owners), 1)
        file.from_tensors(self._split, stored)
        if self._draft is not None:
            self._draft = file.draft_from(self._split, stored)

    def _size_lines(self) -> list[str]:
        """Describe the size of the ensemble, by role."""
        stored = sum(file.expected_bytes(self._split).values())
        return [*file.role_lines(self._split), file_line(stored, self.given.nbytes)]

    # Checks

    def _refuse_late(self, ticket: object, step: Step) -> None:
        ahead = due(self.plan())
        if ticket is not self._ticket or step != ahead:
            now = f"'{ahead.name}' is next" if ahead else "all stages are committed"
            raise PluresError(f"stage '{step.name}' is out of date: {now}")
