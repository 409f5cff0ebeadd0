"""Read the images and options of a request, within limits, and refuse bad requests."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from plures.errors import PluresError, visible
from plures.lab.data.images import decode, fitted, open_image
from plures.lab.data.split import DataInfo
from plures.lab.evaluation.predict import Wanted
from plures.lab.serving import Limits


class Refused(PluresError):  # noqa: N818 (it is an answer)
    """End a request with a status and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


HOW = "send multipart/form-data with image files"
FILES = {"files": {"type": "array", "items": {"type": "string", "format": "binary"}}}
OPTIONS = msgspec.json.schema_components([Wanted])[1]["Wanted"]["properties"]
FORM = {"type": "object", "properties": FILES | OPTIONS}
DESCRIPTION = {
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}},
    "responses": {
        "408": {"description": "the request took too long to arrive"},
        "413": {"description": "too many bytes, pixels or images"},
        "415": {"description": "not a form"},
        "422": {"description": "an image or option cannot be used; images that can be read are still predicted"},
        "503": {"description": "too many images are waiting"},
    },
}


Uploads = list[tuple[str, bytes]]  # encoded images, with the names that the client gave them


async def read_request(request: Request, limits: Limits) -> tuple[Uploads, Wanted]:
    """Return the images and options of a request."""
    body = await _body(request, limits)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise Refused(415, f"the content type is {visible(kind[:100])!r}: {HOW}")
    uploads, fields = await _from_form(request, body, limits)
    if not uploads:
        raise Refused(422, f"there is no image in this request: {HOW}")
    if len(uploads) > limits.max_images:
        raise Refused(413, f"{len(uploads)} images are more than {limits.max_images} per request: send fewer")
    fields |= request.query_params
    try:
        given = {name: value for name, value in fields.items() if value != ""}
        return uploads, msgspec.convert(given, Wanted, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(422, f"the options are wrong: {visible(str(error)[:200])}; {HOW}") from error


def prepare(name: str, encoded: bytes, info: DataInfo) -> npt.NDArray[np.uint8] | PluresError:
    """Decode an image and prepare it like the images of a data set, or return the reason why not."""
    try:
        return fitted(decode(open_image(encoded, name), info.channels, name), info)
    except PluresError as error:
        return error


async def _body(request: Request, limits: Limits) -> bytes:
    too_long = Refused(413, f"this request has more than {limits.max_bytes:,} bytes: send fewer or smaller images")
    if int(request.headers.get("content-length", "0")) > limits.max_bytes:  # uvicorn has checked that it is a number
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.read):
            async for part in request.stream():
                body += part
                if len(body) > limits.max_bytes:
                    raise too_long
    except TimeoutError:
        raise Refused(408, f"the request was not complete after {limits.read:g} seconds") from None
    return bytes(body)


async def _from_form(request: Request, body: bytes, limits: Limits) -> tuple[Uploads, dict[str, Any]]:
    async def stream() -> AsyncIterator[bytes]:
        yield body

    boundary = parse_options_header(request.headers["content-type"])[1].get(b"boundary", b"")
    end = b"--" + boundary + b"--"
    if not boundary or not body[-len(end) - 64 :].rstrip().endswith(end):
        raise Refused(422, f"the form is cut short or has no boundary: {HOW}")
    parser = MultiPartParser(request.headers, stream(), max_files=limits.max_images, max_fields=8)  # type: ignore[arg-type]
    try:
        form = await parser.parse()
    except MultiPartException as error:
        status = 413 if error.message.startswith("Too many") else 422
        raise Refused(status, f"the form cannot be read: {error.message}") from error
    except (KeyError, ValueError) as error:  # a name that is not text
        raise Refused(422, f"the form cannot be read: {HOW}") from error
    uploads, fields = [], {}
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                uploads.append((visible((value.filename or "image")[:200]), await value.read()))
            else:
                fields[name] = value
    finally:
        await form.close()
    return uploads, fields
