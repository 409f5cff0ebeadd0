"""BatchEnsemble: one shared network, a vector before and after each layer per member (Wen, Tran and Ba, 2020)."""

import copy
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plures.checks import check_members, one_of
from plures.errors import PluresError
from plures.losses import Loss
from plures.methods import building
from plures.methods.building import Init, ManyInOne, Rows, Tiled, TogetherStage
from plures.seeding import generator
from plures.tensors import Layer

FactorInit = Literal["gaussian", "sign"]
DEVIATION = 0.5  # of the Gaussian factors around 1, as in the authors' CIFAR code


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
    do not decay, and factors and biases get half the gradient. Layers of other kinds are shared, and so are the
    projections in `nn.MultiheadAttention`.

    - `factors`: start from a normal distribution around 1 ("gaussian") or as random signs ("sign").
    - `private_norm`: give each member its own batch norm; by default, norm layers are shared.
    """

    _stage_class = BatchEnsembleStage

    def __init__(
        self,
        network: nn.Module,
        members: int = 5,
        *,
        factors: FactorInit = "gaussian",
        private_norm: bool = False,
        init: Init = "fresh",
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        check_members(members)
        one_of("factors", factors, get_args(FactorInit))
        rows = Rows()
        built = building.started(network, init, seed)
        for name, layer in building.layers_of(built).items():
            own = Factors(layer, members, rows, factors, seed, name)
            layer.add_module("members", own)
            layer.register_forward_pre_hook(own.before)
            layer.register_forward_hook(own.after)
        if private_norm:
            built = _with_private_norm(built, members)
        super().__init__(network, loss, Tiled(built, members, rows))
        self.members, self.factors, self.private_norm = members, factors, bool(private_norm)
        self.init, self.seed = init, seed


class Factors(nn.Module):
    """Hold what the members have for themselves at one layer: alpha before it, gamma and bias after it."""

    def __init__(self, layer: Layer, members: int, rows: Rows, init: FactorInit, seed: int, name: str) -> None:
        super().__init__()
        inputs, outputs = building.widths(layer)

        def start(kind: str, width: int) -> nn.Parameter:
            values = torch.randn(members, width, generator=generator(seed, kind, name))
            values = 1 + DEVIATION * values if init == "gaussian" else values.sign() + (values == 0)
            return nn.Parameter(values.to(layer.weight))

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


class PrivateNorm(nn.Module):
    """Normalise the rows of each member with a batch norm of its own."""

    def __init__(self, norm: _BatchNorm, members: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(copy.deepcopy(norm) for _ in range(members))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a tiled batch, which holds all rows of one member after all rows of another."""
        return torch.cat([norm(part) for norm, part in zip(self.members, x.chunk(len(self.members)), strict=True)])


def _with_private_norm(network: nn.Module, members: int) -> nn.Module:
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        raise PluresError(f"private_norm=True, but {type(network).__name__} has no batch norm: leave it out")
    return building.replace(network, {norm: PrivateNorm(norm, members) for norm in norms})
