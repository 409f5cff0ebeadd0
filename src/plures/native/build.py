"""Compile the library. Standard library only: the wheel's build hook runs this file before anything is installed."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
PER_LEVEL = ("kernels.c", "training.c")  # compiled once for each set of instructions
SOURCES = ("owned.h", "training.h", "vectors.h", "rows.h", "channels.h", "winograd.h", *PER_LEVEL, "library.c")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=fast", "-Wno-psabi")
LEVELS: dict[str, tuple[int, tuple[str, ...]]] = {  # sets of instructions, the best first: lanes, and flags
    "avx512": (16, ("-mavx512f", "-mfma")),
    "avx2": (8, ("-mavx2", "-mfma")),
    "portable": (4, ()),
}


class CannotCompileError(Exception):
    """There is no compiler, or the message is what it said."""


def levels_of(machine: str) -> tuple[str, ...]:
    """Return the levels that can be compiled for a machine."""
    return tuple(LEVELS) if machine.lower() in ("x86_64", "amd64") else ("portable",)


def key(levels: Sequence[str]) -> str:
    """Return a name for what the compiler would make here: other sources, flags or machines have other names."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update((HERE / source).read_bytes() + b"\0")
    digest.update(repr((FLAGS, [(level, LEVELS[level]) for level in levels])).encode())
    digest.update(f"{platform.system()} {platform.machine()}".encode())
    return digest.hexdigest()[:16]


def compile_into(folder: Path, levels: Sequence[str]) -> Path:
    """Compile the library into a folder, under a name that holds its checksum: `plures-<key>-<sha256>.so`.

    Written beside and renamed, so that two processes can do it at once.
    """
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise CannotCompileError("there is no C compiler (cc) on the PATH")
    with tempfile.TemporaryDirectory(dir=folder, prefix="compiling-") as temporary:

        def compiled(part: tuple[str, str]) -> str:
            level, source = part
            lanes, flags = LEVELS[level]
            names = (f"-DNAME=kernels_{level}", f"-DTRAINING=training_{level}", f'-DINSTRUCTIONS="{level}"')
            made = str(Path(temporary, f"{level}-{source}.o"))
            _run(compiler, *FLAGS, *flags, f"-DLANES={lanes}", *names, "-c", str(HERE / source), "-o", made)
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, product(levels, PER_LEVEL)))
        made = Path(temporary, "library")
        have = [f"-DHAVE_{level.upper()}" for level in levels]
        _run(compiler, *FLAGS, *have, "-shared", str(HERE / "library.c"), *objects, "-o", str(made), "-pthread", "-lm")
        target = folder / f"plures-{key(levels)}-{hashlib.sha256(made.read_bytes()).hexdigest()}.so"
        made.chmod(0o755)
        made.replace(target)
    return target


def find(folder: Path, levels: Sequence[str]) -> Path | None:
    """Find a compiled library whose content is what its name says; remove those that are damaged."""
    for path in sorted(folder.glob(f"plures-{key(levels)}-*.so")):
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() == path.stem.rpartition("-")[2]:
                return path
            path.unlink()
        except OSError:  # another process removed it, or it cannot be read: then it is not there
            continue
    return None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise CannotCompileError(f"{command[0]} failed: {said}")
