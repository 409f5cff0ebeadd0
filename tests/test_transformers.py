"""A pre-trained network of transformers: read from a folder, adapted by any loop, saved, and read again."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plures
from test_loops import from_the_guide

TOKENS = torch.randint(1, 60, (8, 7), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": TOKENS, "attention_mask": (TOKENS > 5).long()}
LABELS = torch.arange(8) % 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("encoder")
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    with torch.random.fork_rng(devices=[]):
        transformers.BertModel(
            transformers.BertConfig(vocab_size=60, max_position_embeddings=16, **shape)
        ).save_pretrained(path)
    return path


def made(folder: Path, kind: str = "Sequence") -> nn.Module:
    import transformers

    torch.manual_seed(0)
    network: nn.Module = getattr(transformers, f"AutoModelFor{kind}Classification").from_pretrained(
        folder, num_labels=3
    )
    return network


def loop(ensemble: plures.Ensemble, labels: torch.Tensor) -> None:
    for stage in ensemble.stages():
        optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
        for _ in range(3):
            optimizer.zero_grad()
            stage(BATCH, labels).backward()
            optimizer.step()


def fit(ensemble: plures.Ensemble, labels: torch.Tensor) -> None:
    ensemble.fit([{**BATCH, "labels": labels}], epochs=3, progress=False)


def trainer(ensemble: plures.Ensemble, labels: torch.Tensor, out: Path) -> None:
    import transformers

    rows = [{name: one[row] for name, one in {**BATCH, "labels": labels}.items()} for row in range(len(labels))]
    options: dict[str, Any] = {
        "remove_unused_columns": False,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
    }
    arguments = transformers.TrainingArguments(str(out), num_train_epochs=3, disable_tqdm=True, **options)
    for stage in ensemble.stages():
        transformers.Trainer(from_the_guide("StageModel")(stage), arguments, train_dataset=rows).train()


@pytest.mark.parametrize(("train", "last"), [(loop, None), (loop, 1), (fit, None), (trainer, 1)])
def test_changes_to_a_network_from_a_folder(folder: Path, tmp_path: Path, train: Any, last: int | None) -> None:
    network = made(folder)
    ensemble = plures.adapt(network, 3, share=0.05, last=last)
    (partial(train, out=tmp_path) if train is trainer else train)(ensemble, LABELS)
    prediction = ensemble.predict(BATCH)
    for member in range(3):
        with torch.no_grad():
            logits = ensemble.checkout(member)(**BATCH).logits
        torch.testing.assert_close(logits.softmax(-1), prediction.members[member], rtol=0, atol=1e-5)
    assert not torch.equal(prediction.members[0], prediction.members[1])
    plures.save(ensemble, tmp_path / "changes.safetensors")
    loaded = plures.load(tmp_path / "changes.safetensors", made(folder))
    assert torch.equal(loaded.predict(BATCH).members, prediction.members)


def test_outputs_for_tokens(folder: Path) -> None:
    loss = partial(F.cross_entropy, ignore_index=-100)
    network = made(folder, "Token")
    ensemble = plures.adapt(
        network, 2, share=0.05, loss=lambda logits, labels: loss(logits.flatten(0, 1), labels.flatten())
    )
    loop(ensemble, TOKENS % 3)
    with torch.no_grad():
        assert ensemble(BATCH).shape == (2, 8, 7, 3)
        torch.testing.assert_close(ensemble(BATCH)[1], ensemble.checkout(1)(**BATCH).logits)


@pytest.mark.parametrize("method", [plures.adapt, partial(plures.DeepEnsemble, init="given")])
def test_a_new_head_that_is_shared_is_refused(folder: Path, method: Any) -> None:
    network = made(folder)
    network.get_submodule("classifier").requires_grad_(False)
    with pytest.raises(
        plures.PluresError, match="classifier 'classifier' is shared by all members and was never trained"
    ):
        method(network)
    with torch.no_grad():
        network.get_parameter("classifier.bias").add_(0.1)  # as after training
    method(network)
    drawn = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40).requires_grad_(False))
    with pytest.raises(plures.PluresError, match="classifier '2' is shared"):
        method(drawn)
