"""What every engine is, and what several share: batch norm folded into the convolution before it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plures.calling import Arguments
from plures.methods.orthogonal_dropout.engines.tracing import trace
from plures.methods.orthogonal_dropout.partition import Split
from plures.methods.orthogonal_dropout.roles import Role
from plures.prediction import Predictor
from plures.tensors import canonical, own_tensors, shell


class Engine(Predictor, ABC):
    """Predict with a trained ensemble, faster or in less memory than with the ensemble itself.

        engine = ensemble.engine("lean")
        prediction = engine.predict(images)

    Whole data sets (`predict` with a `batch_size`) run member by member, so a member's weights stay in the cache. An
    engine holds the members that were trained when it was created: create another after further training.
    """

    _apart = True
    kind: ClassVar[str]
    members: list[int]

    @property
    def about(self) -> str:
        """What predicts, in a word or two."""
        return self.kind

    @abstractmethod
    def run(self, index: int, batches: list[Any]) -> Tensor:
        """Return the logits of one member for several batches, joined."""

    def of_members(self, indices: list[int], batches: list[Any]) -> Tensor:
        """Return the logits of some members for several batches, joined: members outside, batches inside."""
        return torch.stack([self.run(index, batches) for index in indices])

    @property
    def trained(self) -> list[int]:
        """The members that predict, in the order of the outputs."""
        return self.members

    def _outputs(self, batches: list[Any], chosen: Sequence[int] | None = None) -> Tensor:
        return self.of_members(list(range(len(self.members)) if chosen is None else chosen), batches)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        return self._outputs([Arguments(args, kwargs)])


def foldable(split: Split) -> dict[str, str]:
    """Find the convolutions whose output goes to one batch norm and nowhere else: name of the one -> of the other.

        foldable(plures.OrthogonalDropout(resnet18(classes=10)).split)["conv1"]  # "bn1"

    A network that torch.fx cannot trace has none.
    """
    network = shell(split.network)  # a copy, because tracing may leave its marks
    try:
        nodes = list(trace(network).nodes)
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
            and split.roles[weight] is not Role.SHARED
            and not any(
                first in tied for name, first in first_names.items() if name.rpartition(".")[0] in (convolution, norm)
            )
        ):
            pairs[convolution] = norm
    return pairs


def fold_norms(split: Split, member: int, pairs: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Give the factor of each convolution that takes its norm layer in, and the private tensors that remain.

    scales, private = fold_norms(split, 2, foldable(split))
    """
    values = {name: t.detach() for name, t in (own_tensors(split.network) | split.private.rows(member)).items()}
    private = {name: values[name] for name in split.private.rows(member)}
    scales = {}
    for convolution, norm in pairs.items():
        layer = cast(_BatchNorm, split.network.get_submodule(norm))
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


def remove_norms(network: nn.Module, pairs: Mapping[str, str]) -> None:
    """Put nothing in the place of the norm layers that convolutions have taken in, in place.

    remove_norms(network, foldable(split))
    """
    for name, norm in pairs.items():
        convolution = cast(nn.Conv2d, network.get_submodule(name))
        if convolution.bias is None:
            convolution.bias = nn.Parameter(convolution.weight.detach().new_zeros(convolution.out_channels), False)
        network.set_submodule(norm, nn.Identity())
