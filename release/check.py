"""Install what is in dist into empty folders and run the README's example there: `python release/check.py dist`."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPORT = """
from plures.native import library
assert plures.__file__.startswith(PLACE), plures.__file__
assert prediction.label.shape == (32,)
reason = library.why_unavailable()
print(reason or "native library of " + ("the wheel" if str(library.load().path).startswith(PLACE) else "the cache"))
"""
NATIVE, COMPILED = "native library of the wheel", "native library of the cache"
OFF, NO_COMPILER, NO_HOME = "turned off by PLURES_NATIVE=0", "there is no C compiler", "no folder to compile"
WITHOUT = {"CC": "no-such-compiler"}
# Root becomes a user who may read every file, so also the Python that runs this, and write to none.
STRANGER = [
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--bounding-set=-all,+dac_read_search", "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"),
]


def example() -> str:
    """Return the first Python block of the README."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1].replace("epochs=60", "epochs=3")  # it must run, not learn


def run(place: Path, expected: str, *, stranger: bool = False, **settings: str) -> None:
    """Run the example with a home of its own, and check what became of the native library.

    A stranger is another user, and has a home that cannot be written to.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(place), "HOME": str(place) if stranger else folder}
        environment |= {"OMP_NUM_THREADS": "1", **settings}
        environment.pop("XDG_CACHE_HOME", None)
        Path(folder).chmod(0o777 if stranger else 0o700)  # the example saves a file
        code = example() + REPORT.replace("PLACE", repr(str(place)))
        wrapper = STRANGER if stranger and os.geteuid() == 0 else []
        command = [*wrapper, sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or expected not in done.stdout:
        sys.exit(f"{place.name}: expected {expected!r}:\n{done.stdout}{done.stderr}")
    who = ["as another user who can write nothing"] if stranger else []
    print(", ".join([place.name, *who, *map("=".join, settings.items())]), done.stdout.splitlines()[-1], sep=": ")


def installed(artefact: Path, place: Path, **settings: str) -> Path:
    """Install a wheel or an sdist alone into a folder; the builder of an sdist comes from the package index."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    offline = ["--no-index"] if artefact.suffix == ".whl" else []
    subprocess.run([*pip, *offline, "--target", place, artefact], check=True, env={**os.environ, **settings})
    return place


def check(place: Path, *, native: bool) -> None:
    """Try an installation with and without a compiler, without its library, and as another user."""
    run(place, NATIVE if native else COMPILED)
    run(place, NATIVE if native else NO_COMPILER, **WITHOUT)
    run(place, OFF, PLURES_NATIVE="0")
    for path in (place, *place.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    run(place, NATIVE if native else NO_HOME, stranger=True)
    for path in (place, *place.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)


def main(dist: Path) -> None:
    """Check every wheel that can run here, and the sdist."""
    machine = os.uname().machine
    wheels = [one for one in sorted(dist.glob("*.whl")) if "none-any" in one.name or one.stem.endswith(machine)]
    if not wheels:
        sys.exit(f"{dist} has no wheel for this machine; run make dist first")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        for wheel in wheels:
            check(installed(wheel, folder / wheel.stem), native="none-any" not in wheel.name)
        for sdist in dist.glob("*.tar.gz"):
            check(installed(sdist, folder / sdist.name), native=True)
            run(installed(sdist, folder / f"{sdist.name}, no compiler", **WITHOUT), NO_COMPILER, **WITHOUT)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
