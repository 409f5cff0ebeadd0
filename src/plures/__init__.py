"""Split one PyTorch model into an ensemble of subnetworks: calibrated uncertainty at the size of one model.

    ensemble = plures.split(network, members=5)
    ensemble.fit(loader, epochs=60)  # or your own loop over ensemble.stages()
    prediction = ensemble.predict(images)
    ensemble.save("birds.safetensors")

Names are loaded on first use, so that the command line can answer `--help` without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plures.errors import PluresError as PluresError
from plures.methods import METHODS
from plures.version import __version__ as __version__

if TYPE_CHECKING:
    from plures import guarantees as guarantees
    from plures import metrics as metrics
    from plures.answers import Prediction as Prediction
    from plures.answers import Regression as Regression
    from plures.ensemble import Ensemble as Ensemble
    from plures.exporting.exported import export as export
    from plures.losses import CrossEntropy as CrossEntropy
    from plures.losses import GaussianNLL as GaussianNLL
    from plures.methods.batch_ensemble import BatchEnsemble as BatchEnsemble
    from plures.methods.deep_ensemble import DeepEnsemble as DeepEnsemble
    from plures.methods.deterministic import Deterministic as Deterministic
    from plures.methods.masksembles import Masksembles as Masksembles
    from plures.methods.mc_dropout import MCDropout as MCDropout
    from plures.methods.mimo import MIMO as MIMO
    from plures.methods.orthogonal_dropout.doors import adapt as adapt
    from plures.methods.orthogonal_dropout.doors import split as split
    from plures.methods.orthogonal_dropout.engines.engine import Engine as Engine
    from plures.methods.orthogonal_dropout.method import OrthogonalDropout as OrthogonalDropout
    from plures.methods.orthogonal_dropout.roles import Role as Role
    from plures.methods.orthogonal_dropout.roles import roles as roles
    from plures.methods.packed_ensemble import PackedEnsemble as PackedEnsemble
    from plures.stage import Stage as Stage
    from plures.storage import load as load
    from plures.storage import save as save

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

__all__ = sorted([*_HOMES, "PluresError", "__version__", "guarantees", "metrics"])


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
