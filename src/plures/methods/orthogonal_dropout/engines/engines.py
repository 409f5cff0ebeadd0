"""Two ways to predict with a split ensemble: lean, in the memory of one network, and unfolded, at full speed."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from plures.calling import Arguments, arguments, call, logits_of, swapping
from plures.errors import PluresError
from plures.methods.orthogonal_dropout.masks import put_on
from plures.methods.orthogonal_dropout.partition import Private
from plures.methods.orthogonal_dropout.roles import Role
from plures.prediction import Predictor
from plures.tensors import canonical, own_tensors, tensors
from plures.threads import side_by_side

if TYPE_CHECKING:
    from plures.methods.orthogonal_dropout.method import OrthogonalDropout

Kind = Literal["lean", "unfolded"]


class Engine(Predictor, ABC):
    """Predict with a trained ensemble, faster or in less memory than its own forward.

        engine = ensemble.engine("lean")
        prediction = engine.predict(images)

    Whole data sets (`predict` with a `batch_size`) go through member by member, so that a member's weights stay near.
    An engine is made for the members trained at that moment: make another after further training.
    """

    members: list[int]

    @abstractmethod
    def run(self, index: int, batches: list[Any]) -> Tensor:
        """Return the logits of one member for several batches, joined."""

    def join(self, batches: list[Any]) -> Tensor:
        """Return the logits of several batches, joined along the batch axis: members outside, batches inside."""
        return torch.stack([self.run(index, batches) for index in range(len(self.members))])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        return self.join([Arguments(args, kwargs)])


class Unfolded(Engine):
    """Predict with each member as a network of its own: k times the memory, nothing to mask.

        engine = ensemble.engine("unfolded")
        engine = ensemble.engine("unfolded", threads=4)  # four members at a time, on one thread each

    With `threads` the bits are those of torch on one thread, however many run side by side.
    """

    def __init__(self, ensemble: OrthogonalDropout, fold: bool = True, threads: int | None = None) -> None:
        super().__init__()
        if threads is not None and threads < 1:
            raise PluresError(f"threads={threads}; it must be at least 1")
        self.members = ensemble.trained
        self.threads = threads
        pairs = foldable(ensemble) if fold else {}
        self.networks = nn.ModuleList()
        for member in self.members:
            network = ensemble.checkout(member).requires_grad_(False)
            scales, private = _fold(ensemble, member, pairs)
            _remove_norms(network, pairs)
            for name, tensor in own_tensors(network).items():
                if name in private:
                    tensor.copy_(private[name])
                elif name in scales:
                    tensor.copy_(tensor * scales[name])
            self.networks.append(network)
        self.eval()

    def run(self, index: int, batches: list[Any]) -> Tensor:
        """Return the logits of one member for several batches, joined."""
        return torch.cat([logits_of(call(self.networks[index], batch)) for batch in batches])

    def join(self, batches: list[Any]) -> Tensor:
        """Return the logits of several batches, joined along the batch axis: members outside, batches inside."""
        if self.threads is None or _transformed():
            return super().join(batches)
        members, device = range(len(self.members)), next(self.parameters()).device.type
        return torch.stack(side_by_side(lambda index: self.run(index, batches), members, self.threads, device))


class Lean(Engine):
    """Predict in little more than the memory of one network: each layer is masked when it runs.

        engine = ensemble.engine("lean")
        del ensemble  # the engine keeps the weights, and packs their owners closer

    The same bits come out as of `Unfolded`.
    """

    def __init__(self, ensemble: OrthogonalDropout, fold: bool = True) -> None:
        super().__init__()
        self.members = ensemble.trained
        pairs = foldable(ensemble) if fold else {}
        folded = [_fold(ensemble, member, pairs) for member in self.members]
        # A copy of the structure, around the same tensors.
        self.network = _around_same_memory(ensemble.network)
        first_names = canonical(self.network)
        _remove_norms(self.network, pairs)
        self.private = Private(folded[0][1], len(folded))
        for index, (_, private) in enumerate(folded):
            self.private.write(index, private)
        self._masks = {}
        for name, owners in ensemble.owners.items():
            scales = [scales[name] for scales, _ in folded if name in scales]
            self._masks[name] = _Owned(PackedOwners(owners, ensemble.members), self.members, scales)
        put_on(self.network, self._masks, first_names)
        private = folded[0][1]
        self._private_names = {name: first for name, first in first_names.items() if first in private}
        self._private_names |= {name: name for name in private}
        self.eval()

    def run(self, index: int, batches: list[Any]) -> Tensor:
        """Return the logits of one member for several batches, joined."""
        with swapping():
            for mask in self._masks.values():
                mask.index = index
            rows = self.private.rows(index)
            # Tied tensors are named one by one: to let torch look for them takes longer than a small layer runs.
            private = {name: rows[first] for name, first in self._private_names.items()}
            inputs = [arguments(batch) for batch in batches]
            outputs = [functional_call(self.network, private, *given, tie_weights=False) for given in inputs]
        return torch.cat([logits_of(output) for output in outputs])


class _Owned(nn.Module):
    """A mask that cuts out whichever member runs, and scales it as the folded norm layer would."""

    scales: Tensor | None

    def __init__(self, owners: PackedOwners, members: list[int], scales: list[Tensor]) -> None:
        super().__init__()
        self.owners = owners
        self.members = members
        self.register_buffer("scales", torch.stack([scale.flatten() for scale in scales]) if scales else None)
        self.index = 0

    def forward(self, weight: Tensor) -> Tensor:
        scale = None if self.scales is None else self.scales[self.index].view(-1, *[1] * (weight.dim() - 1))
        return self.owners.owned_part(weight, self.members[self.index], scale)


class PackedOwners(nn.Module):
    """Hold the owners of a weight in half a byte each, where there are at most 15 members.

        part = PackedOwners(owners, members=5).owned_part(weight, member=2)

    A byte holds the owner of a weight in the first half of the rows and of its fellow in the second half, so that a
    run of rows unpacks by one operation.
    """

    packed: Tensor

    def __init__(self, owners: Tensor, members: int) -> None:
        super().__init__()
        self.rows = owners.shape[0]
        self.halves = members <= 15  # a free weight's 255 becomes 15, which is no member either
        if self.halves:
            first, second = owners[: (self.rows + 1) // 2] & 15, owners[(self.rows + 1) // 2 :] & 15
            owners = first.clone()
            owners[: len(second)] |= second << 4
        self.register_buffer("packed", owners)

    def owned_part(self, weight: Tensor, member: int, scale: Tensor | None = None) -> Tensor:
        """Cut one member out of a weight, positive zeros elsewhere, and multiply it by a scale that broadcasts."""
        plain = weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous()
        if plain and not torch.compiler.is_compiling() and not (weight.requires_grad and torch.is_grad_enabled()):
            return self._cut_by_bits(weight, member, scale)
        owners = torch.cat([self.packed & 15, self.packed >> 4])[: self.rows] if self.halves else self.packed
        part = weight.clone().masked_fill_(owners != member, 0.0)  # a clone keeps the layout
        return part if scale is None else part.mul_(scale)

    def _cut_by_bits(self, weight: Tensor, member: int, scale: Tensor | None) -> Tensor:
        """Do by bits, some rows at a time, what a choice by booleans does several times slower in more memory."""
        part = torch.empty_like(weight, requires_grad=False)
        packed, values, bits = self.packed.numpy(), part.numpy(), weight.detach().numpy().view(np.int32)
        factors = None if scale is None else scale.detach().numpy()
        half = len(packed)
        step = max(1, 2**17 * half // packed.size)  # so few that what lies between the operations stays in the cache
        for start in range(0, half, step):
            differs = packed[start : start + step] ^ np.uint8(member * 17 if self.halves else member)
            halves = [(start, differs & 15), (start + half, differs >> 4)] if self.halves else [(start, differs)]
            for first, other in halves:
                rows = slice(first, min(first + len(other), self.rows))
                keep = np.negative((other[: rows.stop - first] == 0).view(np.int8))  # all bits or none
                np.bitwise_and(bits[rows], keep, out=values.view(np.int32)[rows])
                if factors is not None:
                    values[rows] *= factors[rows]
        return part


def _transformed() -> bool:
    """Whether torch compiles, traces or differentiates what is called now: it would not see it in another thread."""
    functional = torch._C._functorch.peek_interpreter_stack() is not None
    return functional or torch.compiler.is_compiling() or bool(torch._C._is_tracing())


def foldable(ensemble: OrthogonalDropout) -> dict[str, str]:
    """Find the convolutions whose output goes to one batch norm and nowhere else: name of the one -> of the other.

        >>> foldable(plures.OrthogonalDropout(resnet18(classes=10)))["conv1"]
        'bn1'

    A network that torch.fx cannot trace has none.
    """
    network = _around_same_memory(ensemble.network)  # a copy, because tracing may leave its marks
    try:
        nodes = list(fx.Tracer().trace(network).nodes)
    except Exception:  # tracing runs the network's own code, which may raise anything
        return {}
    modules = dict(network.named_modules())
    called = [node.target for node in nodes if node.op == "call_module"]
    first_names = canonical(network)
    tied = {first for name, first in first_names.items() if name != first}
    pairs = {}
    for node in nodes:
        following = list(node.users)
        if node.op != "call_module" or len(following) != 1 or following[0].op != "call_module":
            continue
        convolution, norm = node.target, following[0].target
        weight = f"{convolution}.weight"
        if (
            isinstance(modules[convolution], nn.Conv1d | nn.Conv2d | nn.Conv3d)
            and isinstance(modules[norm], _BatchNorm)
            and modules[norm].running_mean is not None
            and called.count(convolution) == called.count(norm) == 1
            and ensemble.roles[weight] is not Role.SHARED
            and not any(
                first in tied for name, first in first_names.items() if name.rpartition(".")[0] in (convolution, norm)
            )
        ):
            pairs[convolution] = norm
    return pairs


def _around_same_memory(network: nn.Module) -> nn.Module:
    """Copy the structure of a network around the memory of its tensors, which neither can then take from the other."""
    same: dict[int, Tensor] = {}
    for tensor in tensors(network).values():
        value = tensor.detach()
        same[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
    return copy.deepcopy(network, same)


def _fold(
    ensemble: OrthogonalDropout, member: int, pairs: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Give the factor of each convolution that takes its norm layer in, and the private tensors that remain."""
    values = {name: t.detach() for name, t in (own_tensors(ensemble.network) | ensemble.private.rows(member)).items()}
    private = {name: values[name] for name in ensemble.private.rows(member)}
    scales = {}
    for convolution, norm in pairs.items():
        layer = cast(_BatchNorm, ensemble.network.get_submodule(norm))
        mean, variance = values[f"{norm}.running_mean"], values[f"{norm}.running_var"]
        scale = torch.rsqrt(variance + layer.eps) * values.get(f"{norm}.weight", torch.ones_like(mean))
        bias = values.get(f"{convolution}.bias", torch.zeros_like(mean))
        shift = values.get(f"{norm}.bias", torch.zeros_like(mean))
        private = {name: tensor for name, tensor in private.items() if name.rpartition(".")[0] != norm}
        private[f"{convolution}.bias"] = (bias - mean) * scale + shift
        scales[f"{convolution}.weight"] = scale.reshape(-1, *[1] * (values[f"{convolution}.weight"].dim() - 1))
        if f"{convolution}.weight" in private:
            private[f"{convolution}.weight"] = private[f"{convolution}.weight"] * scales[f"{convolution}.weight"]
    return scales, private


def _remove_norms(network: nn.Module, pairs: Mapping[str, str]) -> None:
    for name, norm in pairs.items():
        convolution = cast(nn.Conv2d, network.get_submodule(name))
        if convolution.bias is None:
            convolution.bias = nn.Parameter(convolution.weight.detach().new_zeros(convolution.out_channels), False)
        network.set_submodule(norm, nn.Identity())
