"""The paper: its published results, and which runs make its tables and figures.

Numbers are as it prints them; accuracies are fractions here, the rest is unchanged.

Tables 1 and 3 are by Zhang, Gao and Sabuncu (`PAPER`). So is table 2, but for the rows named in `FROM_MIMO_PAPER`,
which it takes from Havasi et al. (`MIMO_PAPER`). On the ResNets all ensembles have five members, but two in MIMO, and
MC dropout makes 30 passes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from plures.checks import unknown, whole_number
from plures.lab.compare import Comparison, Published, Variant
from plures.lab.method_names import LOOKS
from plures.lab.recipes import get_recipe

Scale = Literal["paper", "cpu", "digits", "smoke"]
Papers = Mapping[str, Mapping[str, Published]]  # the published figures by data set and name of the row

PAPER = (
    "Zhilu Zhang, Vianne R. Gao, Mert R. Sabuncu: Ex uno plures: Splitting One Model into an Ensemble of "
    "Subnetworks. 2021, arXiv:2106.04767"
)
MIMO_PAPER = "Marton Havasi et al.: Training independent subnetworks for robust prediction. ICLR 2021, arXiv:2010.06610"


def _tables(text: str, *data: str, columns: str = "accuracy nll ece") -> dict[str, dict[str, Published]]:
    """Read a table as it is printed: a method, then the columns of each data set."""
    found: dict[str, dict[str, Published]] = {name: {} for name in data}
    for line in text.strip().splitlines():
        method, *parts = map(str.strip, line.split("|"))
        for name, part in zip(data, parts, strict=True):
            found[name][method] = Published(**dict(zip(columns.split(), map(float, part.split()), strict=True)))
    return found


# ResNet18 on CIFAR, ResNet50 on the others. Accuracy, NLL and ECE.
TABLE1 = _tables(
    """
    deterministic      | .935 .296 .0408 | .730 1.28 .141  | .501 2.45 .196  | .563 2.18 .164
    mc-dropout         | .944 .191 .0202 | .733 1.11 .0902 | .502 2.49 .171  | .563 1.96 .0871
    batch-ensemble     | .948 .203 .0269 | .743 1.05 .0910 | .540 2.33 .128  | .543 2.31 .185
    mimo               | .943 .205 .0180 | .738 1.09 .0664 | .520 2.11 .0879 | .540 1.96 .0461
    masksembles        | .938 .202 .0099 | .737 .999 .0224 | .496 2.32 .118  | .501 2.07 .0405
    orthogonal-dropout | .951 .157 .0082 | .777 .864 .0191 | .614 1.67 .0335 | .632 1.55 .0189
    deep-ensemble      | .948 .175 .0110 | .767 .921 .0377 | .556 1.98 .0725 | .614 1.73 .0336
    """,
    *("cifar10", "cifar100", "cub200", "tiny-imagenet"),
)
# WideResNet28-10. Accuracy, NLL and ECE.
TABLE2 = _tables(
    """
    deterministic      | .960 .159 .023 | .798 .875 .086
    mc-dropout         | .959 .160 .024 | .796 .830 .050
    batch-ensemble     | .962 .143 .021 | .815 .740 .056
    mimo               | .964 .123 .010 | .820 .690 .022
    masksembles        | .946 .173 .008 | .767 .843 .015
    orthogonal-dropout | .966 .122 .005 | .828 .701 .021
    deep-ensemble      | .966 .114 .010 | .827 .666 .021
    """,
    *("cifar10", "cifar100"),
)
FROM_MIMO_PAPER = frozenset({"deterministic", "mc-dropout", "batch-ensemble", "mimo", "deep-ensemble"})
# The ablation on ResNet18. MO: the masks are optimised; FC: the classifier is fixed.
TABLE3 = _tables(
    """
    mc-dropout                       | .934 .944 .287 .0415 .708 | .713 .733 1.11 .0902 .776
    orthogonal-dropout, random masks | .932 .943 .188 .0138 .597 | .714 .751 .977 .0455 .655
    orthogonal-dropout + MO          | .938 .949 .176 .0122 .601 | .723 .763 .935 .0328 .648
    orthogonal-dropout + MO + FC     | .939 .951 .157 .0082 .594 | .737 .777 .864 .0191 .638
    deep-ensemble                    | .934 .948 .175 .0110 .581 | .727 .767 .921 .0377 .652
    deep-ensemble + FC               | .935 .951 .151 .0091 .580 | .741 .778 .858 .0221 .645
    """,
    *("cifar10", "cifar100"),
    columns="member_accuracy accuracy nll ece agreement",
)

# What is said below the tables.
TABLE2_NOTES = {
    f"of which {', '.join(sorted(FROM_MIMO_PAPER))}": MIMO_PAPER,
    # As the authors of these figures list them: google/uncertainty-baselines, baselines/cifar.
    "deep-ensemble, mc-dropout": "The figures taken over are for a deep ensemble of four networks and for MC dropout "
    "with one pass.",
}
TABLE3_NOTES = {
    "mc-dropout": "The paper contradicts itself on MC dropout for CIFAR10: table 1 gives NLL .191 and ECE .0202, "
    "table 3 gives .287 and .0415, at the same accuracy; it does not say why."
}


def paper_data(name: str) -> str:
    """Return the name of the paper's data set that data was taken from: tiny-imagenet for tiny-imagenet-20."""
    return re.sub(r"-\d+$", "", name)


SEEDS = {"paper": 3, "cpu": 1, "digits": 2, "smoke": 1}  # as many as are made within a sensible time

LONGER = 2.1  # orthogonal dropout trains a member for 200 + 20 + 200 epochs, a deep ensemble for 200
FORM = ("classifier=fixed", "granularity=weight")  # the options of the paper that differ from our defaults
AS_PUBLISHED = Variant("orthogonal-dropout", FORM, label="orthogonal-dropout, as published")
FIXED = Variant("deep-ensemble", ("classifier=fixed",), label="deep-ensemble + FC")
METHODS = (*map(Variant, LOOKS), AS_PUBLISHED)
ABLATION = (
    Variant("mc-dropout"),
    Variant(
        "orthogonal-dropout",
        ("optimize-masks=false", "classifier=split", "granularity=weight"),
        label="orthogonal-dropout, random masks",
    ),
    Variant("orthogonal-dropout", ("classifier=split", "granularity=weight"), label="orthogonal-dropout + MO"),
    replace(AS_PUBLISHED, label="orthogonal-dropout + MO + FC"),
    Variant("orthogonal-dropout", ("classifier=fixed",), label="orthogonal-dropout + MO + FC, kernels"),
    Variant("orthogonal-dropout", label="orthogonal-dropout, our default"),
    Variant("deep-ensemble"),
    FIXED,
    Variant("deep-ensemble", longer=LONGER, label=f"deep-ensemble, {LONGER:g} x epochs"),
)


@dataclass(frozen=True)
class Target:
    """One table or figure of the paper."""

    recipes: Mapping[str, tuple[str, ...]]  # of each scale
    variants: tuple[Variant, ...]
    paper: Papers = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def comparisons(self, scale: Scale, seeds: int | None = None, only: Sequence[str] = ()) -> list[Comparison]:
        """List the runs that the target needs, one comparison per recipe; `only` leaves out the other recipes."""
        for name in only:
            if name not in self.recipes[scale]:
                raise unknown(f"recipe of the scale {scale} here", name, self.recipes[scale])
        numbers = tuple(range(whole_number("--seeds", SEEDS[scale] if seeds is None else seeds)))
        return [
            Comparison(name, recipe, self.variants, numbers, self.paper.get(paper_data(recipe.data), {}))
            for name in only or self.recipes[scale]
            for recipe in [get_recipe(name)]
        ]


def scales(*names: str, digits: str = "digits") -> dict[str, tuple[str, ...]]:
    """Return the recipes that stand for the paper's data sets at each scale."""
    small = {"digits": (digits,), "smoke": (f"{digits}-smoke",)}
    return {"paper": names, "cpu": tuple(f"{name}-cpu" for name in names), **small}


def as_published(table: Papers, row: str) -> Papers:
    """Return a table of the paper with one of its rows named as our variant of the same form."""
    return {
        data: {AS_PUBLISHED.name if name == row else name: figures for name, figures in rows.items()}
        for data, rows in table.items()
    }


RESNETS = scales("cifar10", "cifar100", "cub200", "tiny-imagenet")
WIDE_RESNETS = scales("cifar10-wrn", "cifar100-wrn", digits="digits-wrn")
# The ablation needs convolutions: kernels can own nothing in a perceptron.
CONVOLUTIONS = scales("cifar10", "cifar100", digits="digits-resnet")
CIFARS = scales("cifar10", "cifar100")


def _counted(method: Variant, most: int) -> list[Variant]:
    """Return a method with two members, and with more."""
    return [replace(method, members=count, label=f"{method.method} {count}") for count in range(2, most + 1)]


TARGETS = {
    "table1": Target(RESNETS, METHODS, as_published(TABLE1, "orthogonal-dropout")),
    "table2": Target(WIDE_RESNETS, METHODS, as_published(TABLE2, "orthogonal-dropout"), TABLE2_NOTES),
    "table3": Target(CONVOLUTIONS, ABLATION, TABLE3, TABLE3_NOTES),
    "figure1": Target(
        RESNETS,
        tuple(one for one in METHODS if one.method not in ("deterministic", "mc-dropout")),
        as_published(TABLE3, "orthogonal-dropout + MO + FC"),
    ),
    # The members of a deep ensemble know nothing of each other: its first two are a deep ensemble of two.
    "figure2": Target(
        CIFARS,
        (
            *_counted(AS_PUBLISHED, 10),
            Variant("deep-ensemble", members=10, label="deep-ensemble"),
            replace(FIXED, members=10),
        ),
    ),
    # More than four members of MIMO have no room in a ResNet.
    "figure3": Target(
        CIFARS,
        (
            *_counted(AS_PUBLISHED, 4),
            *_counted(Variant("mimo"), 4),
            Variant("deep-ensemble", members=4, label="deep-ensemble"),
        ),
    ),
}
