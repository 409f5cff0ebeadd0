"""What a person with a GPU runs in ten minutes: `make gpu-check`. Please send us build/gpu-check.json afterwards.

    python -m release.gpu_check --device cuda --out build/gpu-check.json

It runs the tests of every method on the GPU, checks that no training step makes the host wait, compares predictions
with the CPU's, measures steps and predictions of a ResNet18 against the plain network, and trains one recipe. Without a
GPU those parts are skipped, and the file says why.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import plures
from benchmarks.harness import prediction, race, training_step
from plures.lab.costs import machine
from plures.lab.models import resnet8, resnet18
from plures.lab.recipes import get_recipe

ROOT = Path(__file__).parent.parent
CLOSE = 1e-3  # of logits on two devices, in float32
METHODS: dict[str, dict[str, Any]] = {
    "OrthogonalDropout": {"schedule": "together"},
    "DeepEnsemble": {},
    "BatchEnsemble": {},
    "PackedEnsemble": {"members": 2},
}


def command(*words: str, **environment: str) -> dict[str, Any]:
    """Run a command of this environment, and return how it ended."""
    settings = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'docs' / 'make'}", **environment}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=settings, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    last = lines[-1] if lines else done.stderr[-2000:]
    return {"passed": done.returncode == 0, "last line": last, "failed": failed}


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images and labels."""
    inputs = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return inputs, torch.arange(count) % 10


def tests_without_numbers(_: torch.device) -> dict[str, Any]:
    """Train and predict with tensors that have shapes alone."""
    return command("pytest", "-n", "0", "tests/test_meta.py")


def tests(device: torch.device) -> dict[str, Any]:
    """Run what every method promises, on the device."""
    return command("pytest", "-n", "0", "tests/test_contract.py", PLURES_TEST_DEVICE=str(device))


def no_waiting(device: torch.device) -> dict[str, Any]:
    """Train a step of every stage while CUDA refuses whatever makes the host wait."""
    found: dict[str, Any] = {"passed": True}
    inputs, targets = (one.to(device) for one in images(16))
    for name, options in METHODS.items():
        for stage in getattr(plures, name)(resnet8(10, 3, width=16), **options).to(device).stages():
            step = training_step(stage, inputs, targets, "no")
            stage(inputs, targets)  # the first batch of a stage is compared with torch, once
            torch.cuda.set_sync_debug_mode("error")
            try:
                stage(inputs, targets).backward()
            except RuntimeError as error:
                found |= {"passed": False, f"{name}, {stage.name}": str(error)[:300]}
            finally:
                torch.cuda.set_sync_debug_mode("default")
            step()
    return found


def same_as_cpu(device: torch.device) -> dict[str, Any]:
    """Compare predictions with those of the CPU."""
    inputs, _ = images(32)
    gaps = {}
    for name, options in METHODS.items():
        ensemble = getattr(plures, name)(resnet8(10, 3, width=16), **options)
        for _stage in ensemble.stages():
            pass
        with torch.no_grad():
            expected = ensemble(inputs)
            found = ensemble.to(device)(inputs.to(device)).cpu()
        gaps[name] = float((found - expected).abs().max() / expected.abs().max())
    return {"passed": max(gaps.values()) < CLOSE, "largest differences": gaps}


def benchmark(device: torch.device) -> dict[str, Any]:
    """Measure steps and predictions relative to the plain network."""
    found: dict[str, Any] = {"passed": True}
    large = device.type != "cpu"
    inputs, targets = (one.to(device) for one in images(128 if large else 8))
    width = 64 if large else 16
    for precision in ("no", "bf16") if large else ("no",):
        plain = plures.Deterministic(resnet18(10, 3, width=width)).to(device)
        stages = {"Deterministic": next(iter(plain.stages()))}
        ensembles = {"Deterministic": plain}
        for name, options in METHODS.items():
            ensemble = getattr(plures, name)(resnet18(10, 3, width=width), **options).to(device)
            stages[name] = next(iter(ensemble.stages()))
            if len(ensemble.plan()) == 1:
                ensembles[name] = ensemble
        steps = {name: training_step(stage, inputs, targets, precision) for name, stage in stages.items()}
        base = steps.pop("Deterministic")
        ratios = list(race(f"ResNet18, batch {len(inputs)}, {precision}", base, steps, rounds=5))
        for name in ensembles:
            stages[name].commit()
        asks = {name: prediction(ensemble, inputs, precision) for name, ensemble in ensembles.items()}
        base = asks.pop("Deterministic")
        predictions = race(f"ResNet18, batch {len(inputs)}, {precision}", base, asks, rounds=5)
        found[f"steps, {precision}"] = {one.name: [one.value, one.low, one.high] for one in ratios}
        found[f"predictions, {precision}"] = {one.name: [one.value, one.low, one.high] for one in predictions}
    return found


def recipe(device: torch.device) -> dict[str, Any]:
    """Train one recipe: embedded digits, a network with convolutions."""
    name = "digits-resnet" if device.type != "cpu" else "digits"
    few = ["--epochs.pretrain", "3", "--epochs.prune", "1", "--epochs.finetune", "3"] if name == "digits" else []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        found = command("plures", "train", name, "--run", str(run), *few)
        metrics = run / "metrics.json"
        known = json.loads(metrics.read_text()) if metrics.is_file() else {}
    kept = {key: known[key] for key in ("accuracy", "nll", "ece") if key in known}
    return found | kept | {"trained in seconds": known.get("seconds"), "recipe": name, "about": get_recipe(name).about}


PARTS: dict[str, tuple[Callable[[torch.device], dict[str, Any]], bool]] = {
    "tests without numbers": (tests_without_numbers, False),
    "tests of every method": (tests, True),
    "no step waits": (no_waiting, True),
    "predictions as on the CPU": (same_as_cpu, True),
    "benchmark": (benchmark, False),
    "one recipe": (recipe, False),
}


def main(words: list[str] | None = None) -> int:
    """Run all parts, and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="by default the accelerator that torch finds")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check.json")
    parser.add_argument("--only", choices=list(PARTS), nargs="+", default=list(PARTS), help="some parts")
    chosen = parser.parse_args(words)
    device = torch.device(chosen.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    missing = "" if device.type != "cpu" else f"torch {torch.__version__} finds no accelerator on this computer"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    found: dict[str, Any] = {"machine": machine() | {"device": str(device), "gpu": gpu, "cuda": torch.version.cuda}}
    for name in chosen.only:
        part, needs_gpu = PARTS[name]
        started = time.perf_counter()
        if needs_gpu and (missing or (name == "no step waits" and device.type != "cuda")):
            result: dict[str, Any] = {"skipped": missing or "only CUDA can refuse to wait"}
        else:
            try:
                result = part(device)
            except Exception as error:  # the file says so, and the other parts go on
                result = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.perf_counter() - started, 1)
        found[name] = result
        word = f"skipped: {result['skipped']}" if "skipped" in result else "passed" if result["passed"] else "FAILED"
        print(f"{name}: {word} ({result['seconds']} s)", flush=True)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written: {chosen.out}; please send it to us")
    return int(any(not part.get("passed", True) for part in found.values()))


if __name__ == "__main__":
    sys.exit(main())
