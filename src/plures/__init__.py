"""Split one PyTorch model into an ensemble of subnetworks: calibrated uncertainty at the size of one model.

    ensemble = plures.OrthogonalDropout(network, members=5)
    for stage in ensemble.stages():
        train(stage, loader)
    prediction = ensemble.predict(images)
    plures.save(ensemble, "birds.safetensors")

Names are loaded on first use, so that the command line can answer `--help` without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plures.errors import PluresError
from plures.methods import METHODS
from plures.version import __version__

if TYPE_CHECKING:
    from plures import metrics
    from plures.ensemble import Ensemble, Stage, Step
    from plures.masks import Keep, TopK
    from plures.methods.orthogonal_dropout import OrthogonalDropout
    from plures.partition import Partition
    from plures.prediction import Prediction
    from plures.role import Role, roles
    from plures.storage import load, save

_HOMES = {
    "Ensemble": "plures.ensemble",
    "Keep": "plures.masks",
    "Partition": "plures.partition",
    "Prediction": "plures.prediction",
    "Role": "plures.role",
    "Stage": "plures.ensemble",
    "Step": "plures.ensemble",
    "TopK": "plures.masks",
    "load": "plures.storage",
    "roles": "plures.role",
    "save": "plures.storage",
    **METHODS,
}

__all__ = [
    "Ensemble",
    "Keep",
    "OrthogonalDropout",
    "Partition",
    "PluresError",
    "Prediction",
    "Role",
    "Stage",
    "Step",
    "TopK",
    "__version__",
    "load",
    "metrics",
    "roles",
    "save",
]


def __getattr__(name: str) -> Any:
    if name == "metrics":
        return import_module("plures.metrics")
    if name not in _HOMES:
        raise AttributeError(f"module 'plures' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
