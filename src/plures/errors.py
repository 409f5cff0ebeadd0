"""The one error class of the library."""

import unicodedata


class PluresError(Exception):
    """Catch every error that plures raises on purpose.

        try:
            ensemble = plures.load("birds.safetensors", network)
        except plures.PluresError as error:
            print(error)  # one sentence: what was given, what is accepted, what to do

    Anything else that escapes from the library is a bug. Control characters, which may come from the names in a
    file from elsewhere, are shown as escapes: a message is one line and cannot steer a terminal.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(visible(str(message)))


def visible(text: str) -> str:
    r"""Show control characters, and bytes of a file name that are not UTF-8, as escapes.

    >>> print(visible("wren\n.png"))
    wren\n.png
    """
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character.encode("unicode_escape", "backslashreplace").decode("ascii")
    return character
