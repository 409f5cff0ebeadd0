"""Run folders whose author means ill or whose disk failed, opened as those from the hub are."""

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
from plures.lab.compare.rows import Finished
from plures.lab.runs.open import open_run

ODD = ["model.pkl", "weights.PT", "\x1b[31m.bin", "a\nb.npz", "deep/er/x.pickle"]


@dataclass
class Folders(Commands):
    """Run folders, damaged, for `open_run` and the tables of comparisons."""

    @property
    def name(self) -> str:
        """Name the part of the attack."""
        return "run folders"

    def judge(self, index: int) -> list[Verdict]:
        """Damage a folder, and open it."""
        chance = Random(f"{self.seed}/{self.name}/{index}")
        folder = self.shop / "damaged"
        shutil.copytree(self.shop / "run", folder)
        sure = self._damage(folder, chance)
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                found = open_run(folder)
                Finished.read(folder)
            verdict = Verdict("silent", f"it was taken: {found!r:.200}") if sure else Verdict("harmless")
        except plures.PluresError as error:
            verdict = Verdict("refused")
            try:
                check_sentence(error)
            except AssertionError as fault:
                verdict = Verdict("silent", str(fault))
        except Exception:
            verdict = Verdict("raw", traceback.format_exc(limit=-4))
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)
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
        return break_folder(folder, "folders", chance)
