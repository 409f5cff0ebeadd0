"""The examples in docstrings: doctests run by themselves (see pyproject.toml), the others are held here."""

import ast
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import plures
from examples import Block, as_restructured_text, blocks, examples
from plures import guarantees, metrics
from plures.lab.recipes import Epochs, get_recipe
from plures.methods import METHODS
from plures.sklearn import PluresClassifier, PluresRegressor
from reader import Network, at_hand

ROOT = Path(__file__).parent.parent


def docstrings(source: Path) -> list[tuple[str, str]]:
    """Of classes and functions; those of modules may show files or a shell command."""
    documented = (ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, documented)]
    return [(f"{node.name} in {source.name}", text) for node in nodes if (text := ast.get_docstring(node))]


DOCSTRINGS = [found for source in sorted((ROOT / "src/plures").rglob("*.py")) for found in docstrings(source)]


def test_every_example_is_python() -> None:
    for name, text in DOCSTRINGS:
        for example in examples(text):
            try:
                ast.parse(example)
            except SyntaxError as error:
                pytest.fail(f"the example of {name} is not Python: {error}")


def test_a_summary_comes_first_and_then_an_example_or_a_sentence() -> None:
    """An example with a typing error would pass for text."""
    for name, text in DOCSTRINGS:
        assert blocks(text)[0].kind == "text", f"the docstring of {name} does not start with a summary"
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
    assert as_restructured_text(doctest).split("\n\n")[1:3] == [".. code-block:: pycon", "   >>> add_one(1)\n   2"]


def public() -> dict[str, Any]:
    """Every public class and function, with the methods that the classes themselves define."""
    top = {name: getattr(plures, name) for name in plures.__all__ if name not in ("__version__", "metrics")}
    for module in (guarantees, metrics):
        own = vars(module).items()
        top |= {name: value for name, value in own if getattr(value, "__module__", "") == module.__name__}
    top |= {one.__name__: one for one in (PluresClassifier, PluresRegressor, Epochs, get_recipe)}
    top = {name: value for name, value in top.items() if inspect.isclass(value) or inspect.isfunction(value)}
    methods = {
        f"{name}.{method}": function
        for name, value in top.items()
        if inspect.isclass(value)
        for method, function in inspect.getmembers(value, inspect.isroutine)
        if method in vars(value) and str(getattr(function, "__module__", "")).startswith("plures")
    }
    return {name: value for name, value in {**top, **methods}.items() if not name.split(".")[-1].startswith("_")}


@pytest.mark.parametrize("name", [name for name in public() if "." not in name])
def test_every_public_name_has_a_summary_and_then_an_example(name) -> None:
    summary, *others = blocks(inspect.getdoc(public()[name]) or "")
    assert summary.kind == "text", f"the docstring of {name} does not start with a summary"
    assert "\n" not in summary.text, f"the summary of {name} is longer than a line"
    assert others, f"the docstring of {name} has no example"
    assert others[0].kind != "text", f"the docstring of {name} does not go on with an example"


def at_hand_for(name: str) -> dict[str, Any]:
    names = {**vars(metrics), **at_hand(), **{name: getattr(plures, name) for name in plures.__all__}}
    if name.split(".")[0] in METHODS:  # its own methods are shown with an ensemble of its own
        names["ensemble"] = names[name.split(".")[0]](names["network"])
        for _ in names["ensemble"].stages():
            pass
    probabilities = torch.rand(16, 10).softmax(-1)
    names |= {"probabilities": probabilities, "targets": names["labels"], "test_probabilities": probabilities}
    names |= {"members": probabilities[None], "inside_scores": torch.rand(9), "outside_scores": torch.rand(9)}
    names |= {"confidence": torch.rand(1000), "right": torch.ones(1000, dtype=torch.bool), "select": guarantees.select}
    names |= {"Epochs": Epochs, "get_recipe": get_recipe}
    if name.startswith("Plures"):
        names |= {"X": torch.rand(40, 3).numpy(), "y": torch.arange(40).numpy() % 2}
        names |= {"X_held_out": names["X"], "y_held_out": names["y"]}
    names |= {one.__name__: partial(one, epochs=1) for one in (PluresClassifier, PluresRegressor)}
    names |= {"plot": lambda *lines: None, "resnet18": lambda num_classes: Network()}
    layer = torch.nn.Linear(100, 20)
    return {**names, "layer": layer, "weight": layer.weight.detach(), "free": torch.ones(20, 100, dtype=torch.bool)}


# These take seconds or more: the guide shows them, and its test runs them.
LONG = ("export",)
SHOWN = [name for name, value in public().items() if any(examples(inspect.getdoc(value) or "")) and name not in LONG]


@pytest.mark.parametrize("name", SHOWN)
def test_every_public_example_runs(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = examples(inspect.getdoc(public()[name]) or "")
    exec(compile(example, name, "exec"), at_hand_for(name))
