"""How bad input is worded: did-you-mean, one-of, must-be."""

from collections.abc import Mapping
from difflib import get_close_matches


def nearest(name: str, known: Mapping[str, object]) -> str:
    """Word the end of an error: the known names that look like the unknown one.

    >>> nearest("fc.wieght", {"fc.weight": 1})
    '; did you mean fc.weight?'
    """
    matches = get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
