"""The code that the README and the guide show runs; the commands that they show exist."""

import dataclasses
import re
import shlex
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import pytest

from plures.lab import recipes
from plures.lab.cli.main import parse
from reader import at_hand

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("guide/*.md"))]
PAGES += ["docs/engines.md", "docs/method.md", "CONTRIBUTING.md"]


def code(page: str, language: str) -> str:
    """Join the blocks of a page, each at its own line, so that an error names the line of the page."""
    text = (ROOT / page).read_text()
    kept = [""] * (text.count("\n") + 1)
    for found in re.finditer(rf"^( *)```{language}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        first = text[: found.start(2)].count("\n")
        for offset, line in enumerate(found[2].splitlines()):
            kept[first + offset] = line.removeprefix(found[1])
    return "\n".join(kept)


@pytest.fixture
def names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return at_hand()


@pytest.mark.parametrize("page", [page for page in PAGES if code(page, "python").strip()])
def test_the_code_runs(page, names, monkeypatch) -> None:
    if page == "README.md":
        names = {}  # a newcomer has nothing at hand
    if "pretrained" in page or "other-loops" in page:
        transformers = pytest.importorskip("transformers")
        shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        small = transformers.ViTConfig(**shape, image_size=8, patch_size=4, num_labels=10)
        made = transformers.ViTForImageClassification(small)
        made.save_pretrained("my-model")
        warnings.simplefilter("ignore")  # trainers warn of what they do themselves
    if "pretrained" in page:
        monkeypatch.setattr(transformers.AutoModelForImageClassification, "from_pretrained", lambda *a, **k: made)
    if "deploying" in page:  # the hub is elsewhere: only the arguments are checked
        for name in ("create_repo", "upload_folder", "snapshot_download"):
            known = mock.create_autospec(getattr(huggingface_hub, name), return_value="runs/birds")
            monkeypatch.setattr(f"huggingface_hub.{name}", known)
        monkeypatch.setattr("plures.lab.runs.open.open_run", lambda _: SimpleNamespace(ensemble=names["ensemble"]))
    short = dataclasses.replace(recipes.get_recipe("digits"), epochs=recipes.Epochs(1, 1, 1, 1), limit=200)
    monkeypatch.setitem(recipes.RECIPES, "digits", short)
    exec(compile(code(page, "python"), page, "exec"), names)
    if page == "README.md":
        assert names["prediction"].members.shape == (5, 32, 10)
        again = names["ensemble"].predict(names["loader"][0][0])
        assert again.probabilities.equal(names["prediction"].probabilities)
    if page == "CONTRIBUTING.md":
        ensemble = names["Committee"](names["network"], members=2)
        for stage in ensemble.stages():
            stage(names["images"], names["labels"]).backward()
        assert ensemble.predict(names["images"]).members.shape == (2, 16, 10)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_code_is_tested(page) -> None:
    """Blocks of text show folders, formulas and output; anything else would be code that no test runs."""
    languages = re.findall(r"^ *```(\S*)\n.*?^ *```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert set(languages) <= {"python", "bash", "text", "{toctree}"}, page


def commands(page: str) -> list[list[str]]:
    return [words for line in code(page, "bash").splitlines() if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_exist(page) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for words in commands(page):
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), words
        elif words[:2] == ["pip", "install"]:
            assert set(re.findall(r"\w+", words[2])) <= set(extras), words
        elif words[:2] == ["python", "-c"]:
            compile(words[2], page, "exec")
        elif words[:2] == ["python", "-m"]:
            assert find_spec(words[2]), words
        else:
            parse(words[words.index("plures") + 1 :])
