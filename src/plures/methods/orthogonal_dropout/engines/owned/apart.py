"""What runs member by member: layers and functions that the kernels do not know, and tensors of the members' own."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plures.errors import PluresError
from plures.methods.orthogonal_dropout.engines.owned.parts import OfMembers, Running


class EachMember(OfMembers):
    """Run a layer once for each member, as the unfolded engine does: for layers that the kernels do not know.

    EachMember([layer, other], running)(batch)
    """

    def __init__(self, layers: list[nn.Module], running: Running) -> None:
        super().__init__(running)
        self.layers = nn.ModuleList(layers)

    def choose(self, indices: list[int]) -> None:
        """Keep the layers of some members."""
        self.layers = nn.ModuleList(self.layers[index] for index in indices)

    def __getattr__(self, name: str) -> Any:
        """Return what torch's encoders ask a layer for, such as its dtype, from the first member's."""
        layers = self.__dict__.get("_modules", {}).get("layers")
        if name in ("layers", "running") or name.startswith("__") or layers is None:
            return super().__getattr__(name)
        return getattr(layers[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cut the batch into members, run each, and join what comes out."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
        count = len(given[0]) if given else 0
        results = []
        for turn, layer in enumerate(self.layers):

            def cut(value: Any, turn: int = turn) -> Any:
                batched = isinstance(value, Tensor) and value.dim() and len(value) == count
                return value.chunk(self.running.count)[turn] if batched else value

            results.append(layer(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()}))
        return joined(results)


def joined(results: list[Any]) -> Any:
    """Join what members returned along the batch axis; tuples part by part."""
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    if type(results[0]) in (tuple, list):
        return type(results[0])(joined(list(parts)) for parts in zip(*results, strict=True))
    if not all(result is results[0] or result == results[0] for result in results):
        raise PluresError(f"outputs of type {type(results[0]).__name__} cannot be joined over the members")
    return results[0]


class Apart(list[Any]):
    """What each of the running members has, one after the other.

    Apart([token_of_first, token_of_second])
    """


class MembersTensor(OfMembers):
    """Return a tensor that each member has for itself.

    MembersTensor(stack, running)()
    """

    stack: Tensor

    def __init__(self, stack: Tensor, running: Running) -> None:
        super().__init__(running, stack=stack)

    def forward(self) -> Apart:
        """Return the tensors of the members that run."""
        return Apart(self.stack)


class EachCall(nn.Module):
    """Call a function, or a method by name, once for each member.

    EachCall(torch.add)(tokens, positions)
    """

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Apart:
        """Return what comes out for each member."""
        found: list[Apart] = []
        map_structure(found.append, (args, kwargs))
        results = Apart()
        for index in range(len(found[0])):
            own = map_structure(lambda values, index=index: values[index], (args, kwargs))
            if isinstance(self.function, str):
                results.append(getattr(own[0][0], self.function)(*own[0][1:], **own[1]))
            else:
                results.append(self.function(*own[0], **own[1]))
        return results


def map_structure(change: Any, value: Any) -> Any:
    """Change every `Apart` in nested arguments.

    >>> map_structure(sum, ([Apart([1, 2]), 5], {}))
    ([3, 5], {})
    """
    if isinstance(value, Apart):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(map_structure(change, part) for part in value)
    if isinstance(value, dict):
        return {name: map_structure(change, part) for name, part in value.items()}
    return value


def private_copy(layer: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Copy a layer with a member's tensors in it.

    private_copy(layer, {"weight": weight})
    """
    made = copy.deepcopy(layer)
    with torch.no_grad():
        for name, tensor in made.state_dict(keep_vars=True).items():
            if name in values:
                tensor.copy_(values[name])
    return made.requires_grad_(False).eval()
