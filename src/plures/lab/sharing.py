"""Publish an ensemble on the Hugging Face hub or in a folder, with a model card, and load it again.

Only safetensors and JSON files are read.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn

from plures import files
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.lab.method_names import is_code
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import Run, open_run
from plures.losses import is_for_numbers
from plures.storage import load, save
from plures.version import __version__

ENSEMBLE, CONFIG, METRICS = "ensemble.safetensors", "config.json", "metrics.json"
READ = (ENSEMBLE, CONFIG, METRICS)
UNREACHABLE = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError)


def push_to_hub(
    source: Ensemble | str | Path,
    target: str | Path,
    *,
    metrics: Mapping[str, Any] | None = None,
    private: bool = False,
    trust_code: bool = False,
) -> str:
    """Publish an ensemble or a finished run with a model card, and return its address.

        plures.push_to_hub("runs/birds", "me/birds")  # to the Hugging Face hub
        plures.push_to_hub(ensemble, Path("shared/birds"), metrics={"accuracy": 0.95})  # into a folder

    A run includes its configuration and metrics. For an ensemble from your own loop, pass `metrics` for the table of
    the card. A run that names code outside plures as its network or method needs `trust_code`. Log in to the hub with
    `huggingface-cli login`.
    """
    run = None
    with TemporaryDirectory() as made:
        folder = Path(made)
        if isinstance(source, Ensemble):
            ensemble = source
            save(ensemble, folder / ENSEMBLE)
        else:
            run = open_run(Path(source), trust_code=trust_code)
            ensemble, kept = run.ensemble, [name for name in READ if (run.path / name).is_file()]
            for name in kept:
                shutil.copyfile(run.path / name, folder / name)
            metrics = RunFolder(run.path).metrics() if METRICS in kept else None
        (folder / "README.md").write_text(_card(ensemble, target, metrics, run), "utf-8")
        if _is_folder(target):
            for file in sorted(folder.iterdir()):
                files.write(Path(target) / file.name, file.read_bytes())
            return str(Path(target))
        try:
            name = huggingface_hub.create_repo(str(target), private=private, exist_ok=True).repo_id
            huggingface_hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Publish by plures")
        except UNREACHABLE as error:
            raise PluresError(f"cannot publish {target}: {str(error).splitlines()[0]}") from error
        return name


def from_hub(
    source: str | Path,
    network: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    revision: str | None = None,
    trust_code: bool = False,
) -> Ensemble:
    """Load a published ensemble from the Hugging Face hub or from a folder.

        ensemble = plures.from_hub("me/birds")
        ensemble = plures.from_hub("shared/birds", network)

    A published run with a built-in network needs no `network`; for others pass it, as to `plures.load`. Code that a
    run names is imported only with `trust_code`. Other files of the place are not read.
    """
    folder = Path(source) if _is_folder(source) else _downloaded(str(source), revision)
    if not files.is_file(folder / ENSEMBLE):
        raise PluresError(f"{source} has no {ENSEMBLE}: it was not published by plures.push_to_hub")
    if network is not None:
        return load(folder / ENSEMBLE, network)
    if not (folder / CONFIG).is_file():
        raise PluresError(f"{source} does not name its network: give it, plures.from_hub(..., network)")
    return open_run(folder, trust_code=trust_code).ensemble


def _downloaded(name: str, revision: str | None) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(READ)))
    except UNREACHABLE as error:
        reason = str(error).strip().splitlines()[0]
        raise PluresError(f"cannot read {name} from the hub, and there is no folder of this name: {reason}") from error


def _is_folder(place: str | Path) -> bool:
    """Return whether a place is a folder, not a name on the hub such as `user/name`."""
    # os.path, not Path: a name may be too long for a folder, which is no error here.
    return isinstance(place, Path) or place.startswith((".", "/", "~")) or os.path.isdir(place)  # noqa: PTH112


def _card(ensemble: Ensemble, target: str | Path, metrics: Mapping[str, Any] | None, run: Run | None) -> str:
    folder = _is_folder(target)
    made = ModelCard.from_template(
        ModelCardData(library_name="plures", tags=["uncertainty", "ensemble", "plures"]),
        template_str=Path(__file__).with_name("card.md.jinja").read_text("utf-8"),
        name=Path(target).resolve().name if folder else target,
        method=type(ensemble).__name__,
        version=__version__,
        run=run,
        metrics={name: value for name, value in (metrics or {}).items() if value is not None},
        numbers=is_for_numbers(ensemble.loss),
        # A folder may be moved, and its place is nobody's business: the example is to be run inside it.
        place="." if folder else target,
        own_network=run is None or is_code(run.recipe.model),
    )
    return str(made)
