"""Random changes of training images, a whole batch at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from plures.errors import PluresError

LOG_ASPECT = 0.28768207  # log(4/3): random resized crops are between 3:4 and 4:3


@dataclass(frozen=True)
class Augment:
    """How training images are changed at random: by default not at all.

        Augment(crop=4, flip=True)                        # CIFAR, as in the ResNet paper
        Augment(resized_crop=(0.25, 1.0), flip=True)      # photographs

    `crop` pads with that many pixels of the mean colour (zero after normalisation) and cuts a square out at random;
    `resized_crop` cuts out a random fraction of the area, between the two given, and resizes it; `flip` mirrors half of
    the images left to right. Images that are larger in the cache are always cut at a random place.
    """

    crop: int = 0
    flip: bool = False
    resized_crop: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise PluresError(f"Augment.crop is a number of pixels, zero or more, but {self.crop} was given")
        if self.resized_crop is not None:
            low, high = self.resized_crop
            if not 0 < low <= high <= 1:
                raise PluresError(
                    f"Augment.resized_crop takes fractions of the area, 0 < low <= high <= 1, but got {low} and {high}"
                )
            if self.crop:
                raise PluresError("Augment takes crop or resized_crop, but both were given")

    def __call__(self, images: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Change normalised images [batch, channels, height, width] and bring them to size x size.

            Augment(crop=2)(images, 16, torch.Generator().manual_seed(0))

        Random numbers are drawn on the CPU, so that every device sees the same images.
        """
        mirrored = (
            torch.rand(len(images), generator=generator) < 0.5
            if self.flip
            else torch.zeros(len(images), dtype=torch.bool)
        )
        if self.resized_crop is not None:
            return _resized_crops(images, size, self.resized_crop, mirrored, generator)
        return _crops(images, size, self.crop, mirrored, generator)


def _crops(images: Tensor, size: int, padding: int, mirrored: Tensor, generator: torch.Generator) -> Tensor:
    """Cut a square out of every padded image; without padding the place is random only if the image is larger."""
    batch, channels, height, width = images.shape
    top = torch.randint(height + 2 * padding - size + 1, (batch, 1), generator=generator) - padding
    left = torch.randint(width + 2 * padding - size + 1, (batch, 1), generator=generator) - padding
    along = torch.arange(size)
    y = top + along
    x = left + torch.where(mirrored[:, None], along.flip(0), along)
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
    image = torch.arange(batch)[:, None, None] * (height * width)
    pixel = image + y[:, :, None] * width + x[:, None, :]
    # One table of all pixels with a zero at the end, which stands for everything outside: a single gather does it all.
    pixel = pixel.masked_fill_(~inside, batch * height * width).to(images.device)
    table = F.pad(images.permute(0, 2, 3, 1).reshape(-1, channels), (0, 0, 0, 1))
    return table.index_select(0, pixel.view(-1)).view(batch, size, size, channels).permute(0, 3, 1, 2)


def _resized_crops(
    images: Tensor, size: int, area: tuple[float, float], mirrored: Tensor, generator: torch.Generator
) -> Tensor:
    """Cut a random rectangle out of every image and resize it; sides longer than the image are clipped."""
    batch = len(images)
    area_drawn, aspect, y, x = torch.rand(4, batch, generator=generator)
    area_drawn = area[0] + (area[1] - area[0]) * area_drawn
    aspect = torch.exp(LOG_ASPECT * (2 * aspect - 1))
    height = (area_drawn / aspect).sqrt().clamp(max=1)
    width = (area_drawn * aspect).sqrt().clamp(max=1)
    # In the coordinates of grid_sample an image reaches from -1 to 1.
    transform = torch.zeros(batch, 2, 3)
    transform[:, 0, 0] = torch.where(mirrored, -width, width)
    transform[:, 1, 1] = height
    transform[:, 0, 2] = (1 - width) * (2 * x - 1)
    transform[:, 1, 2] = (1 - height) * (2 * y - 1)
    grid = F.affine_grid(transform.to(images.device), [batch, images.shape[1], size, size], align_corners=False)
    sampled = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return sampled.contiguous(memory_format=torch.channels_last)
