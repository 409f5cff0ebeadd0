"""The site: `make docs-site`. It is built and read without a network."""

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "make"), str(DOCS.parent / "src")]

from commands import commands  # noqa: E402
from examples import as_restructured_text  # noqa: E402

# Files of the repository that are pages of the site, too.
FILES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/results.md": "benchmark.md",
}

project = "plures"
version = release = re.search(
    r'^__version__ = "(.+)"$', (DOCS.parent / "src/plures/version.py").read_text(), re.MULTILINE
)[1]
html_title = f"plures {version}"
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = html_copy_source = False
pygments_style = "tango"  # of those that read well on white
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["results/*.md", "make"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"

# Docstrings: `names` in backticks are code, the constructor's arguments stand with the class.
default_role = "code"
smartquotes = False  # --options keep their hyphens
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"


def setup(app: Any) -> None:
    """Show examples as code, make the page of the commands, and keep links to the repository's files inside."""
    app.connect("autodoc-process-docstring", _mark_examples)
    app.connect("autodoc-process-signature", _shorten)
    app.connect("source-read", _complete)


def _mark_examples(_app: Any, _kind: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = [*as_restructured_text("\n".join(lines)).splitlines(), ""]


def _shorten(*given: Any) -> tuple[str, str | None] | None:
    *_, arguments, result = given
    return arguments and (arguments.replace("ndarray[tuple[Any, ...], dtype[Any]]", "ndarray"), result)


def _complete(_app: Any, page: str, source: list[str]) -> None:
    text = source[0]
    for file in FILES:
        text = text.replace(f"<!-- {file} -->", (DOCS.parent / file).read_text().replace("](docs/", "]("))
    for file, its_page in FILES.items():
        text = re.sub(rf"\]\((\.\./)*{re.escape(file)}", f"](/{its_page}", text)
    text = re.sub(r"(?<=\d) x (?=\|)", "\N{NO-BREAK SPACE}x ", text)  # 1.08 x in a table stays on one line
    text = re.sub(r"<!-- (interactive/\S+) -->", r"```{raw} html\n:file: \1\n```", text)
    source[0] = text.replace("<!-- commands -->", commands() if page == "reference/commands" else "")
