"""Whose code a run folder may name: a network or method given as module:name is imported, which runs it.

A run that was trained here with such code is signed with a key of the user's own. Without a signature by the same
user, the folder may come from anybody, and its code is run only on request.
"""

import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from plures.errors import PluresError
from plures.lab.methods import is_code


def sign(model: str, method: str) -> str | None:
    """Sign the code of a run as the user's own; None where there is no code, or no place for a key."""
    key = _key(make=True) if is_code(model) or is_code(method) else None
    return None if key is None else _signature(key, model, method)


def check(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a run whose network or method is code that this user has not trained with."""
    made = config.get("made") or {}
    model, method = str(config["recipe"].get("model")), str(made.get("method", ""))
    code = [name for name in (model, method) if is_code(name)]
    key = _key(make=False) if code else None
    own = key is not None and hmac.compare_digest(_signature(key, model, method), str(made.get("signature")))
    if code and not own:
        raise PluresError(
            f"{folder} was not trained by you, and to open it runs the code {' and '.join(code)}: look at that code, "
            "and say --trust-code (in Python trust_code=True) if you trust it"
        )


def _signature(key: bytes, model: str, method: str) -> str:
    return hmac.digest(key, json.dumps([model, method]).encode(), "sha256").hex()[:32]


def _key(*, make: bool) -> bytes | None:
    """Read the user's key; it is made when it is needed for the first time."""
    path = Path(platformdirs.user_data_dir("plures")) / "key"
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(os.urandom(32))
        return path.read_bytes() or None
    except OSError:
        return None
