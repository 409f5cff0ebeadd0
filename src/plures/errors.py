"""The error class of the library."""

LONGEST = 2000  # characters of a message: room for several paths


class PluresError(Exception):
    """The base of all errors that plures raises on purpose.

        try:
            ensemble = plures.load("birds.safetensors", network)
        except plures.PluresError as error:
            print(error)  # one sentence: what was given, what is accepted, what to do

    Any other exception from the library is a bug. A message is one line: control characters, which may come from names
    in an untrusted file, are shown as escapes, and the middle of a very long message is left out.
    """

    def __init__(self, message: object = "") -> None:
        text = str(message)
        half = LONGEST // 2
        super().__init__(visible(text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"))


class MissingExtraError(PluresError, ModuleNotFoundError):
    """A module needs packages that an extra of plures installs.

    try:
        import plures.sklearn
    except ImportError as error:
        print(error)  # names the extra
    """


def brief(error: BaseException) -> str:
    """Return the class and the first line of an error, for use in a sentence.

    >>> brief(ValueError("no square.\\nand more"))
    'ValueError: no square'
    """
    text = str(error).strip().partition("\n")[0][:160].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def visible(text: str) -> str:
    r"""Show characters that cannot be printed, and bytes of a file name that are not UTF-8, as escapes.

    >>> print(visible("wren\n.png"))
    wren\n.png
    >>> print(visible("\ue000"))  # of nobody's alphabet
    \ue000
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
