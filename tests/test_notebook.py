"""The notebook runs from top to bottom, and shows what it says; those that need data and packages can be read."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "docs/notebooks/uncertainty.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: (shown.append(plt.gcf()), plt.close()))
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = {}
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "kept without outputs: they would grow stale"
            exec(compile(source, f"cell {number}", "exec"), names)
    assert len(shown) == 3
    right, groups = names["right"], names["groups"]
    assert right.float().mean() > 0.93
    assert groups["noise"].median() > groups["right"].median()
    assert groups["wrong"].median() > groups["right"].median()
    assert names["accuracy"][-1] > names["accuracy"][0]


@pytest.mark.parametrize("name", ["text", "images"])
def test_notebooks_of_pretrained_networks_are_kept_without_outputs_and_their_code_is_python(name):
    """`docs/make/notebook.py` runs them: they need networks and data that are not here."""
    notebook = json.loads((NOTEBOOK.parent / f"pretrained-{name}.ipynb").read_text())
    assert f"docs/make/notebook.py {name}" in "".join(notebook["cells"][0]["source"])
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            compile("".join(cell["source"]), f"cell {number}", "exec")
