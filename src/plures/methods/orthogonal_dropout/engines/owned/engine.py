"""The owned engine: all members in one pass that multiplies only the weights that each member owns."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from plures.calling import arguments, chunks, logits_of
from plures.errors import PluresError
from plures.methods.orthogonal_dropout.engines.engine import Engine, fold_norms, foldable
from plures.methods.orthogonal_dropout.engines.owned.graph import Rewriter
from plures.methods.orthogonal_dropout.engines.owned.parts import Parts
from plures.methods.orthogonal_dropout.engines.owned.tree import Tree
from plures.methods.orthogonal_dropout.engines.tracing import trace
from plures.methods.orthogonal_dropout.engines.unfolded import Unfolded
from plures.methods.orthogonal_dropout.partition import Split
from plures.native.library import load
from plures.tensors import own_tensors, shell

log = logging.getLogger("plures")

AT_ONCE = 80  # samples times members whose activations stay near

CLOSE = 1e-5  # what the answers of a network that could not be traced may differ by, relative to their size

# What all members of a layer cost in dense layers of one network, where the kernels do worst: docs/engines.md tells
# what was measured. A layer that runs member by member costs as many as there are members.
COST_OF_KERNELS, COST_OF_WEIGHTS = 2.0, 2.5
COST_OF_TOKENS = {"block": 2.5, "weight": 4.0}  # linear layers in torch's encoders, which see many rows at once
COST_OF_ROWS = {"block": 5.5, "weight": 7.5}  # other linear layers: one image may be a single row


class Owned(Engine):
    """Predict with all members in one pass that multiplies each weight once, for the member that owns it.

        engine = ensemble.engine("owned")
        engine.one_by_one  # layers that the kernels do not know, and that run member by member

    The answers are those of `checkout(member)` to about 1e-5: sums are taken in another order. They do not depend on
    the number of threads.

    Of a network that torch.fx cannot trace, known layers are replaced and the rest runs as it is. Its first answers are
    compared with the members' own. Where they differ, each member runs as a network of its own, and a line in the log
    says so.
    """

    kind = "owned"
    network: nn.Module

    @property
    def about(self) -> str:
        """What predicts, with the instructions of its kernels."""
        return f"{self.kind} ({load().instructions})"

    def __init__(self, split: Split, fold: bool = True) -> None:
        super().__init__()
        refuse_if_impossible(split)
        self.members = split.trained
        self._own: Unfolded | None = None  # the members, until a network that could not be traced has been compared
        self._compared = True
        network = shell(split.network).eval()
        pairs = foldable(split) if fold else {}
        parts = Parts(split, [fold_norms(split, member, pairs) for member in self.members])
        try:
            traced = trace(shell(network))
        except Exception:  # tracing runs the network's own code, which may raise anything
            tree = Tree(network, parts)
            self.network, self.one_by_one = tree, tree.one_by_one
            self._own, self._compared = Unfolded(split, fold), False
        else:
            rewriter = Rewriter(network, traced, parts, pairs)
            self.network, self.one_by_one = rewriter.rewritten(), rewriter.substitutes.one_by_one
        self._running = parts.running
        lanes = load().lanes
        self.samples_at_once = max(1, AT_ONCE // len(self.members) // lanes) * lanes
        self._of_some: dict[tuple[int, ...], nn.Module] = {}
        self.eval()

    def run(self, index: int, batches: list[Any]) -> Tensor:
        """Return the logits of one member for several batches, joined."""
        return self.of_members([index], batches)[0]

    def of_members(self, indices: list[int], batches: list[Any]) -> Tensor:
        """Return the logits of some members for several batches, joined."""
        parts = [part for batch in batches for part in chunks(batch, self.samples_at_once)]
        if not self._compared:
            self._compare(indices, parts[0])
        if self._own is not None:
            return self._own.of_members(indices, batches)
        results = [self._pass(indices, part) for part in parts]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def _pass(self, indices: list[int], part: Any) -> Tensor:
        given = arguments(part)
        logits = logits_of(self._network_of(tuple(indices))(*given.args, **given.kwargs))
        return torch.unflatten(logits, 0, (len(indices), -1))

    def _compare(self, indices: list[int], part: Any) -> None:
        """Compare the first answers of a network that could not be traced with the members' own; then let one go."""
        own = self._own
        if own is None:  # another thread was faster
            return
        expected = own.of_members(indices, [part])
        try:
            error = float((self._pass(indices, part) - expected).norm() / expected.norm().clamp_min(1e-30))
            reason = None if error <= CLOSE else f"its answers differ by {error:.1g}"
        except Exception as refused:  # the network's own code may raise anything
            reason = str(refused)
        if reason is None:
            self._own = None
        else:
            log.warning("the owned engine runs each member as a separate network: %s", reason)
            self.one_by_one = [name for name, _ in own.networks[0].named_children()]
            self.network = nn.Identity()
            self._of_some.clear()
        self._compared = True

    def _network_of(self, indices: tuple[int, ...]) -> nn.Module:
        """Give the network of some members: a structure of its own around the same tensors, made once."""
        if indices == tuple(range(len(self.members))):
            return self.network
        if indices not in self._of_some:
            network, running = shell((self.network, self._running))
            running.chosen = list(indices)
            self._of_some[indices] = network
        return self._of_some[indices]

    def _apply(self, fn: Any, recurse: bool = True) -> "Owned":
        probe = fn(torch.zeros(1))
        if probe.dtype != torch.float32 or not probe.is_cpu:
            raise PluresError(
                f"the owned engine computes in float32 on the CPU, not in {probe.dtype} on {probe.device}: use "
                'ensemble.engine("unfolded"), which can be converted and moved'
            )
        self._of_some.clear()
        return super()._apply(fn, recurse)


def faster_than_unfolded(split: Split) -> bool:
    """Tell whether the owned engine can run here and will be faster than each member as a network of its own.

        faster_than_unfolded(ensemble.split)

    A rule, not a measurement: layers count by their weights.
    """
    try:
        refuse_if_impossible(split)
        trace(shell(split.network))
    except Exception:  # whatever the network's own code raises
        return False
    members, owners = len(split.trained), split.owners()
    weights, cost = 0, 0.0
    encoders = [module for module in split.network.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    tokens = {id(layer) for encoder in encoders for layer in encoder.modules()}
    for name, layer in split.network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            owner = owners.get(f"{name}.weight")
            each = members if owner is None else _cost(layer, owner, members, id(layer) in tokens)
            weights += layer.weight.numel()
            cost += layer.weight.numel() * each
    return weights > 0 and cost < members * weights


def _cost(layer: nn.Linear | nn.Conv2d, owners: Tensor, members: int, tokens: bool) -> float:
    single = owners.numel() == layer.weight.numel()
    if isinstance(layer, nn.Linear):
        return (COST_OF_TOKENS if tokens else COST_OF_ROWS)["weight" if single else "block"]
    if layer.groups > 1 or layer.dilation != (1, 1):
        return members
    return COST_OF_WEIGHTS if single else COST_OF_KERNELS


def owned_bytes(split: Split) -> int:
    """Count the bytes of the lists that the owned engine holds, and of what is private.

    owned_bytes(ensemble.split)
    """
    weights = own_tensors(split.network)
    lists = sum(weights[name].nbytes + 2 * owners.numel() for name, owners in split.owners().items())
    private = sum(row.nbytes for row in split.private.rows(0).values()) * len(split.trained)
    return lists + private


def refuse_if_impossible(split: Split) -> None:
    """Refuse what the native kernels cannot run, and say why.

    refuse_if_impossible(ensemble.split)
    """
    load()
    for name, tensor in own_tensors(split.network).items():
        if not tensor.is_cpu:
            raise PluresError(
                f"the owned engine runs on the CPU, and {name!r} is on {tensor.device}: move the ensemble to the CPU, "
                'or use ensemble.engine("unfolded")'
            )
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise PluresError(
                f"the owned engine multiplies float32, and {name!r} is {tensor.dtype}: convert the ensemble, "
                'or use ensemble.engine("unfolded")'
            )
