"""plures export: a finished run as one file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from plures.errors import visible
from plures.lab.cli.shared import Switch, print_json


@dataclass(frozen=True)
class Export:
    """Export a run to one file that runs without plures: ONNX, pt2.

    Examples:
      plures export runs/birds birds.onnx
      plures export runs/birds birds.pt2

    What the file does:
      It takes uint8 pixels [images, height, width, channels] of the size that
      the network takes, and normalises them. It returns probabilities, label,
      confidence, total, aleatoric, epistemic and members. Its metadata hold
      class names, preprocessing and provenance.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder that `plures train` wrote."""
    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """The file to write: .onnx, or .pt2 for torch.export.load."""
    format: Annotated[Literal["onnx", "pt2"] | None, arg(metavar="{onnx,pt2}", help_behavior_hint="")] = None
    """The format, if the file name does not end with it."""
    trust_code: Switch = False
    """Import the code from outside plures that the run names as its network or method."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Export, and print the size of the file and its calibration."""
        from plures.files import check_place
        from plures.lab.runs.exported_run import export_run
        from plures.lab.runs.open import open_run

        check_place(self.file)
        run = open_run(self.run, trust_code=self.trust_code)
        found: dict[str, Any] = export_run(run, self.file, self.format)
        if self.json:
            print_json(found)
            return 0
        print(f"{visible(str(found['file']))}: {found['bytes']:,} bytes, {found['stored']}")
        print(found["calibration"])
        return 0
