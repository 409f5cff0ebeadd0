"""The one error class of the library."""

import unicodedata


class PluresError(Exception):
    """Catch every error that plures raises on purpose.

        try:
            ensemble = plures.load("birds.safetensors", network)
        except plures.PluresError as error:
            print(error)  # one sentence: what was given, what is accepted, what to do

    Anything else that escapes from the library is a bug. Control characters, which may come from the names in a
    stranger's file, are shown as escapes: a message is one line and cannot steer a terminal.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__("".join(map(_visible, str(message))))


def _visible(character: str) -> str:
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character.encode("unicode_escape", "backslashreplace").decode("ascii")
    return character
