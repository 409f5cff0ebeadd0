"""The command line, as a person uses it: words in, tables and exit codes out."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pytest
from filelock import FileLock
from PIL import Image
from pyarrow import parquet

from plures import PluresError
from plures.errors import visible
from plures.lab import recipes
from plures.lab.cli.main import commands, main
from plures.lab.compare import Comparison, Variant
from plures.lab.evaluation import evaluate
from plures.lab.evaluation.evaluate import engine_of, fastest
from plures.lab.method_names import METHOD_NAMES, kebab, method_class, method_options, place_of, short_name
from plures.lab.recipes import RECIPES, Epochs, Recipe, get_recipe
from plures.lab.runs.config import train_command
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.open import open_run
from short import start_in_this_process

SMALL = [
    *("--model", "mlp", "--width", "32", "--members", "2", "--limit", "300", "--validation", "0.1"),
    *("--batch-size", "32"),
    *("--epochs.pretrain", "2", "--epochs.prune", "1", "--epochs.finetune", "2", "--epochs.train", "2"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on digits."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    assert main(["train", "digits", "--run", str(folder), *SMALL]) == 0
    return folder


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder of red and blue photographs, not all of one size."""
    folder, random = tmp_path_factory.mktemp("data") / "colours", np.random.default_rng(0)
    for split, count in (("train", 30), ("test", 10)):
        for channel, name in ((0, "red"), (2, "blue")):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 80, (12, 10 + number % 3, 3), dtype=np.uint8)
                pixels[:, :, channel] += 150
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def colour_run(tmp_path_factory: pytest.TempPathFactory, colours: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "colours"
    assert (
        main(["train", "digits", "--data", str(colours), "--size", "8", "--run", str(folder), *SMALL, "--limit", "60"])
        == 0
    )
    return folder


def digit(path: Path, size: int = 8) -> Path:
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (size, size), dtype=np.uint8)).save(path)
    return path


def shell(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own, with one thread and without a terminal."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, "-m", "plures", *words], capture_output=True, text=True, env=variables)


def test_help_does_not_load_torch() -> None:
    own = ["train", "cifar10", "--method", "mine:Best", "--help"]
    commands = [["--help"], [], ["train", "--help"], own, ["predict", "--help"], ["--version"], ["recipes"]]
    program = (
        "import sys\n"
        "from plures.lab.cli.main import main\n"
        f"for words in {commands}:\n"
        "    try:\n"
        "        main(words)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0, (words, end.code)\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_the_help_of_train_shows_the_numbers_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["train", *words, "--help"])
        assert end.value.code == 0
        return " ".join(capsys.readouterr().out.replace("│", " ").split())

    assert "--batch-size INT images per step (default: 32)" in told("cub200-cpu")
    assert f"--members INT members of the ensemble (default: {get_recipe('digits').members})" in told()
    assert "--members INT members of the ensemble (default: 2)" in told("digits", "--method", "mimo")
    assert "--about" not in told()
    assert "ensemble.safetensors" in told()


@pytest.mark.parametrize("command", ["", *commands()])
def test_help_is_plain_text_that_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    assert not re.search(r">>>|Epochs\(|NoneType", told)
    words = {
        "": ["--version", "Commands", "Train one ensemble"],
        "train": [
            "train/CLASS/",
            "test/CLASS/",
            "plures train --data ./birds",
            "classes= and channels=",
            "--limit {None}|INT",
        ],
    }
    assert all(word in told for word in words.get(command, [f"plures {command}"]))


@pytest.mark.slow
def test_a_person_trains_evaluates_and_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*words: str) -> tuple[str, str]:
        assert main(list(words)) == 0
        said = capsys.readouterr()
        return said.out, said.err

    words = ["train", "digits", "--run", str(tmp_path / "first"), *SMALL]
    first = answer(*words)
    assert {"config.json", "log.jsonl", "metrics.json", "ensemble.safetensors"} <= {
        file.name for file in (tmp_path / "first").iterdir()
    }
    assert "accuracy" in first[0]
    assert "orthogonal-dropout on digits" in first[0]
    again = answer(*words)
    assert "is finished" in again[1]
    assert again[0] == first[0]

    evaluated = answer("evaluate", str(tmp_path / "first"), "--json")
    metrics = json.loads((tmp_path / "first" / "metrics.json").read_text())
    found = json.loads(evaluated[0])["test"]
    accuracies = found.pop("member_accuracies")
    assert accuracies == pytest.approx(metrics["member_accuracies"])
    assert found == pytest.approx({name: metrics[name] for name in found})

    predicted = answer("predict", str(tmp_path / "first"), str(digit(tmp_path / "one.png")))
    assert "one.png" in predicted[0]
    for out, err in (first, again, evaluated, predicted):
        assert "\x1b" not in out + err
        assert "Traceback" not in err


def test_every_field_of_the_recipe_can_be_overridden(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    assert config["method"] == "OrthogonalDropout"
    expected = {"model": "mlp", "width": 32, "members": 2, "limit": 300, "validation": 0.1, "batch_size": 32}
    assert expected.items() <= config["recipe"].items()
    assert config["recipe"]["epochs"] == {"pretrain": 2, "prune": 1, "finetune": 2, "train": 2}
    unchanged = get_recipe("digits").as_json()
    for name in set(unchanged) - set(expected) - {"epochs"}:
        assert config["recipe"][name] == unchanged[name], name


def test_the_recipe_may_stand_after_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data-dir", str(tmp_path), "--run", str(tmp_path / "run"), "cub200-cpu"]
    assert main(["train", *words, "--data", "cub"]) == 2
    assert "no data set 'cub'" in capsys.readouterr().err  # the recipe was found, its data were overridden


def test_epochs_of_other_stages_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["train", "digits-smoke", "--model", "mlp", "--width", "32", "--members", "2", "--epochs.train", "1"]
    assert main([*words, "--run", str(tmp_path / "sequential")]) == 0
    told = [one.getMessage() for one in caplog.records if "changes nothing" in one.getMessage()]
    counted = "--epochs.pretrain, --epochs.prune, --epochs.finetune"
    assert told == [f"--epochs.train changes nothing: the epochs that count here are {counted}"]
    caplog.clear()
    assert main([*words, "--together", "True", "--run", str(tmp_path / "together")]) == 0
    assert "changes nothing" not in caplog.text


def test_methods_and_their_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--set", "optimize-masks=false", "--set", "classifier=split", "--seed", "3"]
    assert main(["train", "--run", str(tmp_path / "random"), *words]) == 0
    found = json.loads((tmp_path / "random" / "metrics.json").read_text())
    assert found["members"] == 2
    assert found["bytes"] == (tmp_path / "random" / "ensemble.safetensors").stat().st_size
    assert f"{found['bytes']:,} bytes" in capsys.readouterr().out
    config = json.loads((tmp_path / "random" / "config.json").read_text())
    assert config["options"]["optimize_masks"] is False
    assert config["options"]["classifier"] == "split"
    assert config["options"]["seed"] == config["recipe"]["seed"] == 3


def test_the_run_folder_has_a_name_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "mlp", "--width", "32", "--limit", "300", "--epochs.train", "1", "--seed", "4"]
    assert main(["train", "digits", "--method", "deterministic", *words]) == 0
    assert (tmp_path / "runs" / "digits-deterministic-seed4" / "metrics.json").is_file()
    assert "one member" in capsys.readouterr().out


NETWORKS = """
from torch import nn
def wide(classes, channels, size, width=24):
    flat = channels * size * size
    return nn.Sequential(nn.Flatten(), nn.Linear(flat, width), nn.ReLU(), nn.Linear(width, classes))
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with code of the user's own, which no path of Python names."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    Path("own_networks.py").write_text(NETWORKS)
    return tmp_path


@pytest.mark.usefixtures("workplace", "no_charts")
def test_a_network_of_the_users_own_is_found_in_the_working_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--run", "own", *SMALL, "--model", "own_networks:wide"]) == 0
    del sys.modules["own_networks"]
    for words in (["evaluate", "own"], ["predict", "own", "one.png"], ["report", "own"]):
        assert main(words) == 2
        assert "--trust-code" in capsys.readouterr().err
    assert "own_networks" not in sys.modules
    assert main(["evaluate", "own", "--json", "--trust-code"]) == 0
    assert '"accuracy"' in capsys.readouterr().out
    assert main(["report", "own", "--trust-code"]) == 0


@pytest.mark.usefixtures("workplace")
def test_a_method_of_the_users_own_trains_resumes_and_predicts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own_methods.py").write_text(
        "import plures\n"
        "class Pair(plures.DeepEnsemble):\n"
        "    def __init__(self, network, *, members: int = 2, init: str = 'fresh', loss=None, seed: int = 0):\n"
        "        super().__init__(network, members, init=init, loss=loss, seed=seed)\n"
    )
    words = ["train", "--method", "own_methods:Pair", "--set", "init=given", *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr("plures.lab.training.train.evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(words)
    run = Path("runs/digits-pair-seed0")
    assert main(words) == 0  # reads what is trained, and measures it
    assert json.loads((run / "metrics.json").read_text())["members"] == 2
    assert json.loads((run / "config.json").read_text())["options"]["init"] == "given"
    assert "--method own_methods:Pair" in train_command(RunFolder(run).config(), run)
    assert main(["predict", str(run), str(digit(Path("one.png"))), "--trust-code"]) == 0
    variant = Variant.parse("own_methods:Pair:init=given")
    assert (variant.method, variant.settings, variant.name) == ("own_methods:Pair", ("init=given",), "pair init=given")
    assert variant.recipe(get_recipe("digits")) == get_recipe("digits")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trian"], "did you mean train?"),
        (["--fast"], "no option '--fast'"),
        (["train", "cifar-10"], "cifar10"),
        (["train", "--method", "deepensemble"], "did you mean deep-ensemble"),
        (["train", "--set", "granularty=kernel"], "did you mean granularity"),
        (["train", "--set", "granularity=layer"], "give weight or kernel"),
        (["train", "--set", "granularity"], "write NAME=VALUE"),
        (["train", "--set", "seed=3"], "no option of orthogonal-dropout 'seed'"),
        (["train", "--method", "deterministic", "--members", "3"], "deterministic has no option members"),
        (
            ["train", "--method", "deterministic", "--members", "5"],
            "deterministic has no option members",
        ),
        (["train", "--learning-rate", "-1"], "learning_rate is -1.0, but must be float > 0.0"),
        (["train", "--seed", str(2**64)], "seed is 18446744073709551616, but must be"),
        (["train", "--validation", "nan"], "validation is nan, but must be"),
        (["train", "--learning-rate", "inf"], "learning_rate is inf, but must be"),
        (["train", "--width", "1000000000"], "width is 1000000000, but must be"),
        (["train", "--size", "-3"], "size is -3, but must be"),
        (["train", "--epochs.train", str(10**12)], "epochs.train is 1000000000000, but must be"),
        (["train", "--method", "packed-ensemble", "--set", "alpha=inf"], "alpha=inf; use a number above 0"),
        (["train", "--method", "packed-ensemble", "--set", "alpha=nan"], "alpha=nan; use a number above 0"),
        (["train", "--method", "masksembles", "--set", "scale=inf"], "scale=inf; use a number from 1"),
        (["train", "--method", "mc-dropout", "--set", "rate=nan"], "is nan; use a number above 0 and below 1"),
        (["train", "--set", "measured=1"], "no option of orthogonal-dropout 'measured'"),
        (["train", "--model", "builtins:dict"], "'builtins:dict' must"),
        (["train", "--model", "torch:zeros"], "'torch:zeros' must"),
        (
            ["train", "--model", "json:dumps"],
            "'json:dumps' must be a function or class that takes classes= and channels=",
        ),
        (["train", "--model", "mlp", "--width", "65536"], "of this width and size takes"),
        (["train", "--method", "no_such_module:Best"], "cannot be imported"),
        (["train", "--method", "torch.nn:Linear"], "derived from plures.Ensemble"),
        (["train", "--data", "nowhere/birds"], "nowhere/birds"),
        (["evaluate", "nowhere"], "nowhere is not a run folder"),
        (["predict", "nowhere", "one.png"], "nowhere is not a run folder"),
        (["predict", "nowhere"], "no images to predict"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_words_get_a_sentence_and_exit_code_2(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(words) == 2
    answer = capsys.readouterr()
    assert sentence in answer.err
    assert answer.out == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", [["train", "--learning-rate", "fast"], ["evaluate"], ["recipes", "--x"]])
def test_values_of_the_wrong_kind_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert capsys.readouterr().out == ""


def test_another_configuration_in_the_same_folder_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--run", str(run), *SMALL, "--weight-decay", "0.25"]) == 2
    answer = capsys.readouterr()
    assert "recipe.weight_decay was 0.0005 and is 0.25" in answer.err
    assert answer.out == ""


def test_an_interrupted_training_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("plures.lab.training.train.fit", interrupted)
    assert main(["train", "--run", str(tmp_path / "run"), *SMALL]) == 130
    assert "the same command resumes" in capsys.readouterr().err


def test_members_that_are_given_are_given_even_if_they_are_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Comparison] = []

    def compare(comparisons: list[Comparison], *_: object, **__: object) -> None:
        asked.extend(comparisons)
        raise PluresError("enough")

    monkeypatch.setattr("plures.lab.compare.compare.compare", compare)
    monkeypatch.setattr("plures.lab.cli.compare.check_place", lambda path: None)
    assert main(["compare", "digits", "--methods", "mimo", "deep-ensemble", "--members", "5"]) == 2
    assert main(["compare", "digits", "--methods", "mimo", "deep-ensemble"]) == 2
    members = [[job.recipe.members for job in one.jobs(Path("runs"))] for one in asked]
    assert members == [[5, 5], [2, 5]]


def test_the_command_of_a_run_makes_the_same_run(run: Path) -> None:
    words = shlex.split(train_command(RunFolder(run).config(), run))
    assert words[:3] == ["plures", "train", "digits"]
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    assert main(words[1:]) == 0
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before


@pytest.mark.parametrize("name", ["config.json", "metrics.json"])
@pytest.mark.parametrize("contents", ["[]", "null", "{}", "{", "9" * 5000, "[" * 100_000])
def test_damaged_json_gets_a_sentence(
    run: Path, tmp_path: Path, name: str, contents: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / name).write_text(contents)
    readers = [["train", "--run", str(folder), *SMALL], ["report", str(folder), "--out", str(tmp_path / "page.html")]]
    for words in [*readers, *([["evaluate", str(folder)]] if name == "config.json" else [])]:
        assert main(words) == 2, words
        assert name in capsys.readouterr().err


def test_a_broken_line_of_the_log_does_not_end_a_training(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "metrics.json").unlink()
    lines = (folder / "log.jsonl").read_text().splitlines()
    (folder / "log.jsonl").write_text("\n".join([*lines[:2], '{"stage": ', "[]", *lines[2:], ""]))
    assert main(["train", "--run", str(folder), *SMALL]) == 0
    assert json.loads((folder / "metrics.json").read_text()) == json.loads((run / "metrics.json").read_text())
    assert "line 3 of" in caplog.text


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC], ids=["read-only", "another's", "no inodes"])
def test_a_finished_run_is_read_where_nothing_can_be_written(
    code: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    folder = shutil.copytree(run, tmp_path / "run")
    begun = tmp_path / "begun"
    begun.mkdir()
    with monkeypatch.context() as patch:
        for owner, name in ((FileLock, "acquire"), (Path, "unlink"), (Path, "touch"), (Path, "mkdir")):
            patch.setattr(owner, name, refuse)
        assert main(["train", "--run", str(folder), *SMALL]) == 0
        assert main(["train", "--run", str(begun), *SMALL]) == 2
        assert os.strerror(code) in capsys.readouterr().err
    (folder / "metrics.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "acquire", refuse)
        assert main(["train", "--run", str(folder), *SMALL]) == 0
    assert f"{json.loads((run / 'metrics.json').read_text())['nll']:.3f}" in capsys.readouterr().out


def test_what_another_process_writes_into_a_finished_run_is_left_alone(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    writing = folder / ".metrics.json.1-1.part"
    writing.write_text("{")
    assert main(["train", "--run", str(folder), *SMALL]) == 0
    assert writing.exists()


def test_control_c_while_python_imports_is_an_interruption() -> None:
    program = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'tyro': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "import runpy\n"
        "sys.argv = ['plures', 'recipes']\n"
        "runpy.run_module('plures', run_name='__main__')\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (130, "")
    assert answer.stderr == "plures: interrupted; nothing was done\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full device is something of Linux")
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("recipes > /dev/full", 2, "plures: cannot write the output: No space left on device\n"),
        ("recipes >&-", 0, ""),
        ("recipes 2>&-", 0, None),
        ("recipes | true", 0, ""),
    ],
)
def test_output_that_cannot_be_written(words: str, code: int, told: str | None) -> None:
    answer = subprocess.run(f"{sys.executable} -m plures {words}", shell=True, capture_output=True, text=True)
    assert answer.returncode == code
    assert told is None or answer.stderr == told


def test_an_unfinished_run_is_not_measured(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    for words in (["evaluate", str(tmp_path)], ["predict", str(tmp_path), "one.png"]):
        assert main(words) == 2
        assert "is not finished" in capsys.readouterr().err


def test_shift_and_unfamiliar_data(colour_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", str(colour_run), "--shift", "--ood", "digits"]  # grey 8 x 8 for a network of colours
    predicted: list[str] = []

    def counted(ensemble, split, spoil=None, predictions=evaluate.predictions, **options):
        predicted.extend([] if spoil else [f"{split.name} of {split.info.name}"])
        return predictions(ensemble, split, spoil, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "predictions", counted)
        assert main([*words, "--json"]) == 0
    assert len(predicted) == len(set(predicted)) == 2
    found = json.loads(capsys.readouterr().out)
    assert len(found["shift"]) == 55
    assert {row["severity"] for row in found["shift"]} == {1, 2, 3, 4, 5}
    assert found["ood"]["data"] == "digits"
    assert [row["score"] for row in found["ood"]["scores"]] == ["1 - max p", "entropy", "mutual information"]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("calibrated NLL", "under shift", "separating digits", "AUROC"))
    shift = table.partition("accuracy in % under shift")[2].partition("separating")[0]
    assert max(map(len, shift.splitlines())) <= 80


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("name", ["birds/train.parquet", "birds/data/train-00000-of-00001.parquet", "birds.parquet"])
def test_a_table_without_test_images_is_trained_measured_and_reported(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": digit(tmp_path / "one.png", 8 + number % 2).read_bytes()} for number in range(40)]
    parquet.write_table(arrow.table({"image": cells, "label": [number % 2 for number in range(40)]}), name)
    words = [
        "train",
        "digits",
        "--data",
        name.split("/")[0],
        "--size",
        "8",
        "--run",
        "run",
        *SMALL,
        "--limit",
        "40",
    ]
    assert main(words) == 0
    assert "has no test images: 8 of its 40 training images are held out" in caplog.text
    assert json.loads(Path("run/metrics.json").read_text())["images"] == 8
    assert main(["evaluate", "run"]) == main(["report", "run"]) == main(["predict", "run", "one.png"]) == 0


def test_other_data_of_the_same_name_are_not_measured(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test"):
        for number in range(10):
            (tmp_path / "digits" / split / str(number)).mkdir(parents=True)
            for copy in range(2):
                digit(tmp_path / "digits" / split / str(number) / f"{copy}.png")
    assert main(["evaluate", str(run), "--data-dir", str(tmp_path)]) == 2
    assert "are not those that" in capsys.readouterr().err


def test_predictions_as_json_agree_with_the_table(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    files = [digit(tmp_path / "folder" / name) for name in ("[red].png", "b.PNG", "deeper/c.png")]
    (tmp_path / "folder" / "notes.txt").write_text("not an image, and nobody said it was")
    assert main(["predict", str(run), str(tmp_path / "folder"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(one["file"] for one in found["predictions"]) == sorted(map(str, files))
    assert found["failed"] == []
    assert found["engine"] == engine_of(fastest(open_run(run).ensemble))
    for one in found["predictions"]:
        assert one["label"] in "0123456789"
        assert len(one["votes"]) == 2
        assert 0.1 <= one["confidence"] <= 1
        assert 0 <= one["epistemic"] <= one["total"]
    assert main(["predict", str(run), str(files[0])]) == 0
    table = capsys.readouterr().out
    first = next(one for one in found["predictions"] if one["file"] == str(files[0]))
    assert str(files[0]) in table
    assert f"{100 * first['confidence']:.1f} %" in table
    assert ", ".join(first["votes"]) in table
    assert (f"engine: {found['engine']}" in table) == (found["engine"] is not None)


def test_bad_pictures_are_named_and_the_others_predicted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "colour.png")
    digit(tmp_path / "large.png", size=20)
    digit(tmp_path / "good.png")
    Image.new("L", (10_000, 10_000)).save(tmp_path / "huge.png")
    os.mkfifo(tmp_path / "pipe.png")
    bad = ["text.png", "missing.png", "empty", "huge.png", "pipe.png", "x" * 5000, "\udcff\n.png", "/dev/zero"]
    names = [*bad, "colour.png", "large.png", "good.png"]
    assert main(["predict", str(run), *(str(tmp_path / name) for name in names), "--json"]) == 2
    answer = capsys.readouterr()
    found = json.loads(answer.out)
    assert [Path(one["file"]).name for one in found["predictions"]] == ["colour.png", "large.png", "good.png"]
    assert [one["file"] for one in found["failed"]] == [visible(str(tmp_path / name)) for name in bad]
    assert [line.removeprefix("plures: ") for line in answer.err.splitlines()] == [
        one["error"] for one in found["failed"]
    ]
    assert all(one["file"][:100] in one["error"] for one in found["failed"]), "a name of any length is cut"
    assert "huge.png is too large: images may have at most 89,478,485 pixels" in answer.err
    assert "colour.png was converted to grey" in caplog.text
    assert "large.png was brought from 20 x 20 to 8 x 8 pixels" in caplog.text


def test_data_with_a_relative_path_are_found_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, colour in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
        for number in range(10):
            file = tmp_path / "here" / "my colours" / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), colour).save(file)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ["--data", "my colours", "--size", "8", "--limit", "None", "--validation", "4", "--run", "../there/run"]
    assert (
        main(["train", "--method", "deterministic", "--model", "mlp", "--width", "8", "--epochs.train", "1", *words])
        == 0
    )
    assert "--data 'my colours'" in train_command(RunFolder("../there/run").config(), Path("run"))
    monkeypatch.chdir(tmp_path / "there")
    capsys.readouterr()
    assert main(["evaluate", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test"]["images"] == 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").rename(tmp_path / "moved")
    assert main(["evaluate", "moved/run"]) == 0


def test_pictures_are_prepared_as_the_training_images(
    colour_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGBA", (50, 31), (200, 40, 40, 255)).save(tmp_path / "red.png")
    Image.new("RGB", (9, 90), (40, 40, 200)).save(tmp_path / "blue.jpg", quality=95)
    Image.new("L", (8, 8), 100).save(tmp_path / "grey.png")
    assert main(["predict", str(colour_run), str(tmp_path), "--json"]) == 0
    labels = {Path(one["file"]).name: one["label"] for one in json.loads(capsys.readouterr().out)["predictions"]}
    assert labels.keys() == {"red.png", "blue.jpg", "grey.png"}
    assert labels["red.png"] == "red"
    assert labels["blue.jpg"] == "blue"


def test_an_ensemble_may_abstain(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(run), str(digit(tmp_path / "one.png"))]
    assert main([*words, "--abstain-below", "1.0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["label"] is None
    assert main([*words, "--abstain-below", "1.0"]) == 0
    assert "abstains" in capsys.readouterr().out
    assert main([*words, "--abstain-below", "2"]) == 2
    assert "abstain_below=2" in capsys.readouterr().err


def test_recipes_are_listed_at_once_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 80
    for name, recipe in RECIPES.items():
        assert name in table
        assert recipe.model in table


def test_method_names_are_those_of_the_classes() -> None:
    assert METHOD_NAMES == {
        "orthogonal-dropout": "OrthogonalDropout",
        "deterministic": "Deterministic",
        "mc-dropout": "MCDropout",
        "deep-ensemble": "DeepEnsemble",
        "batch-ensemble": "BatchEnsemble",
        "mimo": "MIMO",
        "masksembles": "Masksembles",
        "packed-ensemble": "PackedEnsemble",
    }
    assert kebab("batch_repetition") == "batch-repetition"
    assert short_name("mypackage.methods:TwoHeads") == "two-heads"
    names = ["my-method", "mimo granularity=2", "deterministic"]
    assert sorted(names, key=place_of) == ["deterministic", "mimo granularity=2", "my-method"]


def test_options_are_read_by_the_annotations_of_the_constructor() -> None:
    mc_dropout = method_class("mc-dropout")
    assert method_options(mc_dropout, ["passes=7", "rate=0.2"]) == {"passes": 7, "rate": 0.2}
    assert method_options(mc_dropout, ["rate=none"]) == {"rate": None}
    with pytest.raises(PluresError, match="passes=many"):
        method_options(mc_dropout, ["passes=many"])


@pytest.mark.usefixtures("no_charts")
def test_the_demonstration_compares_three_methods_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Recipe(limit=300, model="mlp", width=32, members=2, epochs=Epochs(2, 1, 2, 2), batch_size=32)
    monkeypatch.setitem(recipes.RECIPES, "digits-resnet", small)
    monkeypatch.setattr("plures.lab.compare.compare.Child", start_in_this_process)
    monkeypatch.chdir(tmp_path)
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    words = [line.split()[1:] for line in makefile.splitlines() if "plures" in line and "runs/demo" in line][:2]
    assert [main(command) for command in words] == [0, 0]
    first = capsys.readouterr()
    sizes = {
        line.split()[0]: float(found[1])
        for line in first.out.splitlines()
        if (found := re.search(r"([\d.]+) x", line)) and line[0].isalpha()
    }
    assert sizes["deterministic"] == 1
    assert sizes["orthogonal-dropout"] < 1.5 < sizes["deep-ensemble"]
    report = first.out.split()[-1]
    assert "orthogonal-dropout" in Path(report).read_text()
    assert "3 to train" in first.err
    assert [main(command) for command in words] == [0, 0]
    again = capsys.readouterr()
    assert again.out == first.out
    assert "3 done before, 0 to train" in again.err
