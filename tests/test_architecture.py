"""The house as drawn: no cycle among modules, the core below the laboratory, nothing imported that is not declared."""

import ast
import re
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


def imports(path: Path) -> set[str]:
    """All that a file imports, at its top, in its functions and for its types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inside = f"{node.module}.{name.name}"
                found.add(inside if inside in MODULES else node.module)
    return found


GRAPH = {module: {one for one in imports(path) if one in MODULES} for module, path in MODULES.items()}


def test_no_module_imports_itself_through_others_not_even_for_its_types() -> None:
    # The package's own face lists the public names; modules import each other, never the face.
    graph = {module: others - {"plures"} for module, others in GRAPH.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


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
        for name in imports(path):
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
    names = {path.name for path in FILES} | {path.name for path in (ROOT / "tests").glob("*.py")}
    named = set(re.findall(r"\b(\w+\.py)\b", page)) - {"your_method.py"}
    assert not named - names, f"CONTRIBUTING names files that are not there: {sorted(named - names)}"
