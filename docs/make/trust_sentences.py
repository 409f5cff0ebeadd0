"""The sentences of docs/trust.md that follow from its figures."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Found = Mapping[str, Mapping[str, Any]]
One = Mapping[str, Any]
UNSEEN = 0.0005  # of NLL: less does not show in the table


def calibration(found: Found) -> str:
    """Return what a temperature changes on images that it was not fitted on."""
    every = {name: one for name, one in found.items() if "calibrated" in one}
    change = {name: one["calibrated"]["nll"] - one["home"]["nll"] for name, one in every.items()}
    lower = [name for name in every if change[name] <= -UNSEEN]
    higher = [name for name in every if change[name] >= UNSEEN]
    same = [name for name in every if name not in lower and name not in higher]
    said = []
    if lower:
        said.append(f"lowers the NLL of {'all methods' if lower == list(every) else listed(lower)}")
    if same:
        said.append(f"changes the NLL of {listed(same)} by less than 0.001")
    if higher:
        most = max(change[name] for name in higher)
        said.append(f"raises the NLL of {listed(higher)} by up to {most:.3f}: one fitted on few images is uncertain")
    return f"On the test images, which it has not seen, it {', and '.join(said)}."


def coverage(found: Found) -> str:
    """Return how far the coverage of sets may be off by chance, and whether it is further off."""
    every = [(each, one) for one in found.values() for each in one.get("sets", [])]
    if not every:
        return "There are too few validation images for it."
    each, one = every[0]
    spread = _chance(each["asked"], one["calibrated"]["held_out"], one["home"]["images"])
    # Adaptive sets always hold the most probable class, so an accuracy above what was asked for is no miss.
    missed = [each for each, _ in every if each["covered"] < each["asked"] - 2 * spread]
    verdict = "None of them falls" if not missed else f"{len(missed)} of {len(every)} fall"
    return (
        f"With this number of images the share that is covered differs from {100 * each['asked']:.0f} % by "
        f"{100 * spread:.1f} points (one standard deviation) by chance. {verdict} short by more than two of these."
    )


def _chance(asked: float, held_out: int, images: int) -> float:
    """Return the standard deviation of a coverage: of a beta distribution, and of the images it is measured on."""
    rank = math.ceil((held_out + 1) * asked - 1e-9)
    other = held_out + 1 - rank
    drawn = rank * other / ((held_out + 1) ** 2 * (held_out + 2))
    return math.sqrt(drawn + asked * (1 - asked) / images)


def bounds(found: Found) -> str:
    """Return whether the bounds on the risk hold."""
    every = [(name, each) for name, one in found.items() for each in one.get("bounded", [])]
    if not every:
        return "There are too few validation images to guarantee any of the risks tried."
    broken = [name for name, each in every if each["wrong"] > each["risk"]]
    if not broken:
        return "On the test images every bound holds."
    return f"On the test images {len(broken)} of {len(every)} bounds are exceeded, by {listed(sorted(set(broken)))}."


def shift(found: Found) -> str:
    """Return which methods are best at the highest severity."""
    last = {name: one["shift"]["by_severity"][-1] for name, one in found.items()}
    best, surest = _most(last, "accuracy"), _least(last, "ece")
    return (
        f"At the highest severity {best} is right most often ({100 * last[best]['accuracy']:.1f} %), and "
        f"{'' if surest == best else surest + ' '}has the lowest calibration error (ECE {last[surest]['ece']:.3f})."
    )


def strangers(found: Found, ood: str) -> str:
    """Return which method separates other data best."""
    by_entropy = {name: scores(one)["entropy"] for name, one in found.items()}
    best = _most(by_entropy, "auroc")
    words = f"Entropy separates {ood} best for {best}, with an AUROC of {100 * by_entropy[best]['auroc']:.1f} %."
    if any(one["home"]["members"] == 1 for one in found.values()):
        words += " A single network has no members that could disagree, so it has no mutual information."
    return words


def silence(found: Found) -> str:
    """Return the method whose confidence ranks its predictions best."""
    best = min(found, key=lambda name: found[name]["home"]["aurc"])
    return f"The lowest area under the curve (AURC) is that of {best}."


def scores(one: One) -> dict[str, One]:
    """Return how well each score separates other data."""
    return {each["score"]: each for each in one["ood"]["scores"]}


def _most(figures: Mapping[str, One], key: str) -> str:
    return max(figures, key=lambda name: figures[name][key])


def _least(figures: Mapping[str, One], key: str) -> str:
    return min(figures, key=lambda name: figures[name][key])


def listed(words: Sequence[str]) -> str:
    """Return words joined as in a sentence: a, b and c."""
    return " and ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])
