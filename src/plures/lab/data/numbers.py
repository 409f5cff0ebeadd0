"""Tables of numbers, for regression: a row is stored as an image of one pixel with a channel for each column."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from plures.errors import PluresError
from plures.files import digest
from plures.lab.data.split import DataInfo, Rows, Split
from plures.seeding import permutation

TABLES = ("diabetes",)
TEST_SHARE = 0.2


@dataclass(frozen=True)
class TableInfo(DataInfo):
    """How the rows of a table are prepared; its "classes" are what a network returns of each row.

        info = open_data("diabetes").info
        info.normalise(torch.from_numpy(data.test.images)), info.target_std

    `mean` and `std` are those of the training rows, column by column. Targets are given in standard deviations from
    their mean.
    """

    target_mean: float = 0.0
    target_std: float = 1.0
    most_channels: ClassVar[int] = 1 << 16

    def normalise(self, images: Tensor) -> Tensor:
        """Turn rows [batch, 1, 1, columns] into network input [batch, columns, 1, 1]."""
        mean, std = torch.tensor(self.mean, device=images.device), torch.tensor(self.std, device=images.device)
        return ((images - mean) / std).permute(0, 3, 1, 2)


def share_out(count: int, limit: int | None, validation: float, seed: int) -> dict[str, Rows]:
    """Say which rows of a table are for what: the test rows are always the same, the validation rows follow the seed.

    share_out(442, limit=None, validation=0.2, seed=0)["test"]
    """
    order = permutation(count, "test rows", 0)
    test, rest = order[: round(TEST_SHARE * count)], order[round(TEST_SHARE * count) :]
    rest = rest[permutation(len(rest), "validation rows", seed)][:limit]
    held_out = round(validation * len(rest)) if validation < 1 else int(validation)
    if held_out >= len(rest):
        raise PluresError(
            f"validation={validation} cannot be held out from {len(rest)} training rows: give a fraction, such as "
            "0.2, or a smaller number"
        )
    return {"train": np.sort(rest[held_out:]), "validation": np.sort(rest[:held_out]), "test": np.sort(test)}


def open_table(name: str, limit: int | None, validation: float, seed: int) -> tuple[dict[str, Split], str]:
    """Read an embedded table: its splits, and a fingerprint of all of it.

    splits, fingerprint = open_table("diabetes", limit=None, validation=0.2, seed=0)
    """
    from sklearn.datasets import load_diabetes  # the only one of TABLES

    columns, values = load_diabetes(return_X_y=True)
    rows, values = columns.astype(np.float32)[:, None, None, :], values.astype(np.float32)[:, None]
    parts = share_out(len(rows), limit, validation, seed)
    seen, wanted = rows[parts["train"]].reshape(len(parts["train"]), -1).astype(np.float64), values[parts["train"]]
    info = TableInfo(
        name=name,
        classes=("mean", "log-variance"),
        channels=rows.shape[-1],
        size=1,
        cache_size=1,
        resize=False,
        mean=seen.mean(0).tolist(),
        std=seen.std(0).tolist(),
        target_mean=float(wanted.mean(dtype=np.float64)),
        target_std=float(wanted.std(dtype=np.float64)),
    )
    targets = ((values - info.target_mean) / info.target_std).astype(np.float32)
    splits = {part: Split(part, info, rows, chosen, targets[chosen]) for part, chosen in parts.items()}
    return splits, digest(rows.tobytes(), values.tobytes(), *(one.tobytes() for one in parts.values()), length=32)
