"""Names of files, classes and runs may come from anybody: no command gives them the control of a terminal."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plures.lab.cli.main import main

CODES = "\x1b[31m\r\n\x9b2J\u202e"  # red, a new line, an empty screen, and writing from right to left
EVIL = f"a{CODES}b"
SHOWN = r"a\x1b[31m\r\n\x9b2J\u202eb"
SMALL = [
    *("--model", "mlp", "--width", "16", "--members", "2", "--validation", "0.25", "--batch-size", "8"),
    *("--epochs.pretrain", "1", "--epochs.prune", "1", "--epochs.finetune", "1", "--epochs.train", "1"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, classes and a folder with such names."""
    folder, random = tmp_path_factory.mktemp("data") / EVIL, np.random.default_rng(0)
    for split in ("train", "test"):
        for name in (f"red {EVIL}", f"blue {EVIL}"):
            (folder / split / name).mkdir(parents=True)
            for number in range(8):
                pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number} {EVIL}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / EVIL
    assert main(["train", "digits", "--data", str(data), "--run", str(folder), *SMALL]) == 0
    return folder


def said(words: list[str], capsys: pytest.CaptureFixture[str], terminal: bool = False) -> str:
    """Everything that a command writes; the terminal's own codes, which colour it, are left out."""
    capsys.readouterr()
    try:
        main(words)
    except SystemExit as end:
        assert end.code == 2
    answer = capsys.readouterr()
    told = answer.out + answer.err
    assert not any(code in told for code in ("\x9b", "\u202e", "a\x1b[31m"))
    assert terminal or "\x1b" not in told
    return told


@pytest.mark.parametrize("terminal", [False, True])
def test_commands_show_control_characters_as_escapes(
    data: Path,
    run: Path,
    tmp_path: Path,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "200")

    def told(*words: object) -> str:
        return said([str(word) for word in words], capsys, terminal)

    picture = next((data / "test").rglob("*.png"))
    (tmp_path / f"{EVIL}.png").write_text("no picture")
    Image.new("L", (20, 20)).save(tmp_path / f"grey {EVIL}.png")
    assert SHOWN in told("train", "--data", data, "--run", run.with_name(f"{terminal} {EVIL}"), *SMALL)
    assert f"red {SHOWN}" in told("predict", run, picture, tmp_path, tmp_path / f"no {EVIL}", "--coverage", "0.5")
    assert SHOWN in told("evaluate", run, "--ood", data)
    assert SHOWN in told("report", run, "--out", tmp_path / f"{EVIL}.html")
    assert SHOWN in told("export", run, tmp_path / f"{EVIL}.zip")
    assert SHOWN in told("compare", "--data", data, "--methods", f"deterministic:{EVIL}=1")


@pytest.mark.parametrize(
    "words",
    [
        ["train", EVIL],
        [EVIL],
        ["train", f"--{EVIL}", "1"],
        ["train", "--stem", EVIL],
        ["train", "--method", f"{EVIL}:Best"],
        ["recipes", EVIL],
        ["report", EVIL],
        ["evaluate", EVIL],
    ],
    ids=lambda words: " ".join(words).replace(EVIL, "X"),
)
def test_wrong_words_are_shown_harmlessly(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert r"\x1b[31m" in said(words, capsys)


@pytest.mark.usefixtures("no_charts")
def test_a_forged_run_folder_does_not_reach_the_terminal(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def forged(value: object) -> object:
        if isinstance(value, dict):
            return {key: forged(one) for key, one in value.items()}
        return (
            [forged(one) for one in value]
            if isinstance(value, list)
            else value + EVIL
            if isinstance(value, str)
            else value
        )

    picture = next((data / "test").rglob("*.png"))
    config = json.loads((run / "config.json").read_text())
    for key in ("method", "network", "environment", "data", "made"):
        folder = shutil.copytree(run, tmp_path / key)
        (folder / "config.json").write_text(json.dumps({**config, key: forged(config[key])}))
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps({"stage": EVIL}) + "\n")
        said(["evaluate", str(folder)], capsys)
        said(["predict", str(folder), str(picture)], capsys)
        said(["report", str(folder), "--out", str(tmp_path / "page.html")], capsys)
        said(["train", "--data", str(data), "--run", str(folder), *SMALL], capsys)
    assert "is damaged and ignored" in caplog.text
    assert "a\x1b" not in caplog.text
