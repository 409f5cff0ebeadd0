"""BatchEnsemble: one shared network, a vector before and after each layer per member (Wen, Tran and Ba, 2020)."""

from typing import Any

import torch
from torch import Tensor, nn

from plures.checks import check_members
from plures.losses import Loss
from plures.methods import building
from plures.methods.building import Init, ManyInOne, Rows, Tiled, TogetherStage
from plures.seeding import generator
from plures.tensors import Layer

DEVIATION = 0.5  # of the factors around 1, as in the authors' CIFAR code


class BatchEnsembleStage(TogetherStage):
    """Train all members, with weight decay on everything but their factors."""

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Return parameter groups: decay would pull the factors, which start around 1, to 0."""
        found = [module for module in self.modules() if isinstance(module, Factors)]
        factors = [parameter for module in found for parameter in (module.alpha, module.gamma)]
        known = set(map(id, factors))
        (every,) = super().parameter_groups(weight_decay)
        every["params"] = [parameter for parameter in every["params"] if id(parameter) not in known]
        return [every, {"params": factors, "weight_decay": 0.0}]


class BatchEnsemble(ManyInOne):
    """Share all weights, with two vectors per layer and member: y = layer(x * alpha) * gamma + bias.

        ensemble = plures.BatchEnsemble(network, members=5)
        for stage in ensemble.stages():
            train(stage, stage.parameter_groups(weight_decay=1e-4))

    Every Linear and convolution, including the classifier, has its own factors and biases for each member. All members
    see every batch: it is repeated once per member, so a training step costs as much as `members` plain steps. Factors
    start from a normal distribution around 1 and do not decay; factors and biases get half the gradient. Layers of
    other kinds are shared, such as norm layers, and so are the projections in `nn.MultiheadAttention`.
    """

    _stage_class = BatchEnsembleStage

    def __init__(
        self, network: nn.Module, members: int = 5, *, init: Init = "fresh", loss: Loss | None = None, seed: int = 0
    ) -> None:
        check_members(members)
        rows = Rows()
        built = building.started(network, init, seed)
        for name, layer in building.layers_of(built).items():
            own = Factors(layer, members, rows, seed, name)
            layer.add_module("members", own)
            layer.register_forward_pre_hook(own.before)
            layer.register_forward_hook(own.after)
        super().__init__(network, loss, Tiled(built, members, rows))
        self.members, self._init, self.seed = members, init, seed


class Factors(nn.Module):
    """Hold what the members have for themselves at one layer: alpha before it, gamma and bias after it."""

    def __init__(self, layer: Layer, members: int, rows: Rows, seed: int, name: str) -> None:
        super().__init__()
        inputs, outputs = building.widths(layer)

        def start(kind: str, width: int) -> nn.Parameter:
            values = torch.randn(members, width, generator=generator(seed, kind, name))
            return nn.Parameter((1 + DEVIATION * values).to(layer.weight))

        self.rows = rows
        self.alpha = start("alpha", inputs)
        self.gamma = start("gamma", outputs)
        self.bias: nn.Parameter | None = None
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().repeat(members, 1), layer.bias.requires_grad)
            layer.bias = None

    def before(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Scale the inputs."""
        x, *others = args
        return (x * self.rows.spread(with_half_gradient(self.alpha), x, layer), *others)

    def after(self, layer: nn.Module, _args: object, y: Tensor) -> Tensor:
        """Scale the outputs and shift them."""
        y = y * self.rows.spread(with_half_gradient(self.gamma), y, layer)
        return y if self.bias is None else y + self.rows.spread(with_half_gradient(self.bias), y, layer)


def with_half_gradient(parameter: Tensor) -> Tensor:
    """Return the same values, through which half the gradient flows.

    The factors of the authors' code learn at half the rate of the weights. Half plus half is exact in floating point.
    """
    half = parameter * 0.5
    return half + half.detach()
