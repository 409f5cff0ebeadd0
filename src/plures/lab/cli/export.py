"""plures export: a finished run as one file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from plures.lab.cli.shared import DataDir, Switch, print_json


@dataclass(frozen=True)
class Export:
    """Write a run as one file that needs no plures: ONNX, pt2.

    Examples:
      plures export runs/birds birds.onnx
      plures export runs/birds birds.pt2
      plures export runs/birds birds-int8.onnx --int8 --data-dir data

    What the file does:
      It takes uint8 pixels [pictures, height, width, channels] of the size that
      the network sees and normalises them. It gives probabilities, label,
      confidence, total, aleatoric, epistemic and members. Class names,
      preprocessing and origin stand in its metadata. With --int8 validation
      images show the ranges, and the accuracy that is lost is measured on the
      test images.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder that `plures train` wrote."""
    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """The file to write: .onnx, or .pt2 for torch.export.load."""
    format: Literal["onnx", "pt2"] | None = None
    """The format, where the ending does not say it."""
    int8: Switch = False
    """Quantise the layers to int8 by onnxruntime, and measure what that costs."""
    data_dir: DataDir = None
    """Where data sets are looked up by name; if not given, the environment's PLURES_DATA."""
    trust_code: Switch = False
    """Run the code that a folder of somebody else names as its network or method."""
    json: Switch = False
    """Print JSON."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Export, and say what was written."""
        from plures.files import check_place
        from plures.lab.exporting import export_run
        from plures.lab.runs.open import open_run

        check_place(self.file)
        run = open_run(self.run, trust_code=self.trust_code)
        run.need_pictures("plures export")
        found: dict[str, Any] = export_run(run, self.file, self.format, int8=self.int8, data_dir=self.data_dir)
        if self.json:
            print_json(found)
            return 0
        print(f"{found['file']}: {found['bytes']:,} bytes, {found['stored']}")
        if self.int8:
            print(
                f"accuracy on {found['images']} test images: {100 * found['accuracy']:.2f} % in float32, "
                f"{100 * found['int8_accuracy']:.2f} % in int8"
            )
        return 0
