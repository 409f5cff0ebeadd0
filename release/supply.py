"""What plures is made of: hashes, licences and a bill of materials, by `make supply`.

    python release/supply.py

- release/requirements.txt: every package that tests and site need, at the versions of constraints.txt, with the hashes
  of its files. Without torch and what comes with it: its CPU files are on an index of their own, with other hashes.
- release/licences.md: the licences of what a user installs, read from the packages in this environment.
- build/sbom.json: the bill of materials of this environment, CycloneDX.
"""

import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
OF_TORCH = ("nvidia-", "cuda-", "triton")
EXTRAS = ("lab", "export", "serve", "sklearn")
PYTHON = "3.11.7"  # the oldest that all pinned versions support


def hashed(tools: Path) -> str:
    """Return the pinned requirements with hashes."""
    extras = [word for extra in (*EXTRAS, "docs", "dev") for word in ("--extra", extra)]
    with tempfile.TemporaryDirectory() as folder:
        builder = Path(folder) / "builder.in"
        builder.write_text("hatchling\n")
        options = ["--universal", "--python-version", PYTHON, "--generate-hashes", "--no-annotate", "--no-header"]
        options += ["--no-emit-index-url", "--no-emit-package", "torch", "--constraint", "constraints.txt"]
        words = [str(tools / "uv"), "pip", "compile", "--quiet", *options, *extras, "pyproject.toml", str(builder)]
        text = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    blocks = re.split(r"\n(?=\S)", text.strip())
    kept = [block for block in blocks if not block.startswith(OF_TORCH)]
    return "# Made by `make supply`; without torch. Install with --no-deps --require-hashes.\n" + "\n".join(kept) + "\n"


def needed() -> dict[str, set[str]]:
    """Map each package that a user installs to the parts of plures that need it."""
    found: dict[str, set[str]] = {}

    def walk(name: str, extras: frozenset[str], part: str, seen: set[tuple[str, frozenset[str]]]) -> None:
        if (name, extras) in seen:
            return
        seen.add((name, extras))
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:  # not for this computer
            return
        if name != "plures":
            found.setdefault(name, set()).add(part)
        for one in map(Requirement, requirements):
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                walk(canonicalize_name(one.name), frozenset(one.extras), part, seen)

    for part in ("", *EXTRAS):
        walk("plures", frozenset({part} if part else ()), part or "plures", set())
    return found


def licence(name: str) -> str:
    """Return the licence that a package declares."""
    about = distribution(name).metadata
    kinds = [one.rpartition(" :: ")[2] for one in about.get_all("Classifier") or [] if one.startswith("License :: OSI")]
    short = (about.get("License") or "").partition("\n")[0]
    if not re.fullmatch(r"[A-Za-z0-9][\w .+-]{2,40}", short):  # the beginning of the text itself
        short = ""
    return about.get("License-Expression") or short or ", ".join(kinds) or "in its files"


def licences() -> str:
    """Return a table of the licences."""
    lines = [
        "# Licences of what plures needs",
        "",
        "Made by `make supply` from the packages themselves, on Linux with the CPU version of torch. The wheels of",
        "plures contain none of them: each is installed from its own project. plures itself is under Apache-2.0.",
        "",
        "| package | version | licence | needed by |",
        "|---|---|---|---|",
    ]
    for name, parts in sorted(needed().items()):
        by = "plures" if "plures" in parts else ", ".join(f"[{part}]" for part in EXTRAS if part in parts)
        lines.append(f"| {name} | {distribution(name).version} | {licence(name)} | {by} |")
    return "\n".join(lines) + "\n"


def main(tools: Path) -> None:
    """Write all three."""
    (ROOT / "release" / "requirements.txt").write_text(hashed(tools))
    (ROOT / "release" / "licences.md").write_text(licences())
    (ROOT / "build").mkdir(exist_ok=True)
    words = ["environment", sys.executable, "--pyproject", "pyproject.toml", "--of", "JSON", "-o", "build/sbom.json"]
    subprocess.run([str(tools / "cyclonedx-py"), *words], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/supply-venv/bin"))
