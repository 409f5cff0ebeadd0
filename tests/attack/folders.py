"""Folders from the hub, whose author means ill or whose disk failed: read and published again."""

import contextlib
import io
import os
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path
from random import Random

import plures
from attack.commands import Commands, break_folder
from attack.driver import Verdict
from attack.subjects import check_sentence

ODD = ["model.pkl", "weights.PT", "\x1b[31m.bin", "a\nb.npz", "deep/er/x.pickle"]


@dataclass
class Folders(Commands):
    """Published folders, damaged, for plures.from_hub and plures.push_to_hub."""

    @property
    def name(self) -> str:
        """Name the part of the attack."""
        return "hub folders"

    def judge(self, index: int) -> list[Verdict]:
        """Damage a folder, load it and publish it."""
        chance = Random(f"{self.seed}/{self.name}/{index}")
        folder, out = self.shop / "damaged", self.shop / "out"
        shutil.copytree(self.shop / "run", folder)
        sure = self._damage(folder, chance)
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                found = plures.from_hub(folder) if index % 2 else plures.push_to_hub(folder, out)
            verdict = Verdict("silent", f"it was taken: {found!r:.200}") if sure else Verdict("harmless")
        except plures.PluresError as error:
            verdict = Verdict("refused")
            try:
                check_sentence(error)
            except AssertionError as fault:
                verdict = Verdict("silent", str(fault))
        except Exception:
            verdict = Verdict("raw", traceback.format_exc(limit=-4))
        for made in (folder, out):
            if made.is_symlink() or made.is_file():
                made.unlink()
            else:
                shutil.rmtree(made, ignore_errors=True)
        return [verdict]

    def _damage(self, folder: Path, chance: Random) -> bool:
        kind = chance.random()
        if kind < 0.05:
            odd = folder / chance.choice(ODD)
            odd.parent.mkdir(parents=True, exist_ok=True)
            odd.write_bytes(b"x")
            return False
        if kind < 0.1:
            (folder / "loop").symlink_to(folder)
            os.mkfifo(folder / "pipe")
            return False
        return break_folder(folder, "hub", chance)
