"""Put the figures of the owned engine into README.md and docs/engines.md: python -m benchmarks.pages."""

import json
import re
from pathlib import Path
from typing import Any

HOME = Path(__file__).parent.parent
COST = re.compile(r"<!-- cost -->\n.*?<!-- end -->", re.DOTALL)
TABLE = re.compile(r"<!-- owned -->\n.*?<!-- end -->", re.DOTALL)
FIVE = "owned prediction of 5 members / one plain network"


def main() -> None:
    """Replace the text between the marks."""
    document = json.loads((HOME / "benchmarks" / "results.json").read_text())
    for name in ("README.md", "docs/engines.md"):
        page = HOME / name
        page.write_text(included(page.read_text(), document))


def included(text: str, document: dict[str, Any]) -> str:
    """Return a page with the figures of a document; unchanged if the engine was not measured."""
    rows = [row for row in document["ratios"] if row["name"].startswith("owned") and "value" in row]
    if not rows:
        return text
    machine = document["machine"]
    made = f"Made by `make bench` on {_about(machine)}: median of the rounds, with the least and the largest."
    lines = "\n".join([made, "", *table(rows, digits=2)])
    text = COST.sub(lambda _: f"<!-- cost -->\n{cost(rows, machine)}\n<!-- end -->", text)
    return TABLE.sub(lambda _: f"<!-- owned -->\n{lines}\n<!-- end -->", text)


def _about(machine: dict[str, Any]) -> str:
    return f"{machine['processor']}, {machine['instructions']}, {machine['threads']} threads, torch {machine['torch']}"


def results(document: dict[str, Any]) -> str:
    """Return the results of every set of instructions as Markdown, one column for each."""
    runs = {document["machine"]["instructions"]: document, **document.get("others", {})}
    lines = ["# Benchmark", "", "Made by `make bench`. Ratios measured side by side in one run: median of the rounds,"]
    lines += [
        "with the least and the largest; a dash if the run did not measure it. The targets are those of the first",
        "column.",
        "",
    ]
    lines += [f"- {name}: {_about(run['machine'])}, plures {run['machine']['plures']}" for name, run in runs.items()]
    lines += ["", f"| measure | setting | {' | '.join(runs)} | target |", "|---|---|" + "---|" * (len(runs) + 1)]
    by_place = [{(row["name"], row["setting"]): row for row in run["ratios"]} for run in runs.values()]
    for place in dict.fromkeys(place for rows in by_place for place in rows):
        found = [rows.get(place) for rows in by_place]
        cells = ["-" if row is None else f"{row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f})" for row in found]
        lines.append(f"| {' | '.join([*place, *cells, _target(found[0])])} |")
    for name, run in runs.items():
        if run.get("methods"):
            lines += ["", f"Each method on ResNet18-CIFAR, relative to the plain network, batch 16, {name}.", ""]
            lines += [
                "| method | members | parameters | file | training step | prediction |",
                "|---|---|---|---|---|---|",
            ]
        for cost_of in run.get("methods", []):
            numbers = (f"{cost_of[key]:.2f}" for key in ("parameters", "file", "step", "prediction"))
            lines.append(f"| {cost_of['method']} | {cost_of['members']} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def _target(row: dict[str, Any] | None) -> str:
    bar = None if row is None else row["bar"]
    return "" if row is None or bar is None else f"<= {bar:g} {'met' if row['met'] else '**missed**'}"


def cost(rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """Return one sentence on what five members cost."""
    measured = [row for row in rows if row["name"] == FIVE and row["setting"].startswith("ResNet18, batch")]
    found = [row for row in measured if row["setting"].split(", ")[-1] == measured[0]["setting"].split(", ")[-1]]
    values = [row["value"] for row in found if "kernel granularity" in row["setting"]]
    batches = sorted({int(row["setting"].split("batch ")[1].split(",")[0]) for row in found})
    about = f"{machine['instructions']}, {found[0]['setting'].split(', ')[-1]}"
    return (
        f"A ResNet18 of full width that is split into five predicts in **{min(values):.1f} to {max(values):.1f} times "
        f"the time of one** ({about}, batches of {batches[0]} to {batches[-1]}; [how](docs/engines.md))."
    )


def table(rows: list[dict[str, Any]], digits: int) -> list[str]:
    """Return the lines of a Markdown table of ratios."""
    lines = ["| measure | setting | ratio | spread | target |", "|---|---|---|---|---|"]
    for row in rows:
        value, low, high = (f"{row[key]:.{digits}f}" for key in ("value", "low", "high"))
        lines.append(f"| {row['name']} | {row['setting']} | {value} | {low} to {high} | {_target(row)} |")
    return lines


if __name__ == "__main__":
    main()
