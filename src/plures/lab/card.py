"""The model card of a published ensemble: what it is, what was measured, how to load it."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from plures import metrics as measured
from plures.ensemble import Ensemble
from plures.lab.runs.open import Run
from plures.version import __version__

ROWS = {
    "accuracy": "accuracy",
    "nll": "negative log-likelihood (nats)",
    "brier": "Brier score",
    "ece": "expected calibration error, 15 bins",
    "aurc": "area under the risk-coverage curve",
    "mean_member_accuracy": "accuracy of a single member, on average",
    "agreement": "agreement of the members (lower is more diverse)",
    "temperature": "temperature fitted on held-out images",
    "calibrated_nll": "negative log-likelihood at that temperature",
}


def card(
    ensemble: Ensemble, target: str | Path, metrics: Mapping[str, Any] | None, run: Run | None, missing: str = ""
) -> str:
    """Write the card as Markdown, with the head that the hub reads."""
    name = Path(target).name
    head = ["---", "library_name: plures", "tags:", "- uncertainty", "- ensemble", "- plures", "---", ""]
    about = f"A {type(ensemble).__name__} ensemble, made by [plures](https://pypi.org/project/plures/) {__version__}."
    parts = [f"# {name}", about, *_data(run), "## Results", *_results(metrics, run)]
    if missing:
        parts.append(f"There is no reliability picture: {missing}.")
    parts += ["## Intended use", *_use(run), "## How to load it", _loading(target, run)]
    return "\n".join(head) + "\n\n".join(parts) + "\n"


def reliability_png(probabilities: Tensor, targets: Tensor) -> bytes:
    """Draw how often the ensemble is right when it is so sure, against how often it would be if it knew itself."""
    from matplotlib.figure import Figure

    table = measured.calibration_table(probabilities, targets)
    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="perfectly calibrated")
    some = table.count > 0
    lower, upper, confidence, accuracy = (
        column[some].numpy() for column in (table.lower, table.upper, table.confidence, table.accuracy)
    )
    axes.bar(lower, accuracy, upper - lower, align="edge", alpha=0.5)
    axes.plot(confidence, accuracy, "o", markersize=4, label="this ensemble")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    axes.set_title(f"{len(targets)} samples, ECE {measured.ece(probabilities, targets):.3f}", fontsize=10)
    axes.legend(loc="upper left", fontsize=8)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=150)
    return written.getvalue()


def _data(run: Run | None) -> list[str]:
    if run is None:
        return []
    info = run.info
    shape = f"{info.size} x {info.size} pixels, {info.channels} channel{'s' if info.channels > 1 else ''}"
    return [f"Trained on {info.name}: {len(info.classes)} classes, {shape}, recipe seed {run.recipe.seed}."]


def _results(metrics: Mapping[str, Any] | None, run: Run | None) -> list[str]:
    rows = [(words, metrics[name]) for name, words in ROWS.items() if metrics and metrics.get(name) is not None]
    if not rows:
        return ["Nothing was measured."]
    images = (metrics or {}).get("images")
    where = f"On {images} test images of {run.info.name}:" if run is not None and images else "On held-out data:"
    return [where, "\n".join(["| | |", "|---|---|", *(f"| {words} | {value:.4f} |" for words, value in rows)])]


def _use(run: Run | None) -> list[str]:
    pictures = f"pictures like those of {run.info.name}" if run is not None else "inputs like those it was trained on"
    return [
        f"Classifying {pictures}, with a confidence that can be acted on: abstain where it is low. `epistemic` grows "
        "where the members disagree, which is a sign of inputs unlike the training data, not a proof.",
        "Not for decisions about people, nor for data unlike those above, without measuring it there first.",
    ]


def _loading(target: str | Path, run: Run | None) -> str:
    source = f'"{target}"' if run is not None else f'"{target}", network'
    lines = ["```python", "import plures", "", f"ensemble = plures.from_hub({source})"]
    given = "# uint8 pixels, normalised as in config.json" if run is not None else ""
    return "\n".join([*lines, f"prediction = ensemble.predict(inputs)  {given}".rstrip(), "```"])
