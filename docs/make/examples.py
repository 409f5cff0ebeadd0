"""Find the examples in docstrings. The site and the tests both ask here, so that they see the same ones."""

import ast
from collections.abc import Iterator
from inspect import cleandoc
from textwrap import dedent
from typing import Any, Literal, NamedTuple

import griffe

Kind = Literal["text", "code", "doctest"]


class Block(NamedTuple):
    """One paragraph of a docstring, or neighbouring ones of the same example."""

    kind: Kind
    text: str


def blocks(docstring: str) -> list[Block]:
    """Cut a docstring into text and examples.

        blocks("Add one.\n\n>>> add_one(1)\n2")  # [Block("text", "Add one."), Block("doctest", ">>> ...")]

    Indented paragraphs are code, and so is the second paragraph where it can be read as Python: the formatter takes the
    indentation away where nothing but the example follows the summary.
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
    """Give the examples that are no doctests."""
    return (text for kind, text in blocks(docstring) if kind == "code")


def as_markdown(docstring: str) -> str:
    """Fence the examples."""
    return "\n\n".join(_fenced(block) for block in blocks(docstring))


class Examples(griffe.Extension):
    """Show the examples of all docstrings as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = as_markdown(obj.docstring.value)


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


def _fenced(block: Block) -> str:
    if block.kind == "text":
        return block.text
    return f"```{'pycon' if block.kind == 'doctest' else 'python'}\n{block.text}\n```"
