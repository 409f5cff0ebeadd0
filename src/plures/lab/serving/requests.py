"""Read the images of a request, within limits, and refuse bad requests."""

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from plures.checks import number, whole_number
from plures.errors import visible
from plures.lab.data.pictures import TooLarge, centre, decode, open_picture, to_pixels, to_square
from plures.lab.data.split import DataInfo


@dataclass(frozen=True)
class Limits:
    """Bound what requests may cost: memory, time, and how many wait."""

    bytes: int = 16 * 2**20  # of a request; what is longer is answered with 413
    pixels: int = 40_000_000  # of a picture, before it is decoded: 413
    pictures: int = 64  # of a request: 413
    queue: int = 512  # pictures that wait for the network: 503 beyond
    batch: int = 64  # pictures in the network at once
    wait: float = 0.004  # seconds that the first picture of a batch waits for others
    read: float = 20.0  # seconds that a client may take to send its request: 408

    def __post_init__(self) -> None:
        for name in ("bytes", "pixels", "pictures", "queue", "batch"):
            whole_number(name, getattr(self, name))
        number("wait", self.wait, "0 seconds or more", above=-1e-9)
        number("read", self.read, "a number of seconds above 0", above=0)


class Refused(Exception):  # noqa: N818 (it is an answer)
    """End a request with a status and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


HOW = 'send multipart/form-data with files, or application/json {"images": [base64, ...]}'


class Picture(NamedTuple):
    """An encoded picture of a request, with what the client calls it."""

    name: str
    encoded: bytes


class Asked(NamedTuple):
    """What a request asks: pictures, and below which confidence it wants no label."""

    pictures: list[Picture]
    abstain_below: float | None


async def read_request(request: Request, limits: Limits) -> Asked:
    """Read the pictures of a request, within the limits.

    asked = await read_request(request, Limits())
    """
    body = await _body(request, limits)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        pictures, abstain = await _from_form(request, body, limits)
    elif kind == "application/json":
        pictures, abstain = _from_json(body)
    else:
        raise Refused(415, f"the content type is {visible(kind[:100])!r}: {HOW}")
    if not pictures:
        raise Refused(422, f"there is no image in this request: {HOW}")
    if len(pictures) > limits.pictures:
        raise Refused(413, f"{len(pictures)} images are more than {limits.pictures} per request: send fewer")
    return Asked(pictures, _confidence(request.query_params.get("abstain_below", abstain)))


def prepare(picture: Picture, info: DataInfo, limits: Limits) -> npt.NDArray[np.uint8]:
    """Decode a picture and prepare it as the pictures of a data set were, or say why that cannot be."""
    opened = open_picture(picture.encoded, picture.name)
    if opened.width * opened.height > limits.pixels:
        most = f"images may have at most {limits.pixels:,} pixels"
        raise TooLarge(f"{picture.name} is too large: {most}; make it smaller")
    decoded = decode(opened, info.channels, picture.name)
    return to_pixels(centre(to_square(decoded, info.cache_size), info.size)).copy()


async def _body(request: Request, limits: Limits) -> bytes:
    too_long = Refused(413, f"this request has more than {limits.bytes:,} bytes: send fewer or smaller images")
    if request.headers.get("content-length", "0").isdigit() is False:
        raise Refused(400, "the content length is not a number")
    if int(request.headers.get("content-length", "0")) > limits.bytes:
        raise too_long
    parts, length = [], 0
    try:
        async with asyncio.timeout(limits.read):
            async for part in request.stream():
                length += len(part)
                if length > limits.bytes:
                    raise too_long
                parts.append(part)
    except TimeoutError:
        raise Refused(408, f"the request was not complete after {limits.read:g} seconds") from None
    return b"".join(parts)


async def _from_form(request: Request, body: bytes, limits: Limits) -> tuple[list[Picture], Any]:
    async def stream() -> AsyncIterator[bytes]:
        yield body

    boundary = parse_options_header(request.headers["content-type"])[1].get(b"boundary", b"")
    end = b"--" + boundary + b"--"
    if not boundary or not body[-len(end) - 64 :].rstrip().endswith(end):
        raise Refused(422, f"the form is cut short or has no boundary: {HOW}")
    parser = MultiPartParser(request.headers, stream(), max_files=limits.pictures, max_fields=8)  # type: ignore[arg-type]
    try:
        form = await parser.parse()
    except MultiPartException as error:
        status = 413 if error.message.startswith("Too many") else 422
        raise Refused(status, f"the form cannot be read: {error.message}") from error
    except (KeyError, ValueError, UnicodeDecodeError) as error:  # no boundary, or a name that is no text
        raise Refused(422, f"the form cannot be read: {HOW}") from error
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        pictures = [Picture(visible((file.filename or "picture")[:200]), await file.read()) for file in files]
    finally:
        await form.close()
    return pictures, form.get("abstain_below")


def _from_json(body: bytes) -> tuple[list[Picture], Any]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(422, f"this is not JSON: {HOW}") from error
    images = asked.get("images") if isinstance(asked, dict) else None
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise Refused(422, f"the JSON has no list of strings `images`: {HOW}")
    pictures = []
    for place, image in enumerate(images):
        try:
            encoded = base64.b64decode(image.partition(",")[2] if image.startswith("data:") else image, validate=True)
        except (binascii.Error, ValueError) as error:
            raise Refused(422, f"image {place} is not base64: {HOW}") from error
        pictures.append(Picture(f"image {place}", encoded))
    return pictures, asked.get("abstain_below")


def _confidence(given: Any) -> float | None:
    if given is None or given == "":
        return None
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= 1:
        raise Refused(422, f"abstain_below={visible(str(given)[:50])!r}; use a number from 0 to 1")
    return value
