"""Put the tables that `plures reproduce` wrote into docs/results/ where docs/results.md names them."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent
PLACE = re.compile(r"<!-- table (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def main() -> None:
    """Replace what stands between the marks."""
    page = DOCS / "results.md"
    page.write_text(included(page.read_text()))


def included(text: str) -> str:
    """Return the page with the tables as they are now."""
    return PLACE.sub(lambda found: f"<!-- table {found[1]} -->\n{table(found[1])}<!-- end -->", text)


def table(name: str) -> str:
    """Read a table that was made."""
    return (DOCS / "results" / f"{name}.md").read_text()


if __name__ == "__main__":
    main()
