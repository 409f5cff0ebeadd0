"""The owned engine gives the members' own answers, says what it cannot do, and is chosen where it is the faster one."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import networks
import plures
from benchmarks.harness import VisionTransformer
from plures import PluresError
from plures.calling import logits_of
from plures.lab.models import resnet8
from plures.methods.orthogonal_dropout.engines.owned import Owned
from plures.methods.orthogonal_dropout.engines.unfolded import Unfolded
from plures.native import library

needs_library = pytest.mark.skipif(library.why_unavailable() is not None, reason="no native library")


class Mixed(nn.Module):
    """Everything that the kernels do not know, between layers that they do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.dilated = nn.Conv2d(16, 16, 3, padding=2, dilation=2)
        self.norm = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2)
        self.scale = nn.Parameter(torch.rand(1, 16, 1, 1) + 0.5)
        self.squeeze = nn.Conv2d(16, 16, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(8, 8, (3, 1), (2, 1), (1, 0))
        self.head = nn.Linear(8, networks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x), inplace=True)
        x = self.norm(self.grouped(x) + self.dilated(x)) * self.scale
        x = self.pool(x)
        gate = torch.sigmoid(self.squeeze(x.mean((2, 3), keepdim=True)))
        x = self.squeeze(x * gate) + gate
        x = F.gelu(self.last(self.up(x)))
        return self.head(x.flatten(2).mean(2))


class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.conv = nn.Conv2d(12, 12, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(12, networks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.dropout(self.conv(F.relu(self.norm(x))))
        return self.head(F.relu(x).mean((2, 3)))


class DecidesByInputs(nn.Module):
    """torch.fx cannot follow it; every member decides alike."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.scaled = Scaled()
        self.again = self.scaled
        self.head = nn.Linear(16, networks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 100:
            x = x - 100
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        for _ in range(int(x.shape[-1] > 4)):
            x = self.again(self.scaled(x + self.grouped(x)))
        return self.head(x.mean((2, 3)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(1, 16, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class MixesSamples(nn.Module):
    """Its answer to a sample depends on the others in the batch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, networks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0) if self.where == "inputs" else x
        x = F.relu(self.stem(x)).mean((2, 3))
        if self.where == "attention":
            x = torch.softmax(x @ x.t(), -1) @ x
        if self.where == "norms":
            x = F.layer_norm(x.t(), x.shape[:1]).t()
        x = self.head(x)
        return F.normalize(x, dim=0) if self.where == "outputs" else x


def vision_transformer() -> nn.Module:
    return VisionTransformer(width=16, depth=2, heads=2)


MAKES = [
    networks.mlp,
    networks.resnet,
    networks.group_norm_resnet,
    networks.tied,
    vision_transformer,
    networks.reproducible(Mixed),
    networks.reproducible(PreActivation),
]
ALL = [(make, granularity) for make in MAKES for granularity in ("weight", "kernel", "block")]


def pictures(make: object, batch: int) -> Tensor:
    size = 32 if make is vision_transformer else 16
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))


def trained(network: nn.Module, members: int = 3, **options: object) -> plures.OrthogonalDropout:
    """An ensemble whose norm layers and biases are no longer what they were at the start."""
    ensemble = plures.OrthogonalDropout(network, members, optimize_masks=False, **options)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(1)
    for stage in ensemble.stages():
        with torch.no_grad():
            frozen = {name for name, parameter in stage.network.named_parameters() if not parameter.requires_grad}
            for name, tensor in (*stage.network.named_parameters(), *stage.network.named_buffers()):
                if tensor.is_floating_point() and "parametrizations" not in name and name not in frozen:
                    tensor.add_(torch.rand(tensor.shape, generator=random) * 0.3)
    return ensemble


@needs_library
@pytest.mark.parametrize(("make", "granularity"), ALL, ids=lambda value: getattr(value, "__name__", value))
def test_members_are_those_of_checkout(make, granularity, caplog) -> None:
    ensemble = trained(make(), granularity=granularity)
    engine = ensemble.engine("owned")
    assert isinstance(engine, Owned)
    for batch in (1, 7, 9, 20):
        images = pictures(make, batch)
        with torch.no_grad():
            expected = torch.stack([logits_of(ensemble.checkout(member)(images)) for member in range(3)])
            found = engine(images)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    some = engine.predict(images, members=[2, 0], batch_size=6).members
    torch.testing.assert_close(some, expected[[2, 0]].softmax(-1), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(ensemble.engine("owned", fold=False)(images), found, rtol=1e-4, atol=1e-4)
    assert not caplog.records, "nothing ran as a network of its own"


class Words(nn.Module):
    """torch.fx cannot follow it: a transformer over words, with positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, 32), nn.Embedding(20, 32)
        self.scaled, self.norm = ScaledWords(), nn.LayerNorm(32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(2))
        self.wide, self.head = nn.Linear(32, 256), nn.Linear(256, networks.CLASSES)

    def forward(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        if words.shape[1] > 19:
            words = words[:, :19]
        x = self.norm(self.words(words) + self.positions(torch.arange(words.shape[1])[None]))
        for layer in self.layers:
            x = self.scaled(layer(x))
        x = x if mask is None else x * mask[..., None]
        return self.head(self.wide(x.mean(1)).relu())


class ScaledWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(32) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def agree_with_members(engine: Owned, ensemble: plures.OrthogonalDropout, *sizes: int, **given: Tensor) -> None:
    for size in sizes:
        some = {name: tensor[:size] for name, tensor in given.items()}
        with torch.no_grad():
            expected = torch.stack([logits_of(ensemble.checkout(member)(**some)) for member in ensemble.trained])
            found = engine(**some)
        assert found.shape == expected.shape
        assert float((found - expected).norm() / expected.norm()) < 1e-5


def words(length: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(length)
    mask = torch.arange(length) < torch.randint(2, length + 1, (20, 1), generator=random)
    return {"words": torch.randint(50, (20, length), generator=random), "mask": mask.float()}


@needs_library
@pytest.mark.parametrize("granularity", ["kernel", "block"])
def test_a_network_that_cannot_be_traced_runs_layer_by_layer(granularity, caplog) -> None:
    network = networks.reproducible(Words)()
    roles = plures.roles(network) | {"words.weight": plures.Role.SPLIT}
    ensemble = trained(network, members=3, granularity=granularity, roles=roles)
    engine = ensemble.engine()
    assert isinstance(engine, Owned)
    assert engine.one_by_one == ["positions", "scaled"]
    agree_with_members(engine, ensemble, 4, 20, 1, 7, 20, **words(7))
    agree_with_members(engine, ensemble, 3, 20, **words(15))
    batch = words(5)
    for other in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        some = other.predict(batch, members=[2, 0], batch_size=6).members
        torch.testing.assert_close(some, ensemble.predict(batch).members[[2, 0]])
    assert "separate network" not in caplog.text


@needs_library
@pytest.mark.parametrize("make", [networks.resnet, vision_transformer, networks.mlp])
def test_a_large_network_runs_few_members_at_a_time(make, monkeypatch, caplog) -> None:
    monkeypatch.setattr("plures.methods.orthogonal_dropout.engines.owned.LARGE", 0)
    ensemble = trained(make(), members=5)
    engine = ensemble.engine("owned")
    seen, run = [], library.Library.run
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def watched(self: library.Library, function: str, *given: object) -> None:
        seen.extend(one.members for one in given if hasattr(one, "members"))
        run(self, function, *given)

    monkeypatch.setattr(library.Library, "run", watched)
    with torch.no_grad():
        for batch in (1, 7, 20, 3, 16):
            expected = torch.stack([ensemble.checkout(member)(pictures(make, batch)) for member in range(5)])
            found = engine(pictures(make, batch))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.set_num_threads(3)
        three = engine(pictures(make, batch))
        torch.set_num_threads(1)
        assert make is vision_transformer or three.equal(found), "bits of our kernels do not depend on threads"
        engine(pictures(make, batch))
    torch.set_num_threads(before)
    assert seen[-1] == (5 if make is networks.mlp else 1), "one member of 16 images at a time, rows all together"
    for other in (copy.deepcopy(engine), pickle.loads(pickle.dumps(ensemble.engine("owned")))):
        some = other.predict(pictures(make, 20), members=[4, 0], batch_size=6).members
        torch.testing.assert_close(some, ensemble.predict(pictures(make, 20)).members[[4, 0]])
    assert "separate network" not in caplog.text


@needs_library
def test_models_of_transformers_run_owned(caplog) -> None:
    ensemble = trained(networks.transformers_vit(), members=5, granularity="block")
    engine = ensemble.engine("owned")
    assert engine.one_by_one == ["vit.embeddings"]
    agree_with_members(engine, ensemble, 3, 5, 1, 20, pixel_values=pictures(None, 20))
    made = trained(networks.transformers_bert(), members=3)
    given = words(9)
    engine = made.engine()
    assert isinstance(engine, Owned)
    agree_with_members(engine, made, 3, 20, 1, input_ids=given["words"], attention_mask=given["mask"].long())
    assert "separate network" not in caplog.text


class DecidesByLength(DecidesByInputs):
    def forward(self, x: Tensor) -> Tensor:
        return super(DecidesByInputs, self).forward(x) if len(x) > 1000 else self.head(self.stem(x).mean((2, 3)))


@needs_library
@pytest.mark.parametrize("make", [DecidesByInputs, DecidesByLength, networks.transformers_resnet])
def test_a_course_that_depends_on_the_batch_runs_unfolded(make, caplog) -> None:
    ensemble = trained(networks.reproducible(make)(), members=5)
    assert isinstance(ensemble.engine(), Unfolded)
    engine, images = ensemble.engine("owned"), pictures(make, 9)
    with torch.no_grad():
        torch.testing.assert_close(engine(images), ensemble(images))
    assert engine.about.startswith("unfolded")
    assert "without numbers" in caplog.text or "depends on the length of the batch" in caplog.text


@needs_library
@pytest.mark.parametrize("kind", [None, "owned"])
@pytest.mark.parametrize("where", ["inputs", "attention", "norms", "outputs"])
@pytest.mark.parametrize("sizes", [(9, 4), (1, 1, 30), (100,), (300,), (2, 5)])
def test_samples_that_influence_each_other_are_answered_as_the_members_do(where, sizes, kind, caplog) -> None:
    """Also in batches that the engine would cut, and if the first batch has a single sample."""
    network = networks.reproducible(lambda: MixesSamples(where))()
    ensemble = trained(network, members=5, granularity="kernel", classifier="split")
    engine = ensemble.engine(kind)
    for size in sizes:
        images = pictures(None, size)
        with torch.no_grad():
            expected = torch.stack([ensemble.checkout(member)(images) for member in range(5)])
            torch.testing.assert_close(engine(images), expected)
            torch.testing.assert_close(engine.predict(images, members=[2]).members, expected[[2]].softmax(-1))
    if max(sizes) > 1:
        (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
        assert "runs each member as a separate network: its outputs differ by" in record.getMessage()
        assert engine.one_by_one == ["stem", "head"]
        assert engine.about == "unfolded"


class MixesFarSamples(MixesSamples):
    """Only samples that lie 90 apart influence each other."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x)).mean((2, 3))
        return self.head(torch.cat([x[:90], x[90:] + 5 * x[:-90]]))


@needs_library
@pytest.mark.parametrize("size", [100, 300])
def test_the_whole_first_batch_is_compared(size) -> None:
    network = networks.reproducible(lambda: MixesFarSamples("far"))()
    ensemble = trained(network, members=5, granularity="kernel", classifier="split")
    engine, images = ensemble.engine("owned"), pictures(None, size)
    with torch.no_grad():
        expected = torch.stack([ensemble.checkout(member)(images) for member in range(5)])
        torch.testing.assert_close(engine(images), expected)
    assert engine.about == "unfolded"


@needs_library
def test_the_members_are_held_as_one_network_until_two_sizes_were_compared() -> None:
    ensemble = trained(networks.resnet(), members=5)
    weights = sum(tensor.nbytes for tensor in ensemble.network.state_dict().values())
    engine = ensemble.engine("owned")
    held = [held_by(engine)]
    for size in (1, 1, 5, 5, 7, 9):
        engine.predict(networks.images(size))
        held.append(held_by(engine))
    assert min(held[:3]) > max(held[3:]) + weights, "gone after the second size"
    assert held[2] - held[3] < 1.7 * weights


def held_by(engine: nn.Module) -> int:
    """Count the bytes of all tensors that a pickled engine has."""
    return len(pickle.dumps(engine))


@needs_library
def test_further_training_does_not_disturb_an_engine() -> None:
    ensemble = trained(networks.resnet())
    engine, images = ensemble.engine("owned"), networks.images(6)
    with torch.no_grad():
        expected = ensemble(images)
    other = trained(networks.resnet(), seed=5)
    ensemble.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert not torch.allclose(ensemble(images), expected)
        torch.testing.assert_close(engine(images), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(engine(images[:3]), expected[:, :3], rtol=1e-4, atol=1e-4)
    assert engine.about.startswith("owned"), "the members with which it was compared are those of before"


@needs_library
def test_an_argument_as_long_as_the_batch_by_chance() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, networks.CLASSES)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.head(F.relu(self.stem(x)) @ table)

    ensemble = trained(Biased(), classifier="split")
    engine, table = ensemble.engine("owned"), torch.randn(16, 16)
    for size in (3, 5):
        engine.predict((torch.randn(size, 6), table))
    x = torch.randn(16, 6)
    with pytest.raises(PluresError, match="another argument is as long as the batch"):
        engine.predict((x, table))
    fresh = ensemble.engine("owned")
    with torch.no_grad():
        expected = torch.stack([ensemble.checkout(member)(x, table) for member in range(3)])
        torch.testing.assert_close(fresh(x, table), expected, rtol=1e-4, atol=1e-4)


@needs_library
def test_a_fold_that_changes_the_network_is_found() -> None:
    """The network looks at its norm layer, which is gone when it is folded."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, networks.CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.conv(x)).mean((2, 3))
            return self.head(x if isinstance(self.norm, nn.BatchNorm2d) else -x)

    ensemble = trained(Looks())
    images = networks.images(5)
    with torch.no_grad():
        torch.testing.assert_close(ensemble.engine("unfolded")(images), ensemble(images))


@pytest.mark.parametrize("make", [networks.mlp, networks.reproducible(Mixed)], ids=["mlp", "mixed"])
def test_blocks_train_prune_save_and_load(make, tmp_path) -> None:
    ensemble = plures.OrthogonalDropout(make(), 3, granularity="block")
    for stage in ensemble.stages():
        optimizer = torch.optim.SGD([one for one in stage.parameters() if one.requires_grad], lr=0.1)
        stage(networks.images(), networks.labels()).backward()
        optimizer.step()
    for name, owners in ensemble.owners.items():
        weight = ensemble.network.get_parameter(name)
        if weight[0, 0].numel() == 1:
            assert owners.shape[:2] == (-(-len(weight) // 8), weight.shape[1]), name
        counts = owners.flatten().bincount(minlength=3)
        assert int(counts.max() - counts.min()) <= 1
    plures.save(ensemble, tmp_path / "blocks.safetensors")
    loaded = plures.load(tmp_path / "blocks.safetensors", make)
    images = networks.images(5)
    with torch.no_grad():
        expected = torch.stack([ensemble.checkout(member)(images) for member in range(3)])
        assert loaded(images).equal(expected)
        torch.testing.assert_close(loaded.engine("unfolded")(images), expected)


@needs_library
def test_engine_says_which_layers_run_member_by_member() -> None:
    engine = trained(Mixed(), granularity="kernel").engine("owned")
    assert {"dilated", "up"} <= set(engine.one_by_one)
    assert not {"stem", "grouped", "squeeze", "last"} & set(engine.one_by_one)
    assert trained(networks.resnet(), classifier="fixed").engine("owned").one_by_one == []


@needs_library
def test_engine_outlives_the_ensemble_and_can_be_copied_and_compiled() -> None:
    ensemble = trained(networks.resnet())
    images = networks.images(9)
    with torch.no_grad():
        expected = ensemble(images)
        engine = ensemble.engine("owned")
        for parameter in ensemble.parameters():
            parameter.zero_()
        torch.testing.assert_close(engine(images), expected, rtol=1e-4, atol=1e-4)
        assert copy.deepcopy(engine)(images).equal(engine(images))
        compiled = torch.compile(engine.network, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(images), engine.network(images))


@needs_library
def test_bits_are_the_same_from_run_to_run_and_for_any_number_of_threads() -> None:
    engine = trained(networks.resnet()).engine("owned")
    images = networks.images(9)
    before = torch.get_num_threads()
    with torch.no_grad():
        expected = engine(images)
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert engine(images).equal(expected)
        finally:
            torch.set_num_threads(before)


def test_some_members_of_every_engine() -> None:
    ensemble = trained(networks.mlp())
    images = networks.images(5)
    whole = ensemble.predict(images).members
    for kind in ("owned", "unfolded"):
        engine = ensemble.engine(kind)
        torch.testing.assert_close(engine.predict(images, members=[2, 1]).members, whole[[2, 1]])
        for wrong in ([], [3], [0, 0]):
            with pytest.raises(PluresError, match=r"use one or more of \[0, 1, 2\]"):
                engine.predict(images, members=wrong)


@needs_library
def test_what_the_engine_cannot_run_is_refused_with_what_to_do() -> None:
    with pytest.raises(PluresError, match="float32"):
        trained(networks.mlp()).double().engine("owned")
    with pytest.raises(PluresError, match="on the CPU"):
        trained(networks.mlp()).to("meta").engine("owned")


@needs_library
@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "meta"])
def test_an_engine_in_another_type_or_place_is_refused(convert: str) -> None:
    engine = trained(networks.mlp(), classifier="split").engine("owned")
    images = networks.images(3)
    expected = engine.predict(images).members
    with pytest.raises(PluresError, match=r"the owned engine computes in float32 on the CPU.*unfolded"):
        engine.to("meta") if convert == "meta" else getattr(engine, convert)()
    assert engine.predict(images).members.equal(expected), "nothing has changed"
    for module in engine.modules():  # past the engine, layer by layer
        if module is not engine:
            module.to("meta") if convert == "meta" else getattr(module, convert)()
    with pytest.raises((PluresError, RuntimeError)):
        engine.predict(images)


def test_engine_without_library_is_refused_by_name_and_passed_over_otherwise(monkeypatch) -> None:
    monkeypatch.setenv("PLURES_NATIVE", "0")
    ensemble = trained(networks.mlp())
    with pytest.raises(PluresError, match="PLURES_NATIVE=0"):
        ensemble.engine("owned")
    assert isinstance(ensemble.engine(), Unfolded)


@needs_library
def test_engine_is_chosen_by_memory_and_by_what_is_faster() -> None:
    wide = trained(resnet8(classes=4, width=8), members=5, granularity="kernel")
    assert isinstance(wide.engine(), Owned)
    with pytest.raises(PluresError, match="no engine fits into 1000 bytes"):
        wide.engine(memory=1000)
    assert isinstance(wide.engine(memory=10**9), Owned)
    # Two members of single weights cost about two networks either way.
    assert isinstance(trained(resnet8(classes=4, width=8), members=2, granularity="weight").engine(), Unfolded)
    # A chain of linear layers is one call.
    perceptron = trained(networks.mlp(), members=5).engine()
    assert isinstance(perceptron, Owned)
    assert not perceptron.one_by_one
    assert isinstance(trained(vision_transformer(), members=5, granularity="block").engine(), Owned)
    # What torch.fx cannot trace.
    assert isinstance(trained(networks.transformer(), members=5).engine(), Unfolded)
