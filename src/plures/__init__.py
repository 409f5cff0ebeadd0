"""Split one PyTorch model into an ensemble of subnetworks: calibrated uncertainty at the size of one model.

    ensemble = plures.split(network, members=5)
    ensemble.fit(loader, epochs=60)  # or your own loop over ensemble.stages()
    prediction = ensemble.predict(images)
    ensemble.save("birds.safetensors")

Names are loaded on first use, so that the command line can answer `--help` without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plures.errors import PluresError
from plures.methods import METHODS
from plures.version import __version__

if TYPE_CHECKING:
    from plures import guarantees, metrics
    from plures.answers import Prediction, Regression
    from plures.ensemble import Ensemble
    from plures.exporting.exported import export
    from plures.losses import CrossEntropy, GaussianNLL
    from plures.methods.batch_ensemble import BatchEnsemble
    from plures.methods.deep_ensemble import DeepEnsemble
    from plures.methods.deterministic import Deterministic
    from plures.methods.masksembles import Masksembles
    from plures.methods.mc_dropout import MCDropout
    from plures.methods.mimo import MIMO
    from plures.methods.orthogonal_dropout.doors import adapt, split
    from plures.methods.orthogonal_dropout.engines.engine import Engine
    from plures.methods.orthogonal_dropout.method import OrthogonalDropout
    from plures.methods.orthogonal_dropout.roles import Role, roles
    from plures.methods.packed_ensemble import PackedEnsemble
    from plures.stage import Stage
    from plures.storage import load, save

_NAMES = {
    "plures.answers": ("Prediction", "Regression"),
    "plures.ensemble": ("Ensemble",),
    "plures.exporting.exported": ("export",),
    "plures.losses": ("CrossEntropy", "GaussianNLL"),
    "plures.methods.orthogonal_dropout.doors": ("adapt", "split"),
    "plures.methods.orthogonal_dropout.engines.engine": ("Engine",),
    "plures.methods.orthogonal_dropout.roles": ("Role", "roles"),
    "plures.stage": ("Stage",),
    "plures.storage": ("load", "save"),
}
_HOMES = METHODS | {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "MIMO",
    "BatchEnsemble",
    "CrossEntropy",
    "DeepEnsemble",
    "Deterministic",
    "Engine",
    "Ensemble",
    "GaussianNLL",
    "MCDropout",
    "Masksembles",
    "OrthogonalDropout",
    "PackedEnsemble",
    "PluresError",
    "Prediction",
    "Regression",
    "Role",
    "Stage",
    "__version__",
    "adapt",
    "export",
    "guarantees",
    "load",
    "metrics",
    "roles",
    "save",
    "split",
]


def __getattr__(name: str) -> Any:
    if name in ("guarantees", "metrics"):
        return import_module(f"plures.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'plures' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
