"""The house as drawn: no cycle among modules, the core below the laboratory, nothing imported that is not declared."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
FILES = sorted(SOURCE.glob("plures/**/*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports(source: str) -> set[str]:
    """All that some code imports, at its top, in its functions and for its types alone."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full: relative ones are not looked at here"
            for name in node.names:
                inside = f"{node.module}.{name.name}"
                found.add(inside if inside in MODULES else str(node.module))
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


GRAPH = {module: {one for one in imports(path.read_text()) if one in MODULES} for module, path in MODULES.items()}


def test_no_module_imports_itself_through_others_not_even_for_its_types() -> None:
    # The face of the package lists the public names of all modules, so no module may import the face ...
    outside = {"plures.sklearn", "plures.__main__"}  # ... but those that use plures as its users do
    assert {module for module, others in GRAPH.items() if "plures" in others} <= outside
    assert not circle(GRAPH)


def test_a_circle_is_found_wherever_its_imports_stand() -> None:
    types = "if TYPE_CHECKING:\n    from plures.storage import load"
    inside = "def late():\n    import plures.ensemble"
    assert imports(types) == {"plures.storage"}
    assert imports("from plures import files") == {"plures.files"}
    assert circle(GRAPH | {"plures.ensemble": imports(types), "plures.storage": imports(inside)})
    assert circle(GRAPH | {"plures.files": {"plures.files"}})


def test_the_core_knows_nothing_of_the_laboratory() -> None:
    for module, others in GRAPH.items():
        if not module.startswith("plures.lab") and module not in ("plures", "plures.__main__"):
            assert not [one for one in others if one.startswith("plures.lab")], module


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    words = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {normal(re.split(r"[^\w.-]", word)[0]) for word in words}
    distributions = packages_distributions()
    for path in FILES:
        for name in imports(path.read_text()):
            top = name.partition(".")[0]
            if top == "plures" or top in sys.stdlib_module_names:
                continue
            known = {normal(one) for one in distributions.get(top, [top])}
            assert known & declared, f"{path.relative_to(ROOT)} imports {top}, which pyproject.toml does not declare"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_map_in_contributing_shows_every_room_and_nothing_else() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = {path.parent.name for path in FILES} - {"plures", "lab"}
    assert not [room for room in rooms if f"{room}/" not in page]
    elsewhere = [
        path for folder in ("tests", "docs/make", "release", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    names = {path.name for path in [*FILES, *elsewhere]}
    named = set(re.findall(r"\b(\w+\.py)\b", page)) - {"your_method.py"}
    assert not named - names, f"CONTRIBUTING names files that are not there: {sorted(named - names)}"


def test_opening_a_run_does_not_import_what_takes_as_long_as_torch_itself() -> None:
    heavy = {"torch._dynamo", "torchmetrics", "transformers", "matplotlib", "sklearn"}
    imports = "import sys, plures, plures.lab.evaluation.predict; plures.OrthogonalDropout, plures.MCDropout"
    code = f"{imports}; print(*{heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_no_two_classes_share_a_name() -> None:
    names = [
        one.name for path in FILES for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.ClassDef)
    ]
    assert not {name for name in names if names.count(name) > 1}
