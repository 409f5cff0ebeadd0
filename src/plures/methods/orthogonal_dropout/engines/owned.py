"""The owned engine: all members in one pass that multiplies only the weights that each member owns."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from plures.calling import arguments, call, chunks, logits_of
from plures.errors import PluresError
from plures.graph import Graph, is_hooked, why_joined
from plures.methods.orthogonal_dropout.engines.engine import Engine, MemberComparison, batched, size_of
from plures.methods.orthogonal_dropout.engines.layers import OfMembers, OwnedLinear, Parts
from plures.methods.orthogonal_dropout.engines.rewriting import Replacer, Rewriter
from plures.methods.orthogonal_dropout.engines.unfolded import Unfolded, foldable
from plures.methods.orthogonal_dropout.owners import SplitNetwork
from plures.native.library import load, why_unavailable
from plures.tensors import own_tensors, shell

AT_ONCE = 80  # samples times members whose activations stay near
LARGE, FEW = 2**21, 16  # numbers of a network of which so few samples times members of each thread stay nearer still
MANY = 2**16


class Owned(Engine):
    """Predict with all members in one pass that multiplies each weight once, for the member that owns it.

        engine = ensemble.engine("owned")
        engine.one_by_one  # the layers that run member by member, because the kernels do not know them

    The answers are those of `checkout(member)` to about 1e-5: sums are taken in another order. They do not depend on
    the number of threads. It computes in float32 on the CPU, and no gradients.
    """

    kind = "owned"
    network: nn.Module

    def __init__(self, split: SplitNetwork, graph: Graph | None, fold: bool = True) -> None:
        super().__init__()
        reason = why_impossible(split, graph)
        if reason is not None:
            raise PluresError(reason)
        self.members = split.trained
        self._size = sum(one.numel() for one in split.network.parameters())
        self._untraced = graph is None
        graph = graph if split.background is None else None
        pairs = foldable(split, graph) if fold else {}
        parts = Parts(split, pairs)
        replacer = Replacer(parts) if graph is None else Rewriter(graph, parts, pairs)
        try:
            self.network = replacer.whole(shell(split.network))
        except Exception as error:  # what torch.fx has traced, but no graph of all members can do
            raise PluresError(f'the owned engine cannot run this network ({error}): use engine("unfolded")') from error
        self.one_by_one = list(dict.fromkeys(replacer.one_by_one))
        lanes, maps = load().lanes, any(isinstance(one, _ConvNd) for one in split.network.modules())
        each = len(self.members) if maps or split.background is None else 1
        self.samples_at_once = max(1, AT_ONCE // each // lanes) * lanes
        if all(isinstance(layer, OwnedLinear | nn.Flatten | fx.GraphModule) for layer in self.network.modules()):
            self.samples_at_once = MANY  # a chain of linear layers takes few rows at a time by itself
        large = sum(tensor.numel() for tensor in own_tensors(split.network).values()) > LARGE
        together = replacer.shares_weights or parts.changes or self.samples_at_once == MANY or not large
        self._rows_of_a_thread = MANY * len(self.members) if together else FEW
        self._of_some: dict[tuple[int, ...], nn.Module] = {}
        self._separate: Unfolded | None = None
        self._comparison = MemberComparison(split)
        self._batched = self._comparison.batched
        self.eval()

    @property
    def about(self) -> str:
        """What predicts, with the instructions of its kernels, and how much of it runs once for all members."""
        if self._separate is not None:
            return self._separate.about
        ran = [layer for layer in self.network.modules() if getattr(layer.forward, "did", False)]
        self._run_once = sum(one.numel() for one in {one for layer in ran for one in layer.parameters()}) / self._size
        return super().about.replace(self.kind, f"{self.kind} ({load().instructions})")

    def of_members(self, indices: list[int], batches: list[Any]) -> Tensor:
        """Return the logits of some members for several batches, joined."""
        network, results = self.network, []
        run = self._network_of(network, tuple(indices)).forward
        separate = self._separate  # looked at after the network, which another thread may have put away meanwhile
        if separate is not None:
            return separate.of_members(indices, batches)
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
            for batch in batches:
                args, kwargs = arguments(batch)
                simple = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
                size = args[0].shape[0] if simple and args[0].dim() > 0 else MANY * MANY  # len() takes a microsecond
                if size <= self.samples_at_once and size * len(indices) <= self._rows_of_a_thread:
                    results.append(logits_of(run(*args)))
                    continue
                if self._comparison is None and batched(batch) not in self._batched:
                    raise PluresError(
                        f"another argument is as long as the batch, {size_of(batch)}, which it was not before: use "
                        'ensemble.engine("unfolded"), or a batch of another size'
                    )
                results += [self._run(network, indices, part) for part in chunks(batch, self.samples_at_once)]
        count = len(indices)
        results = [result.reshape(count, result.shape[0] // count, *result.shape[1:]) for result in results]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def _run(self, network: nn.Module, indices: list[int], batch: Any) -> Tensor:
        """Return the logits of some members, one after the other along the batch."""
        at_once = self._rows_of_a_thread * torch.get_num_threads() // max(1, size_of(batch))
        step = len(indices) if torch.compiler.is_compiling() else max(1, at_once)
        groups = (tuple(indices[first : first + step]) for first in range(0, len(indices), step))
        found = [logits_of(call(self._network_of(network, group), batch)) for group in groups]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _network_of(self, network: nn.Module, indices: tuple[int, ...]) -> nn.Module:
        """Return the network of some members: a structure of its own around the same tensors, made once."""
        if indices == tuple(range(len(self.members))):
            return network
        found = self._of_some.get(indices)
        if found is None:
            found = shell(network)
            for layer in found.modules():
                if isinstance(layer, OfMembers):
                    layer.choose(list(indices))
            self._of_some[indices] = found
        return found

    def _why_wrong(self, batch: Any, expected: Tensor) -> str | None:
        comparison, reason = self._comparison, None
        if comparison is not None and self._untraced:
            reason = why_joined(comparison.split.network, batch)
        return reason or super()._why_wrong(batch, expected)

    def _run_members_apart(self, split: SplitNetwork) -> None:
        separate = Unfolded(split)
        self.one_by_one = [name for name, _ in separate.networks[0].named_children()]
        self._separate = separate
        self.network = nn.Identity()
        self._of_some.clear()

    def _apply(self, fn: Any, recurse: bool = True) -> "Owned":
        probe = fn(torch.zeros(1))
        if self._separate is None and (probe.dtype != torch.float32 or not probe.is_cpu):
            raise PluresError(
                f"the owned engine computes in float32 on the CPU, not in {probe.dtype} on {probe.device}: use "
                'ensemble.engine("unfolded"), which can be converted and moved'
            )
        self._of_some.clear()
        super()._apply(fn, recurse)
        return self


def why_impossible(split: SplitNetwork, graph: Graph | None) -> str | None:
    """Return why the native kernels cannot run a network, and what to do; None if they can."""
    instead = 'or use ensemble.engine("unfolded")'
    if (unavailable := why_unavailable()) is not None:
        return unavailable
    for name, tensor in own_tensors(split.network).items():
        if not tensor.is_cpu:
            return f"the owned engine runs on the CPU, and {name!r} is on {tensor.device}: move the ensemble, {instead}"
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            return f"the owned engine multiplies float32, and {name!r} is {tensor.dtype}: convert it, {instead}"
    if graph is None and is_hooked(split.network):
        return f"{type(split.network).__name__} has hooks, which the owned engine drops: {instead[3:]}"
    return None
