"""Write what pages have from the figures of finished runs: the results, their pictures, the tables of the appendix.

The figures are made by `plures reproduce` and `plures compare` with `--out docs/results`, and by the scripts of this
folder. A page names a table where it wants one: a mark of its name, and one where it ends.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import claims
import concepts
import picture

DOCS = Path(__file__).parent.parent
PLACE = re.compile(r"<!-- table (\S+) -->\n.*?<!-- end -->", re.DOTALL)
MARK = re.compile(r"<!-- (claims|adapted|losses|sets|accuracies) -->\n.*?<!-- end -->", re.DOTALL)


def main() -> None:
    """Draw the pictures, and replace the text between the marks."""
    picture.main()
    concepts.main(claims.PICTURES)
    for page, text in written().items():
        page.write_text(text)


def pages() -> Iterator[Path]:
    """Return the pages that may have marks."""
    yield DOCS.parent / "README.md"
    yield DOCS / "results.md"
    yield DOCS / "guide/pretrained-network.md"
    yield DOCS / "guide/command-line.md"
    yield from sorted((DOCS / "evidence").glob("*.md"))


def written() -> dict[Path, str]:
    """Return the pages as they are now; their pictures are drawn."""
    parts = claims.generated()
    return {page: MARK.sub(lambda one: mark(one[1], parts[one[1]]), included(page.read_text())) for page in pages()}


def included(text: str) -> str:
    """Return a page with the tables as they are now."""
    return PLACE.sub(lambda one: mark(f"table {one[1]}", table(one[1])), text)


def mark(name: str, text: str) -> str:
    """Return some text between its marks."""
    return f"<!-- {name} -->\n{text.strip()}\n<!-- end -->"


def table(name: str) -> str:
    """Return a table, or the words that it was not made yet."""
    path = DOCS / "results" / f"{name}.md"
    return path.read_text() if path.is_file() else "Not measured yet.\n"


if __name__ == "__main__":
    main()
