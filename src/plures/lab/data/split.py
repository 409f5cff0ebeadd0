"""One part of a data set, and what one must know to feed its pictures to a network."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plures.errors import PluresError


@dataclass(frozen=True)
class DataInfo:
    """How the pictures of a data set are prepared: enough to prepare others in the same way.

        info = data.info
        json.dumps(dataclasses.asdict(info))            # goes into a run folder ...
        info = DataInfo(**json.loads(text))             # ... and comes back equal
        unfamiliar = open_data("svhn", like=info)       # other data, prepared for the same network

    `mean` and `std` are per channel, for pixels between 0 and 1; both are empty for data without training images.
    """

    name: str
    classes: Sequence[str]
    channels: int
    size: int  # pixels per side that the network sees
    cache_size: int  # pixels per side in the cache; larger than `size` leaves room for random crops
    resize: bool  # whether pictures of other sizes are brought to `size`
    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        # JSON gives lists back; tuples make equal values equal again.
        for field in ("classes", "mean", "std"):
            object.__setattr__(self, field, tuple(getattr(self, field)))

    def normalise(self, images: Tensor) -> Tensor:
        """Turn uint8 pixels [batch, height, width, channels] into network input [batch, channels, height, width].

            inputs = data.normalise(torch.from_numpy(data.test.images[:8]))

        Subtracts the mean and divides by the standard deviation of the training images; the result is float32 in the
        channels_last memory format.
        """
        if not self.mean:
            raise PluresError(
                f"{self.name} has no training images to take mean and standard deviation from: "
                "open it with like=info of the data that the network was trained on."
            )
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[-1] != self.channels:
            raise PluresError(
                f"normalise takes uint8 images of shape [batch, height, width, {self.channels}], "
                f"but was given {images.dtype} of shape {list(images.shape)}."
            )
        batch, height, width, channels = images.shape
        mean, std = torch.tensor(self.mean, dtype=torch.float64), torch.tensor(self.std, dtype=torch.float64)
        # One long row of pixels and channels: arithmetic over three channels alone would not vectorise.
        scale = (1 / (255 * std)).float().repeat(width).to(images.device)
        shift = (-mean / std).float().repeat(width).to(images.device)
        rows = images.reshape(batch, height, width * channels).float()
        return rows.mul_(scale).add_(shift).view(batch, height, width, channels).permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class Split:
    """The train, validation or test part of a data set.

        len(data.test), data.test.images[0], data.test.labels[0]

    `pixels` is the memory map of all that was decoded together, and `rows` says what of it belongs to the split.
    """

    name: str
    info: DataInfo
    pixels: npt.NDArray[np.uint8]  # [pictures, height, width, channels]
    rows: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]  # one per row of the split

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def images(self) -> npt.NDArray[np.uint8]:
        """The pictures as [N, height, width, channels]: the memory map itself, or a copy when only some rows are taken.

        data.test.images[:16]
        """
        if np.array_equal(self.rows, np.arange(len(self.pixels))):
            return self.pixels
        return self.pixels[self.rows]
