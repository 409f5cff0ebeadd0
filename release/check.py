"""Install each wheel into an empty folder and run the README's example from there: `python release/check.py dist`."""

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
NATIVE, OFF, NO_COMPILER = "native library of the wheel", "turned off by PLURES_NATIVE=0", "there is no C compiler"


def example() -> str:
    """Return the first Python block of the README."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1].replace("epochs=60", "epochs=3")  # it must run, not learn


def run(place: Path, expected: str, *wrapper: str, **settings: str) -> None:
    """Run the example with a home of its own, and check what became of the native library."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(place), "HOME": folder, "XDG_CACHE_HOME": folder}
        environment |= {"OMP_NUM_THREADS": "1", **settings}
        code = example() + REPORT.replace("PLACE", repr(str(place)))
        command = [*wrapper, sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or expected not in done.stdout:
        sys.exit(f"{place.name}: expected {expected!r}:\n{done.stdout}{done.stderr}")
    print(f"{place.name} {' '.join(wrapper[:1])} {settings}: {done.stdout.splitlines()[-1]}")


def check(wheel: Path, folder: Path) -> None:
    """Try a wheel as it is, without its library, and in a folder that cannot be written to."""
    place = folder / wheel.stem
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", place, wheel], check=True)
    pure = "none-any" in wheel.name
    without = {"CC": "no-such-compiler"}
    expected = NO_COMPILER if pure else NATIVE
    run(place, expected, **without)
    run(place, OFF, PLURES_NATIVE="0")
    for path in (place, *place.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    # Root writes where it likes, unless this right is dropped.
    root = os.geteuid() == 0
    wrapper = ["setpriv", "--bounding-set=-dac_override,-fowner", "--inh-caps=-dac_override,-fowner"] if root else []
    run(place, expected, *wrapper, **without)
    for path in (place, *place.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)


def main(dist: Path) -> None:
    """Check every wheel that can run here."""
    machine = os.uname().machine
    wheels = [one for one in sorted(dist.glob("*.whl")) if "none-any" in one.name or one.stem.endswith(machine)]
    if not wheels:
        sys.exit(f"{dist} has no wheel for this machine; run make dist first")
    folder = Path(tempfile.mkdtemp())
    try:
        for wheel in wheels:
            check(wheel, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
