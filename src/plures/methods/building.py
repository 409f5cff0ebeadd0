"""What the methods have in common that train one network in one stage."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from plures.calling import logits_of
from plures.ensemble import Ensemble, Loss, Stage, Step
from plures.errors import PluresError
from plures.tensors import moments, restart, tensors

Init = Literal["given", "fresh"]
Layer = nn.Linear | _ConvNd


class OneStage(Ensemble):
    """Build a method whose members live in one network and are trained together, in one `train` stage.

        class Single(OneStage):
            def __init__(self, network, loss=None):
                super().__init__(network, loss, copy.deepcopy(network))

            def forward(self, *args, **kwargs):
                self.require_trained()
                return logits_of(self.network(*args, **kwargs)).unsqueeze(0)

    `built` is the network that the method made of the user's: the stage trains a copy of it. A method whose loss is not
    that of the network's logits overrides `stage`. With `ready` the ensemble can predict before it is trained.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: Loss | None,
        built: nn.Module,
        *,
        member: int | None = None,
        ready: bool = False,
    ) -> None:
        super().__init__(network, loss)
        self.network = built
        self.committed = False
        self._member = member
        self._ready = ready
        self.eval()

    def plan(self) -> list[Step]:
        """List the one stage."""
        return [Step("train", self._member, self.committed)]

    def open(self, step: Step) -> Stage:
        """Check out the stage, a copy of the network to train."""
        if step not in self.plan() or step.committed:
            raise PluresError(f"stage '{step.name}' cannot be opened: take a step of plan() that is not committed")
        return self.stage(step)

    def stage(self, step: Step) -> Stage:
        """Make the stage that `open` checks out."""
        return Stage(copy.deepcopy(self.network), step, self.loss, self.write)

    def write(self, stage: Stage) -> None:
        """Take over what a stage has trained: what `Stage` calls to commit."""
        if self.committed:
            raise PluresError(f"stage '{stage.name}' is out of date: another one was committed before it")
        values = tensors(stage.network)
        for name, tensor in tensors(self.network).items():
            tensor.copy_(values[name])
        self.committed = True

    def require_trained(self) -> None:
        """Refuse to predict with random weights."""
        if not (self.committed or self._ready):
            raise PluresError("this ensemble is not trained: train its stages() or load a trained file")

    def state(self) -> dict[str, Any]:
        """Give what a file must know beyond options and tensors, as JSON values."""
        return {"committed": self.committed}

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
        ensemble = super().restore(network, options, state, read, names, members)
        ensemble.committed = bool(state["committed"])
        return ensemble

    def get_extra_state(self) -> Tensor:
        """Put the progress into the state dict, as a tensor."""
        return torch.tensor(self.committed)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the progress from a state dict."""
        self.committed = bool(state)


class ManyInOne(OneStage):
    """Build a method whose one network returns the logits of all members, [members, batch, classes].

        class Twice(ManyInOne):
            def __init__(self, network, loss=None):
                super().__init__(network, loss, Tiled(copy.deepcopy(network), members=2, rows=Rows()))

    It trains on the mean of the losses of what the network returns, unless the method overrides `stage`.
    """

    stage_class = Stage

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        self.require_trained()
        logits: Tensor = self.network(*args, **kwargs)
        return logits

    def stage(self, step: Step) -> Stage:
        """Make the stage that `open` checks out."""
        loss = functools.partial(mean_over_members, self.loss)
        return self.stage_class(copy.deepcopy(self.network), step, loss, self.write)


def started(network: nn.Module, init: Init, seed: int) -> nn.Module:
    """Copy a network as a method shall start from it: with the weights it has, or with fresh ones.

    built = started(network, "fresh", seed=0)
    """
    check_network(network)
    if init not in get_args(Init):
        raise PluresError(f"init={init!r}; use one of {', '.join(get_args(Init))}")
    result = copy.deepcopy(network)
    if init == "fresh":
        known = moments(network)
        restart(result, known, known, seed, "member", 0)
    return result


def layers(network: nn.Module) -> dict[str, Layer]:
    """Name the linear and convolution layers that a network calls, in the order in which they were made.

        >>> list(layers(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))))
        ['0', '3']

    The projection inside of `nn.MultiheadAttention` is not among them: its weight is used, but it is never called.
    """
    check_network(network)
    attention = [module for module in network.modules() if isinstance(module, nn.MultiheadAttention)]
    never_called = {id(child) for module in attention for child in module.modules()}
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | _ConvNd) and id(module) not in never_called
    }


def check_network(network: object) -> None:
    """Refuse what is no network, before anything is made of it.

    check_network(network)
    """
    if not isinstance(network, nn.Module):
        raise PluresError(f"network must be an nn.Module, not {type(network).__name__}")


def mean_over_members(loss: Loss, logits: Tensor, targets: Tensor) -> Tensor:
    """Average a loss over the first axis of [members, batch, classes], with the same targets for all members.

    functools.partial(mean_over_members, F.cross_entropy)
    """
    return torch.stack([loss(member, targets) for member in logits]).mean()


def layers_of(network: nn.Module) -> dict[str, Layer]:
    """List the layers that members can differ in, by name, or say that there are none.

    layers_of(network)["stem.conv"]
    """
    if not isinstance(network, nn.Module):
        raise PluresError(f"network must be an nn.Module, not {type(network).__name__}")
    found = layers(network)
    if not found:
        raise PluresError(f"{type(network).__name__} has no Linear or convolution layer that members could differ in")
    return found


def widths(layer: Layer) -> tuple[int, int]:
    """Give the input and the output width of a layer.

    >>> widths(nn.Conv2d(3, 8, 5))
    (3, 8)
    """
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


def check_members(members: object) -> None:
    """Refuse what is no number of members.

    check_members(5)
    """
    if not isinstance(members, int) or isinstance(members, bool) or members < 1:
        raise PluresError(f"members={members!r}; use a whole number, 1 or more")


def rehearse(network: nn.Module, tiled: nn.Module, members: int, explain: str) -> None:
    """Try a rewritten network without computing anything, and refuse now what would fail in training.

        rehearse(network, Tiled(...), 5, "BatchEnsemble cannot run ResNet")

    The input's shape is guessed from the layers. Where no guess suits the given network itself, nothing is learned, and
    a misfit shows with the first batch.
    """
    plain, tiled = _shadow(network).eval(), _shadow(tiled).eval()
    for shape in dict.fromkeys(_likely_inputs(network)):
        x = torch.zeros(3, *shape, device="meta")
        try:
            with torch.no_grad():
                expected = logits_of(plain(x)).shape
        except Exception:  # the guess was wrong, or the network cannot run without numbers
            continue
        try:
            with torch.no_grad():
                given = tiled(x).shape
        except Exception as error:
            raise PluresError(f"{explain}: {error}") from error
        if given != (members, *expected):
            raise PluresError(f"{explain}: the members gave {list(given)} instead of {[members, *expected]}")
        return


def _shadow(network: nn.Module) -> nn.Module:
    """Copy a network without its numbers: on the meta device only shapes are computed."""

    def shape_of(tensor: Tensor) -> Tensor:
        empty = torch.empty_like(tensor, device="meta")
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    own = (*network.parameters(), *network.buffers())
    return copy.deepcopy(network, {id(tensor): shape_of(tensor) for tensor in own})


def _likely_inputs(network: nn.Module) -> Iterator[tuple[int, ...]]:
    for layer in layers_of(network).values():
        if isinstance(layer, nn.Linear):
            yield (layer.in_features,)
        else:
            for size in (32, 28, 64, 224):
                yield (layer.in_channels, *[size] * len(layer.kernel_size))
