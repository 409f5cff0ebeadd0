"""The corruptions (noise, blur, weather, compression) of `plures evaluate --shift`.

These are the common corruptions of Hendrycks and Dietterich (2019), with the constants that they published for images
of 32 x 32 (CIFAR-10-C: ImageNet-C/create_c/make_cifar_c.py of their repository), except those that need photographs of
frost or a random walk through the image. Lengths scale with the image, so larger images lose the same detail.
"""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import correlate, gaussian_filter, map_coordinates
from torch import Tensor

from plures.seeding import generator

SIDE = 32  # lengths are pixels of images with this side
SEVERITIES = (1, 2, 3, 4, 5)

Streams = list[torch.Generator]
"""The random numbers of each image."""


@dataclass(frozen=True)
class Corruption:
    """One way to corrupt an image, at one of five severities.

    The result depends on the images and their row numbers alone, never on the batch in which they come. The random
    numbers of a row are the same at every severity, so that severities differ in nothing else.
    """

    name: str
    severity: int

    def __call__(self, images: Tensor, first_row: int = 0) -> Tensor:
        """Corrupt uint8 images [batch, height, width, channels], which are `first_row` and following of their split."""
        corrupt, constants = KINDS[self.name]
        streams = [generator(0, "corruption", self.name, first_row + place) for place in range(len(images))]
        corrupted = corrupt(images, constants[self.severity - 1], streams)
        # Truncated, not rounded, as published; the small sum is for whole numbers that floating point just missed.
        return (corrupted + 1e-6).clamp_(0, 255).to(torch.uint8)


def gaussian_noise(images: Tensor, deviation: float, streams: Streams) -> Tensor:
    """Add normal random numbers, as a sensor in the dark does."""
    noise = [torch.randn(images.shape[1:], generator=stream, dtype=torch.float64) for stream in streams]
    return 255 * (images.double() / 255 + deviation * torch.stack(noise)).clamp(0, 1)


def shot_noise(images: Tensor, photons: float, streams: Streams) -> Tensor:
    """Count that many photons per white pixel: the noise of light itself, a Poisson number."""
    expected = images.double() / 255 * photons
    counted = [torch.poisson(one, generator=stream) for one, stream in zip(expected, streams, strict=True)]
    return 255 * (torch.stack(counted) / photons).clamp(0, 1)


def impulse_noise(images: Tensor, amount: float, streams: Streams) -> Tensor:
    """Turn a part of the values black or white, as bit errors do."""
    hit, white = _uniform(streams, 2 * images[0].numel()).view(len(images), 2, *images.shape[1:]).unbind(1)
    return torch.where(hit <= amount, torch.where(white <= 0.5, 255.0, 0.0), images.double())


def defocus_blur(images: Tensor, disk: tuple[float, float], streams: Streams) -> Tensor:
    """Blur with a disk, softened at its edge, as a lens out of focus does; radius and softness are in pixels."""
    radius, softness = (_grown(images) * length for length in disk)
    reach = math.ceil(radius) + 1
    places = torch.arange(-reach, reach + 1, dtype=torch.float64)
    inside = (places[:, None] ** 2 + places**2 <= radius**2).double()
    kernel = gaussian_filter((inside / inside.sum()).numpy(), softness, mode="constant", radius=1)
    return torch.from_numpy(correlate(images.double().numpy(), kernel[None, :, :, None], mode="mirror"))


def motion_blur(images: Tensor, trail: tuple[float, float], streams: Streams) -> Tensor:
    """Draw every pixel out along a line of random angle, as a camera that moves does; radius and deviation in pixels.

    The weights and places are those of ImageMagick's MotionBlurImage, which the published images were made with.
    """
    radius, deviation = (_grown(images) * length for length in trail)
    steps = torch.arange(2 * math.ceil(radius) + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (steps / deviation).square())
    angle = torch.deg2rad(90 * _uniform(streams, 1) - 45)
    down, right = ((steps * part(angle) - 0.5).ceil().long() for part in (torch.sin, torch.cos))
    height, width = images.shape[1:3]
    batch = torch.arange(len(images))[:, None, None]
    result = torch.zeros(images.shape, dtype=torch.float64)
    for step, weight in enumerate(weights / weights.sum()):
        rows = (torch.arange(height) + down[:, step, None]).clamp(0, height - 1)
        columns = (torch.arange(width) + right[:, step, None]).clamp(0, width - 1)
        result += weight * images[batch, rows[:, :, None], columns[:, None, :]]
    return result.round()


def brightness(images: Tensor, amount: float, streams: Streams) -> Tensor:
    """Add to the value of every pixel's colour (hue, saturation, value), as too long an exposure does."""
    white = images.double() / 255
    value = white.amax(dim=-1, keepdim=True)
    brighter = (value + amount).clamp(0, 1)
    # Hue and saturation stay, so all channels grow by the same factor; black has neither and turns grey.
    return 255 * torch.where(value > 0, white * brighter / value.clamp_min(1e-9), brighter)


def contrast(images: Tensor, kept: float, streams: Streams) -> Tensor:
    """Move every pixel towards the mean colour of its image; the fraction `kept` of the distance stays."""
    white = images.double() / 255
    mean = white.mean(dim=(1, 2), keepdim=True)
    return 255 * ((white - mean) * kept + mean).clamp(0, 1)


def fog(images: Tensor, cloud: tuple[float, float], streams: Streams) -> Tensor:
    """Add a cloudy fractal and keep the range; the constants are its thickness and how fast fine detail fades."""
    thickness, fading = cloud
    height, width = images.shape[1:3]
    side = 2 ** math.ceil(math.log2(max(height, width, 2)))
    clouds = fractal(_uniform(streams, side * side), fading)[:, :height, :width, None]
    white = images.double() / 255
    brightest = white.amax(dim=(1, 2, 3), keepdim=True)
    return 255 * ((white + thickness * clouds) * brightest / (brightest + thickness)).clamp(0, 1)


def pixelate(images: Tensor, kept: float, streams: Streams) -> Tensor:
    """Return the image made smaller and larger again: the fraction `kept` of the pixels per side stays."""

    def corrupt(image: Image.Image) -> Image.Image:
        small = max(1, int(image.width * kept)), max(1, int(image.height * kept))
        return image.resize(small, Image.Resampling.BOX).resize(image.size, Image.Resampling.BOX)

    return _each(images, corrupt)


def jpeg(images: Tensor, quality: int, streams: Streams) -> Tensor:
    """Store the image as JPEG of a quality and read it again."""

    def corrupt(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _each(images, corrupt)


def elastic(images: Tensor, stretch: tuple[float, float, float], streams: Streams) -> Tensor:
    """Pull three points of the image apart and shake it locally; all constants are parts of the side.

    They are how far pixels move, over which distance neighbours move alike, and how far the three points may move.
    """
    height, width = images.shape[1:3]
    side = min(height, width)
    reach, alike, apart = (side * part for part in stretch)
    numbers = 2 * _uniform(streams, 6 + 2 * height * width) - 1
    third, middle = side // 3, torch.tensor([height // 2, width // 2], dtype=torch.float64)
    corners = middle + third * torch.tensor([[1, 1], [1, -1], [-1, -1]], dtype=torch.float64)
    ones = torch.ones(len(images), 3, 1, dtype=torch.float64)
    # Where each pixel of the result comes from: the map that takes the moved points back to the corners.
    back = torch.linalg.solve(torch.cat([corners + apart * numbers[:, :6].reshape(-1, 3, 2), ones], dim=2), corners)
    rows, columns = torch.meshgrid(*(torch.arange(one, dtype=torch.float64) for one in (height, width)), indexing="ij")
    places = torch.stack([columns, rows, torch.ones_like(rows)], dim=-1).view(-1, 3) @ back
    x, y = places.view(len(images), height, width, 2).unbind(-1)
    pulled = _between_pixels(images.double(), y, x, "mirror")
    moves = (reach * numbers[:, 6:]).view(len(images), 2, height, width).numpy()
    dx, dy = torch.from_numpy(gaussian_filter(moves, (0, 0, alike, alike), truncate=3)).unbind(1)
    return _between_pixels(pulled, rows + dy, columns + dx, "reflect")


def fractal(random: Tensor, fading: float) -> Tensor:
    """Grow cloudy height maps [batch, side, side] by the diamond-square rule, from random numbers [batch, side * side].

    Every round halves the distance between known points and sets the points between to the mean of their four
    neighbours plus a random number that fades; opposite edges are neighbours.
    """
    side = math.isqrt(random.shape[1])
    field = torch.zeros(len(random), side, side, dtype=random.dtype)
    used, step, wobble = 0, side, 100.0

    def set_to_mean(points: Tensor, four: Tensor) -> None:
        nonlocal used
        count = points[0].numel()
        shaken = wobble * wobble * (2 * random[:, used : used + count].view(points.shape) - 1)
        used += count
        points.copy_(four / 4 + shaken)

    while step >= 2:
        half = step // 2
        corners, centres = field[:, ::step, ::step], field[:, half::step, half::step]
        sides = corners + corners.roll(-1, 1)
        set_to_mean(centres, sides + sides.roll(-1, 2))
        set_to_mean(field[:, ::step, half::step], centres + centres.roll(1, 1) + corners + corners.roll(-1, 2))
        set_to_mean(field[:, half::step, ::step], centres + centres.roll(1, 2) + corners + corners.roll(-1, 1))
        step, wobble = half, wobble / fading
    field -= field.amin(dim=(1, 2), keepdim=True)
    return field / field.amax(dim=(1, 2), keepdim=True)


def _uniform(streams: Streams, count: int) -> Tensor:
    """Draw random numbers between 0 and 1 for each image, [batch, count]."""
    return torch.stack([torch.rand(count, generator=stream, dtype=torch.float64) for stream in streams])


def _each(images: Tensor, corrupt: Callable[[Image.Image], Image.Image]) -> Tensor:
    grey = images.shape[-1] == 1
    opened = [Image.fromarray((image[..., 0] if grey else image).numpy()) for image in images]
    corrupted = np.stack([np.asarray(corrupt(image)) for image in opened])
    return torch.from_numpy(corrupted).double().view(images.shape)


def _between_pixels(images: Tensor, y: Tensor, x: Tensor, border: str) -> Tensor:
    """Read images at places between pixels, [batch, height, width]: the mean of four, weighted by how near they are."""
    read = [
        [map_coordinates(channel, place, order=1, mode=border) for channel in image]
        for image, place in zip(images.permute(0, 3, 1, 2).numpy(), torch.stack([y, x], dim=1).numpy(), strict=True)
    ]
    return torch.from_numpy(np.array(read)).permute(0, 2, 3, 1)


def _grown(images: Tensor) -> float:
    return max(1.0, min(images.shape[1:3]) / SIDE)


# Each kind with its constants for the severities 1 to 5, in the order of the paper: noise, blur, weather, digital.
KINDS: dict[str, tuple[Callable[..., Tensor], tuple[object, ...]]] = {
    "gaussian noise": (gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot noise": (shot_noise, (500, 250, 100, 75, 50)),
    "impulse noise": (impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus blur": (defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))),
    "motion blur": (motion_blur, ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))),
    "fog": (fog, ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))),
    "brightness": (brightness, (0.05, 0.10, 0.15, 0.20, 0.30)),
    "contrast": (contrast, (0.75, 0.50, 0.40, 0.30, 0.15)),
    "elastic": (
        elastic,
        ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": (pixelate, (0.95, 0.90, 0.85, 0.75, 0.65)),
    "jpeg": (jpeg, (80, 65, 58, 50, 40)),
}
