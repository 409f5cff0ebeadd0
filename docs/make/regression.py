"""Make the figure and the table of docs/guide/regression.md.

python docs/make/regression.py
"""

import math
import re
import statistics
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

matplotlib.use("svg")

import matplotlib.pyplot as plt
from sklearn.datasets import load_diabetes

import plures

DOCS = Path(__file__).parent.parent
SEEDS = range(5)
STEPS = {"wave": 300, "diabetes": 40}  # more steps overfit the few patients
matplotlib.rcParams |= {"svg.hashsalt": "plures", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def main() -> None:
    """Train, draw and write."""
    torch.set_num_threads(1)
    draw(DOCS / "results" / "regression.svg")
    page = DOCS / "guide" / "regression.md"
    marked = re.compile(r"<!-- diabetes -->\n.*?<!-- end -->", re.DOTALL)
    page.write_text(marked.sub(lambda _: f"<!-- diabetes -->\n{table()}<!-- end -->", page.read_text()))


def forecaster(features: int, width: int, seed: int) -> plures.Ensemble:
    """Return a small network of three layers, split, to be trained by likelihood."""
    torch.manual_seed(seed)
    layers = nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    return plures.OrthogonalDropout(nn.Sequential(*layers), members=5, loss=plures.GaussianNLL(), seed=seed)


def train(ensemble: plures.Ensemble, x: Tensor, y: Tensor, steps: int) -> plures.Ensemble:
    """Train every stage on all samples at once."""
    for stage in ensemble.stages():
        optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            stage(x, y).backward()
            nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return ensemble


def draw(path: Path) -> None:
    """Draw predictions of a wave that was seen between -2 and 2 only."""
    random = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(200, 1, generator=random) - 2
    y = torch.sin(2 * x) + (0.05 + 0.08 * (x + 2)) * torch.randn(200, 1, generator=random)
    ensemble = train(forecaster(1, 128, seed=0), x, y, STEPS["wave"])
    grid = torch.linspace(-4, 4, 300)[:, None]
    answer = ensemble.regress(grid)
    figure, axis = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    places, mean = grid[:, 0], answer.mean[:, 0]
    for std, shade, name in ((answer.std, 0.2, "all of it"), (answer.epistemic.sqrt(), 0.45, "epistemic")):
        half = 2 * std[:, 0]
        axis.fill_between(places, mean - half, mean + half, color="#D55E00", alpha=shade, lw=0, label=f"2 std, {name}")
    axis.plot(places, mean, color="#D55E00", label="mean of 5 members")
    axis.plot(x[:, 0], y[:, 0], ".", color="#444444", ms=3, label="training data")
    axis.set(ylim=(-4, 4), xlabel="x", ylabel="y")
    axis.legend(frameon=False, fontsize=8, loc="lower left", ncols=2)
    figure.savefig(path, metadata={"Date": None})


def table() -> str:
    """Measure on the diabetes data: a fifth is for testing, a quarter of the rest is held out to calibrate on."""
    found: dict[str, list[list[float]]] = {"average member": [], "ensemble": [], "ensemble, calibrated": []}
    covered = []
    for seed in SEEDS:
        inputs, targets = (torch.tensor(array, dtype=torch.float32) for array in load_diabetes(return_X_y=True))
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
        training, held_out, test = order[:266], order[266:354], order[354:]
        x = (inputs - inputs[training].mean(0)) / inputs[training].std(0)
        y = ((targets - targets[training].mean()) / targets[training].std())[:, None]
        ensemble = train(forecaster(10, 64, seed), x[training], y[training], STEPS["diabetes"])
        answer = ensemble.regress(x[test])
        stds = answer.variances.sqrt()
        each = [measured(mean, std, y[test]) for mean, std in zip(answer.members, stds, strict=True)]
        found["average member"].append([statistics.fmean(column) for column in zip(*each, strict=True)])
        found["ensemble"].append(measured(answer.mean, answer.std, y[test]))
        calibrated = ensemble.calibrate(x[held_out], y[held_out]).regress(x[test])
        found["ensemble, calibrated"].append(measured(calibrated.mean, calibrated.std, y[test]))
        lower, upper = calibrated.interval(0.9)
        covered.append(100 * float(((lower <= y[test]) & (y[test] <= upper)).double().mean()))
    lines = ["| | RMSE | NLL | CRPS |", "|---|---:|---:|---:|"]
    for name, rows in found.items():
        lines.append(f"| {name} | {' | '.join(spread(list(column)) for column in zip(*rows, strict=True))} |")
    return "\n".join(lines) + f"\n\n90 % intervals contain {spread(covered, 1)} % of the 88 test values.\n"


def measured(mean: Tensor, std: Tensor, targets: Tensor) -> list[float]:
    """Return RMSE, NLL and CRPS, in standard deviations of the training targets."""
    return [
        float((mean - targets).square().mean().sqrt()),
        -float(torch.distributions.Normal(mean.double(), std.double()).log_prob(targets).mean()),
        gaussian_crps(mean, std, targets),
    ]


def gaussian_crps(mean: Tensor, std: Tensor, targets: Tensor) -> float:
    """Return the continuous ranked probability score of normal distributions (Gneiting and Raftery, 2007)."""
    ratio, normal = (targets - mean) / std, torch.distributions.Normal(0.0, 1.0)
    score = ratio * (2 * normal.cdf(ratio) - 1) + 2 * normal.log_prob(ratio).exp() - 1 / math.sqrt(math.pi)
    return float((std * score).mean())


def spread(values: list[float], digits: int = 3) -> str:
    """Return mean and standard deviation."""
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


if __name__ == "__main__":
    main()
