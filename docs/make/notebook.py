"""Run a notebook of docs/notebooks from top to bottom, without Jupyter, and keep what it prints.

    python docs/make/notebook.py text --data DATA
    python docs/make/notebook.py images --data DATA

The output goes to docs/results/notebook-NAME.txt. The first cell of each notebook says what it needs.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plures.lab.costs import machine

DOCS = Path(__file__).parent.parent


class Both(io.StringIO):
    """Keep what is printed, and show it."""

    def __init__(self, shown: Any) -> None:
        super().__init__()
        self.shown = shown

    def write(self, text: str) -> int:
        """Write to both."""
        self.shown.write(text)
        self.shown.flush()
        return super().write(text)


def main() -> None:
    """Run a notebook."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("text", "images"))
    parser.add_argument("--data", type=Path, required=True)
    asked = parser.parse_args()
    os.environ["DATA"] = str(asked.data.resolve())
    begun, before = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        printed = run(DOCS / "notebooks" / f"pretrained-{asked.name}.ipynb")
    minutes, busy = (time.monotonic() - begun) / 60, (time.process_time() - before) / 60
    told = ", ".join(f"{key} {value}" for key, value in machine().items())
    taken = f"{minutes:.1f} minutes, {busy:.1f} of processor time"
    note = f"\npython docs/make/notebook.py {asked.name} --data DATA: {taken}; {told}\n"
    print(note)
    (DOCS / "results" / f"notebook-{asked.name}.txt").write_text(printed + note)


def run(path: Path) -> str:
    """Run the cells of a notebook in order, and return what they print."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(Both(sys.stdout)) as printed:
        for number, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
    return printed.getvalue()


if __name__ == "__main__":
    main()
