"""The reference of the commands, made from their own help."""

import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from io import BytesIO, TextIOWrapper
from os import environ
from unittest import mock

from plures.lab.cli.main import main

WIDE = 400  # columns in which no line of help is broken


def commands() -> str:
    """Return the reference of all commands.

    print(commands())
    """
    overview = help_of()
    (listed,) = re.findall(r"^Commands.*?:\n(.*?)\n\n", overview, re.DOTALL | re.MULTILINE)
    names = re.findall(r"^  (\S+)", listed, re.MULTILINE)
    parts = [*_about(overview), *(_section(name, help_of(name)) for name in names)]
    return "\n\n".join(parts)


@cache
def help_of(*command: str) -> str:
    """Return the help of a command, in lines so long that none is broken.

    help_of("train")
    """
    told = TextIOWrapper(BytesIO(), encoding="utf-8")  # which has the characters that boxes are drawn with
    with mock.patch.dict(environ, COLUMNS=str(WIDE), NO_COLOR="1"), redirect_stdout(told), suppress(SystemExit):
        main([*command, "--help"])
    told.seek(0)
    return told.read()


def options(text: str) -> Iterator[tuple[str, str]]:
    """Yield arguments and their meanings from the boxes of a help text."""
    name, meaning = "", ""
    for line in text.splitlines():
        inside = re.fullmatch(r"│ (.*?)\s*│", line.strip())
        found = inside and re.fullmatch(r"(-\S.*?|[A-Z][A-Z.| \[\]]*?)(?:\s{2,}(.*))?", inside[1])
        if found:
            if name:
                yield name, meaning
            name, meaning = found[1], found[2] or ""
        elif inside and name and inside[1].startswith("  "):
            meaning = f"{meaning} {inside[1].strip()}".strip()
    if name:
        yield name, meaning


def _section(name: str, text: str) -> str:
    rows = [f"| `{_cell(one)}` | {_cell(meaning)} |" for one, meaning in options(text) if "--help" not in one]
    table = "\n".join(["| argument | meaning |", "|---|---|", *rows])
    return "\n\n".join([f"## plures {name}", *_about(text), table])


def _about(text: str) -> list[str]:
    """Return the text between usage and boxes, with the lines of examples as code."""
    before = re.split(r"^╭", text, maxsplit=1, flags=re.MULTILINE)[0]
    paragraphs = [part for part in before.strip().split("\n\n") if not part.startswith("usage:")]
    return [_indented(part) if "\n  " in part else part for part in paragraphs]


def _indented(paragraph: str) -> str:
    """Return commands and columns as code, and other indented lines as text under a title."""
    title, *lines = paragraph.splitlines()
    if any(re.match(r"  (plures|accelerate) |.*\S {2,}\S", line) for line in lines):
        return "\n".join([title, "", "```text", *(line.removeprefix("  ") for line in lines), "```"])
    return f"**{title}** {' '.join(line.strip() for line in lines)}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
