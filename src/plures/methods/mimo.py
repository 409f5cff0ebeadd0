"""MIMO: one network that takes several images at once and has one head for each (Havasi et al., 2021)."""

import copy
import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from plures.calling import Arguments, arguments, logits_of
from plures.checks import check_members, whole_number
from plures.errors import PluresError
from plures.losses import Loss, class_axis
from plures.methods import building
from plures.methods.building import Init, ManyInOne, TogetherStage
from plures.stage import Stage, Step
from plures.tensors import Layer, canonical, moments, restart


class MIMO(ManyInOne):
    """Train one network on several images at once, stacked on the channel axis; each slot has its own head.

        ensemble = plures.MIMO(network, members=2, batch_repetition=4)
        ensemble = plures.MIMO(network, members=3, first="stem", last="head.fc")

    In training, each slot gets its own shuffle of the batch, and the loss is the sum over the heads. At prediction, the
    same image goes into all slots. The network must take one tensor of images or features and nothing else.

    - `batch_repetition`: how often each batch is repeated in training.
    - `first`, `last`: the layers to widen, by `members` times the inputs and the classes; by default, the first layer
      and the last Linear, or without a Linear the last convolution. They always start from new random weights.
    - `init`: "fresh" draws new weights for the other layers as well; "given" keeps those of the network.
    """

    def __init__(
        self,
        network: nn.Module,
        members: int = 2,
        *,
        batch_repetition: int = 4,
        first: str | None = None,
        last: str | None = None,
        init: Init = "fresh",
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        check_members(members)
        whole_number("batch_repetition", batch_repetition, most=1000)
        first, last = _ends(network, first, last)
        axis = 1 if loss is None else class_axis(loss)
        widened = _widened(network, members, first, last, init, seed)
        super().__init__(network, loss, _Slots(widened, members, first, last, axis))
        self.members, self.first, self.last, self._init, self.seed = members, first, last, init, seed
        self.batch_repetition = batch_repetition

    def _stage(self, step: Step) -> Stage:
        return _Training(self, copy.deepcopy(cast(_Slots, self.network)), step)


class _Slots(nn.Module):
    """Run a widened network: one batch for each slot in, [members, batch, ...] out, with the classes on `axis`."""

    def __init__(self, network: nn.Module, members: int, first: str, last: str, axis: int) -> None:
        super().__init__()
        self.network = network
        self.members, self.last = members, last
        self.axis = axis  # of the network's output, without the axis of members
        self.linear = isinstance(network.get_submodule(first), nn.Linear)
        self.outputs = building.widths(cast(Layer, network.get_submodule(last)))[1]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        images, name = _one_tensor(Arguments(args, kwargs))
        return self.run([images] * self.members, name)

    def run(self, slots: list[Tensor], name: str | None) -> Tensor:
        # Images have their channels on the second axis; what else a Linear takes has its features on the last.
        axis = -1 if self.linear and slots[0].dim() <= 3 else 1
        stacked = torch.cat(slots, axis)
        logits = logits_of(self.network(stacked) if name is None else self.network(**{name: stacked}))
        if logits.dim() < 2 or len(logits) != len(slots[0]):
            raise PluresError(
                f"the network made logits of shape {list(logits.shape)} from a batch of {len(slots[0])} samples; MIMO "
                "needs [batch, classes], or [batch, classes, ...] for pixels and tokens"
            )
        axis = self.axis % logits.dim()
        if axis == 0 or logits.shape[axis] != self.outputs:
            raise PluresError(
                f"the network made logits of shape {list(logits.shape)}, whose axis {axis} is not the {self.outputs} "
                f"outputs of {self.last!r}: name another layer with last=, or the axis with CrossEntropy(class_axis=)"
            )
        return torch.unflatten(logits, axis, (self.members, -1)).movedim(axis, 0)


class _Training(TogetherStage):
    """Train on slots that are shuffled apart; in eval mode, give the loss of the same images in all slots."""

    def __init__(self, ensemble: MIMO, slots: _Slots, step: Step) -> None:
        super().__init__(slots, step, ensemble.loss, ensemble._write)
        self.slots = (ensemble.members, ensemble.batch_repetition)
        self.heads = ensemble.members

    def _loss_of(self, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        images, name = _one_tensor(inputs)
        if self.training:
            rows = shuffles(len(images), *self.slots, device=images.device)
        else:
            rows = torch.arange(len(images), device=images.device).expand(self.slots[0], -1)
        heads = cast(_Slots, self.network).run([images[row] for row in rows], name)
        losses = [self.member_loss(head, targets[row]) for head, row in zip(heads, rows, strict=True)]
        return torch.stack(losses).sum(), heads[0]


def shuffles(batch: int, members: int, batch_repetition: int, device: torch.device | str = "cpu") -> Tensor:
    """Return which sample of a batch goes where: one row for each slot, [members, batch x batch_repetition].

    Every row holds every sample `batch_repetition` times.
    """
    common = torch.arange(batch, device=device).repeat(batch_repetition)
    common = common[torch.randperm(len(common), device=device)]
    return torch.stack([common[torch.randperm(len(common), device=device)] for _ in range(members)])


def _one_tensor(inputs: Any) -> tuple[Tensor, str | None]:
    """Return the one tensor among a network's inputs, and its name if it has one."""
    args, kwargs = arguments(inputs)
    values = [*args, *kwargs.values()]
    if len(values) != 1 or not isinstance(values[0], Tensor):
        kinds = ", ".join(type(value).__name__ for value in values)
        raise PluresError(f"MIMO stacks one tensor on its channels; the network was given ({kinds})")
    if values[0].dtype in (torch.int64, torch.int32):
        raise PluresError(
            f"MIMO stacks images or features on their channels; the network was given {values[0].dtype}, such as token "
            "ids, which have none: use another method"
        )
    return values[0], next(iter(kwargs), None)


def _ends(network: nn.Module, first: str | None, last: str | None) -> tuple[str, str]:
    """Find the two layers to widen, and refuse those that cannot be."""
    first, last = building.ends(network, first, last)
    if first == last:
        raise PluresError(f"{first!r} cannot be the first and the last layer; name two with first=... and last=...")
    names = canonical(network)
    for end, name in (("first", first), ("last", last)):
        layer = network.get_submodule(name)
        plain = isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and getattr(layer, "groups", 1) == 1
        alone = list(names.values()).count(names.get(f"{name}.weight", "")) == 1  # neither tied nor parametrized
        if not (plain and alone and layer.weight.requires_grad):
            raise PluresError(
                f"MIMO cannot widen {name!r}, the {end} layer: it must be a Linear or a convolution without groups, "
                f"whose weight is not frozen, tied or parametrized; name another with {end}=..."
            )
    return first, last


def _widened(network: nn.Module, members: int, first: str, last: str, init: Init, seed: int) -> nn.Module:
    """Copy a network with `members` times the inputs of its first layer and the outputs of its last."""
    result = building.started(network, init, seed)
    entry, head = cast(Layer, result.get_submodule(first)), cast(Layer, result.get_submodule(last))
    channels, _ = building.widths(entry)
    for depth in range(1, first.count(".") + 1):
        parent = result.get_submodule(first.rsplit(".", depth)[0])
        if getattr(parent, "num_channels", None) == channels:  # the embeddings of transformers check their inputs
            parent.num_channels = channels * members  # type: ignore[assignment]
    for layer, name, axis in ((entry, "weight", 1), (head, "weight", 0), (head, "bias", 0)):
        given = getattr(layer, name)
        if given is not None:
            setattr(layer, name, nn.Parameter(torch.cat([given.detach()] * members, axis)))
    for layer, side in ((entry, "in"), (head, "out")):
        count = f"{side}_features" if isinstance(layer, nn.Linear) else f"{side}_channels"
        setattr(layer, count, getattr(layer, count) * members)

    known = moments(network)
    if f"{first}.weight" in known:
        mean, deviation = known[f"{first}.weight"]
        known[f"{first}.weight"] = (mean, deviation / math.sqrt(members))  # more inputs must not make larger sums
    restart(result, known, [f"{first}.weight", f"{last}.weight", f"{last}.bias"], seed, "widened")
    return result
