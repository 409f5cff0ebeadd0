"""The pages in docs/ say what the commands found."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tables_of_the_results_are_those_that_were_made() -> None:
    page = (ROOT / "docs/results.md").read_text()
    places = re.findall(r"<!-- table (\S+) -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert places
    for name, table in places:
        assert table == (ROOT / f"docs/results/{name}.md").read_text(), f"make docs would change {name}"


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
