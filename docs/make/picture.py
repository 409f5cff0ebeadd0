"""Draw what a split network is: one network coloured by owner, five answers, and their mean.

python docs/make/picture.py
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from drawing import MEMBERS, Drawing

PICTURES = Path(__file__).parent.parent / "pictures"
LAYERS = (4, 6, 6, 3)
CLASSES = ("wren", "tit", "owl")
ANSWERS = ((0.72, 0.2, 0.08), (0.55, 0.37, 0.08), (0.81, 0.12, 0.07), (0.38, 0.52, 0.1), (0.64, 0.26, 0.1))


def main() -> None:
    """Draw the picture."""
    says = (
        "One network whose weights are coloured by the member that owns them gives five answers; "
        "their mean is the prediction, and where they differ, the model does not know"
    )
    drawing = Drawing(560, 290, says)
    network(drawing, 24, 62, 170, 170)
    drawing.text(109, 34, "one network, one file", "bold middle")
    drawing.text(109, 270, "every weight has one owner", "quiet middle")
    drawing.arrow(212, 147, 24)
    drawing.text(303, 34, "five answers", "bold middle")
    for number, (colour, answer) in enumerate(zip(MEMBERS, ANSWERS, strict=True)):
        bars(drawing, 254, 50 + 40 * number, 98, 30, answer, colour)
    drawing.text(303, 270, "they differ: it is unsure", "quiet middle")
    drawing.arrow(368, 147, 24)
    drawing.text(476, 34, "their mean", "bold middle")
    mean = [sum(each) / len(ANSWERS) for each in zip(*ANSWERS, strict=True)]
    bars(
        drawing, 472, 102, 72, 90, mean, "", [f"{name} {share:.0%}" for name, share in zip(CLASSES, mean, strict=True)]
    )
    drawing.text(476, 270, "label and confidence", "quiet middle")
    drawing.save(PICTURES / "ensemble.svg")


def network(drawing: Drawing, x: float, y: float, width: float, height: float) -> None:
    """Draw layers of dots, and every weight between them in the colour of its owner."""
    choose = random.Random(6)
    columns = [
        [(x + width * place / (len(LAYERS) - 1), y + height * (row + 0.5) / count) for row in range(count)]
        for place, count in enumerate(LAYERS)
    ]
    for left, right in pairwise(columns):
        pairs = [(one, other) for one in left for other in right]
        owners = [number % len(MEMBERS) for number in range(len(pairs))]
        choose.shuffle(owners)
        for pair, owner in zip(pairs, owners, strict=True):
            drawing.line(pair, MEMBERS[owner], 1.8, 'stroke-opacity="0.85"')
    for column in columns:
        for place in column:
            drawing.dot(*place, radius=6)


def bars(
    drawing: Drawing,
    x: float,
    y: float,
    width: float,
    height: float,
    shares: Sequence[float],
    colour: str,
    names: Sequence[str] = (),
) -> None:
    """Draw one answer: a bar for each class."""
    step = height / len(shares)
    for row, share in enumerate(shares):
        drawing.box(x, y + row * step, width, step - 3, more='rx="2"')
        drawing.box(x, y + row * step, width * share, step - 3, colour or "#57606a", 'rx="2"')
        if names:
            drawing.text(x - 6, y + row * step + step / 2 + 3, names[row], "end", 12)


if __name__ == "__main__":
    main()
