"""The one error class of the library."""


class PluresError(Exception):
    """Catch every error that plures raises on purpose.

        try:
            ensemble = plures.load("birds.safetensors", network)
        except plures.PluresError as error:
            print(error)  # one sentence: what was given, what is accepted, what to do

    Anything else that escapes from the library is a bug.
    """
