"""Pictures from the Hugging Face hub."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from plures.errors import PluresError
from plures.lab.data.arrow import ROWS_AT_ONCE, ArrowTable, arrow_contents
from plures.lab.data.contents import Contents, by_split

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

PATIENCE = 10  # seconds to wait for the first answer of the hub


def read_hub(hub_id: str, configuration: str | None, missing: Callable[[str], str]) -> Contents:
    """Load a data set from the hub, or from what `datasets` has downloaded before when HF_HUB_OFFLINE is set.

        read_hub("ufldl-stanford/svhn", "cropped_digits", missing=lambda answer: f"No svhn: {answer}.")

    `missing` makes the sentence for the case that it cannot be had, from what the hub answered.
    """
    import datasets

    _ask_hub(hub_id, missing)
    try:
        loaded = datasets.load_dataset(hub_id, configuration)
    except Exception as error:  # from http libraries to file systems: everything that can go wrong in a download
        reason = str(error).partition("\n")[0].rstrip(".")
        raise PluresError(missing(f"{hub_id} on the Hugging Face hub cannot be loaded ({reason})")) from None
    splits = by_split(dict(loaded), hub_id)
    return arrow_contents({split: [_table(f"{hub_id} ({split})", part)] for split, part in splits.items()})


def _ask_hub(hub_id: str, missing: Callable[[str], str]) -> None:
    """Fail at once when there is no network: `datasets` alone would try again and again first."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:
        huggingface_hub.HfApi().dataset_info(hub_id, timeout=PATIENCE)
    except HfHubHTTPError:
        raise PluresError(
            missing(f"the Hugging Face hub has no public data set {hub_id} (or you need to log in)")
        ) from None
    except Exception:  # the exception classes of connections differ between versions of the hub client
        raise PluresError(missing(f"the Hugging Face hub cannot be reached for {hub_id}")) from None


def _table(origin: str, part: "datasets.Dataset") -> ArrowTable:
    def read(columns: list[str]) -> "Iterator[pa.Table]":
        yield from part.select_columns(columns).with_format("arrow").iter(batch_size=ROWS_AT_ONCE)

    return ArrowTable(origin, part.features.arrow_schema, len(part), read)
