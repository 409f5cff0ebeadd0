"""From an encoded picture to the pixels that a network is trained on."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from plures.errors import PluresError

if TYPE_CHECKING:
    from plures.lab.data.split import DataInfo

GREY_MODES = ("1", "L", "LA")
DEEP_MODES = ("I", "F")  # 16-bit, 32-bit and float pixels, which 8 bits cannot hold


def open_picture(encoded: bytes, origin: str) -> Image.Image:
    """Read the head of a picture: size and mode are known, pixels are not decoded yet.

    open_picture(Path("wren.jpg").read_bytes(), "wren.jpg").size
    """
    try:
        picture = Image.open(io.BytesIO(encoded))
    except Exception as error:  # Pillow's readers raise nearly anything on damaged bytes
        raise PluresError(
            f"{origin} is damaged or not a picture: remove it or save it again as PNG or JPEG."
        ) from error
    if picture.mode.startswith(DEEP_MODES):
        raise PluresError(f"{origin} has pixels of more than 8 bits (mode {picture.mode}): convert it to 8 bits.")
    return picture


def is_grey(picture: Image.Image) -> bool:
    """Tell whether a picture is stored without colour.

    is_grey(open_picture(encoded, "scan.png"))
    """
    return picture.mode in GREY_MODES


def decode(picture: Image.Image, channels: int, origin: str) -> Image.Image:
    """Decode the pixels: upright, on white where transparent, grey (1 channel) or RGB (3 channels).

    decode(open_picture(encoded, "wren.jpg"), 3, "wren.jpg")
    """
    try:
        ImageOps.exif_transpose(picture, in_place=True)
        if "A" in picture.getbands() or "transparency" in picture.info:
            layer = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        picture.load()
        mode = "L" if channels == 1 else "RGB"
        return picture if picture.mode == mode else picture.convert(mode)
    except Exception as error:  # as above: a truncated file shows itself only now
        raise PluresError(f"{origin} is damaged: remove it or save it again as PNG or JPEG.") from error


def to_square(picture: Image.Image, size: int) -> Image.Image:
    """Bring a picture to size x size.

        to_square(picture, 16)

    A square picture whose side is a multiple of `size` is averaged down, pixel block by pixel block. Otherwise the
    shorter side is resized to `size` (bicubic, antialiased) and the middle of the longer one is kept.
    """
    width, height = picture.size
    if width == height and width % size == 0:
        return picture.reduce(width // size) if width > size else picture
    shorter = min(width, height)
    picture = picture.resize(
        (max(size, round(width * size / shorter)), max(size, round(height * size / shorter))), Image.Resampling.BICUBIC
    )
    return centre(picture, size)


def centre(picture: Image.Image, size: int) -> Image.Image:
    """Keep the middle size x size pixels.

    centre(picture, 224)
    """
    left, top = (picture.width - size) // 2, (picture.height - size) // 2
    return picture.crop((left, top, left + size, top + size))


def to_pixels(picture: Image.Image) -> npt.NDArray[np.uint8]:
    """Return the pixels as [height, width, channels], also for a grey picture.

    to_pixels(picture).shape  # (32, 32, 3)
    """
    pixels = np.asarray(picture)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def read_image(path: str | Path, info: "DataInfo") -> npt.NDArray[np.uint8]:
    """Read a picture file the way the pictures of a data set were prepared: uint8 [size, size, channels].

        pixels = read_image("wren.jpg", data.info)
        images = data.normalise(torch.from_numpy(pixels)[None])  # what a network takes

    A data set opened with a size takes pictures of any size, others only their own; grey pictures become colour where
    the data set has colour, but not the other way round.
    """
    origin = str(path)
    try:
        encoded = Path(path).read_bytes()
    except OSError as error:
        raise PluresError(f"{origin} cannot be read ({error.strerror}).") from error
    picture = open_picture(encoded, origin)
    if info.channels == 1 and not is_grey(picture):
        raise PluresError(f"{origin} is a colour picture, but {info.name} holds grey ones: convert it to grey.")
    picture = decode(picture, info.channels, origin)
    if not info.resize and picture.size != (info.size, info.size):
        raise PluresError(
            f"{origin} has {picture.width} x {picture.height} pixels, but the pictures of {info.name} have "
            f"{info.size} x {info.size}: resize it, or open the data with a size."
        )
    return to_pixels(centre(to_square(picture, info.cache_size), info.size)).copy()
