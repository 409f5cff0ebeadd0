"""What is published comes back equal, with a card that says what was measured."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

import networks
import plures
from networks import images
from plures.lab import sharing
from plures.lab.runs.open import open_run
from test_contract import trained

RUN = Path(__file__).parent / "data/v0.1/runs/orthogonal-dropout"
SPLIT = ("OrthogonalDropout", {"members": 2})


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "digits"
    plures.push_to_hub(RUN, folder)
    return folder


def test_a_run_comes_back_without_its_network(published):
    digits = torch.randn(5, 1, 8, 8)
    assert torch.equal(plures.from_hub(published)(digits), open_run(RUN).ensemble(digits))
    assert torch.equal(plures.from_hub(str(published))(digits), open_run(RUN).ensemble(digits))


def test_the_card_says_what_was_measured_and_how_to_load_it(published, monkeypatch):
    card = (published / "README.md").read_text()
    measured = json.loads((RUN / "metrics.json").read_text())
    assert f"| accuracy | {measured['accuracy']:.4f} |" in card
    assert f"| negative log-likelihood (nats) | {measured['nll']:.4f} |" in card
    assert "\n\n\n" not in card
    assert re.search(r"\|---\|---\|\n(\| .+ \| -?[\d.]+ \|\n){5,}\n", card), "rows without gaps: one table"
    assert "## Intended use" in card
    assert f"On {measured['images']} test images of digits:" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert str(published.parent) not in card  # a card travels
    monkeypatch.chdir(published)
    names = {"inputs": torch.randn(2, 1, 8, 8)}
    exec(code, names)
    assert len(names["prediction"]) == 2


def test_the_card_names_the_place_where_it_can_be_loaded(tmp_path, monkeypatch):
    """A folder inside another, named by a relative path, which is then moved."""
    monkeypatch.chdir(tmp_path)
    plures.push_to_hub(trained(SPLIT, networks.mlp), Path("shared/birds"))
    Path("shared/birds").rename("elsewhere")
    (code,) = re.findall(r"```python\n(.*?)```", Path("elsewhere/README.md").read_text(), re.DOTALL)
    monkeypatch.chdir("elsewhere")
    names = {"inputs": images(3), "network": networks.mlp()}
    exec(code, names)
    assert len(names["prediction"]) == 3


def test_the_head_of_the_card_is_what_the_hub_reads(published):
    head = ModelCard.load(published / "README.md").data
    assert (head.library_name, head.tags) == ("plures", ["uncertainty", "ensemble", "plures"])


def test_only_safetensors_json_and_card_are_published(published):
    assert {file.name for file in published.iterdir()} == {
        "ensemble.safetensors",
        "config.json",
        "metrics.json",
        "README.md",
    }


def test_an_ensemble_of_ones_own_loop(tmp_path):
    ensemble = trained(SPLIT, networks.mlp)
    place = plures.push_to_hub(ensemble, tmp_path / "mine", metrics={"accuracy": 0.5})
    assert torch.equal(plures.from_hub(place, networks.mlp())(images()), ensemble(images()))
    assert "| accuracy | 0.5000 |" in (tmp_path / "mine/README.md").read_text()
    with pytest.raises(plures.PluresError, match="does not name its network"):
        plures.from_hub(place)
    with pytest.raises(plures.PluresError, match="was saved from another network"):
        plures.from_hub(place, networks.resnet())
    assert plures.push_to_hub(ensemble, tmp_path / "mine") == str(tmp_path / "mine")  # again, over the old one
    assert "Nothing was measured" in (tmp_path / "mine/README.md").read_text()


def test_the_hub_is_asked_for_the_files_that_are_read_and_no_others(published, monkeypatch):
    """The hub itself is out of reach of the tests: its client is replaced."""
    asked = {}

    def create_repo(name, private, exist_ok):
        asked["created"] = name, private
        return type("Created", (), {"repo_id": name})

    def upload_folder(repo_id, folder_path, commit_message):
        asked["uploaded"] = repo_id, sorted(file.name for file in Path(folder_path).iterdir())

    def snapshot(name, revision, allow_patterns):
        asked["patterns"] = allow_patterns
        return str(published)

    replaced = {"create_repo": create_repo, "upload_folder": upload_folder, "snapshot_download": snapshot}
    for name, function in replaced.items():
        monkeypatch.setattr(sharing.huggingface_hub, name, function)
    plures.from_hub("me/digits")
    assert asked["patterns"] == ["ensemble.safetensors", "config.json", "metrics.json"]
    assert plures.push_to_hub(trained(SPLIT, networks.mlp), "me/mine", private=True) == "me/mine"
    assert asked["created"] == ("me/mine", True)
    assert asked["uploaded"] == ("me/mine", ["README.md", "ensemble.safetensors"])


def test_what_is_not_there_is_told_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(plures.PluresError, match="has no ensemble.safetensors"):
        plures.from_hub(tmp_path / "empty")
    with pytest.raises(plures.PluresError, match="is not a run folder"):
        plures.push_to_hub(tmp_path / "empty", tmp_path / "there")
    with pytest.raises(plures.PluresError, match="cannot read not a name from the hub"):
        plures.from_hub("not a name")
