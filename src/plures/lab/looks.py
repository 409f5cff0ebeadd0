"""How methods look, and in which order they stand, in every figure and on every page."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple


class Look(NamedTuple):
    """A colour, and a marker as matplotlib calls it."""

    colour: str
    marker: str


# In the order of the paper; packed ensembles came later. Okabe and Ito's colours, safe for the colour-blind,
# with wine and grey for black and yellow.
LOOKS = {
    "deterministic": Look("#7F7F7F", "p"),
    "mc-dropout": Look("#56B4E9", "v"),
    "batch-ensemble": Look("#E69F00", "<"),
    "mimo": Look("#CC79A7", "D"),
    "masksembles": Look("#009E73", "^"),
    "packed-ensemble": Look("#882255", ">"),
    "orthogonal-dropout": Look("#D55E00", "o"),
    "deep-ensemble": Look("#0072B2", "s"),
}


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """Give every name a look that no other has: a method its own, anything else one that is left over.

    >>> looks_of(["mimo", "my-method"])["mimo"].marker
    'D'
    """
    unique = list(dict.fromkeys(names))
    found = {name: LOOKS[name] for name in unique if name in LOOKS}
    # Every colour with its own marker first, and with those of others when these are used up.
    every = list(LOOKS.values())
    shifted = (every[(place + lap) % len(every)].marker for lap in range(len(every)) for place in range(len(every)))
    free = (
        look for look in map(Look, itertools.cycle(one.colour for one in every), shifted) if look not in found.values()
    )
    found |= {name: next(free) for name in unique if name not in found}
    return {name: found[name] for name in unique}


def place_of(name: str) -> tuple[int, str]:
    """Say where a row of a table stands: methods in the order of the paper, all else behind them by name.

    >>> sorted(["my-method", "mimo granularity=2", "deterministic"], key=place_of)
    ['deterministic', 'mimo granularity=2', 'my-method']
    """
    method = name.partition(" ")[0]
    return (list(LOOKS).index(method) if method in LOOKS else len(LOOKS), name)
