"""Draw the concepts: roles and owners, the two schedules, what uncertainties mean, calibration and guarantees.

python docs/make/concepts.py
"""

import math
from collections.abc import Sequence
from pathlib import Path

from drawing import MEMBERS, Drawing

GREY = "#8b949e"
ANIMALS = ("wren", "tit", "owl")
CASES = {  # five members each
    "sure": [(0.95, 0.03, 0.02), (0.93, 0.05, 0.02), (0.96, 0.02, 0.02), (0.94, 0.04, 0.02), (0.95, 0.03, 0.02)],
    "noise": [(0.5, 0.47, 0.03), (0.47, 0.5, 0.03), (0.49, 0.48, 0.03), (0.5, 0.46, 0.04), (0.46, 0.5, 0.04)],
    "unknown": [(0.95, 0.03, 0.02), (0.04, 0.92, 0.04), (0.03, 0.04, 0.93), (0.9, 0.05, 0.05), (0.05, 0.9, 0.05)],
}
WORDS = {
    "sure": ("a clear wren", "members agree"),
    "noise": ("a blurred bird", "all are unsure alike"),
    "unknown": ("a lawn mower", "each is sure of another"),
}


def main(folder: Path) -> None:
    """Draw all."""
    roles(folder / "roles.svg")
    schedules(folder / "schedules.svg")
    uncertainty(folder / "uncertainty.svg")
    guarantees(folder / "guarantees.svg")


def roles(path: Path) -> None:
    """Draw tensors in three roles."""
    says = "Split tensors have an owner for each kernel, private ones a copy per member, shared ones one frozen value"
    drawing = Drawing(560, 232, says)
    rows = (
        ("convolution", "split: one owner for each kernel", "split"),
        ("norm layer, bias", "private: a copy for each member", "private"),
        ("small classifier", "private; a large one is split", "private"),
        ("frozen embedding", "shared: used by all, never changed", "shared"),
    )
    for number, (name, says, role) in enumerate(rows):
        y = 24 + 50 * number
        drawing.text(16, y + 20, name, "bold")
        if role == "split":
            for place in range(40):
                drawing.box(152 + 4.25 * place, y, 3.5, 32, MEMBERS[(place * 7 + place // 5) % 5])
        elif role == "private":
            for place, colour in enumerate(MEMBERS):
                drawing.box(152 + 34.5 * place, y + 6, 31, 20, colour, 'rx="2"')
        else:
            drawing.box(152, y, 169, 32, GREY, 'rx="2"')
        drawing.text(334, y + 20, says, "quiet", 12)
    drawing.save(path)


def schedules(path: Path) -> None:
    """Draw what trains when: one member after the other, or all in one run."""
    says = "One by one: each member pre-trains what is free, is pruned and finetuned. Together: one run for all members"
    drawing = Drawing(560, 196, says)
    drawing.text(16, 34, "one by one", "bold")
    drawing.text(16, 52, "Algorithm 1", "quiet", 12)
    x = 104.0
    for member, colour in enumerate(MEMBERS):
        free = 1 - member / 5
        drawing.box(x, 60 - 36 * free, 34, 36 * free, colour, 'rx="2" fill-opacity="0.4"')
        if member < 4:
            drawing.box(x + 36, 60 - 36 * free, 7, 36 * free, colour, 'rx="2" fill-opacity="0.7"')
        drawing.box(x + 45, 52, 34, 8, colour, 'rx="2"')
        drawing.text(x + 39, 80, f"member {member}", "quiet middle", 12)
        x += 90
    drawing.text(104, 102, "height: the share of the weights that it trains; pretrain, prune, finetune", "quiet", 12)
    drawing.text(16, 142, "together", "bold")
    for member, colour in enumerate(MEMBERS):
        drawing.box(104, 126 + 7.4 * member, 240, 6.6, colour, 'rx="1"')
    drawing.text(104, 182, "one stage: each trains its fifth on every batch, for about twice the epochs", "quiet", 12)
    drawing.save(path)


def entropy(shares: Sequence[float]) -> float:
    """Return the entropy in nats."""
    return -sum(share * math.log(share) for share in shares if share)


def uncertainty(path: Path) -> None:
    """Draw three cases of five answers, with total, aleatoric and epistemic uncertainty."""
    drawing = Drawing(560, 300, "Members that agree, members that are unsure alike, members that contradict each other")
    for number, (case, answers) in enumerate(CASES.items()):
        x = 20 + 182 * number
        title, says = WORDS[case]
        drawing.text(x, 32, title, "bold")
        drawing.text(x, 50, says, "quiet", 12)
        for member, (colour, answer) in enumerate(zip(MEMBERS, answers, strict=True)):
            for row, share in enumerate(answer):
                drawing.box(x, 64 + 30 * member + 8 * row, 150, 6.5, more='rx="1"')
                drawing.box(x, 64 + 30 * member + 8 * row, 150 * share, 6.5, colour, 'rx="1"')
        mean = [sum(each) / len(answers) for each in zip(*answers, strict=True)]
        total, aleatoric = entropy(mean), sum(map(entropy, answers)) / len(answers)
        figures = {"total": total, "aleatoric": aleatoric, "epistemic": total - aleatoric}
        for row, (name, value) in enumerate(figures.items()):
            drawing.text(x, 236 + 20 * row, name)
            drawing.box(x + 72, 226 + 20 * row, 56 * value / math.log(3), 11, GREY, 'rx="2"')
            drawing.text(x + 77 + 56 * value / math.log(3), 236 + 20 * row, f"{value:.2f}", "quiet", 12)
    drawing.save(path)


def guarantees(path: Path) -> None:
    """Draw a temperature, prediction sets and abstention."""
    says = "A temperature corrects confidence, sets contain the truth, and abstention bounds the errors"
    drawing = Drawing(600, 250, says)
    left, bottom, side = 24, 206, 140
    drawing.text(20, 32, "a temperature", "bold", 12)
    drawing.line([(left, bottom), (left + side, bottom)])
    drawing.line([(left, bottom), (left, bottom - side)])
    drawing.line([(left, bottom), (left + side, bottom - side)], GREY, 1.5, 'stroke-dasharray="4 4"')
    for colour, temperature in ((MEMBERS[0], 2.2), (MEMBERS[2], 1.05)):
        points = []
        for step in range(1, 40):
            confidence = step / 40
            right = 1 / (1 + ((1 - confidence) / confidence) ** (1 / temperature))
            points.append((left + side * confidence, bottom - side * right))
        drawing.line(points, colour, 2.5)
    drawing.text(left + 12, bottom - 74, "before", "", 12)
    drawing.text(left + 44, bottom - 16, "after", "", 12)
    drawing.text(left + side / 2, bottom + 20, "confidence", "quiet middle", 12)
    drawing.text(left + 10, bottom - side + 6, "share that is right", "quiet", 12)
    drawing.text(200, 32, "sets: 90 % have the truth", "bold", 12)
    for row, size in enumerate((1, 2, 3)):
        y = 62 + 50 * row
        for place in range(len(ANIMALS)):
            inside = place < size
            drawing.box(200 + 56 * place, y, 50, 26, MEMBERS[2] if inside else "", 'rx="13"')
            paint = 'style="fill:#fff"' if inside else 'class="quiet"'
            where = f'x="{225 + 56 * place}" y="{y + 17}" font-size="12" text-anchor="middle"'
            drawing.parts.append(f"<text {where} {paint}>{ANIMALS[place]}</text>")
    drawing.text(200, 226, "harder images, larger sets", "quiet", 12)
    drawing.text(400, 32, "abstaining: 1 % errors", "bold", 12)
    for place in range(40):
        x, y = 408 + 19 * (place % 10), 70 + 34 * (place // 10)
        answered = place < 27
        drawing.dot(x, y, MEMBERS[2] if answered else GREY, 8, "" if answered else 'fill-opacity="0.35"')
    drawing.text(400, 226, "it answers what it is sure of", "quiet", 12)
    drawing.save(path)


if __name__ == "__main__":
    main(Path(__file__).parent.parent / "pictures")
