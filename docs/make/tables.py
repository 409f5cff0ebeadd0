"""Put the tables that were written into docs/results/ where docs/results.md names them.

They are made by `plures reproduce` and `plures compare` with `--out docs/results`, and by the scripts of this folder.
"""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent
PLACE = re.compile(r"<!-- table (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def main() -> None:
    """Replace the text between the marks."""
    page = DOCS / "results.md"
    page.write_text(included(page.read_text()))


def included(text: str) -> str:
    """Return the page with the tables as they are now."""
    return PLACE.sub(lambda found: f"<!-- table {found[1]} -->\n{table(found[1])}<!-- end -->", text)


def table(name: str) -> str:
    """Return a table, or the words that it was not made yet."""
    path = DOCS / "results" / f"{name}.md"
    return path.read_text() if path.is_file() else "Not measured yet.\n"


if __name__ == "__main__":
    main()
