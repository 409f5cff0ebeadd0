"""A network that peft has adapted: its wrappers forward attributes to the layers inside."""

from pathlib import Path

import pytest
import torch

import plures


def adapted() -> torch.nn.Module:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")  # seconds of every process
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(vocab_size=500, dim=64, n_layers=2, n_heads=2, hidden_dim=128, num_labels=3)
    wrapped = {"target_modules": ["q_lin", "v_lin"], "modules_to_save": ["pre_classifier", "classifier"]}
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, **wrapped)
    return peft.get_peft_model(transformers.DistilBertForSequenceClassification(config), lora)


INPUTS = {"input_ids": torch.arange(80).reshape(8, 10), "attention_mask": torch.ones(8, 10, dtype=torch.long)}
LABELS = torch.arange(8) % 3


def train(ensemble: plures.Ensemble) -> None:
    for stage in ensemble.stages():
        optimizer = torch.optim.Adam((one for one in stage.parameters() if one.requires_grad), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            stage(INPUTS, LABELS).backward()
            optimizer.step()


@pytest.mark.parametrize("method", [plures.OrthogonalDropout, plures.DeepEnsemble])
def test_adapters_are_private_and_the_frozen_base_is_stored_once(method: type, tmp_path: Path) -> None:
    network = adapted()
    roles = plures.roles(network)
    trainable = {name for name, one in network.named_parameters() if one.requires_grad}
    assert {name for name, role in roles.items() if role == "private"} == trainable
    ensemble = method(network, members=3)
    train(ensemble)
    assert type(ensemble.checkout(1)) is type(network)
    with torch.no_grad():
        members = torch.stack([ensemble.checkout(member)(**INPUTS).logits for member in range(3)])
        assert torch.equal(ensemble(INPUTS), members)
    plures.save(ensemble, tmp_path / "lora.safetensors")
    loaded = plures.load(tmp_path / "lora.safetensors", adapted())
    assert torch.equal(loaded.predict(INPUTS).members, ensemble.predict(INPUTS).members)
    assert (tmp_path / "lora.safetensors").stat().st_size < 1.4 * ensemble.given.nbytes


def test_layers_inside_of_wrappers_can_be_split() -> None:
    network = adapted()
    roles = plures.roles(network)
    split = [name for name in roles if name.endswith("pre_classifier.modules_to_save.default.weight")]
    assert split
    ensemble = plures.OrthogonalDropout(network, members=2, roles=roles | dict.fromkeys(split, "split"))
    train(ensemble)
    assert ensemble.trained == [0, 1]
    assert ensemble.predict(INPUTS).members.shape == (2, 8, 3)


def test_the_file_of_changes_holds_the_adapters_alone(tmp_path: Path) -> None:
    ensemble = plures.adapt(adapted(), 3)
    train(ensemble)
    plures.save(ensemble, tmp_path / "adapters.safetensors")
    assert (tmp_path / "adapters.safetensors").stat().st_size < 0.5 * ensemble.given.nbytes
    loaded = plures.load(tmp_path / "adapters.safetensors", adapted())
    assert torch.equal(loaded.predict(INPUTS).members, ensemble.predict(INPUTS).members)
    merged = adapted()
    merged.merge_adapter()
    with pytest.raises(plures.PluresError, match="adapters of .* are merged into its weights"):
        plures.adapt(merged)
