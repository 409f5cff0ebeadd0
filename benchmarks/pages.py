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
    about = f"{machine['processor']}, {machine['instructions']}, {machine['threads']} threads, torch {machine['torch']}"
    made = f"Made by `make bench` on {about}: median of the rounds, with the least and the largest."
    lines = "\n".join([made, "", *table(rows, digits=2)])
    text = COST.sub(lambda _: f"<!-- cost -->\n{cost(rows)}\n<!-- end -->", text)
    return TABLE.sub(lambda _: f"<!-- owned -->\n{lines}\n<!-- end -->", text)


def cost(rows: list[dict[str, Any]]) -> str:
    """Return one sentence on what five members cost."""
    found = [row for row in rows if row["name"] == FIVE and row["setting"].startswith("ResNet18, batch")]
    values = [row["value"] for row in found if "kernel granularity" in row["setting"]]
    batches = sorted({int(row["setting"].split("batch ")[1].split(",")[0]) for row in found})
    about = ", ".join(found[0]["setting"].split(", ")[-2:])
    return (
        f"**Five members of a ResNet18 cost {min(values):.1f} to {max(values):.1f} networks**, not 5, to predict "
        f"({about}, batches of {batches[0]} to {batches[-1]}; [how](docs/engines.md))."
    )


def table(rows: list[dict[str, Any]], digits: int) -> list[str]:
    """Return the lines of a Markdown table of ratios."""
    lines = ["| measure | setting | ratio | spread | target |", "|---|---|---|---|---|"]
    for row in rows:
        bar = "" if row["bar"] is None else f"<= {row['bar']:g} {'met' if row['met'] else '**missed**'}"
        value, low, high = (f"{row[key]:.{digits}f}" for key in ("value", "low", "high"))
        lines.append(f"| {row['name']} | {row['setting']} | {value} | {low} to {high} | {bar} |")
    return lines


if __name__ == "__main__":
    main()
