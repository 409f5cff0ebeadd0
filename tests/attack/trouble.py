"""What the driver of an attack must get along with; without torch, so that processes start at once."""

import os
import signal
from dataclasses import dataclass

from attack.driver import Verdict


@dataclass
class Trouble:
    """Items of which one dies, one never ends and one is wrong."""

    name: str = "trouble"
    items: int = 6
    batch: int = 3
    memory: int = 1 << 36
    seconds: int = 1

    def prepare(self) -> None:
        pass

    def judge(self, index: int) -> list[Verdict]:
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while index == 3:
            pass
        return [Verdict("silent", "other numbers") if index == 4 else Verdict("refused")]
