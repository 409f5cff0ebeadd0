"""Stages of orthogonal dropout in other people's hands: compiled, in several processes, with any kind of layer."""

import logging
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plures
from forked import start
from plures import OrthogonalDropout, PluresError
from plures.methods.orthogonal_dropout.file import expected_bytes
from plures.methods.orthogonal_dropout.owners import Partition, Private, SplitNetwork
from plures.tensors import own_tensors, tensors

INPUTS = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(12) % 3


def mlp(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def train(stage: nn.Module, inputs: torch.Tensor = INPUTS, steps: int = 2) -> None:
    optimizer = torch.optim.SGD([p for p in stage.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        stage(inputs, TARGETS).backward()
        optimizer.step()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(20, 3))


@pytest.mark.parametrize("build", [mlp, convolutions])
def test_the_compiler_survives_all_stages_of_five_members(build) -> None:
    torch.compiler.reset()
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(stage.name)
        return graph.forward

    ensemble = OrthogonalDropout(build(), members=5)
    for stage in ensemble.stages():
        train(torch.compile(stage, backend=backend, fullgraph=True), steps=1)
    assert len(ensemble.trained) == 5
    prunings = [f"member {member} prune" for member in range(4)]
    assert compiled[0] == "member 0 pretrain"
    assert set(compiled) <= {"member 0 pretrain", *prunings}, "the other nine stages find what was compiled before"
    assert len(compiled) == len(set(compiled))
    torch.compiler.reset()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.recurrent = kind(8, 12, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(24, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embedding(tokens))
        return self.head(self.cell(states[:, -1]))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_split(kind) -> None:
    torch.manual_seed(0)
    network = Recurrent(kind)
    ensemble = OrthogonalDropout(network, members=3)
    assert {"recurrent.weight_hh_l0", "recurrent.weight_ih_l0_reverse", "cell.weight_hh"} <= set(ensemble.owners)
    tokens = torch.randint(0, 20, (12, 5), generator=torch.Generator().manual_seed(0))
    for stage in ensemble.stages():
        train(stage, tokens)
    logits = ensemble(tokens)
    for member in range(3):
        plain = ensemble.checkout(member)
        assert plain(tokens).allclose(logits[member], atol=1e-6)
        weight = plain.recurrent.weight_hh_l0
        assert weight[ensemble.owners["recurrent.weight_hh_l0"] != member].eq(0).all()
        assert weight.ne(0).sum() == (ensemble.owners["recurrent.weight_hh_l0"] == member).sum()
    starts = [ensemble.checkout(member).recurrent.bias_hh_l0 for member in range(3)]
    assert not starts[0].equal(starts[1]), "members of a recurrent network start from other numbers"


class Twice(nn.Module):
    """A layer that has two names and is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()).relu())


@pytest.mark.parametrize("init", ["fresh", "given"])
def test_a_module_under_two_names_is_split_once_and_trains(init, tmp_path) -> None:
    torch.manual_seed(0)
    network = Twice()
    roles = plures.roles(network)
    assert roles["first.weight"] == roles["second.weight"] == "split"
    interrupted, straight = (OrthogonalDropout(network, members=2, init=init) for _ in range(2))
    for ensemble in (interrupted, straight):
        for stage in ensemble.stages():
            train(stage)
            if ensemble is interrupted and ensemble.trained:
                ensemble.predict(INPUTS)  # a prediction between stages changes nothing
    assert interrupted(INPUTS).equal(straight(INPUTS))
    assert all(isinstance(p, nn.Parameter) for p in interrupted.network.first._parameters.values())
    for member in range(2):
        assert interrupted.checkout(member)(INPUTS).allclose(interrupted(INPUTS)[member], atol=1e-6)
    plures.save(interrupted, tmp_path / "twice.safetensors")
    assert plures.load(tmp_path / "twice.safetensors", Twice())(INPUTS).equal(interrupted(INPUTS))


def test_one_number_per_sample_is_not_trained_with_cross_entropy() -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    for method in (plures.OrthogonalDropout, plures.Deterministic, plures.BatchEnsemble, plures.DeepEnsemble):
        stage = next(method(network).stages())
        with pytest.raises(PluresError, match="one number per sample"):
            stage(INPUTS, torch.zeros(12, dtype=torch.long))


def test_predict_refuses_one_number_per_sample() -> None:
    with pytest.raises(PluresError, match="one number per sample"):
        plures.Deterministic(nn.Linear(8, 1)).predict(INPUTS)


def test_calling_an_ensemble_takes_what_predict_takes() -> None:
    ensemble = plures.Deterministic(mlp())
    assert ensemble({"input": INPUTS}).equal(ensemble(INPUTS))


@pytest.mark.parametrize("method", ["OrthogonalDropout", "BatchEnsemble", "Masksembles", "PackedEnsemble", "MCDropout"])
def test_an_empty_batch_gets_an_empty_answer_from_every_method(method) -> None:
    ensemble = getattr(plures, method)(mlp())
    for _ in ensemble.stages():
        pass
    prediction = ensemble.predict(INPUTS[:0])
    assert len(prediction) == 0
    assert prediction.members.shape[1:] == (0, 3)


def test_the_summary_tells_members_roles_and_sizes(caplog) -> None:
    with caplog.at_level(logging.WARNING, "plures"):
        ensemble = OrthogonalDropout(mlp(64), members=5)
    assert not caplog.records, "a small network is not worth a warning"
    text = str(ensemble)
    assert "OrthogonalDropout of Sequential (members=5" in text
    assert "not trained: call fit" in text
    assert re.search(r"^split +4,608 numbers in 2 tensors$", text, re.MULTILINE)
    assert re.search(r"^private +323 numbers in 4 tensors x 5 members$", text, re.MULTILINE)
    said = re.search(r"([\d.]+) x the plain network", text)
    assert said
    stored = sum(tensor.nbytes for tensor in trained(ensemble).tensors().values())
    assert float(said[1]) == pytest.approx(stored / ensemble.given.nbytes, abs=0.005)


def test_a_network_whose_file_grows_much_is_warned_of(caplog) -> None:
    network = nn.Sequential(nn.Linear(8, 1024), nn.LayerNorm(1024), nn.Linear(1024, 3))
    network.register_parameter("table", nn.Parameter(torch.zeros(1024, 512)))
    with caplog.at_level(logging.WARNING, "plures"):
        OrthogonalDropout(network, members=5)
    assert "x the bytes of the plain network" in caplog.text


def text_network(name: str) -> nn.Module:
    """A text network of its full size, without numbers."""
    import transformers

    with torch.device("meta"):
        config = getattr(transformers, f"{name}Config")()
        network: nn.Module = getattr(transformers, f"{name}ForSequenceClassification")(config)
    return network


@pytest.mark.parametrize("name", ["DistilBert", "Bert"])
def test_text_networks_in_five_members_take_little_more_than_one(name: str) -> None:
    network = text_network(name)
    roles, own = plures.roles(network), own_tensors(network)
    by_role = {role: {name: own[name] for name in own if roles[name] == role} for role in plures.Role}
    embeddings = [name for name in by_role[plures.Role.SPLIT] if name.endswith("word_embeddings.weight")]
    assert len(embeddings) == 1
    partition = Partition({name: one.shape for name, one in by_role[plures.Role.SPLIT].items()}, 5, "kernel")
    split = SplitNetwork(network, roles, partition, Private(by_role[plures.Role.PRIVATE], 5), [])
    stored = sum(expected_bytes(split).values())
    assert stored <= 1.25 * sum(one.nbytes for one in own.values())


def test_a_small_distilbert_is_stored_at_the_size_that_was_reckoned(tmp_path) -> None:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=8000, dim=96, n_layers=2, n_heads=2, hidden_dim=192, max_position_embeddings=64
    )
    ensemble = OrthogonalDropout(DistilBertForSequenceClassification(config), members=5)
    stored = sum(tensor.nbytes for tensor in trained(ensemble).tensors().values())
    assert stored <= 1.25 * ensemble.given.nbytes
    assert stored == pytest.approx(sum(expected_bytes(ensemble._split).values()), rel=1e-3)
    plures.save(ensemble, tmp_path / "text.safetensors")
    assert (tmp_path / "text.safetensors").stat().st_size <= 1.25 * ensemble.given.nbytes


def trained(ensemble: plures.Ensemble) -> plures.Ensemble:
    for _ in ensemble.stages():
        pass
    return ensemble


def in_a_process(folder: Path, rank: int) -> None:
    """Train in one of two processes, and write down what came of it."""
    torch.distributed.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    for classifier, schedule in ((None, "sequential"), ("private", "together"), ("fixed", "sequential")):
        torch.manual_seed(rank)  # the mistake: each process draws another network
        seed = 0 if schedule == "together" else rank  # other owners from the start would be refused
        network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        ensemble = OrthogonalDropout(network, members=2, classifier=classifier, schedule=schedule, seed=seed)
        torch.manual_seed(rank)
        x, y = torch.randn(8, 8), torch.arange(8) % 3  # each process has data of its own
        try:
            for stage in ensemble.stages():
                ddp = nn.parallel.DistributedDataParallel(stage)
                optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1)
                for _ in range(3):
                    optimizer.zero_grad()
                    ddp(x, y).backward()
                    optimizer.step()
                for buffer in stage.buffers():  # as the guide has it
                    torch.distributed.broadcast(buffer, src=0)
            told = f"answer {ensemble(torch.ones(1, 8)).tolist()}"
        except PluresError as error:
            (folder / "said" / f"{classifier}-{rank}").write_text(f"refused {error}")
            os._exit(0)  # at once: the other one goes on, and taking leave of it may wait for it
        (folder / "said" / f"{classifier}-{rank}").write_text(told)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What two processes said in the end, by the classifier and the process."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "said").mkdir()
    both = [start(in_a_process, folder, rank) for rank in range(2)]

    def wait_for(process: BaseProcess) -> None:
        process.join()
        if process.exitcode:  # the other would wait for it
            for one in both:
                one.kill()

    with ThreadPoolExecutor(2) as waiting:
        list(waiting.map(wait_for, both))
    return {file.name: file.read_text() for file in (folder / "said").iterdir()}


def test_processes_that_start_from_other_networks_end_with_the_same_ensemble(said: dict[str, str]) -> None:
    for classifier in ("None", "private"):
        assert said[f"{classifier}-0"] == said[f"{classifier}-1"]
        assert said[f"{classifier}-0"].startswith("answer")


def test_processes_with_another_fixed_classifier_are_told(said: dict[str, str]) -> None:
    told = [said.get(f"fixed-{rank}", "") for rank in range(2)]
    assert any(line.startswith("refused") and "of another ensemble" in line for line in told)


def fixed_by_hand() -> nn.Module:
    network = mlp()
    network.get_parameter("0.weight").requires_grad_(False)
    return network


SHARING = [
    (lambda: OrthogonalDropout(mlp(), members=2, classifier="fixed"), "4.weight"),
    (lambda: plures.DeepEnsemble(mlp(), members=2, classifier="fixed"), "4.weight"),
    (lambda: plures.DeepEnsemble(fixed_by_hand(), members=2), "0.weight"),
]


@pytest.mark.parametrize(("build", "name"), SHARING)
def test_a_stage_with_shared_weights_of_another_process_is_refused(build, name: str) -> None:
    ensemble = build()
    stage = ensemble.open(ensemble.plan()[0])
    with torch.no_grad():
        tensors(stage.network)[name].normal_()  # as DDP does, with what the first process has drawn
    with pytest.raises(PluresError, match=f"shared tensor '{name}' of another ensemble"):
        stage.commit()
    assert not any(step.committed for step in ensemble.plan())


def test_a_stage_with_random_masks_of_another_process_is_refused() -> None:
    stage, of_another = (
        ensemble.open(ensemble.plan()[0])
        for ensemble in (OrthogonalDropout(mlp(), members=2, optimize_masks=False, seed=seed) for seed in range(2))
    )
    for buffer, other in zip(stage.buffers(), of_another.buffers(), strict=True):
        buffer.copy_(other)  # as DDP does before every step
    with pytest.raises(PluresError, match=r"the mask of '0.weight' of another ensemble"):
        stage.commit()


@pytest.mark.parametrize(("build", "name"), SHARING)
def test_what_is_shared_may_be_rounded_and_stays(build, name: str) -> None:
    ensemble = build()
    expected = None
    for stage in ensemble.stages():
        shared = tensors(stage.network)[name]
        expected = shared.clone() if expected is None else expected
        assert shared.equal(expected)
        with torch.no_grad():
            shared.mul_(1.004)  # a moving average or bfloat16 rounds by less
    assert ensemble.checkout(0).state_dict()[name].equal(expected)


@pytest.mark.parametrize("method", [OrthogonalDropout, plures.DeepEnsemble])
def test_what_is_shared_may_come_from_half_precision(method) -> None:
    torch.manual_seed(0)
    ensemble = method(nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 1000)), members=2, classifier="fixed")
    for stage in ensemble.stages():
        stage.load_state_dict({name: tensor.half() for name, tensor in stage.state_dict().items()})
    assert len(ensemble.trained) == 2


@pytest.mark.parametrize("method", [partial(OrthogonalDropout, background="given"), plures.DeepEnsemble])
def test_an_ensemble_in_shared_memory_is_trained(method: Callable[..., plures.Ensemble]) -> None:
    network = mlp()
    network[0].requires_grad_(False)
    ensemble = method(network, 2)
    ensemble.share_memory()
    for stage in ensemble.stages():
        train(stage)
    assert ensemble.trained == [0, 1]


@pytest.mark.parametrize("schedule", ["sequential", "together"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_norms_with_shared_statistics_stay_as_they_are(norm: type[nn.Module], schedule: str) -> None:
    network = nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 8, 1), norm(8, track_running_stats=True), nn.Flatten(), nn.Linear(32, 3)
    )
    roles = {name: "split" if name == "4.weight" else "shared" for name in network.state_dict()}
    ensemble = OrthogonalDropout(network, 2, background="given", roles=roles, schedule=schedule)
    for stage in ensemble.stages():
        train(stage)
    assert ensemble.checkout(1)[2].running_mean.equal(torch.zeros(8))


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"loss": nn.CrossEntropyLoss(reduction="none")},
            r"CrossEntropyLoss returned a tensor of shape \[12\]: return one",
        ),
        (
            {"loss": lambda logits, _: float(logits.detach().sum())},
            "the loss <lambda> returned float: return one number",
        ),
        ({"inputs": INPUTS[:1], "targets": TARGETS[:1]}, "a batch norm needs more than one sample in training"),
        ({"inputs": INPUTS[:0], "targets": TARGETS[:0]}, "the batch is empty"),
        ({"inputs": INPUTS.numpy()}, "the batch has a numpy array: convert it with torch.from_numpy"),
        ({"targets": TARGETS.tolist()}, "the targets are list: give a tensor"),
        ({"targets": TARGETS[:5]}, r"for targets of shape \[5\]: give one class for each place, \[12\]"),
        ({"targets": TARGETS.float()}, "the targets are torch.float32; classes are whole numbers"),
        ({"targets": TARGETS + 3}, "a target is not among the classes, which count from 0"),
    ],
)
@pytest.mark.parametrize("schedule", ["sequential", "together"])
def test_a_batch_that_cannot_be_trained_on_gets_one_sentence(schedule: Any, given: dict[str, Any], words: str) -> None:
    ensemble = OrthogonalDropout(with_norm(), 2, schedule=schedule, loss=given.get("loss"))
    stage = next(ensemble.stages())
    with pytest.raises(PluresError, match=words):
        stage(given.get("inputs", INPUTS), given.get("targets", TARGETS))


def test_sparse_embeddings_of_members_together_have_dense_gradients() -> None:
    network = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    ensemble = OrthogonalDropout(network, 2, schedule="together")
    stage = next(ensemble.stages())
    stage(torch.randint(0, 10, (12, 3)), TARGETS).backward()
    assert all(one.grad.layout is torch.strided for one in stage.parameters() if one.grad is not None)
