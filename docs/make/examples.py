"""Find the examples in docstrings, for the site and for the tests."""

import ast
import re
from collections.abc import Iterator
from inspect import cleandoc
from textwrap import dedent, indent
from typing import Literal, NamedTuple

Kind = Literal["text", "code", "doctest"]


class Block(NamedTuple):
    """One paragraph of a docstring, or neighbouring ones of the same example."""

    kind: Kind
    text: str


def blocks(docstring: str) -> list[Block]:
    """Cut a docstring into text and examples.

        blocks("Add one.\n\n>>> add_one(1)\n2")  # [Block("text", "Add one."), Block("doctest", ">>> ...")]

    Indented paragraphs are code, and so is the second paragraph if it is valid Python: the formatter removes the
    indentation if nothing but the example follows the summary.
    """
    found: list[Block] = []
    for index, paragraph in enumerate(cleandoc(docstring).split("\n\n")):
        kind = _kind(paragraph, after_summary=index == 1)
        if kind == "code" and found and found[-1].kind == "code":
            found[-1] = Block("code", f"{found[-1].text}\n\n{dedent(paragraph)}")
        else:
            found.append(Block(kind, paragraph if kind == "text" else dedent(paragraph)))
    return found


def examples(docstring: str) -> Iterator[str]:
    """Return the examples that are no doctests."""
    return (text for kind, text in blocks(docstring) if kind == "code")


def as_restructured_text(docstring: str) -> str:
    """Return a docstring for the site: examples are code."""
    return "\n\n".join(_marked(block) for block in blocks(docstring))


def _kind(paragraph: str, after_summary: bool) -> Kind:
    if paragraph.lstrip().startswith(">>>"):
        return "doctest"
    if paragraph.startswith("    "):
        return "code"
    return "code" if after_summary and _is_python(paragraph) else "text"


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _marked(block: Block) -> str:
    if block.kind == "text":  # |score| is no substitution, and *args no emphasis
        return re.sub(r"(`[^`]*`)|([|*])", lambda found: found[1] or f"\\{found[2]}", block.text)
    return f".. code-block:: {'pycon' if block.kind == 'doctest' else 'python'}\n\n{indent(block.text, '   ')}"
