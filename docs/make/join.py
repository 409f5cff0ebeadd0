"""Join the tables of one comparison that were made in parts: with other seeds or methods, on another day or machine.

    plures compare cifar10-cpu --seed 1 --seeds 2 --data-dir data --out docs/results/parts/seeds-1-2
    python docs/make/join.py compare-cifar10-cpu

Every `docs/results/parts/*/NAME.json` is a part. Rows of the same name become one row with the seeds of all parts; its
size and times are those of the first part. The table goes to docs/results; `make docs` puts it into docs/results.md.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plures.errors import PluresError
from plures.lab.compare import table
from plures.lab.compare.rows import Finished, Row
from plures.lab.method_names import LOOKS
from plures.lab.paper.published import Published
from plures.lab.timing.costs import Costs
from plures.lab.training.progress import duration

RESULTS = Path(__file__).parent.parent / "results"


class Kept(Finished):
    """A run of which only the figures were kept."""

    @property
    def method(self) -> str:
        """The method, as on the command line."""
        return str(self.config["method"])


def main(words: Sequence[str] | None = None) -> None:
    """Join the parts of each table that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="NAME")
    for name in parser.parse_args(words).tables:
        documents = [json.loads(path.read_text()) for path in sorted((RESULTS / "parts").glob(f"*/{name}.json"))]
        rows = joined([row for document in documents for row in document["rows"]])
        paths = table.write(RESULTS, name, rows, table.columns(rows), about(documents, rows))
        print(f"{len(documents)} parts: {', '.join(map(str, paths))}")


def joined(parts: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Make one row of those that have the same name, with the runs of all their seeds."""
    rows: dict[str, Row] = {}
    for part in parts:
        if part["failures"]:
            raise PluresError(f"{part['name']} failed with {part['failures'][0]}: make it again before you join it")
        before = rows.get(part["name"])
        runs = (*(before.runs if before else ()), *runs_of(part))
        if len({run.seed for run in runs}) < len(runs):
            raise PluresError(f"{part['name']} has a seed in more than one part: remove one of them")
        rows[part["name"]] = Row(
            part["name"],
            tuple(sorted(runs, key=lambda run: run.seed)),
            before.costs if before else Costs(**part["costs"]),
            Published(**part["paper"]) if part["paper"] else None,
        )
    order = list(LOOKS)
    return sorted(rows.values(), key=lambda row: order.index(row.runs[0].method))


def runs_of(part: Mapping[str, Any]) -> list[Kept]:
    """Take the runs of a row out of its lists."""
    runs = []
    for place, seed in enumerate(part["seeds"]):
        figures = {key: one["values"][place] for key, one in part["metrics"].items() if one["values"]}
        figures["member_accuracies"] = part["member_accuracies"][place]
        runs.append(Kept(Path(), {"recipe": {"seed": seed}, "method": part["method"]}, figures))
    return runs


def about(documents: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> dict[str, str]:
    """Say how the parts came about, and which rows have fewer seeds than others."""
    most = max(len(row.runs) for row in rows)
    fewer = [f"{row.name} {', '.join(str(run.seed) for run in row.runs)}" for row in rows if len(row.runs) < most]

    def all_of(key: str) -> str:
        return "; ".join(dict.fromkeys(document["about"][key] for document in documents))

    return {
        **({"fewer seeds": "; ".join(fewer)} if fewer else {}),
        "commands": all_of("command"),
        "training time of all runs, one core each": duration(sum(sum(row.values("seconds")) for row in rows)),
        "machines": all_of("machine"),
    }


if __name__ == "__main__":
    main()
