"""Stages trained in other people's loops come out as those of the lab's own loop."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import plures
from plures.lab.data import open_data
from plures.lab.recipes import Epochs, get_recipe
from plures.lab.training.fit import fit

EPOCHS = 4
BATCH = 64
RATE = 5e-3
GUIDE = Path(__file__).parent.parent / "docs/guide/other-loops.md"

# Trainers warn of what they are given and of what they use themselves; a library cannot change that.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def data():
    return open_data("digits", validation=0.1)


def inputs_and_labels(data, split):
    return data.info.normalise(torch.from_numpy(split.images)).contiguous(), torch.from_numpy(split.labels)


@pytest.fixture(scope="module")
def digits(data):
    return TensorDataset(*inputs_and_labels(data, data.train))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        return self.out(self.hidden(x.flatten(1)).relu())


def network():
    torch.manual_seed(0)
    return Network()


def ensemble(schedule="sequential"):
    return plures.OrthogonalDropout(network(), members=2, schedule=schedule)


def optimizer(stage):
    return torch.optim.AdamW(stage.parameter_groups(weight_decay=1e-4), lr=RATE)


def from_the_guide(name):
    """A class as docs/guide/other-loops.md shows it."""
    block = next(one for one in GUIDE.read_text().split("```python\n") if f"class {name}(" in one)
    known = {"torch": torch}
    exec("\n".join(line for line in block.splitlines() if re.match("(from|import) ", line)), known)
    exec(re.search(rf"^class {name}\(.*?(?=^\S)", block, re.DOTALL | re.MULTILINE)[0], known)
    return known[name]


def accuracy(trained, data):
    assert all(step.committed for step in trained.plan())
    images, labels = inputs_and_labels(data, data.test)
    return (trained.predict(images).label == labels).float().mean().item()


@pytest.fixture(scope="module")
def usual(data):
    epochs = Epochs(EPOCHS, EPOCHS, EPOCHS, EPOCHS)
    recipe = replace(get_recipe("digits"), epochs=epochs, batch_size=BATCH, optimizer="adamw", learning_rate=RATE)
    return accuracy(fit(ensemble(), data, recipe, quiet=True), data)


@pytest.mark.parametrize("schedule", ["sequential", "together"])
def test_accelerate(data, digits, usual, schedule):
    from accelerate import Accelerator

    accelerator, trained = Accelerator(cpu=True), ensemble(schedule)
    for stage in trained.stages():
        batches = DataLoader(digits, BATCH, shuffle=True)
        model, stepper, batches = accelerator.prepare(stage, optimizer(stage), batches)
        for _ in range(EPOCHS):
            for inputs, targets in batches:
                accelerator.backward(model(inputs, targets))
                stepper.step()
                stepper.zero_grad()
    assert accuracy(trained, data) == pytest.approx(usual, abs=0.05)


@pytest.mark.slow
def test_hugging_face_trainer(data, digits, usual, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = from_the_guide("StageModel")

    rows = [{"x": image, "labels": label} for image, label in digits]
    settings = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, learning_rate=RATE, use_cpu=True,
        remove_unused_columns=False, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trained = ensemble("together")
    for stage in trained.stages():
        transformers.Trainer(model(stage), settings, train_dataset=rows).train()
    assert accuracy(trained, data) == pytest.approx(usual, abs=0.05)


def lightning_trainer(folder, epochs=EPOCHS, **more):
    lightning = pytest.importorskip("lightning")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(max_epochs=epochs, default_root_dir=folder, **quiet, **more)


def test_lightning(data, digits, usual, tmp_path):
    pytest.importorskip("lightning")
    module = from_the_guide("StageModule")

    trained = ensemble("together")
    for stage in trained.stages():
        trainer = lightning_trainer(tmp_path, enable_checkpointing=False)
        trainer.fit(module(stage), DataLoader(digits, BATCH, shuffle=True))
    assert accuracy(trained, data) == pytest.approx(usual, abs=0.05)


def test_lightning_goes_on_from_a_checkpoint_with_the_same_bits(digits, tmp_path):
    lightning = pytest.importorskip("lightning")
    module = from_the_guide("StageModule")

    class Losses(lightning.Callback):
        seen: list[float]

        def __init__(self):
            self.seen = []

        def on_train_epoch_end(self, trainer, module):
            self.seen.append(float(trainer.callback_metrics["validation_loss"]))

    def trained(epochs, callback=None, checkpoint=None):
        stage = next(iter(ensemble().stages()))
        few = DataLoader(TensorDataset(*digits[:128]), 32)
        trainer = lightning_trainer(
            tmp_path, epochs, callbacks=[callback] if callback else None, enable_checkpointing=False
        )
        # Our own file: Lightning would unpickle its hyperparameters, of which there are none.
        options = {"weights_only": True} if checkpoint else {}
        trainer.fit(module(stage), few, few, ckpt_path=checkpoint, **options)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return stage.state_dict()

    losses = Losses()
    whole = trained(3, losses)
    assert len(losses.seen) == 3
    assert losses.seen[-1] < losses.seen[0]
    trained(1)
    resumed = trained(3, checkpoint=tmp_path / "1.ckpt")
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
