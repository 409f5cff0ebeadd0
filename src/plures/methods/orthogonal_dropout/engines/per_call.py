"""The owned engine of networks that torch.fx cannot trace: one for each way in which the network is called."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plures.calling import arguments
from plures.errors import PluresError
from plures.graph import Graph, exported
from plures.methods.orthogonal_dropout.engines.engine import Engine, batched
from plures.methods.orthogonal_dropout.engines.owned import Owned, refuse_conversion, why_impossible
from plures.methods.orthogonal_dropout.engines.unfolded import Unfolded
from plures.methods.orthogonal_dropout.owners import SplitNetwork

log = logging.getLogger("plures")
MOST_GRAPHS = 4  # each holds the weights of a network


class OwnedPerCall(Engine):
    """Predict by torch.export's graphs of the network, made when the first batch comes that no other one is for.

        engine = ensemble.engine()  # of a model of transformers: the first batch takes some seconds
        engine.predict({"input_ids": tokens, "attention_mask": mask})

    Each member runs as a separate network if the network cannot be traced, or if `worth` says that this is faster.
    """

    kind = "owned"

    def __init__(self, split: SplitNetwork, fold: bool, worth: Callable[[SplitNetwork, Graph], bool] | None) -> None:
        super().__init__()
        if (reason := why_impossible(split)) is not None:
            raise PluresError(reason)
        self.members = split.trained
        self.split, self.fold, self.worth = split, fold, worth
        self._known: list[tuple[Any, Callable[..., Any] | None, Engine]] = []
        self.eval()

    @property
    def about(self) -> str:
        """What predicts: known after the first batch."""
        return self._known[-1][2].about if self._known else self.kind

    @property
    def one_by_one(self) -> list[str]:
        """The layers that run member by member for batches such as the last one of a new kind."""
        return getattr(self._known[-1][2], "one_by_one", []) if self._known else []

    def of_members(self, indices: list[int], batches: list[Any]) -> Tensor:
        """Return the logits of some members for several batches, joined."""
        return torch.cat([self._engine_for(batch)._outputs([batch], indices) for batch in batches], dim=1)

    def _engine_for(self, batch: Any) -> Engine:
        args, kwargs = arguments(batch)
        call = [len(args), *kwargs, *zip(map(_kind_of, (*args, *kwargs.values())), batched(batch), strict=False)]
        for known, guard, engine in list(self._known):
            if known == call and _accepts(guard, (*args, *kwargs.values())):
                return engine
        graph = exported(self.split.network, batch) if len(self._known) < MOST_GRAPHS else None
        made: Engine
        if graph is not None and (self.worth is None or self.worth(self.split, graph)):
            made = Owned(self.split, graph, self.fold)
        else:
            made = next((one for _, _, one in self._known if isinstance(one, Unfolded)), None) or Unfolded(self.split)
            reason = "it is faster" if graph is not None else "torch.export cannot trace the network"
            log.log(logging.INFO if self.worth else logging.WARNING, "members run as separate networks: %s", reason)
        self._known.append((call, None if graph is None else graph.guard, made))
        return made

    def _run_members_apart(self, split: SplitNetwork) -> None:
        """Each engine that is made does this for itself."""

    def _apply(self, fn: Any, recurse: bool = True) -> "OwnedPerCall":
        refuse_conversion(fn)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": []}  # guards are functions that torch.export has written


def _kind_of(value: Any) -> Any:
    """Return what must be the same of an argument: lengths of zero and one are their own kinds for torch.export."""
    if not isinstance(value, Tensor):
        return type(value)
    return value.dtype, tuple(length if length < 2 else None for length in value.shape[1:])


def _accepts(guard: Callable[..., Any] | None, tensors: tuple[Any, ...]) -> bool:
    """Return whether a graph is for tensors such as these."""
    try:
        return guard is None or guard(*tensors) is None
    except AssertionError:
        return False
