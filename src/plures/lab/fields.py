"""Check the fields of a dataclass against their annotations: types, and bounds given by msgspec."""

from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from plures.errors import PluresError


def check_fields(values: Any, kind: type, prefix: str = "") -> None:
    """Raise an error that names all fields of the dataclass `kind` that have a wrong type or are out of bounds."""
    wrong = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        value = getattr(values, name)
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            accepted = str(error).replace("Expected ", "").replace("`", "")
            if get_origin(hint) is Literal:
                accepted = f"one of {', '.join(get_args(hint))}"
            wrong.append(f"{prefix}{name} is {value!r:.60}, but must be {accepted}")
    if wrong:
        raise PluresError("; ".join(wrong))
