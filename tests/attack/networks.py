"""Random networks: every engine of each gives the answers of the members, or refuses in one sentence."""

import logging
import traceback
import warnings
from dataclasses import dataclass

import torch

from attack.driver import Verdict
from random_networks import wrong_answers


@dataclass
class Networks:
    """Networks drawn from their numbers; every fiftieth is compiled and exported, too."""

    items: int
    seed: int = 0
    name: str = "networks"
    batch: int = 50
    memory: int = 1 << 36
    seconds: int = 600

    def prepare(self) -> None:
        """Keep what plures and torch say of the networks out of the way."""
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)

    def judge(self, index: int) -> list[Verdict]:
        """Compare all engines of one network."""
        slow = index % 50 == 49
        try:
            wrong = list(wrong_answers(self.seed * 1_000_000 + 1000 + index, compiled=slow, exported=slow))
        except Exception:
            return [Verdict("raw", traceback.format_exc(limit=-4))]
        return [Verdict("silent", note) for note in wrong] or [Verdict("same")]
