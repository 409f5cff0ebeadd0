"""Find, compile and load the library: from the wheel, else from the user's cache, else report why not."""

import ctypes
import os
import platform
import stat
import sys
from functools import cache
from pathlib import Path
from typing import cast

import torch

from plures.errors import PluresError
from plures.native import build
from plures.native.structures import STRUCTURES

INTERFACE = 11  # PLURES_INTERFACE of owned.h


class UnavailableError(PluresError):
    """The native library is unavailable; the message says why, and what to do."""


class Library:
    """The loaded library, with the kernels for one set of instructions."""

    def __init__(self, path: Path, level: str | None = None) -> None:
        self.path = path
        self.functions = functions = ctypes.CDLL(str(path))
        if functions.plures_interface() != INTERFACE:
            raise UnavailableError(f"{path} has another interface; delete it")
        functions.plures_size.restype = ctypes.c_int64
        for place, structure in enumerate(STRUCTURES):
            if functions.plures_size(place) != ctypes.sizeof(structure):
                raise UnavailableError(f"{path} has another layout of {structure.__name__}; delete it")
        functions.plures_kernels.restype = functions.plures_instructions.restype = ctypes.c_void_p
        functions.plures_instructions.restype = ctypes.c_char_p
        functions.plures_kernels.argtypes = [ctypes.c_char_p]
        kernels = functions.plures_kernels(None if level is None else level.encode())
        if kernels is None:
            raise UnavailableError(f"{path} has no kernels for {level or 'this CPU'}")
        self.kernels = ctypes.c_void_p(kernels)
        self.lanes = int(functions.plures_lanes(self.kernels))
        halves = self.lanes == 16 and functions.plures_kernels(b"avx2") is not None
        self.layouts = (1, 8, 16) if halves else (1, self.lanes)  # numbers of images that may lie side by side
        self.instructions = functions.plures_instructions(self.kernels).decode()
        shared = getattr(ctypes.CDLL(None), "GOMP_parallel", None)  # of the OpenMP that torch has loaded
        functions.plures_use_threads(None if shared is None else ctypes.cast(shared, ctypes.c_void_p))

    def run(self, function: str, *given: object) -> None:
        """Call a function of the library with as many threads as torch has."""
        passed = [ctypes.byref(one) if isinstance(one, ctypes.Structure) else one for one in given]
        if getattr(self.functions, function)(*passed, torch.get_num_threads()):
            raise MemoryError("no memory is left for the native library")


def load() -> Library:
    """Load the library, and compile it first if needed; raise `UnavailableError` if there is no way to do so."""
    found = _load_once(os.environ.get("PLURES_NATIVE", ""))
    if isinstance(found, UnavailableError):
        raise UnavailableError(str(found))  # a new one: the old one holds the traceback of another call
    return found


def why_unavailable() -> str | None:
    """Return why the library is unavailable, or None if it is available."""
    found = _load_once(os.environ.get("PLURES_NATIVE", ""))
    return str(found) if isinstance(found, UnavailableError) else None


@cache
def _load_once(setting: str) -> Library | UnavailableError:
    if setting == "0":
        return UnavailableError("the native library is turned off by PLURES_NATIVE=0; unset it")
    if setting not in ("", "1", *build.LEVELS):
        return UnavailableError(f"PLURES_NATIVE={setting!r}; use 0, 1 or one of {', '.join(build.LEVELS)}")
    if sys.platform == "win32":
        return UnavailableError("the native library supports Linux and macOS; use the unfolded engine")
    level = setting if setting in build.LEVELS else None
    try:
        packaged = build.find(build.HERE, build.levels_of(platform.machine()))
        if packaged is not None:
            return Library(packaged, level)
        folder = cache_folder()
        levels = [level or _level_here(folder)]
        levels += ["avx2"] if levels == ["avx512"] else []  # for half as many images as a vector holds
        return Library(build.find(folder, levels) or build.compile_into(folder, levels), level)
    except build.CannotCompileError as error:
        return UnavailableError(f"the native library cannot be compiled: {error}; install a C compiler")
    except OSError as error:
        return UnavailableError(f"the native library cannot be loaded: {error}")
    except UnavailableError as error:
        return error


def cache_folder() -> Path:
    """Return the folder of the user's cache for compiled libraries; refuse one that other users can write to."""
    usual = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or usual).expanduser().resolve() / "plures" / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # a home that cannot be written to, or none, as in some containers
        raise UnavailableError(
            f"there is no folder to compile the native library into ({error}): "
            "set XDG_CACHE_HOME to a folder of your own"
        ) from error
    refuse_if_others_write(folder)
    return folder


def refuse_if_others_write(folder: Path) -> None:
    """Refuse a folder in which another user could put a library for us to load."""
    me = os.geteuid()
    for path in (folder, *folder.parents):
        found = path.stat()
        owned = found.st_uid == me or (found.st_uid == 0 and path != folder)
        sticky = found.st_mode & stat.S_ISVTX and path != folder
        if not owned or (found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky):
            raise UnavailableError(
                f"other users can write to {path}, so no library is loaded from {folder}: "
                "set XDG_CACHE_HOME to a folder of your own"
            )


def _level_here(folder: Path) -> str:
    """Return the best set of instructions of this CPU, which a library without kernels finds out."""
    if build.levels_of(platform.machine()) == ("portable",):
        return "portable"
    found = ctypes.CDLL(str(build.find(folder, []) or build.compile_into(folder, [])))
    found.plures_level.restype = ctypes.c_char_p
    return cast(bytes, found.plures_level()).decode()
