"""Without the optional packages, one sentence names the extra that installs them."""

import subprocess
import sys

import pytest

BLOCK = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""
LAB = ("tyro", "PIL", "pyarrow", "rich", "msgspec", "pydantic", "huggingface_hub", "jinja2")


def run(program: str, names: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(names=names) + program], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("words", [["--help"], ["train"], []])
def test_the_command_line_names_its_extra(words: list[str]) -> None:
    answer = run(f"from plures.lab.cli.main import main; sys.exit(main({words!r}))", LAB)
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr.startswith("plures: the command line needs ")
    assert answer.stderr.endswith("pip install 'plures[lab]'\n")
    assert answer.stderr.count("\n") == 1


def test_the_estimators_name_their_extra() -> None:
    program = """
import plures
for kind in (plures.PluresError, ImportError):
    try:
        import plures.sklearn
    except kind as error:
        print(error)
import plures.sklearn
"""
    answer = run(program, ("sklearn",))
    told = "plures.sklearn needs scikit-learn: pip install 'plures[sklearn]'"
    assert answer.stdout == 2 * f"{told}\n", answer.stderr
    assert answer.stderr.splitlines()[-1] == f"plures.errors.MissingExtraError: {told}"
