"""Bad words, files and folders for every command: each must end with exit code 2 and one sentence."""

import contextlib
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from attack.damage import damaged
from attack.driver import Verdict
from plures.lab.cli.main import commands, main

SECONDS = 600  # on the clock: a busy machine is no hang
SHORT = [
    *("--model", "mlp", "--width", "8", "--limit", "60", "--validation", "10", "--batch-size", "32"),
    *("--epochs.pretrain", "1", "--epochs.prune", "1", "--epochs.finetune", "1", "--epochs.train", "1"),
]
WORDS = [
    "x",
    "",
    "five",
    "\x1b[31mred",
    "a\nb",
    "ü" * 300,
    "1e",
    "--",
    "None None",
    "[]",
    "{}",
    "0x10",
    "½",
    "x" * 5000,
]
NO_COUNT = ["0", "-1", "-99999999999999999999", "1.5", "nan", "inf", "1e3", *WORDS]
NO_NUMBER = ["nan", "inf", "-inf", "-1", "1e999", *WORDS]
NO_NAME = [
    "nothing",
    "a:b",
    ":",
    "a:b:c",
    "builtins:dict",
    "json:dumps",
    "os:system",
    "sys:nothing",
    "../x:y",
    "1",
    *WORDS,
]
NO_FOLDER = ["file/inside", "/dev/null/inside", "/proc/inside", "x" * 300, "picture.png/inside"]
# What no command takes for an option of this name.
BAD = {
    "--members": NO_COUNT,
    "--seed": ["-1", "18446744073709551616", "1.5", "nan", *WORDS],
    "--seeds": NO_COUNT,
    "--jobs": NO_COUNT,
    "--scale": ["mars", *WORDS],
    "--recipes": ["nothing", "cifar", *WORDS],
    "--methods": ["nothing", "orthogonal-dropout:x=1", "deep-ensemble:members=x", *NO_NAME],
    "--method": NO_NAME,
    "--model": NO_NAME,
    "--set": [
        *(
            "nothing=1",
            "=",
            "x",
            "granularity=x",
            "granularity",
            "granularity=blocks",
            "seed=x",
            "alpha=inf",
            "measured=1",
            "classifier=7",
        ),
        *("optimize_masks=perhaps", "init=", "init=old", "roles=x", "roles={}", "members=0", "members=1e9", "loss=x"),
        *("network=x", "self=1", *WORDS),
    ],
    "--epochs.pretrain": ["-1", "4294967296", "1.5", "nan", *WORDS],
    "--epochs.train": ["-1", "4294967296", "1.5", "nan", *WORDS],
    "--batch-size": [*NO_COUNT, "99999999999"],
    "--learning-rate": ["0", *NO_NUMBER],
    "--momentum": ["1", "2", *NO_NUMBER],
    "--weight-decay": NO_NUMBER,
    "--gamma": ["0", *NO_NUMBER],
    "--warmup": NO_NUMBER,
    "--clip": ["0", *NO_NUMBER],
    "--crop": ["-1", "1.5", "99999999", *WORDS],
    "--size": ["0", "-1", "99999999", "1.5", *WORDS],
    "--width": ["65535", "0", "-1", "99999999", "1.5", *WORDS],
    "--limit": ["0", "-1", "1.5", *WORDS],
    "--validation": [*NO_NUMBER, "1000000"],
    "--optimizer": ["adam", *WORDS],
    "--schedule": ["never", *WORDS],
    "--precision": ["fp8", *WORDS],
    "--stem": ["leaf", *WORDS],
    "--data": ["nothing", "/dev/null", "/dev/zero", "fifo", "empty", "file", "picture.png", "bad-pictures", *NO_FOLDER],
    "--ood": ["nothing", "/dev/null", "/dev/zero", "fifo", "empty", "file", "picture.png", *NO_FOLDER],
    "--run": [*NO_FOLDER, "file"],
    "--runs": NO_FOLDER,
    "--out": NO_FOLDER,
    "--port": ["-1", "65536", "1.5", *WORDS],
    "--max-bytes": NO_COUNT,
    "--max-images": NO_COUNT,
    "--queue": NO_COUNT,
    "--batch": NO_COUNT,
    "--wait": NO_NUMBER,
    "--abstain-below": ["2", "-0.1", *NO_NUMBER],
    "--coverage": ["0", "1", "2", "0.999999", *NO_NUMBER],
    "--risk": ["2", *NO_NUMBER],
    "--weights": ["nothing", "/dev/null", "/dev/zero", "fifo", "empty", "file", "run", "picture.png", *NO_FOLDER],
    "--host": ["256.256.256.256", "1.2.3.4", "::::", "/tmp", "a b", *WORDS[3:6], "x" * 5000],
    "--data-dir": [*NO_FOLDER, "fifo", "file", "/dev/zero", "/proc/self", "\x1b[31m"],
}
FOREIGN = [b"", b"null", b"[]", b"{}", b"7", b'"x"', b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 10_000, b"NaN"]


@dataclass(frozen=True)
class Input:
    """Words to try; `sure` where they must be refused, and not only may be."""

    words: list[str]
    sure: bool = True


@dataclass
class Commands:
    """Bad inputs to one command."""

    command: str
    items: int
    template: Path  # a folder with a finished run
    seed: int = 0
    batch: int = 250
    memory: int = 12 << 30
    seconds: int = SECONDS + 60  # the alarm ends what Python runs; this ends the process
    processes: bool = False  # as a person does, each in a process of its own, and all commands in turn
    shop: Path = Path()

    @property
    def name(self) -> str:
        """Name the part of the attack."""
        return "processes" if self.processes else f"command {self.command}"

    def prepare(self) -> None:
        """Furnish a workshop, and work there."""
        torch.set_num_threads(1)
        self.shop = Path(tempfile.mkdtemp(dir=self.template.parent))
        furnish(self.shop, self.template)
        os.chdir(self.shop)
        os.environ.update(environment(self.shop))

    def judge(self, index: int) -> list[Verdict]:
        """Give one input, and say what was answered."""
        name = list(commands())[index % len(commands())] if self.processes else self.command
        tried = bad_input(name, Random(f"{self.seed}/{self.name}/{index}"), self.shop)
        word, note = judge(tried, in_a_process if self.processes else run)
        _tidy(self.shop)
        wrong = f"plures {tried.words!r:.500} (seed {self.seed}): {note}"
        return [Verdict(word, "" if word in ("refused", "harmless") else wrong)]


Runner = Callable[[list[str]], tuple[int | str, str]]


def judge(tried: Input, runner: Runner | None = None) -> tuple[str, str]:
    """Run one command, in this process unless told otherwise, and say what it answered."""
    code, err = (runner or run)(tried.words)
    lines = [line for line in err.splitlines() if line.startswith("plures: ")]
    if isinstance(code, str):
        return code, err
    if code == 0:
        return ("silent", "it was accepted: exit code 0") if tried.sure else ("harmless", "")
    if code != 2 or "Traceback" in err:
        return "raw", f"exit code {code}: {err}"
    if lines and (len(lines) > 1 or not err.rstrip("\n").endswith(lines[0]) or not lines[0].isprintable()):
        return "wordy", err
    return "refused", err


def run(words: list[str]) -> tuple[int | str, str]:
    """Give the exit code, or the name of what went wrong, and what was written to stderr."""

    def too_long(*_: object) -> None:
        raise TooLong

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(SECONDS)
        code: int | str
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else f"SystemExit({end.code!r})"
        except TooLong:
            return "hang", f"no answer within {SECONDS} s"
        except Exception:
            return "raw", traceback.format_exc(limit=-5)
        finally:
            signal.alarm(0)
        with contextlib.suppress(ValueError, OSError):
            err.flush()
            err.seek(0)
            return code, err.read()
        return code, ""


class TooLong(BaseException):
    """Raised by the alarm; no handler of ordinary exceptions may take it."""


def bad_input(name: str, chance: Random, shop: Path) -> Input:
    """Make one bad input to a command."""
    return chance.choice(MAKERS.get(name, [_soup, _run_folder]))(name, chance, shop)


def _soup(name: str, chance: Random, shop: Path) -> Input:
    """Words that the command does not know, or options without their values."""
    known = _options(name)
    wrong = [
        ["--nothing"],
        [f"--{chance.choice(WORDS)}y"],
        [f"{chance.choice(known)}x"],
        [chance.choice(known), "y", "--nothing", "1"],
        ["-z"],
        ["--help=perhaps"],
    ]
    return Input([name, *_needed(name), *chance.choice(wrong)])


def _option(name: str, chance: Random, shop: Path) -> Input:
    """A known option with a value that it does not take."""
    known = [option for option in _options(name) if option in BAD]
    option = chance.choice(known)
    given = f"{option}={chance.choice(BAD[option])}"
    words = [name, *_needed(name), *_small(name, shop), given]
    return Input(words, sure=option != "--data-dir")  # the digits of the run are not looked up


def _recipe(name: str, chance: Random, shop: Path) -> Input:
    words = ["nothing", "digit", "/dev/null", "table9", *(word for word in WORDS if not word.startswith("-"))]
    return Input([name, chance.choice(words), *_small(name, shop)])


def _run_folder(name: str, chance: Random, shop: Path) -> Input:
    """A folder that is no run, or no longer."""
    others = ["nothing", "empty", "file", "/dev/null", "/dev/zero", "fifo", "picture.png", "/proc/self", *NO_FOLDER]
    if chance.random() < 0.3:
        return Input([name, chance.choice(others), *_after(name)])
    folder = shop / "damaged"
    shutil.copytree(shop / "run", folder)
    sure = break_folder(folder, name, chance)
    return Input([name, str(folder), *_after(name)], sure)


def break_folder(folder: Path, command: str, chance: Random) -> bool:
    """Damage one file of a run folder; say whether the command cannot do without what was there."""
    file = folder / chance.choice(["config.json", "config.json", "ensemble.safetensors", "metrics.json", "log.jsonl"])
    needed = file.name in ("config.json", "ensemble.safetensors")
    if command in ("serve", "export"):  # what is harmless would take long, or for ever
        needed, file = True, folder / chance.choice(["config.json", "ensemble.safetensors"])
    kind = chance.randrange(4 if command in ("serve", "export") else 6)
    if kind == 0:
        file.unlink()
    elif kind == 1:
        file.write_bytes(chance.choice(FOREIGN))
    elif kind == 2:
        file.unlink()
        file.mkdir()
    elif kind == 3:
        file.unlink()
        os.mkfifo(file)
    elif kind == 4 and file.suffix == ".json":
        _bend(file, chance)
        return False
    else:
        file.write_bytes(damaged(file.read_bytes(), chance))
        return False
    return needed


def _bend(file: Path, chance: Random) -> None:
    """Put another value, or none, somewhere into a JSON file."""
    document: Any = json.loads(file.read_bytes())
    holder = document
    while True:
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if not isinstance(holder[key], dict | list) or not holder[key] or chance.random() < 0.3:
            break
        holder = holder[key]
    values = [
        None,
        [],
        {},
        0,
        -1,
        1e300,
        2**70,
        "x",
        "\x1b[31m",
        "a\nb",
        True,
        [[]],
        {"x": 1},
        "builtins:dict",
        "\ud800",
        30_000,
    ]
    if chance.random() < 0.2:
        del holder[key]
    else:
        holder[key] = chance.choice(values)
    file.write_text(json.dumps(document))


def _image(name: str, chance: Random, shop: Path) -> Input:
    """A picture that is none."""
    path = shop / (chance.choice(["wren", "a\x1b[31m", "ü", "x" * 200, "a\nb"]) + ".png")
    picture = (shop / "picture.png").read_bytes()
    contents = [b"", b"P5", chance.randbytes(100), picture[: chance.randrange(40)], png(1, 60_000), png(60_000, 60_000)]
    others = ["nothing", "file", "fifo", "/dev/null", "/dev/zero", "empty", "run", "/proc/self/mem", *NO_FOLDER]
    kind = chance.randrange(3)
    if kind == 0:
        return Input([name, "run", chance.choice(others)])
    if kind == 1:
        path.write_bytes(chance.choice(contents))
        return Input([name, "run", str(path)], sure=path.stat().st_size < 60)
    path.write_bytes(damaged(picture, chance))
    return Input([name, "run", str(path)], sure=False)


def _exported(name: str, chance: Random, shop: Path) -> Input:
    """A file that cannot be exported to."""
    return Input(
        [name, "run", chance.choice(["x.h5", "x", "empty", "file/x.onnx", "/proc/x.pt2", "x" * 300 + ".onnx"])]
    )


def png(width: int, height: int) -> bytes:
    """A grey PNG of few bytes, whatever its head promises."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = bytes((width + 1) * height) if width * height < 10**6 else b""
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


Maker = Callable[[str, Random, Path], Input]
MAKERS: dict[str, list[Maker]] = {
    "train": [_option, _option, _option, _soup, _recipe],
    "compare": [_option, _option, _soup, _recipe],
    "reproduce": [_option, _soup, _recipe],
    "evaluate": [_run_folder, _run_folder, _option, _soup],
    "predict": [_image, _image, _run_folder, _option, _soup],
    "report": [_run_folder, _run_folder, _option, _soup],
    "export": [_run_folder, _run_folder, _option, _soup, _exported],
    "serve": [_run_folder, _option, _soup],
    "recipes": [_soup],
    "bench": [_option, _soup],
}


def _options(name: str) -> list[str]:
    """Name the options of a command that have values."""
    of_recipe = list(BAD)[list(BAD).index("--epochs.pretrain") : list(BAD).index("--data")]
    of_recipe += ["--members", "--seed", "--model", "--data"]
    return {
        "train": ["--method", "--set", "--run", "--weights", *of_recipe],
        "compare": ["--methods", "--seeds", "--jobs", "--runs", *of_recipe],
        "reproduce": ["--scale", "--recipes", "--seeds", "--jobs", "--runs", "--out"],
        "evaluate": ["--ood", "--ood", "--data-dir"],
        "predict": ["--abstain-below", "--coverage", "--risk"],
        "report": ["--out", "--out", "--out", "--data-dir"],
        "serve": ["--host", "--port", "--max-bytes", "--max-images", "--queue", "--batch", "--wait"],
        "bench": ["--out"],
        "recipes": ["--measure"],
    }.get(name, ["--out"])


def _needed(name: str) -> list[str]:
    if name == "reproduce":
        return ["table3"]
    return ["run", *_after(name)] if name in ("evaluate", "predict", "report", "export", "serve") else []


def _after(name: str) -> list[str]:
    return {"predict": ["picture.png"], "export": ["run.onnx"]}.get(name, [])


def _small(name: str, shop: Path) -> list[str]:
    """Options that keep short what is taken by mistake."""
    if name == "train":
        return [*SHORT, "--run", str(shop / "fresh")]
    if name == "compare":
        return [*SHORT, "--methods", "deterministic", "--runs", str(shop / "fresh")]
    return []


def train_one(template: Path) -> None:
    """Make a finished run, and a cache that knows what it costs."""
    with workshop(template):
        assert main(["train", "--run", "run", *SHORT]) == 0
        assert main(["report", "run", "--out", "report.html"]) == 0


@contextlib.contextmanager
def workshop(shop: Path) -> Iterator[Path]:
    """Work in a folder, quietly."""
    before, variables = Path.cwd(), dict(os.environ)
    os.chdir(shop)
    os.environ.update(environment(shop))
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield shop
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)


def environment(shop: Path) -> dict[str, str]:
    """Keep caches, data and keys of the user out of it, and the network."""
    home = {"XDG_DATA_HOME": str(shop / "home"), "HF_HOME": str(shop / "hub")}
    return {"PLURES_CACHE": str(shop / "cache"), "PLURES_DATA": str(shop), "HF_HUB_OFFLINE": "1", **home}


def furnish(shop: Path, template: Path) -> None:
    """Put all kinds of files beside a finished run."""
    for name in ("run", "cache"):
        shutil.copytree(template / name, shop / name)
    (shop / "file").write_bytes(b"no folder")
    (shop / "empty").mkdir()
    os.mkfifo(shop / "fifo")
    (shop / "picture.png").write_bytes(png(8, 8))
    for split in ("train", "test"):
        for label in ("wren", "robin"):
            (shop / "bad-pictures" / split / label).mkdir(parents=True)
            (shop / "bad-pictures" / split / label / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (shop / "kept").write_text("\n".join([*sorted(path.name for path in shop.iterdir()), "home", "hub"]))


def _tidy(shop: Path) -> None:
    kept = {*(shop / "kept").read_text().splitlines(), "kept"}
    for path in shop.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def in_a_process(words: list[str]) -> tuple[int | str, str]:
    """Start a command as a person does."""
    try:
        command = [sys.executable, "-m", "plures", *words]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, errors="replace")
    except subprocess.TimeoutExpired:
        return "hang", f"no answer within {SECONDS} s"
    return answer.returncode, answer.stderr
