"""Corruptions are those that were published: each against an independent way to make it."""

import colorsys
import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from plures.lab.evaluation.corruptions import KINDS, SEVERITIES, Corruption, fractal
from plures.seeding import generator


def pictures(count: int = 2, side: int = 32, channels: int = 3) -> Tensor:
    """Smooth colours with an edge, a black and a white corner."""
    rng = np.random.default_rng(0)
    images = ndimage.zoom(rng.uniform(0, 255, (count, 4, 4, channels)), (1, side / 4, side / 4, 1), order=1)
    images[:, : side // 4, : side // 4] = 0
    images[:, -side // 4 :, -side // 4 :] = 255
    return torch.from_numpy(images.clip(0, 255).astype(np.uint8))


def cut(values: np.ndarray) -> np.ndarray:
    """Cut off what is behind the point, but for what rounding left there."""
    return np.floor(values + 1e-6)


def differs_by_one_at_most(found: Tensor, expected: np.ndarray) -> bool:
    """Whether images are equal but for values that lie on the edge of two levels and round to either."""
    apart = (found.int() - torch.from_numpy(expected.astype(np.int64))).abs()
    return int(apart.max()) <= 1 and float(apart.double().mean()) < 0.05


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shape", [(5, 8, 6, 3), (5, 9, 9, 1)], ids=["colour", "grey"])
def test_a_corruption_changes_images_but_not_their_kind(name: str, severity: int, shape: tuple[int, ...]) -> None:
    corruption = Corruption(name, severity)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    kept = images.clone()
    spoiled = corruption(images)
    assert torch.equal(images, kept)
    assert spoiled.dtype == torch.uint8
    assert spoiled.shape == images.shape
    assert not torch.equal(spoiled, images)
    assert torch.equal(corruption(images[3:], first_row=3), spoiled[3:])  # whatever the batch
    assert torch.equal(corruption(images), spoiled)


def test_there_are_eleven_kinds_of_five_severities() -> None:
    assert len(KINDS) == 11
    assert all(len(constants) == len(SEVERITIES) == 5 for _, constants in KINDS.values())


@pytest.mark.parametrize(
    "name", [*("gaussian noise", "shot noise", "impulse noise", "defocus blur", "brightness", "contrast", "jpeg")]
)
def test_a_higher_severity_spoils_more(name: str) -> None:
    images = pictures(8)
    apart = [float((Corruption(name, one)(images).float() - images.float()).square().mean()) for one in SEVERITIES]
    assert apart == sorted(apart)
    assert len(set(apart)) == 5


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noise_has_the_moments_of_its_kind(severity: int) -> None:
    grey = torch.full((20, 32, 32, 3), 128, dtype=torch.uint8)
    place = severity - 1

    def noise(name: str) -> Tensor:
        return (Corruption(name, severity)(grey).double() + 0.5) / 255 - 128 / 255  # cut off: half a level is lost

    assert float(noise("gaussian noise").std()) == pytest.approx(KINDS["gaussian noise"][1][place], rel=0.02)
    photons = KINDS["shot noise"][1][place]
    assert float(noise("shot noise").std()) == pytest.approx((128 / 255 / photons) ** 0.5, rel=0.02)
    assert float(noise("shot noise").mean()) == pytest.approx(0, abs=0.003)
    spoiled = Corruption("impulse noise", severity)(grey)
    amount = KINDS["impulse noise"][1][place]
    for extreme in (0, 255):
        assert float((spoiled == extreme).double().mean()) == pytest.approx(amount / 2, rel=0.15)
    assert float((spoiled == 128).double().mean()) == pytest.approx(1 - amount, rel=0.01)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_is_a_softened_disk_over_mirrored_borders(severity: int) -> None:
    images = pictures()
    radius, softness = KINDS["defocus blur"][1][severity - 1]
    y, x = np.mgrid[-8:9, -8:9]
    disk = (x**2 + y**2 <= radius**2) / (x**2 + y**2 <= radius**2).sum()
    soft = np.exp(-0.5 * (np.arange(-1, 2) / softness) ** 2)
    kernel = ndimage.correlate(disk, np.outer(soft, soft) / soft.sum() ** 2, mode="constant")
    blurred = ndimage.correlate(images.numpy() / 255, kernel[None, :, :, None], mode="mirror")
    assert differs_by_one_at_most(Corruption("defocus blur", severity)(images), cut(blurred * 255))


def test_motion_draws_a_point_out_along_a_line() -> None:
    points = torch.zeros(1, 32, 32, 1, dtype=torch.uint8)
    points[:, 16, 16] = 255
    trail = Corruption("motion blur", 3)(points)[0, :, :, 0].double().numpy()
    stream = generator(0, "corruption", "motion blur", 0)
    angle = np.deg2rad(90 * float(torch.rand(1, generator=stream, dtype=torch.float64)) - 45)
    weights = np.exp(-0.5 * (np.arange(13) / 2.0) ** 2)
    expected = np.zeros((32, 32))
    for step, weight in enumerate(255 * weights / weights.sum()):
        # A pixel takes from the places to its right, so the point leaves its trail to the left.
        down, right = (int(np.ceil(step * part(angle) - 0.5)) for part in (np.sin, np.cos))
        expected[16 - down, 16 - right] += weight
    assert np.array_equal(trail, np.rint(expected))
    assert (trail > 0).sum() > 4


@pytest.mark.parametrize("severity", SEVERITIES)
def test_brightness_raises_the_value_of_the_colour(severity: int) -> None:
    images = pictures(1, side=8)
    amount = KINDS["brightness"][1][severity - 1]
    expected = np.zeros(images.shape)
    for place in np.ndindex(1, 8, 8):
        hue, saturation, value = colorsys.rgb_to_hsv(*(images[place].numpy() / 255))
        expected[place] = colorsys.hsv_to_rgb(hue, saturation, min(value + amount, 1))
    assert differs_by_one_at_most(Corruption("brightness", severity)(images), cut(expected * 255))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_keeps_the_mean_colour(severity: int) -> None:
    images = pictures()
    white = images.numpy() / 255
    mean = white.mean(axis=(1, 2), keepdims=True)
    expected = cut(255 * ((white - mean) * KINDS["contrast"][1][severity - 1] + mean))
    assert differs_by_one_at_most(Corruption("contrast", severity)(images), expected)


def test_fog_is_the_diamond_square_fractal() -> None:
    random = torch.rand(1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    field, numbers, step, wobble = np.zeros((8, 8)), iter(random[0].tolist()), 8, 100.0

    def fill(ys: range, xs: range, neighbours: list[tuple[int, int]]) -> None:
        means = {(y, x): sum(field[(y + dy) % 8, (x + dx) % 8] for dy, dx in neighbours) / 4 for y in ys for x in xs}
        for place, mean in means.items():
            field[place] = mean + wobble * wobble * (2 * next(numbers) - 1)

    while step >= 2:
        half = step // 2
        known, between = range(0, 8, step), range(half, 8, step)
        fill(between, between, [(-half, -half), (-half, half), (half, -half), (half, half)])
        across = [(-half, 0), (half, 0), (0, -half), (0, half)]
        fill(known, between, across)
        fill(between, known, across)
        step, wobble = half, wobble / 2
    field = (field - field.min()) / (field - field.min()).max()
    assert fractal(random, 2.0)[0].numpy() == pytest.approx(field)


def test_fog_lightens_and_keeps_the_range() -> None:
    images = pictures(4)
    spoiled = Corruption("fog", 5)(images)
    assert float(spoiled.double().std()) < float(images.double().std())
    assert int(spoiled.max()) <= int(images.max())


@pytest.mark.parametrize("severity", SEVERITIES)
def test_elastic_pulls_and_shakes_as_scipy_does(severity: int) -> None:
    images = pictures(1)
    reach, alike, apart = (32 * part for part in KINDS["elastic"][1][severity - 1])
    stream = generator(0, "corruption", "elastic", 0)
    numbers = 2 * torch.rand(6 + 2 * 32 * 32, generator=stream, dtype=torch.float64).numpy() - 1
    corners = np.array([[26, 26], [26, 6], [6, 6]], dtype=float)  # x, y
    moved = np.c_[corners + apart * numbers[:6].reshape(3, 2), np.ones(3)]
    back = np.linalg.solve(moved, corners).T  # from a place in the result to one in the image
    matrix, offset = back[::-1, 1::-1], back[::-1, 2]  # y before x, as scipy counts
    shakes = reach * numbers[6:].reshape(2, 32, 32)
    dx, dy = (ndimage.gaussian_filter(one, alike, mode="reflect", truncate=3) if alike else one for one in shakes)
    rows, columns = np.mgrid[:32, :32]
    expected = np.zeros(images.shape)
    for channel in range(3):
        plane = images[0, :, :, channel].numpy().astype(float)
        pulled = ndimage.affine_transform(plane, matrix, offset, order=1, mode="mirror")
        expected[0, :, :, channel] = ndimage.map_coordinates(pulled, [rows + dy, columns + dx], order=1, mode="reflect")
    assert differs_by_one_at_most(Corruption("elastic", severity)(images), cut(expected))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_files_and_sizes_are_those_of_pillow(severity: int) -> None:
    images = pictures(1)
    picture = Image.fromarray(images[0].numpy())
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=(80, 65, 58, 50, 40)[severity - 1])
    assert np.array_equal(Corruption("jpeg", severity)(images)[0].numpy(), np.asarray(Image.open(file)))
    side = (30, 28, 27, 24, 20)[severity - 1]
    small = picture.resize((side, side), Image.Resampling.BOX).resize((32, 32), Image.Resampling.BOX)
    assert np.array_equal(Corruption("pixelate", severity)(images)[0].numpy(), np.asarray(small))


def test_larger_images_lose_the_same_detail() -> None:
    small, large = pictures(1, 32), pictures(1, 64)
    for name in ("defocus blur", "motion blur"):
        lost = [float((Corruption(name, 5)(one).float() - one.float()).abs().mean()) for one in (small, large)]
        assert lost[1] == pytest.approx(lost[0], rel=0.5)
