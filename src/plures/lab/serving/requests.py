"""Read the images and options of a request, within limits, and refuse bad requests."""

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from plures.checks import number, whole_number
from plures.errors import PluresError, visible
from plures.lab.data.images import TooLarge, centre, decode, open_image, to_pixels, to_square
from plures.lab.data.split import DataInfo
from plures.lab.evaluation.predict import Wanted


@dataclass(frozen=True)
class Limits:
    """Limit the memory, the time and the number of waiting images that requests may cost."""

    bytes: int = 16 * 2**20  # per request, else 413
    pixels: int = 40_000_000  # per image, checked before it is decoded, else 413
    images: int = 64  # per request, else 413
    queue: int = 512  # images that wait for the network, else 503
    batch: int = 64  # images in the network at once
    wait: float = 0.004  # seconds that the first image of a batch waits for others
    read: float = 20.0  # seconds that a client may take to send the body of its request, else 408

    def __post_init__(self) -> None:
        for name in ("bytes", "pixels", "images", "queue", "batch"):
            whole_number(name, getattr(self, name))
        number("wait", self.wait, "0 seconds or more", above=-1e-9)
        number("read", self.read, "a number of seconds above 0", above=0)


class Refused(PluresError):  # noqa: N818 (it is an answer)
    """End a request with a status and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Options(BaseModel, extra="forbid"):
    """The options of a request, in its form, its JSON or its address."""

    abstain_below: float | None = Field(None, ge=0, le=1, description="no label if the confidence is lower")
    coverage: float | None = Field(
        None, gt=0, lt=1, description="the probability that the set `classes` contains the true class"
    )
    risk: float | None = Field(None, gt=0, lt=1, description="the largest share of labels that may be wrong")


class FormBody(Options):
    """A form with image files."""

    files: list[bytes] = []


class JSONBody(Options):
    """Images as base64 or data URLs, in JSON."""

    images: list[str]


HOW = 'send multipart/form-data with files, or application/json {"images": [base64, ...]}'
DESCRIPTION = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": FormBody.model_json_schema()},
            "application/json": {"schema": JSONBody.model_json_schema()},
        },
    },
    "responses": {
        "408": {"description": "the request took too long to arrive"},
        "413": {"description": "too many bytes, pixels or images"},
        "415": {"description": "neither a form nor JSON"},
        "422": {"description": "an image or option cannot be used; images that can be read are still predicted"},
        "503": {"description": "too many images are waiting"},
    },
}


class Upload(NamedTuple):
    """An encoded image of a request, with the name that the client gave it."""

    name: str
    encoded: bytes


async def read_request(request: Request, limits: Limits) -> tuple[list[Upload], Wanted]:
    """Return the images and options of a request."""
    body = await _body(request, limits)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        uploads, fields = await _from_form(request, body, limits)
    elif kind == "application/json":
        uploads, fields = _from_json(body)
    else:
        raise Refused(415, f"the content type is {visible(kind[:100])!r}: {HOW}")
    if not uploads:
        raise Refused(422, f"there is no image in this request: {HOW}")
    if len(uploads) > limits.images:
        raise Refused(413, f"{len(uploads)} images are more than {limits.images} per request: send fewer")
    fields |= request.query_params
    try:
        options = Options.model_validate({name: value for name, value in fields.items() if value != ""})
    except ValidationError as error:
        raise _refusal(error) from error
    return uploads, Wanted(**options.model_dump())


def prepare(upload: Upload, info: DataInfo, limits: Limits) -> npt.NDArray[np.uint8]:
    """Decode an image and prepare it like the images of a data set."""
    opened = open_image(upload.encoded, upload.name)
    if opened.width * opened.height > limits.pixels:
        most = f"images may have at most {limits.pixels:,} pixels"
        raise TooLarge(f"{upload.name} is too large: {most}; make it smaller")
    decoded = decode(opened, info.channels, upload.name)
    return to_pixels(centre(to_square(decoded, info.cache_size), info.size)).copy()


async def _body(request: Request, limits: Limits) -> bytes:
    too_long = Refused(413, f"this request has more than {limits.bytes:,} bytes: send fewer or smaller images")
    if int(request.headers.get("content-length", "0")) > limits.bytes:  # the protocol has checked that it is a number
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


async def _from_form(request: Request, body: bytes, limits: Limits) -> tuple[list[Upload], dict[str, Any]]:
    async def stream() -> AsyncIterator[bytes]:
        yield body

    boundary = parse_options_header(request.headers["content-type"])[1].get(b"boundary", b"")
    end = b"--" + boundary + b"--"
    if not boundary or not body[-len(end) - 64 :].rstrip().endswith(end):
        raise Refused(422, f"the form is cut short or has no boundary: {HOW}")
    parser = MultiPartParser(request.headers, stream(), max_files=limits.images, max_fields=8)  # type: ignore[arg-type]
    try:
        form = await parser.parse()
    except MultiPartException as error:
        status = 413 if error.message.startswith("Too many") else 422
        raise Refused(status, f"the form cannot be read: {error.message}") from error
    except (KeyError, ValueError, UnicodeDecodeError) as error:  # a name that is not text
        raise Refused(422, f"the form cannot be read: {HOW}") from error
    uploads, fields = [], {}
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                uploads.append(Upload(visible((value.filename or "image")[:200]), await value.read()))
            else:
                fields[name] = value
    finally:
        await form.close()
    return uploads, fields


def _from_json(body: bytes) -> tuple[list[Upload], dict[str, Any]]:
    try:
        given = JSONBody.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from error
    uploads = []
    for place, image in enumerate(given.images):
        try:
            encoded = base64.b64decode(image.partition(",")[2] if image.startswith("data:") else image, validate=True)
        except (binascii.Error, ValueError) as error:
            raise Refused(422, f"image {place} is not base64: {HOW}") from error
        uploads.append(Upload(f"image {place}", encoded))
    return uploads, given.model_dump(exclude={"images"}, exclude_none=True)


def _refusal(error: ValidationError) -> Refused:
    """Return the first problem that pydantic found, as one sentence."""
    first = error.errors(include_url=False)[0]
    given = visible(repr(first["input"])[:50])
    where = visible(".".join(map(str, first["loc"]))[:50]) or "the request"
    what = first["msg"][:1].lower() + first["msg"][1:200]
    return Refused(422, f"{where} = {given}: {what}; {HOW}")
