"""Spoil images the way a worse camera would: what `plures evaluate --shift` measures on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from plures.seeding import generator

BLUR_AT = 32  # blur is given in pixels of an image with so many per side; larger ones lose the same detail


@dataclass(frozen=True)
class Corruption:
    """One way to spoil an image, at one strength.

        spoiled = Corruption("blur", 1.0, blur)(images)  # uint8 in, uint8 out

    The result depends on the images and their row numbers alone, never on the batch in which they come.
    """

    name: str
    strength: float
    spoil: Callable[[Tensor, float, int], Tensor]

    def __call__(self, images: Tensor, first_row: int = 0) -> Tensor:
        """Spoil uint8 images [batch, height, width, channels], which are `first_row` and following of their split."""
        return self.spoil(images.float(), self.strength, first_row).round_().clamp_(0, 255).to(torch.uint8)


def gaussian_noise(images: Tensor, strength: float, first_row: int) -> Tensor:
    """Add normal random numbers; `strength` is their standard deviation, where white is 1.

    gaussian_noise(images, 0.08, first_row=0)
    """
    noise = [
        torch.randn(image.shape, generator=generator(0, "gaussian noise", first_row + place))
        for place, image in enumerate(images)
    ]
    return images + 255 * strength * torch.stack(noise)


def blur(images: Tensor, strength: float, first_row: int) -> Tensor:
    """Blur with a Gaussian of `strength` pixels, in images of more than 32 x 32 accordingly more.

    blur(images, 1.0, first_row=0)
    """
    batch, height, width, channels = images.shape
    sigma = strength * max(1, min(height, width) / BLUR_AT)
    reach = min(max(1, round(3 * sigma)), min(height, width) - 1)  # reflection cannot reach over the whole image
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma).square())
    weights /= weights.sum()
    planes = images.permute(0, 3, 1, 2).reshape(batch * channels, 1, height, width)
    planes = F.pad(planes, (reach, reach, reach, reach), mode="reflect")
    planes = F.conv2d(F.conv2d(planes, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))
    return planes.view(batch, channels, height, width).permute(0, 2, 3, 1)


def contrast(images: Tensor, strength: float, first_row: int) -> Tensor:
    """Move every pixel towards the mean colour of its image, the fraction `strength` of the way.

    contrast(images, 0.6, first_row=0)
    """
    mean = images.mean(dim=(1, 2), keepdim=True)
    return mean + (images - mean) * (1 - strength)


# Strengths from hardly visible to hard for a person.
CORRUPTIONS = [
    Corruption(name, strength, spoil)
    for name, spoil, strengths in (
        ("gaussian noise", gaussian_noise, (0.04, 0.08, 0.16)),
        ("blur", blur, (0.5, 1.0, 2.0)),
        ("contrast", contrast, (0.4, 0.6, 0.8)),
    )
    for strength in strengths
]
