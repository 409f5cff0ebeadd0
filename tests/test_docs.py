"""The site builds, has every public name and command, and says what the commands found."""

import inspect
import re
import zlib
from importlib import import_module
from pathlib import Path

import pytest

import claims
import commands
import plures
import tables

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Python's, of what Sphinx is made of; its own are errors by -W
def test_the_site_builds_strictly_and_has_every_public_name(tmp_path, capsys) -> None:
    from sphinx.cmd.build import main  # here, where torch is loaded already

    options = ["-q", "-W", "--keep-going", "-d", str(tmp_path / "cache")]
    assert main([*options, str(ROOT / "docs"), str(tmp_path / "site")]) == 0, capsys.readouterr().err
    inventory = (tmp_path / "site/objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    assert public_names() <= known, f"not in the reference: {sorted(public_names() - known)}"
    assert f"<title>plures {plures.__version__}</title>" in (tmp_path / "site/index.html").read_text()
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, f"{page.name} cannot be read without a network: it loads {loaded}"


def public_names() -> set[str]:
    """Every name of the library, and what its classes define; Ensemble and Engine stand for what they inherit, too."""
    names = {f"plures.{name}" for name in plures.__all__ if name != "__version__"}
    for one in [value for name in plures.__all__ if inspect.isclass(value := getattr(plures, name))]:
        bases = one.__mro__ if one in (plures.Ensemble, plures.Engine) else (one,)
        members = {name for base in bases if base.__module__.startswith("plures") for name in vars(base)}
        documented = {name for name in members if inspect.getdoc(getattr(one, name, None))}
        names |= {f"plures.{one.__name__}.{name}" for name in documented if not name.startswith("_")}
    names |= {f"plures.{name}" for name in dir(plures) if not name.startswith("_")}
    for name in ("guarantees", "metrics", "sklearn"):
        module = import_module(f"plures.{name}")
        own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        names |= {f"{module.__name__}.{name}" for name in own if not name.startswith("_")}
    return names - {"plures.guarantees", "plures.metrics"}  # modules, with pages of their own


def test_the_page_of_the_commands_has_every_option() -> None:
    page = commands.commands()
    names = re.findall(r"^## plures (\S+)$", page, re.MULTILINE)
    assert {"train", "evaluate", "predict", "compare", "reproduce", "report", "recipes"} <= set(names)
    for name, section in zip(names, page.split("\n## ")[1:], strict=True):
        options = set(re.findall(r"│ (--[\w.-]+)", commands.help_of(name)))
        assert options or name == "recipes", name
        rows = re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)
        assert options <= {row.split()[0].rstrip(",") for row in rows}, name


def test_the_pages_and_pictures_of_the_results_are_those_that_the_figures_make(tmp_path, monkeypatch) -> None:
    pictures = claims.PICTURES
    monkeypatch.setattr(claims, "PICTURES", tmp_path)
    pages = tables.written()
    assert pages == {page: page.read_text() for page in pages}, "make docs would change them"
    for drawn in tmp_path.iterdir():
        assert drawn.read_text() == (pictures / drawn.name).read_text(), f"make docs would change {drawn.name}"
    assert "| split, together, 2 x epochs |" in (page := (ROOT / "docs/results.md").read_text())
    assert len(page.split()) <= 2500
    assert max(line.count("|") for line in page.splitlines() if line.startswith("|")) <= 7, "six columns"


def test_sentences_follow_the_figures() -> None:
    def row(name: str, nll: float, spread: float | None) -> claims.Row:
        return claims.Row(name, (0, 1), {"nll": {"mean": nll, "deviation": spread, "values": [nll]}}, {})

    found = [claims.verdict(row("a", nll, 0.01), row("b", 0.75, 0.02), "nll") for nll in (0.72, 0.74, 0.78)]
    assert found == [-1, 0, 1], "level within the larger spread"
    assert claims.label("orthogonal-dropout schedule=together epochs x 2") == claims.TOGETHER
    assert claims.label("packed-ensemble, mean of the losses") == "packed ensemble, mean of the losses"


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
