"""The two doors to orthogonal dropout: split a network that is to be trained, adapt one that was trained."""

import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from plures.checks import number, unknown, whole_number
from plures.errors import PluresError
from plures.methods.orthogonal_dropout.method import OrthogonalDropout, Schedule
from plures.methods.orthogonal_dropout.roles import SMALL_COUNT, Role, classifier_tensors
from plures.methods.orthogonal_dropout.roles import roles as roles_of
from plures.tensors import canonical, layers, tensors

log = logging.getLogger("plures")


def split(
    network: nn.Module, members: int = 5, *, schedule: Schedule = "together", **options: Any
) -> OrthogonalDropout:
    """Split a network that is not trained yet into members that share no weight, and train in one stage.

        ensemble = plures.split(network, members=5)
        ensemble.fit(loader, epochs=60)  # about twice the epochs of a plain network

    `schedule="sequential"` is the paper's algorithm, which optimises the masks and takes longer. The other options are
    those of `plures.OrthogonalDropout`. To keep what a pre-trained network knows, use `plures.adapt`.
    """
    trained = _why_trained(network) if isinstance(network, nn.Module) else None
    kept = "given" in (options.get("init"), options.get("background"))
    if trained is not None and not kept:
        log.warning("%s, and splitting it draws new weights: plures.adapt(network) keeps what it knows", trained)
    return OrthogonalDropout(network, members, schedule=schedule, **options)


def adapt(
    network: nn.Module,
    members: int = 5,
    *,
    share: float | None = 0.02,
    last: int | str | None = None,
    roles: Mapping[str, str] | None = None,
    **options: Any,
) -> OrthogonalDropout:
    """Make members that keep a pre-trained network and change disjoint shares of its weights.

        ensemble = plures.adapt(network, members=5)
        for stage in ensemble.stages():
            optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)  # 30 times that of a full fine-tuning
            train(stage, optimizer)
        plures.save(ensemble, "birds.safetensors")  # the changes: load needs the same network

    Norm layers, biases, depthwise kernels and the classifier are private; embeddings and what the network has frozen
    are shared and do not change.

    - `share`: the share of each layer that a member changes; None divides everything. A small share needs a larger
      learning rate: about 30 times that of a full fine-tuning for a share of 0.02, and 3 times for one of 0.2.
    - `last`: change only the last blocks, this many, or those from the first module on whose name matches, such as
      "encoder.layer.4". Everything before them is shared.
    - `roles`: the role of each tensor, from `plures.roles`, instead of all this.

    Other options are those of `plures.OrthogonalDropout`, with `background="given"`. With `schedule="together"` all
    members train in one stage.
    """
    if roles is not None and last is not None:
        raise PluresError("roles= says what is shared, and so does last=: give one of them")
    if roles is None:
        if share is not None:
            number("share", share, "a number above 0 and at most 1/members", above=0)
        roles = _roles(network, members, share, last)
    return OrthogonalDropout(network, members, background="given", share=share, roles=roles, **options)


def _roles(network: nn.Module, members: int, share: float | None, last: int | str | None) -> dict[str, Role]:
    """Return the roles for changes: the classifier and what is too small for a share are private."""
    result = roles_of(network, embeddings="shared")
    first, head = canonical(network), classifier_tensors(network)
    if last is not None:
        before = _before(network, last)
        fixed = {first[name] for name in first if name.rpartition(".")[0] in before}
        result |= {name: Role.SHARED for name in result if first[name] in fixed}
    private = dict(result)
    for name, tensor in tensors(network).items():
        few = tensor.numel() <= SMALL_COUNT and tensor.shape[:2].numel() < (members if share is None else 1 / share)
        if result[name] is Role.SPLIT and (name in head or few):
            private[name] = Role.PRIVATE
    return private if Role.SPLIT in private.values() else result


def _before(network: nn.Module, last: int | str) -> list[str]:
    """Return the names of the modules before the last blocks, in the order of the modules."""
    names = [name for name, _ in network.named_modules()]
    if isinstance(last, str):
        start = next((name for name in names if fnmatchcase(name, last)), None)
        if start is None:
            raise unknown("module for last=", last, filter(None, names))
    else:
        found = _blocks(network)
        start = found[-whole_number("last", last, most=len(found))]
    return names[: names.index(start)]


def _blocks(network: nn.Module) -> list[str]:
    """Return the names of the blocks that a network repeats: of the class with the most weights; otherwise its layers.

    >>> _blocks(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3, enable_nested_tensor=False))
    ['layers.0', 'layers.1', 'layers.2']
    """
    kinds: dict[type, dict[str, int]] = {}
    for name, module in network.named_modules():
        plain = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) or not list(module.children())
        known = kinds.setdefault(type(module), {})
        if name and not plain and not any(name.startswith(f"{outer}.") for outer in known):
            known[name] = sum(one.numel() for one in module.parameters())
    repeated = [known for known in kinds.values() if len(known) > 1]
    return list(max(repeated, key=lambda known: sum(known.values()), default=layers(network)))


def _why_trained(network: nn.Module) -> str | None:
    """Return what shows that a network was trained, or None."""
    for module in network.modules():
        config = getattr(module, "config", None)
        origin = getattr(config, "_name_or_path", None) or getattr(config, "name_or_path", None)
        if isinstance(origin, str) and origin:
            return f"{type(module).__name__} was loaded from {origin}"
        if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None and module.num_batches_tracked > 0:
            return f"the batch norms of {type(network).__name__} have seen {int(module.num_batches_tracked)} batches"
    return None
