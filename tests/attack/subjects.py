"""What is attacked: every method, complete and half-trained, on a network of a few hundred weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plures
from plures.methods.orthogonal_dropout.method import Kind

IMAGES = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2])
NUMBERS = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
ALL_STAGES = 100


@dataclass(frozen=True)
class Subject:
    """One method with its options, trained for so many stages."""

    method: str
    options: dict[str, Any]
    stages: int = ALL_STAGES
    calibrated: bool = False
    numbers: bool = False  # it learns two numbers with their variances, not four classes

    @property
    def file(self) -> str:
        """Name the file that it is stored in."""
        return f"{SUBJECTS.index(self)}.safetensors"

    def make(self) -> plures.Ensemble:
        """Train it."""
        loss = plures.GaussianNLL() if self.numbers else F.cross_entropy
        targets = NUMBERS if self.numbers else LABELS
        ensemble: plures.Ensemble = getattr(plures, self.method)(network(), **self.options, loss=loss)
        for _, stage in zip(range(self.stages), ensemble.stages(), strict=False):
            stage(IMAGES, targets).backward()
            with torch.no_grad():
                for parameter in stage.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
            stage.commit()
        return ensemble.calibrate(IMAGES, targets) if self.calibrated else ensemble


SUBJECTS = [
    Subject("OrthogonalDropout", {"members": 3}),
    Subject("OrthogonalDropout", {"members": 3}, stages=0),
    Subject("OrthogonalDropout", {"members": 3, "granularity": "weight"}, stages=4),
    Subject("OrthogonalDropout", {"members": 3, "init": "given", "classifier": "fixed"}, stages=2),
    Subject("OrthogonalDropout", {"members": 2, "optimize_masks": False}, stages=1),
    Subject("OrthogonalDropout", {"members": 3}, calibrated=True),
    Subject("OrthogonalDropout", {"members": 3, "granularity": "block"}, calibrated=True),
    Subject("OrthogonalDropout", {"members": 2, "granularity": "block"}, stages=2),
    Subject("OrthogonalDropout", {"members": 2}, calibrated=True, numbers=True),
    Subject("Deterministic", {}),
    Subject("Deterministic", {"init": "fresh"}, stages=0),
    Subject("MCDropout", {"passes": 3}, calibrated=True),
    Subject("MCDropout", {"passes": 3, "init": "fresh", "sites": {"0": 0.3, "4": 0.1}}, stages=0),
    Subject("DeepEnsemble", {"members": 3}, calibrated=True),
    Subject("DeepEnsemble", {"members": 3, "classifier": "fixed"}, stages=1),
    Subject("BatchEnsemble", {"members": 3}, calibrated=True, numbers=True),
    Subject("BatchEnsemble", {"members": 2, "init": "given"}, stages=0),
    Subject("MIMO", {"members": 2}),
    Subject("MIMO", {"members": 2, "batch_repetition": 2}, stages=0),
    Subject("Masksembles", {"members": 3}),
    Subject("Masksembles", {"members": 3, "layers": ["4"]}, stages=0),
    Subject("PackedEnsemble", {"members": 2}, calibrated=True),
    Subject("PackedEnsemble", {"members": 2, "reduction": "mean"}, stages=0),
    Subject("adapt", {"members": 3, "share": 0.05}, calibrated=True),
    Subject("adapt", {"members": 2, "share": 0.3}, stages=1),
]


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 8),
            nn.ReLU(),
            nn.Linear(8, 4),
        )


def save_all(folder: Path) -> None:
    """Write the file of every subject: 0.safetensors, 1.safetensors, ..."""
    for subject in SUBJECTS:
        plures.save(subject.make(), folder / subject.file)


def same(one: plures.Ensemble, other: plures.Ensemble) -> bool:
    """Say whether two ensembles are equal in all that a file holds, and in what they answer."""
    if (one.options(), one._state(), one.loss) != (other.options(), other._state(), other.loss):
        return False
    tensors, others = one.tensors(), other.tensors()
    if tensors.keys() != others.keys() or not all(_equal(tensors[name], others[name]) for name in tensors):
        return False
    return answer(one) == answer(other)


def answer(ensemble: Any) -> bytes | None:
    """Give what an ensemble or engine answers, as bytes; None where nothing is trained."""
    try:
        return bytes(outputs(ensemble, IMAGES).numpy().tobytes())
    except plures.PluresError:
        return None


def outputs(ensemble: Any, inputs: Tensor) -> Tensor:
    """Give what each member answers, calibrated: probabilities, or means and standard deviations."""
    if isinstance(ensemble.loss, plures.GaussianNLL):
        found = ensemble.regress(inputs)
        return torch.stack([found.mean, found.std])
    members: Tensor = ensemble.predict(inputs).members
    return members


def use(ensemble: plures.Ensemble, path: Path) -> None:
    """Do with a loaded ensemble what a person would; whatever is wrong with it must be told by a PluresError."""
    repr(ensemble)
    ensemble.plan()
    for kind in (None, *(get_args(Kind) if isinstance(ensemble, plures.OrthogonalDropout) else ())):
        try:
            _ask(ensemble if kind is None else ensemble.engine(kind))
        except plures.PluresError as error:
            check_sentence(error)
    plures.save(ensemble, path)
    plures.load(path, network(), loss=F.cross_entropy)
    for stage in ensemble.stages():
        stage.loss = F.cross_entropy
        stage(IMAGES, LABELS).backward()
        stage.commit()
        break


def _ask(predictor: Any) -> None:
    """Ask all that can be asked; answers are finite, and what cannot be promised is told."""
    if isinstance(predictor.loss, plures.GaussianNLL):
        found = predictor.regress(IMAGES)
        numbers = [found.mean, found.std, found.aleatoric, found.epistemic]
        promises: list[Callable[[], Any]] = [lambda: found.interval(0.5)]
    else:
        found = predictor.predict(IMAGES)
        numbers = [found.probabilities, found.members, found.total, found.aleatoric, found.epistemic]
        promises = [lambda: found.sets(0.5), lambda: found.abstain(0.5)]
    assert all(bool(one.isfinite().all()) for one in numbers), "an answer is not finite"
    for promise in promises:
        try:
            promise()
        except plures.PluresError as error:  # too few held-out samples, or none
            check_sentence(error)


def check_sentence(error: plures.PluresError) -> None:
    """Demand one line of bounded length that cannot steer a terminal."""
    text = str(error)
    assert text, "an empty message"
    assert text.isprintable(), f"control characters in {text!r}"
    assert len(text) < 4000, f"a message of {len(text)} letters: {text[:100]}"
    assert "allocate" not in text, f"memory was exhausted: {text}"
    assert "MemoryError" not in text, f"memory was exhausted: {text}"


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.equal(other)
