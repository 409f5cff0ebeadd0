"""Try plures with other versions of Python, torch and its dependencies, and write the table of docs/versions.md.

    python release/versions.py --python 3.11 --torch 2.6.0 --resolution lowest-direct
    python release/versions.py --all

Each line is an environment of its own, in build/versions, made by uv (`pip install uv`); torch comes with its
libraries for GPUs, several gigabytes. Tried are the promises of every method on one network, files of 0.1 and of today,
`fit`, calibration, and the commands train and export. Results are kept in release/versions.json.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "release" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
# What `--all` tries. The lowest dependencies have no wheels for newer Pythons.
ROWS = (
    ("3.11", "2.9.1", "lowest-direct"),
    ("3.11", "2.15.0", "highest"),
    ("3.12", "2.15.0", "highest"),
    ("3.13", "2.15.0", "highest"),
    ("3.14", "2.15.0", "highest"),
)
EXTRAS = "lab,serve,sklearn,export"
TOOLS = ("pytest>=8", "hypothesis>=6.100", "psutil")
FILES = ("contract", "last_version", "fit", "calibration")
COMMANDS = (
    ("train", "digits-smoke", "--method", "orthogonal-dropout", "--run", "RUN"),
    ("export", "RUN", "RUN/model.onnx"),
)
PYTEST = ("-p", "no:xdist", "-o", "addopts=-q --doctest-modules", "-o", "filterwarnings=default", "-m", "not slow")
# Without those that need transformers, peft or mapie.
CHOSEN = "not transformers and not resnet and not adapters and not named_inputs and not mapie"
SHOWN = ("numpy", "safetensors", "scikit-learn", "pillow", "pyarrow", "matplotlib", "fastapi", "onnxruntime")


def attempt(python: str, torch: str, resolution: str) -> dict[str, Any]:
    """Make an environment, run the tests in it, and say what became of them."""
    place = ROOT / "build" / "versions" / f"{Path(python).name}-{torch}-{resolution}"
    inside = place / "bin" / "python"
    environment = {
        **os.environ,
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_HTTP_TIMEOUT": "600",
        "OMP_NUM_THREADS": "1",
        "VIRTUAL_ENV": str(place),
    }
    environment.pop("PYTHONPATH", None)
    found: dict[str, Any] = {"python": python, "torch": torch, "dependencies": resolution}
    install = ["uv", "pip", "install", "--quiet", "--python", str(inside), "--resolution", resolution]
    for words in (
        ["uv", "venv", "--quiet", "--clear", "--python", python, str(place)],
        [*install, f"torch=={torch}", "--editable", f"{ROOT}[{EXTRAS}]", *TOOLS],
    ):
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return found | {"result": "not installed", "why": _last(done.stderr)}
    code = (
        "import json, platform, sys; from importlib.metadata import version; "
        "print(json.dumps([platform.python_version(), *map(version, sys.argv[1:])]))"
    )
    listed = subprocess.run([inside, "-c", code, *SHOWN], env=environment, capture_output=True, text=True, check=True)
    found["python"], *others = json.loads(listed.stdout)
    found["with"] = dict(zip(SHOWN, others, strict=True))
    tests = [f"tests/test_{name}.py" for name in FILES]
    words = [
        str(inside),
        "-m",
        "pytest",
        *PYTEST,
        "-k",
        "not transformers and not resnet and not adapters and not named_inputs and not mapie",
        *tests,
    ]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    (place / "output.txt").write_text(done.stdout + done.stderr)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    counts = lines[-1] if lines else _last(done.stderr)
    for command in COMMANDS:
        run = [word.replace("RUN", str(place / "run")) for word in command]
        told = subprocess.run(
            [inside, "-m", "plures", *run], env=environment, capture_output=True, text=True, check=False
        )
        if told.returncode:
            failed.append(f"plures {command[0]}: {_last(told.stderr)}")
    found |= {"result": "fails" if failed or done.returncode else "works", "why": "; ".join(failed[:3])}
    return found | {"tests": re.sub(r"(, \d+ deselected)?(, \d+ warnings?)? in [\d.]+s.*", "", counts)}


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[-3:])[:300]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = ["| Python | torch | dependencies | result | tests |", "|---|---|---|---|---|"]
    kinds = {"lowest-direct": "lowest declared", "highest": "newest"}
    for row in sorted(rows, key=lambda row: ([int(n) for n in re.findall(r"\d+", row["python"])], _key(row["torch"]))):
        tests = row.get("tests") or row.get("why", "")
        names = kinds.get(row["dependencies"], row["dependencies"])
        lines.append(f"| {row['python']} | {row['torch']} | {names} | {row['result']} | {tests} |")
    return "\n".join(lines)


def _key(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def main() -> int:
    """Try what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every row of the table")
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}", help="or its path")
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--resolution", choices=("lowest-direct", "highest"), default="highest")
    parser.add_argument("--page", action="store_true", help="only write the page")
    chosen = parser.parse_args()
    asked = ROWS if chosen.all else () if chosen.page else ((chosen.python, chosen.torch, chosen.resolution),)
    known = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    for row in asked:
        found = attempt(*row) | {"machine": f"{platform.system()} {platform.machine()}"}
        minor = ".".join(found["python"].split("/")[-1].removeprefix("python").split(".")[:2])
        known[f"{minor} {row[1]} {row[2]}"] = found
        print(json.dumps(found), flush=True)
        KEPT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    text = PAGE.read_text()
    before, _, after = text.partition("<!-- table -->\n")
    after = after.partition("<!-- end -->")[2]
    PAGE.write_text(f"{before}<!-- table -->\n\n{table(list(known.values()))}\n\n<!-- end -->{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
