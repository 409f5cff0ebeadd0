"""Export a finished run: what `plures export` does."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plures.exporting.exported import Format, export
from plures.lab.data import DataInfo
from plures.lab.runs.open import Run


class Normalise(nn.Module):
    """Normalise uint8 pixels as `DataInfo.normalise` does, as a module."""

    scale: Tensor
    shift: Tensor

    def __init__(self, info: DataInfo) -> None:
        super().__init__()
        mean, std = torch.tensor(info.mean, dtype=torch.float64), torch.tensor(info.std, dtype=torch.float64)
        self.register_buffer("scale", (1 / (255 * std)).float())
        self.register_buffer("shift", (-mean / std).float())

    def forward(self, pixels: Tensor) -> Tensor:
        """Return pixels [batch, height, width, channels] as inputs [batch, channels, height, width]."""
        return (pixels.float() * self.scale + self.shift).permute(0, 3, 1, 2)


def export_run(run: Run, path: Path, format: Format | None = None) -> dict[str, Any]:
    """Write a run as one file, and return what was written, as JSON values."""
    info = run.info
    example = torch.zeros(2, info.size, info.size, info.channels, dtype=torch.uint8)
    written = export(
        run.ensemble.cpu(),
        path,
        example,
        format=format,
        classes=list(info.classes),
        preprocess=Normalise(info),
        metadata=about(run),
    )
    return {
        "file": str(path),
        "format": written.format,
        "bytes": written.bytes,
        "stored": written.stored,
        "calibration": written.calibration,
    }


def about(run: Run) -> dict[str, Any]:
    """Return the preprocessing and the provenance that a file stores, as JSON values."""
    info = run.info
    return {
        "preprocessing": {
            "input": "uint8 pixels [batch, height, width, channels], normalised inside the file",
            "size": info.size,
            "resize": f"a square of a multiple of {info.cache_size} averaged down to it, otherwise the shorter side to "
            f"{info.cache_size} (bicubic, antialiased); then the middle {info.size} x {info.size} kept",
            "channels": info.channels,
            "mean": list(info.mean),
            "std": list(info.std),
        },
        "provenance": {
            "method": run.method,
            "recipe": run.recipe.as_json(),
            "data": info.name,
            "fingerprint": run.fingerprint,
        },
    }
