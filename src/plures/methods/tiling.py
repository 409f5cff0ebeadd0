"""Run several members in one pass, along the batch: layers know which rows belong to which member.

A method copies the user's network, puts hooks on its layers or other layers in their place (`replace`), and wraps the
result in `Tiled`. The network's own code only ever sees a longer batch, so it may add, flatten, pool and concatenate as
it likes. Hooks are bound methods, not closures: a copy of the network has hooks that belong to the copy.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plures.calling import Arguments, batch_of, logits_of
from plures.errors import PluresError


class Rows:
    """Know which member each row of the running batch belongs to; one object, shared by all layers of a network.

    `Tiled` writes it before the network runs. `owner` gives the member of each row where it is not simply as many rows
    for each, member after member. A layer may see several rows (tokens, frames) for each row of the batch.
    """

    def __init__(self) -> None:
        self.count = 0
        self.owner: Tensor | None = None

    def per_row(self, x: Tensor) -> int:
        """Count the rows of a layer's input for each row of the batch; refuse an input that is not a batch."""
        if not self.count or len(x) % self.count:
            raise PluresError(
                f"a layer was given a tensor of shape {tuple(x.shape)} in a batch of {self.count} rows: its first axis "
                "must be the batch, because it holds the members; change the network (batch_first) or the method"
            )
        return len(x) // self.count

    def spread(self, table: Tensor, x: Tensor) -> Tensor:
        """Turn [members, width] into [len(x), width]: each row gets what its member has."""
        each = self.per_row(x)
        if self.owner is None:
            return table.unsqueeze(1).expand(-1, len(x) // len(table), -1).flatten(0, 1)
        return table[self.owner].repeat_interleave(each, 0)


class Tiled(nn.Module):
    """Run a rewritten network on each sample once per member; return [members, batch, classes].

    The tiled batch has all samples of the first member, then all of the second, and so on; with `interleave` it has
    all members of the first sample, then all of the second.
    """

    def __init__(self, network: nn.Module, members: int, rows: Rows, *, interleave: bool = False) -> None:
        super().__init__()
        self.network = network
        self.members = members
        self.rows = rows
        self.interleave = interleave

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all members, [members, batch, classes]."""
        batch = len(batched(args, kwargs))

        def tile(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != batch:
                return value  # no batch: a flag, a table
            if self.interleave:
                return value.repeat_interleave(self.members, 0)
            return value.repeat(self.members, *[1] * (value.dim() - 1))

        self.rows.count = batch * self.members
        self.rows.owner = None
        logits = run(self.network, self.rows, *map(tile, args), **{name: tile(value) for name, value in kwargs.items()})
        if self.interleave:
            return torch.unflatten(logits, 0, (batch, self.members)).transpose(0, 1)
        return torch.unflatten(logits, 0, (self.members, batch))


def run(network: nn.Module, rows: Rows, *args: Any, **kwargs: Any) -> Tensor:
    """Run a rewritten network and return its logits, one row for each row of the batch."""
    logits = logits_of(network(*args, **kwargs))
    if logits.dim() == 0 or len(logits) != rows.count:
        raise PluresError(
            f"the network returned logits of shape {tuple(logits.shape)} for a batch of {rows.count} rows; expected "
            "one row of logits for each"
        )
    return logits


def batched(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Find the tensor whose first axis is the batch in what a network is called with: the first one there is."""
    found = batch_of(Arguments(args, dict(kwargs)))
    if found is None:
        raise PluresError("the network was called without a tensor that has a batch axis")
    return found


def along_width(table: Tensor, x: Tensor, layer: nn.Module) -> Tensor:
    """Shape [rows, width] so that it broadcasts against a layer's input or output."""
    between = [1] * (x.dim() - 2)
    shape = [len(x), *between, table.shape[1]] if isinstance(layer, nn.Linear) else [len(x), table.shape[1], *between]
    return table.reshape(shape).to(x.dtype)


def replace(network: nn.Module, others: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put other modules in the place of some, in place, and return the network."""
    if network in others:
        return others[network]
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if module in others:
            parent, _, attribute = name.rpartition(".")
            setattr(network.get_submodule(parent), attribute, others[module])
    return network
