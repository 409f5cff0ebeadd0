"""What a run answers on images that it did not train on and that are not the test images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from plures.lab.data import Split
from plures.lab.evaluation.evaluate import predictions, scores
from plures.lab.runs.open import Run, data_for, open_run

MOST = 10_000  # images: more take long and tell no more


def figures(folder: Path, data_dir: Path | None) -> dict[str, Any]:
    """Measure a run on held-out images, and its file."""
    run = open_run(folder)
    members, targets = predictions(run.ensemble, images_for(run, data_dir))
    return scores(members, targets) | {"bytes": (folder / "ensemble.safetensors").stat().st_size}


def images_for(run: Run, data_dir: Path | None) -> Split:
    """Give the training images that a run did not train on: those for validation, and those beyond its limit."""
    used = run.data(data_dir)
    every = data_for(replace(run.recipe, limit=None, validation=0), data_dir).train
    rest = np.flatnonzero(~np.isin(every.rows, used.train.rows))[:MOST]
    if not len(rest):  # the data bring validation images of their own
        return used.validation
    return Split("held-out", used.info, every.pixels, every.rows[rest], every.labels[rest])
