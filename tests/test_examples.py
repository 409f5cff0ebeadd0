"""The examples in docstrings: doctests run by themselves (see pyproject.toml), the others are held here."""

import ast
from pathlib import Path

import pytest
from examples import Block, as_markdown, blocks, examples

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src/plures").rglob("*.py"))


def docstrings(source: Path) -> list[tuple[str, str]]:
    """Of classes and functions; those of modules may show files or a shell command."""
    documented = (ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, documented)]
    return [(node.name, text) for node in nodes if (text := ast.get_docstring(node))]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT / "src")))
def test_every_example_is_python(source) -> None:
    for name, text in docstrings(source):
        for example in examples(text):
            try:
                ast.parse(example)
            except SyntaxError as error:
                pytest.fail(f"the example of {name} is not Python: {error}")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT / "src")))
def test_what_stands_second_is_an_example_or_a_sentence(source) -> None:
    """An example with a typing error would pass for text."""
    for name, text in docstrings(source):
        second = blocks(text)[1:2]
        if second and second[0].kind == "text":
            assert second[0].text.endswith((".", ":")) or "\n" in second[0].text, f"{name}: {second[0].text}"


def test_examples_are_found_as_they_are_written() -> None:
    flat = "Add one.\n\nadd_one(1)"
    indented = "Add one.\n\n    add_one(1)\n\n    add_one(2)\n\nOne is added."
    doctest = "Add one.\n\n>>> add_one(1)\n2\n\nOne is added."
    assert blocks(flat) == [Block("text", "Add one."), Block("code", "add_one(1)")]
    assert blocks(indented)[1:] == [Block("code", "add_one(1)\n\nadd_one(2)"), Block("text", "One is added.")]
    assert blocks(doctest)[1] == Block("doctest", ">>> add_one(1)\n2")
    assert as_markdown(doctest) == "Add one.\n\n```pycon\n>>> add_one(1)\n2\n```\n\nOne is added."
