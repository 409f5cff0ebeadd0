"""Put the tables that `plures reproduce` wrote into docs/results/ where docs/results.md names them."""

import re
from pathlib import Path

DOCS = Path(__file__).parent
PLACE = re.compile(r"<!-- table (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def main() -> None:
    """Replace what stands between the marks."""
    page = DOCS / "results.md"
    page.write_text(included(page.read_text()))


def included(text: str) -> str:
    """Return the page with the tables as they are now."""
    return PLACE.sub(
        lambda found: f"<!-- table {found[1]} -->\n{(DOCS / 'results' / f'{found[1]}.md').read_text()}<!-- end -->", text
    )


if __name__ == "__main__":
    main()
