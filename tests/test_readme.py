"""The code that the README shows runs."""

import re
from pathlib import Path

import torch

import plures

README = Path(__file__).parent.parent / "README.md"


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_code_on_the_first_screen_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    batch = torch.randn(16, 64), torch.randint(0, 10, (16,))
    names = {"loader": [batch, batch]}
    exec(compile(snippets()[0], "README", "exec"), names)
    assert names["prediction"].members.shape == (5, 16, 10)
    assert names["ensemble"].predict(batch[0]).probabilities.equal(names["prediction"].probabilities)


def test_the_code_further_down_runs() -> None:
    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = torch.nn.Linear(8, 16)
            self.head = torch.nn.ModuleDict({"hidden": torch.nn.Linear(16, 16), "fc": torch.nn.Linear(16, 3)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head["fc"](self.head["hidden"](self.stem(x).relu()).relu())

    trained: list[str] = []
    names = {"plures": plures, "network": Network(), "train": lambda stage, epochs: trained.append(stage.name)}
    for code in snippets()[1:]:
        exec(compile(code, "README", "exec"), names)
    assert len(trained) == 14
    assert isinstance(names["network"], Network)


def test_every_public_name_starts_with_an_example() -> None:
    for name in plures.__all__:
        value = getattr(plures, name)
        if callable(value):
            first = (value.__doc__ or "").strip().split("\n\n")[1:2]
            assert first, f"{name} has no docstring with an example"
            assert first[0].startswith((" ", ">>>")), f"the docstring of {name} does not start with an example"
