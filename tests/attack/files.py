"""Damaged and malicious files of ensembles: refused, equal to the original, or (a malicious one) finite."""

import logging
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

import torch

import plures
from attack.damage import damaged
from attack.driver import Verdict
from attack.forgery import forged
from attack.subjects import SUBJECTS, answer, check_sentence, network, same, use
from plures.storage import refill

Kind = Literal["damaged", "malicious"]


@dataclass
class Files:
    """Files of all subjects in turn, made from the good ones in a folder."""

    name: Kind
    items: int
    folder: Path
    seed: int = 0
    batch: int = 1000
    memory: int = 4 << 30
    seconds: int = 20
    own: Path = Path()  # of each child: where it writes

    def prepare(self) -> None:
        """Use every subject once."""
        torch.set_num_threads(1)
        warnings.simplefilter("error")
        logging.disable(logging.WARNING)  # what plures says of the networks themselves
        self.own = Path(tempfile.mkdtemp(dir=self.folder))
        for subject in SUBJECTS:
            use(plures.load(self.folder / subject.file, network()), self.own / "again.safetensors")

    def judge(self, index: int) -> list[Verdict]:
        """Make one file, load it, and say what became of it."""
        chance = Random(f"{self.seed}/{self.name}/{index}")
        subject = SUBJECTS[index % len(SUBJECTS)]
        good, path = self.folder / subject.file, self.own / "attack.safetensors"
        others = [self.folder / other.file for other in SUBJECTS]
        path.write_bytes(damaged(good.read_bytes(), chance) if self.name == "damaged" else forged(good, others, chance))
        try:
            word, note = self._loaded(path, good, chance), ""
        except plures.PluresError as error:
            word, note = "refused", ""
            try:
                check_sentence(error)
            except AssertionError as fault:
                word, note = "silent", str(fault)
        except AssertionError as fault:
            word, note = "silent", str(fault)
        except Exception:
            word, note = "raw", traceback.format_exc(limit=-4)
        return [Verdict(word, f"{note} (seed {self.seed}, {subject})" if note else "")]

    def _loaded(self, path: Path, good: Path, chance: Random) -> str:
        if self.name == "damaged":
            assert same(plures.load(path, network()), _original(good)), "it loads to other numbers"
            return "same"
        way = chance.random()
        if way < 0.1:
            ensemble = plures.load(good, network())
            refill(ensemble, path)
        else:
            ensemble = plures.load(path, network())
        _check_options(ensemble, _original(good))
        use(ensemble, self.own / "again.safetensors")
        return "same" if answer(ensemble) == _answer(good) else "finite"


def _check_options(ensemble: plures.Ensemble, original: plures.Ensemble) -> None:
    """Demand that options of the wrong type are refused, not kept."""
    if type(ensemble) is type(original):
        for name, value in original.options().items():
            kept = ensemble.options()[name]
            kinds = {type(kept), type(value)}
            alike = len(kinds) == 1 or None in (kept, value) or kinds == {int, float}
            assert alike, f"the option {name}={kept!r} was taken, where {value!r} was"


@cache
def _original(path: Path) -> plures.Ensemble:
    return plures.load(path, network())


@cache
def _answer(path: Path) -> bytes | None:
    return answer(_original(path))
