"""Dense answers go through stages, forward, predict, metrics and files like flat ones."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plures
from plures import PluresError, metrics

CLASSES = 3


class Painter(nn.Module):
    """A small encoder-decoder: pictures [batch, 3, side, side] in, logits [batch, classes, side, side] out."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.paint = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        painted: Tensor = self.paint(self.up(self.deep(self.down(x))).relu())
        return painted


def painter() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Painter()


def tagger() -> nn.Module:
    from transformers import BertConfig, BertForTokenClassification  # seconds that every test process would spend

    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=CLASSES,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForTokenClassification(config)


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rectangles of two colours before a dark background, and where they are."""
    random = torch.Generator().manual_seed(seed)
    maps = torch.zeros(count, 12, 12, dtype=torch.long)
    for one in maps:
        for kind in (1, 2):
            top, left = torch.randint(0, 7, (2,), generator=random).tolist()
            one[top : top + 5, left : left + 5] = kind
    colours = torch.tensor([[-1.0, -1, -1], [1, 0, -1], [-1, 0, 1]])
    return colours[maps].movedim(-1, 1) + 0.8 * torch.randn(count, 3, 12, 12, generator=random), maps


def listener() -> nn.Module:
    """A tagger of features, such as sound: [batch, moments, 8] in, [batch, moments, classes] out."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, CLASSES))


def signals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    features = torch.randn(count, 10, 8, generator=torch.Generator().manual_seed(seed))
    targets = features[..., :CLASSES].argmax(-1)
    targets[:, -2:] = -100
    return features, targets


def sentences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Words whose class follows from their number; the last two are not labelled."""
    words = torch.randint(0, 30, (count, 10), generator=torch.Generator().manual_seed(seed))
    targets = words % CLASSES
    targets[:, -2:] = -100
    return words, targets


def train(ensemble: plures.Ensemble, data: tuple[Tensor, Tensor], steps: int) -> plures.Ensemble:
    for stage in ensemble.stages():
        optimizer = torch.optim.Adam(stage.parameters(), lr=0.02)
        for _ in range(steps):
            optimizer.zero_grad()
            stage(*data).backward()
            optimizer.step()
    return ensemble


LAST = plures.CrossEntropy(class_axis=-1)
METHODS = [
    ("OrthogonalDropout", {"members": 2, "optimize_masks": False}, 2),
    ("OrthogonalDropout", {"members": 2}, 2),
    ("Deterministic", {}, 1),
    ("MCDropout", {"passes": 3}, 3),
    ("DeepEnsemble", {"members": 2}, 2),
    ("BatchEnsemble", {"members": 2}, 2),
    ("Masksembles", {"members": 4}, 4),
    ("MIMO", {"members": 2}, 2),
    ("PackedEnsemble", {"members": 2}, 2),
]
NEEDS_FEATURES = {  # members have a slot or a width of their own, which numbers of words have not
    "MIMO": "MIMO stacks images or features on their channels; the network was given torch.int64",
    "PackedEnsemble": "Embedding 'bert.embeddings.word_embeddings' has parameters that PackedEnsemble cannot narrow",
}


@pytest.mark.parametrize(
    ("name", "options", "members"), METHODS, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("kind", ["pictures", "sentences", "signals"])
def test_dense_answers_keep_the_contract(kind: str, name: str, options, members: int, tmp_path: Path) -> None:
    made = {"pictures": (painter, pictures), "sentences": (tagger, sentences), "signals": (listener, signals)}[kind]
    network, data = made[0](), made[1](6, 0)
    more = {} if kind == "pictures" else {"loss": LAST}
    if kind == "sentences" and name in NEEDS_FEATURES:
        with pytest.raises(PluresError, match=NEEDS_FEATURES[name]):
            train(getattr(plures, name)(network, **options, **more), data, steps=1)
        return
    places = tuple(data[1].shape[1:])
    if name == "Masksembles" and kind == "sentences":
        more["scale"] = 1.5
    ensemble = train(getattr(plures, name)(network, **options, **more), data, steps=2)
    assert ensemble(data[0]).shape == (members, 6, CLASSES, *places)
    prediction = ensemble.predict(data[0], batch_size=4)
    assert prediction.members.shape == (members, 6, CLASSES, *places)
    torch.testing.assert_close(prediction.probabilities.sum(1), torch.ones(6, *places))
    for part in (prediction.label, prediction.confidence, prediction.total, prediction.aleatoric, prediction.epistemic):
        assert part.shape == (6, *places)
    torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic, atol=1e-5, rtol=0)
    assert len(ensemble.predict(data[0][:0])) == 0
    assert "6 samples" in repr(prediction)
    ensemble.calibrate(*data)
    plures.save(ensemble, tmp_path / "dense.safetensors")
    loaded = plures.load(tmp_path / "dense.safetensors", network)
    assert torch.equal(loaded.predict(data[0]).probabilities, ensemble.predict(data[0]).probabilities)
    assert loaded.loss == ensemble.loss
    assert 0 <= metrics.accuracy(prediction.probabilities, data[1]) <= 1


@pytest.fixture(scope="module")
def painted() -> plures.Ensemble:
    split = plures.OrthogonalDropout(painter(), members=2, optimize_masks=False, granularity="weight")
    return train(split, pictures(24, 1), steps=80)


def test_segmentation_learns_and_is_calibrated(painted: plures.Ensemble) -> None:
    ensemble = copy.deepcopy(painted)
    pixels, maps = pictures(24, 2)
    plain = ensemble.predict(pixels)
    assert metrics.accuracy(plain.probabilities, maps) > 0.8
    ensemble.calibrate(*pictures(24, 3))
    assert metrics.nll(ensemble.predict(pixels).probabilities, maps) < metrics.nll(plain.probabilities, maps) + 0.01
    before, after = ensemble.calibration.nll.tolist()
    assert after <= before
    careful = ensemble.predict(pixels, abstain_below=0.9)
    assert careful.label.shape == maps.shape
    sure = ~careful.abstained
    assert metrics.accuracy(plain.probabilities, maps) < float((careful.label == maps)[sure].double().mean())


def test_engines_answer_densely_as_well(painted: plures.Ensemble) -> None:
    pixels, _ = pictures(4, 2)
    engine = painted.engine("unfolded", fold=False)
    assert torch.equal(engine.predict(pixels).probabilities, painted.predict(pixels).probabilities)


def test_a_tagger_learns_from_the_labelled_words() -> None:
    ensemble = train(plures.DeepEnsemble(tagger(), members=2, loss=LAST), sentences(32, 0), steps=60)
    words, targets = sentences(16, 5)
    prediction = ensemble.predict({"input_ids": words})
    assert prediction.label.shape == (16, 10)
    assert metrics.accuracy(prediction.probabilities, targets) > 0.9


@pytest.mark.parametrize("name", ["MIMO", "PackedEnsemble"])
@pytest.mark.parametrize("kind", ["pictures", "signals"])
def test_slots_and_narrow_members_learn_dense_answers(name: str, kind: str) -> None:
    network, draw = (painter(), pictures) if kind == "pictures" else (listener(), signals)
    loss = None if kind == "pictures" else LAST
    ensemble = train(getattr(plures, name)(network, members=2, loss=loss), draw(32, 0), steps=120)
    inputs, targets = draw(24, 5)
    for member in ensemble.predict(inputs).members:
        assert metrics.accuracy(member, targets) > 0.75


def test_promises_are_not_made_for_places(painted: plures.Ensemble) -> None:
    ensemble = copy.deepcopy(painted).calibrate(*pictures(8, 3))
    prediction = ensemble.predict(pictures(2, 4)[0])
    for ask in (
        prediction.sets,
        lambda: prediction.abstain(0.1),
    ):
        with pytest.raises(
            PluresError, match="need one prediction per sample: the pixels or tokens of one sample are not independent"
        ):
            ask()


def test_dense_targets_of_another_shape_get_one_sentence(painted: plures.Ensemble) -> None:
    pixels, maps = pictures(8, 3)
    with pytest.raises(PluresError, match=r"targets of shape \(8, 12, 11\) must have one entry for each place"):
        painted.calibrate(pixels, maps[:, :, 1:])
    with pytest.raises(PluresError, match=r"targets of shape \[8\] must have one class for each place"):
        painted.calibrate(pixels, maps[:, 0, 0])


@pytest.mark.parametrize("name", ["DeepEnsemble", "BatchEnsemble", "OrthogonalDropout"])
def test_training_on_targets_of_another_shape_gets_one_sentence(name: str) -> None:
    (pixels, maps), (words, tags) = pictures(4, 0), sentences(4, 0)
    painting = next(iter(getattr(plures, name)(painter(), members=2).stages()))
    for wrong in (maps[:, :, 1:], maps[:, 0, 0]):
        with pytest.raises(PluresError, match=r"give one class for each place, \[4, 12, 12\]"):
            painting(pixels, wrong)
    tagging = next(iter(getattr(plures, name)(tagger(), members=2, loss=LAST).stages()))
    with pytest.raises(PluresError, match=r"classes on axis -1, for targets of shape \[4, 9\]: give .* \[4, 10\]"):
        tagging(words, tags[:, 1:])
    assert painting(pixels, maps).isfinite()
    assert tagging(words, tags).isfinite()
    shares = nn.functional.one_hot(maps, CLASSES).movedim(-1, 1).float()
    torch.testing.assert_close(painting.eval()(pixels, shares), painting(pixels, maps))


def test_an_axis_that_is_not_there_gets_one_sentence() -> None:
    stage = next(iter(plures.Deterministic(painter(), loss=plures.CrossEntropy(class_axis=4)).stages()))
    with pytest.raises(PluresError, match="has no axis 4: name another class_axis"):
        stage(*pictures(2, 0))


class Tagger(nn.Module):
    """Features [batch, 8, moments] in, [batch, moments, classes] out; a rehearsal can run its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 16, 1)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.convolution(x).transpose(1, 2))


def test_a_network_that_is_tried_out_loads_with_its_classes_last(tmp_path: Path) -> None:
    """The constructor of MIMO runs the network once, and must know by then where the stored classes are."""
    features, targets = signals(6, 0)
    features = features.transpose(1, 2).contiguous()
    ensemble = train(plures.MIMO(Tagger(), members=2, loss=LAST), (features, targets), steps=1)
    plures.save(ensemble, tmp_path / "tagger.safetensors")
    loaded = plures.load(tmp_path / "tagger.safetensors", Tagger)
    assert loaded(features).equal(ensemble(features))
