"""plures report: finished runs on one page."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import Positional, arg

from plures.errors import PluresError, visible
from plures.lab.cli.shared import DataDir, Switch


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about finished runs.

    Examples:
      plures report runs/digits
      plures report runs/digits/mimo/seed-0 runs/first --out report.html

    What the page shows:
      Tables, calibration, members, uncertain images, mistakes. Folders are run
      folders, or contain them at any depth. Runs that differ only in their
      seed share one row; details show the first of them. The page needs no
      network and no scripts. Metrics are read from the run folders, and the
      test images are predicted once per row.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN", help_behavior_hint="(one or more)")]
    """Run folders, or folders that contain them."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("report.html")
    """The file to write."""
    data_dir: DataDir = None
    """The folder of data sets; by default, the environment variable PLURES_DATA."""
    trust_code: Switch = False
    """Import the code from outside plures that the run names as its network or method."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Write the page, and print its path."""
        from plures.files import check_place
        from plures.lab.compare.rows import rows_of, with_sizes
        from plures.lab.report import write_report

        def tell(words: str) -> None:
            print(visible(words), file=sys.stderr, flush=True)

        if not self.runs:
            raise PluresError("there are no runs to report on: give run folders, or folders that contain them")
        try:
            check_place(self.out)
        except PluresError as error:
            raise PluresError(f"{error}; give another file with --out") from error
        rows = with_sizes(rows_of(self.runs), trust_code=self.trust_code)
        words = " ".join(shlex.quote(str(run)) for run in self.runs)
        command = f"plures report {words}"
        trust = self.trust_code
        page = write_report(rows, self.out, data_dir=self.data_dir, command=command, trust_code=trust, tell=tell)
        print(visible(str(page)))
        return 0
