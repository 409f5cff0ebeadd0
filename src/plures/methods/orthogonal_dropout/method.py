"""Orthogonal dropout: k disjoint subnetworks of one network, each trained on its own (Zhang, Gao and Sabuncu, 2021)."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn

from plures.calling import Arguments, call_with, logits_of, swapping
from plures.ensemble import Ensemble, Loss, Stage, Step
from plures.errors import PluresError
from plures.methods.orthogonal_dropout import file as compact
from plures.methods.orthogonal_dropout.engines.engines import Engine, Kind, Lean, Unfolded
from plures.methods.orthogonal_dropout.masks import Keep, TopK, in_layout_of, mask_of, owned_part, put_on, unmasked
from plures.methods.orthogonal_dropout.partition import Granularity, Partition, Private
from plures.methods.orthogonal_dropout.roles import Role, check_roles
from plures.methods.orthogonal_dropout.roles import roles as roles_of
from plures.tensors import Moments, canonical, moments, own_tensors, restart, tensors

Classifier = Literal["fixed", "split", "private"]
Init = Literal["fresh", "given"]
PHASES = ("pretrain", "prune", "finetune", "train")
log = logging.getLogger("plures")


class OrthogonalDropout(Ensemble):
    """Split a network into members that share no weight.

        ensemble = plures.OrthogonalDropout(network, members=5)
        for stage in ensemble.stages():
            train(stage, epochs={"pretrain": 200, "prune": 20, "finetune": 200}[stage.phase])
        prediction = ensemble.predict(images)

    With `optimize_masks` each member is pre-trained on all free weights, pruned to its share by learned scores, and
    finetuned; without, the weights are shared out at random and each member is trained once, in a `train` stage.
    `classifier` says what becomes of the tensors that have the role "shared": "fixed" freezes them for all members,
    "split" and "private" give them to the members. `init="fresh"` draws each member anew, at the scale that the given
    network was initialised with; `init="given"` starts from the given weights: the first member needs no pre-training.
    `literal_gradient` prunes with the gradient as the paper's appendix prints it, for the ablation. `measured` are the
    moments that fresh starts are drawn with, where the network at hand is no longer the one they were measured on.
    """

    def __init__(
        self,
        network: nn.Module,
        members: int = 5,
        *,
        optimize_masks: bool = True,
        classifier: Classifier = "fixed",
        granularity: Granularity = "weight",
        init: Init = "fresh",
        roles: Mapping[str, str] | None = None,
        loss: Loss | None = None,
        literal_gradient: bool = False,
        seed: int = 0,
        measured: Moments | None = None,
    ) -> None:
        super().__init__(network, loss)
        if init not in get_args(Init):
            raise PluresError(f"init={init!r}; use one of {', '.join(get_args(Init))}")
        self.members = members
        self.optimize_masks = bool(optimize_masks)  # plain values, because a file holds them as JSON
        self.classifier = classifier
        self.granularity = granularity
        self.init = init
        self.literal_gradient = bool(literal_gradient)
        self.seed = int(seed)
        self.roles = _resolve_roles(network, roles, classifier)

        self._first_names = canonical(network)
        own = own_tensors(network)
        split = {name: tensor for name, tensor in own.items() if self.roles[name] is Role.SPLIT}
        private = {name: tensor for name, tensor in own.items() if self.roles[name] is Role.PRIVATE}
        self.partition = Partition({name: tensor.shape for name, tensor in split.items()}, members, granularity)
        self.private = Private(private, members)
        # Its split tensors hold the weights of all members; its private ones the values that each member starts from.
        self.network = _copied(network)
        self.draft: nn.Module | None = None  # the member in training, between two of its stages
        self.committed: list[list[str]] = [[] for _ in range(members)]  # the phases that each member has behind it
        self.attempts = [0] * members  # how often a member was thrown away: each attempt draws other numbers
        self.moments = moments(network) if measured is None else measured
        self.loaded: list[int] | None = None  # set where only some members were read from a file
        if not optimize_masks:
            self.partition.randomise(seed)
        self.partition.to(next(iter(split.values())).device)
        self.eval()

    @property
    def trained(self) -> list[int]:
        """The members that can predict."""
        ready = [member for member, done in enumerate(self.committed) if {"finetune", "train"} & set(done)]
        return ready if self.loaded is None else [member for member in ready if member in self.loaded]

    @property
    def in_training(self) -> int | None:
        """The member that has some of its stages behind it and not all, if there is one."""
        return next((m for m, done in enumerate(self.committed) if done and done[-1] in ("pretrain", "prune")), None)

    @property
    def owners(self) -> dict[str, Tensor]:
        """The owner of each split weight, by name: uint8, 255 where free; with kernel granularity one per kernel."""
        return self.partition.owners()

    def member(self, member: int) -> dict[str, Tensor]:
        """Give the state dict of one trained member, for a plain network of the same class.

        network.load_state_dict(ensemble.member(2))
        """
        values = self._member_tensors(self._ready(member))
        return {name: values[first].detach().clone() for name, first in self._first_names.items()}

    def checkout(self, member: int) -> nn.Module:
        """Give one trained member as a plain network of the user's class, in eval mode.

        network = ensemble.checkout(2)
        """
        state = self.member(member)
        network = copy.deepcopy(self.network)
        _overwrite(network, state)
        return network.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all trained members, [members, batch, classes]."""
        return self.join([Arguments(args, kwargs)])

    def engine(
        self,
        kind: Kind | None = None,
        *,
        memory: int | None = None,
        fold: bool = True,
        threads: int | None = None,
    ) -> Engine:
        """Make an engine that predicts faster ("unfolded") or in less memory ("lean") than the ensemble's forward.

            engine = ensemble.engine("lean")
            engine = ensemble.engine(memory=200_000_000)  # unfolded if its weights fit into as many bytes, else lean
            engine = ensemble.engine("unfolded", threads=4)  # many small members: four at a time, on one thread each

        With `fold` batch norm goes into the convolutions where torch.fx finds the two side by side. Both engines give
        the same bits, and without `fold` those of the ensemble. With `threads` the last bits may differ from those,
        because torch rounds some layers otherwise on another number of threads.
        """
        if kind not in (None, *get_args(Kind)):
            raise PluresError(f"kind={kind!r}; use one of {', '.join(get_args(Kind))}")
        ready = self._all_ready()
        if kind is None:
            unfolded = len(ready) * sum(tensor.nbytes for tensor in own_tensors(self.network).values())
            kind = "unfolded" if memory is None or unfolded <= memory else "lean"
        if kind == "unfolded":
            return Unfolded(self, fold, threads)
        if threads is not None:
            raise PluresError(f"threads={threads} needs the unfolded engine: in the lean one members share weights")
        return Lean(self, fold)

    def join(self, batches: list[Any]) -> Tensor:
        """Return the logits of several batches, joined; each member is masked once for all of them."""
        return torch.stack([self._run(member, batches) for member in self._all_ready()])

    def plan(self) -> list[Step]:
        """List all stages from the first to the last, with those committed marked."""
        if self.loaded is not None:
            raise PluresError(f"only members {self.loaded} were loaded: load the whole file to train on")
        steps = []
        claimed = self._claimed()
        for member, done in enumerate(self.committed):
            steps += [Step(phase, member, True) for phase in done]
            reached = PHASES.index(done[-1]) if done else -1
            ahead = [phase for phase in self._phases(claimed - {member}) if PHASES.index(phase) > reached]
            steps += [Step(phase, member, False) for phase in ahead]
            claimed.add(member)
        return steps

    def open(self, step: Step) -> Stage:
        """Check out the stage of one step of the plan."""
        self._refuse_unless_due(step, self.attempts)
        member = self._number(step.member)
        network = self._start(member) if self.draft is None else copy.deepcopy(self.draft)
        for name, tensor in tensors(network).items():
            if self.roles[name] is Role.SHARED or (self.roles[name] is Role.SPLIT and step.phase == "prune"):
                tensor.requires_grad_(False)
        masks: dict[str, nn.Module] = {}
        for name in self.partition.owners():
            if step.phase == "prune":
                masks[name] = self._scores(network, name, member)
            else:
                pretrain = step.phase == "pretrain"
                used = self.partition.free(name) if pretrain else self.partition.owned(name, member)
                masks[name] = Keep(in_layout_of(tensors(network)[name], used))
        put_on(network, masks, self._first_names)
        return Stage(network, step, self.loss, partial(self._commit, attempts=list(self.attempts)))

    def discard(self, member: int, network: nn.Module | None = None) -> None:
        """Throw a member away, so that `stages()` trains it again; the others keep every bit.

            ensemble.discard(2)

        With `init="given"`, hand in the network to start from once more; without it the member starts afresh. After
        loading a complete file, its norm layers start as they are in the network that was given to `load`.
        """
        self._number(member)
        if self.in_training not in (None, member):
            raise PluresError(f"member {self.in_training} is in training: finish or discard it before member {member}")
        if self.loaded is not None:
            raise PluresError(f"only members {self.loaded} were loaded: load the whole file to change it")
        if network is not None and self.init == "fresh":
            raise PluresError("with init='fresh' a member starts afresh: leave out the network")
        if network is not None and {n: list(t.shape) for n, t in tensors(network).items()} != self.shapes:
            raise PluresError("the network handed in is another than the ensemble was made of: its tensors differ")
        if self.init == "given":
            source = copy.deepcopy(self.network if network is None else network)
            if network is None:
                restart(source, self.moments, self.owners, self.seed, "discard", member, self.attempts[member])
            self._write(member, tensors(source))
        if self.optimize_masks:
            self.partition.release(member)
        self.attempts[member] = 0 if network is not None else self.attempts[member] + 1
        self.committed[member] = []
        self.draft = None

    def options(self) -> dict[str, Any]:
        """Give the constructor's arguments as JSON values, so that a file can build the ensemble again."""
        return {
            "members": self.members,
            "optimize_masks": self.optimize_masks,
            "classifier": self.classifier,
            "granularity": self.granularity,
            "init": self.init,
            "roles": {name: role.value for name, role in self.roles.items()},
            "literal_gradient": self.literal_gradient,
            "seed": self.seed,
        }

    def state(self) -> dict[str, Any]:
        """Give what a file must know beyond options and tensors, as JSON values."""
        return {"committed": self.committed, "attempts": self.attempts, "moments": self.moments}

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Give the tensors that a file holds: owners packed, weights by member."""
        if self.loaded is not None:
            raise PluresError(f"only members {self.loaded} were loaded: load the whole file to save it again")
        return compact.to_tensors(self, dtype)

    @classmethod
    def restore(
        cls,
        network: nn.Module,
        options: Mapping[str, Any],
        state: Mapping[str, Any],
        read: Callable[[str], Tensor],
        names: Sequence[str],
        members: Sequence[int] | None,
    ) -> Self:
        """Build an ensemble from what `options`, `state` and `tensors` gave; `read` gets one of the named tensors."""
        # Built with all weights free, because the file says who owns them, and with the roles as they were resolved.
        measured = {name: (float(mean), float(deviation)) for name, (mean, deviation) in state["moments"].items()}
        built = {**options, "optimize_masks": True, "classifier": "fixed", "measured": measured}
        ensemble = cls(network, **built)
        ensemble.optimize_masks, ensemble.classifier = options["optimize_masks"], options["classifier"]
        ensemble.committed = [[PHASES[PHASES.index(phase)] for phase in done] for done in state["committed"]]
        ensemble.attempts = [int(attempts) for attempts in state["attempts"]]
        if not len(ensemble.committed) == len(ensemble.attempts) == ensemble.members:
            raise PluresError(f"the progress of {len(ensemble.committed)} members is stored, not {ensemble.members}")
        if members is not None:
            ensemble.loaded = sorted({ensemble._ready(member) for member in members})
        compact.from_tensors(ensemble, read, names)
        return ensemble

    def get_extra_state(self) -> Tensor:
        """Put the progress into the state dict, as a tensor."""
        rows = zip(self.committed, self.attempts, strict=True)
        return torch.tensor([[*(phase in done for phase in PHASES), attempts] for done, attempts in rows])

    def set_extra_state(self, state: Tensor) -> None:
        """Take the progress from a state dict, and make room for a member in training."""
        rows = state.tolist()
        self.committed = [[phase for phase, done in zip(PHASES, row, strict=False) if done] for row in rows]
        self.attempts = [row[-1] for row in rows]
        self.draft = None if self.in_training is None else copy.deepcopy(self.network)

    def restore_draft(self, read: Callable[[str], Tensor]) -> None:
        """Bring back the member in training, if there is one, from its tensors by name."""
        if self.loaded is None and self.in_training is not None:
            self.draft = copy.deepcopy(self.network)
            _overwrite(self.draft, {name: read(first) for name, first in self._first_names.items()})

    def _number(self, member: int | None) -> int:
        if not isinstance(member, int) or not 0 <= member < self.members:
            raise PluresError(f"there is no member {member!r}: members count from 0 to {self.members - 1}")
        return member

    def _ready(self, member: int) -> int:
        if self._number(member) not in self.trained:
            missing = "is not trained" if self.loaded is None else "was not loaded"
            raise PluresError(f"member {member} {missing}; ready are: {self.trained or 'none'}")
        return member

    def _all_ready(self) -> list[int]:
        if not self.trained:
            raise PluresError("no member of this ensemble is trained: train its stages() or load a trained file")
        return self.trained

    def _claimed(self) -> set[int]:
        smallest = min(self.owners.values(), key=Tensor.numel)
        return {member for member in range(self.members) if bool((smallest == member).any())}

    def _phases(self, claimed_by_others: set[int]) -> list[str]:
        if not self.optimize_masks:
            return ["train"]
        given_whole = self.init == "given" and not claimed_by_others and not any(self.attempts)
        takes_the_rest = len(claimed_by_others) == self.members - 1
        skipped = {"pretrain": given_whole, "prune": takes_the_rest, "finetune": False}
        return [phase for phase, skip in skipped.items() if not skip]

    def _member_tensors(self, member: int) -> dict[str, Tensor]:
        values = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        for name, owners in self.owners.items():
            values[name] = owned_part(values[name], owners, member)
        return values | self.private.rows(member)

    def _run(self, member: int, batches: list[Any]) -> Tensor:
        with swapping():
            values = self._member_tensors(member)
            return torch.cat([logits_of(call_with(self.network, values, batch)) for batch in batches])

    def _start(self, member: int) -> nn.Module:
        network = copy.deepcopy(self.network)
        if self.init == "fresh":
            names = [name for name, role in self.roles.items() if role is not Role.SHARED]
            restart(network, self.moments, names, self.seed, "member", member, self.attempts[member])
        return network

    def _scores(self, network: nn.Module, name: str, member: int) -> TopK:
        free = self.partition.free(name)
        scores = tensors(network)[name].detach().float()
        if free.shape != scores.shape:  # one score per kernel: its length
            scores = scores.flatten(2).norm(dim=2).reshape(free.shape)
        largest = scores.abs().masked_fill(~free, 0.0).max().clamp_min(torch.finfo(torch.float32).tiny)
        return TopK(scores / largest, free, self.partition.budget(name, member), self.literal_gradient)

    def _refuse_unless_due(self, step: Step, attempts: list[int]) -> None:
        due = next((step for step in self.plan() if not step.committed), None)
        if step != due or attempts != self.attempts:
            now = f"'{due.name}' is next" if due else "all stages are committed"
            raise PluresError(f"stage '{step.name}' is out of date: {now}")

    def _commit(self, stage: Stage, attempts: list[int]) -> None:
        member = self._number(stage.member)
        self._refuse_unless_due(stage.step, attempts)
        values = unmasked(stage.network)
        if stage.phase == "prune":
            masks = {name: cast(TopK, mask_of(stage.network, name)) for name in self.owners}
            self.partition.claim(member, {name: mask.chosen() for name, mask in masks.items()})
        elif stage.phase == "pretrain" and "prune" not in self._phases(self._claimed()):
            log.info("member %d takes all the weights that are left: its prune stage is skipped", member)
            self.partition.claim(member, {name: self.partition.free(name) for name in self.owners})
        if stage.phase in ("pretrain", "prune"):
            self.draft = copy.deepcopy(self.network)
            _overwrite(self.draft, values)
        else:
            self._write(member, values)
            self.draft = None
        self.committed[member].append(stage.phase)

    def _write(self, member: int, values: Mapping[str, Tensor]) -> None:
        """Write what a member owns, and nothing else: the others stay bit-identical by construction."""
        with torch.no_grad():
            for name, weight in own_tensors(self.network).items():
                if name in self.owners:
                    value = values[name].to(weight.device, weight.dtype)
                    weight.copy_(torch.where(self.partition.owned(name, member), value, weight))
        self.private.write(member, values)


def _resolve_roles(network: nn.Module, given: Mapping[str, str] | None, classifier: str) -> dict[str, Role]:
    """Say what becomes of the shared classifier; parameters that the network itself has frozen stay shared."""
    if classifier not in get_args(Classifier):
        raise PluresError(f"classifier={classifier!r}; use one of {', '.join(get_args(Classifier))}")
    chosen: dict[str, str] = dict(roles_of(network) if given is None else given)
    if classifier == "fixed":
        if given is None and Role.SHARED not in chosen.values():
            raise PluresError(
                f"{type(network).__name__} has no Linear to take for the classifier: name the layer that gives the "
                "logits with roles=plures.roles(network, classifier=...)"
            )
        return check_roles(network, chosen)
    for name, tensor in tensors(network).items():
        if chosen.get(name) == Role.SHARED and tensor.requires_grad:
            chosen[name] = Role.SPLIT if classifier == "split" and tensor.dim() > 1 else Role.PRIVATE
    return check_roles(network, chosen)


def _copied(network: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(network)
    except Exception as error:  # whatever the network's own attributes raise
        raise PluresError(f"{type(network).__name__} cannot be copied: {error}") from error


def _overwrite(network: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors(network).items():
            tensor.copy_(values[name])
