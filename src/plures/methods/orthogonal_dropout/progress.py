"""How far the members are: which phases each has finished, and how often it was discarded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plures.errors import PluresError
from plures.methods.orthogonal_dropout.phases import PHASES


class Progress:
    """Keep the phases that each member has behind it, in order.

    progress = Progress(members=5)
    progress.committed[0].append("pretrain")
    progress.in_training  # 0
    """

    def __init__(self, members: int) -> None:
        self.committed: list[list[str]] = [[] for _ in range(members)]
        self.attempts = [0] * members  # how often a member was discarded: each attempt draws other numbers

    @property
    def trained(self) -> list[int]:
        """The members that can predict."""
        return [member for member, done in enumerate(self.committed) if done and PHASES[done[-1]].completes]

    @property
    def in_training(self) -> int | None:
        """The member that has some of its phases behind it and not all, if there is one."""
        return next((m for m, done in enumerate(self.committed) if done and not PHASES[done[-1]].completes), None)

    def ahead(self, member: int, phases: list[str]) -> list[str]:
        """Give those of a member's phases that come after the ones it has behind it."""
        order = list(PHASES)
        done = self.committed[member]
        reached = order.index(done[-1]) if done else -1
        return [phase for phase in phases if order.index(phase) > reached]

    def as_json(self) -> dict[str, Any]:
        """Give the progress as JSON values."""
        return {"committed": self.committed, "attempts": self.attempts}

    def take(self, values: Mapping[str, Any]) -> None:
        """Take over what `as_json` gave; refuse what no training can lead to."""
        committed, attempts = values["committed"], values["attempts"]
        if not len(committed) == len(attempts) == len(self.committed):
            raise PluresError(f"the progress of {len(committed)} members is stored, not {len(self.committed)}")
        for done, count in zip(committed, attempts, strict=True):
            in_order = [phase for phase in PHASES if phase in done]
            if list(done) != in_order or type(count) is not int or not 0 <= count < 2**31:
                raise PluresError(f"the progress of a member is stored as {done!r} after {count!r} attempts")
        self.committed = [list(done) for done in committed]
        self.attempts = list(attempts)

    def as_tensor(self) -> Tensor:
        """Give the progress as numbers for a state dict."""
        rows = zip(self.committed, self.attempts, strict=True)
        return torch.tensor([[*(phase in done for phase in PHASES), attempts] for done, attempts in rows])

    def take_tensor(self, state: Tensor) -> None:
        """Take over what `as_tensor` gave."""
        rows = state.tolist()
        committed = [[phase for phase, done in zip(PHASES, row, strict=False) if done] for row in rows]
        self.take({"committed": committed, "attempts": [row[-1] for row in rows]})
