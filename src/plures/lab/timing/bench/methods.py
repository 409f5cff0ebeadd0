"""What each method costs on the same network: parameters, file, training step, prediction."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from safetensors.torch import save_file

from plures.ensemble import Ensemble
from plures.lab.timing.bench.inference import predicting
from plures.lab.timing.bench.measure import race
from plures.lab.timing.bench.subjects import RESNET18, images
from plures.lab.timing.bench.training import Plain, step_of
from plures.methods import METHODS
from plures.storage import save


@dataclass(frozen=True)
class MethodCost:
    """One row of the table: everything relative to the plain network.

    MethodCost("DeepEnsemble", members=5, parameters=5.0, file=5.0, step=5.0, prediction=5.0)
    """

    method: str
    members: int
    parameters: float
    file: float
    step: float
    prediction: float


def method_costs(batch: int, precision: str, rounds: int) -> Iterator[MethodCost]:
    """Measure every method with five members (MC dropout: 30 passes) on ResNet18-CIFAR.

        for cost in method_costs(batch=16, precision="float32", rounds=2): print(cost)

    A step is one batch of the first stage: of one member where they train one after the other, else of all. Prediction
    is of one batch by the ensemble's own forward.
    """
    network = RESNET18.make()
    plain_parameters = sum(parameter.numel() for parameter in network.parameters())
    inputs = images(batch)
    plain_step = step_of(Plain(network), batch, precision)
    with tempfile.TemporaryDirectory() as folder:
        save_file(network.state_dict(), Path(folder, "plain"))
        for name, module in METHODS.items():
            method: Callable[..., Ensemble] = getattr(import_module(module), name)
            ensemble = method(network) if name in ("Deterministic", "MCDropout") else method(network, members=5)
            step = step_of(ensemble.open(ensemble.plan()[0]), batch, precision)
            found = next(race(name, plain_step, {"step": step}, rounds))
            for _ in ensemble.stages():
                pass
            save(ensemble, Path(folder, "ensemble"))
            plain_prediction, prediction = (predicting(one.eval(), inputs, precision) for one in (network, ensemble))
            yield MethodCost(
                name,
                len(ensemble(inputs[:2])),
                _parameters(ensemble) / plain_parameters,
                Path(folder, "ensemble").stat().st_size / Path(folder, "plain").stat().st_size,
                found.value,
                next(race(name, plain_prediction, {"prediction": prediction}, rounds)).value,
            )


def _parameters(ensemble: Ensemble) -> int:
    """Count the floating numbers that a file holds: what an ensemble needs to predict."""
    statistics = {name for name, _ in ensemble.named_buffers()}
    stored = ensemble.tensors()
    return sum(
        tensor.numel()
        for name, tensor in stored.items()
        if tensor.is_floating_point() and name not in statistics and "running_" not in name
    )
