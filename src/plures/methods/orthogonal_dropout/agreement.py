"""Compare a faster way to train a network with the network itself, on one batch."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from plures.methods.orthogonal_dropout.together import Members

CLOSE = 1e-3  # of the length of an output: how far sums in another order may lie apart
FAR = 0.02  # of the length of a gradient, in which rounding errors of norm layers over few samples grow
log = logging.getLogger("plures")


def agrees(network: nn.Module, faster: Callable[[nn.Module], Callable[..., Any]], inputs: Tensor) -> bool | None:
    """Return whether a network gives the same outputs, gradients and statistics by both ways, but for its dropout.

    None if the batch says nothing, because its outputs are NaN or infinite.
    """
    results = []
    cuda = [inputs.device] if inputs.is_cuda else []
    with torch.random.fork_rng(devices=cuda), torch.autocast(inputs.device.type, enabled=False):
        for fast in (False, True):
            trial = _trial(network)
            try:
                run = faster(trial) if fast else trial
                output = run(inputs.clone(memory_format=torch.contiguous_format))
                weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
                (output * weights.to(output)).sum().backward()
            except Exception as error:
                if not fast:
                    raise
                return _differs(network, f"{type(error).__name__}: {error}")
            gradients = {name: one.grad for name, one in trial.named_parameters() if one.grad is not None}
            results.append({"output": output.detach(), **gradients, **dict(trial.named_buffers())})
    slow, quick = results
    if not all(bool(one.isfinite().all()) for one in slow.values()):
        return None
    if slow.keys() != quick.keys():
        return _differs(network, "other parameters get gradients")
    # What a norm layer takes away again has a gradient of rounding errors alone: small is what the largest makes small.
    largest = max(float(slow[name].norm()) for name in gradients)
    for name, expected in slow.items():
        one, (share, least) = quick[name], (FAR, FAR * largest / 4) if name in gradients else (CLOSE, 0.0)
        if not expected.is_floating_point() or one.shape != expected.shape:
            close = one.equal(expected)
        else:  # as vectors: a single ReLU may fall to the other side of zero
            close = float((one - expected).norm()) <= max(share * float(expected.norm()), least) + 1e-6
        if not close:
            return _differs(network, f"{name} differs")
    return True


def _trial(network: nn.Module) -> nn.Module:
    """Copy a network for the comparison: without dropout, and with other biases.

    Outputs that a member owns no input of are constant. With a bias of zero they would lie at the kink of a ReLU, and
    rounding would decide about their gradients. In channels_last, torch's batch norm on a CPU would round too much.
    """
    trial, draw = copy.deepcopy(network), torch.Generator().manual_seed(0)
    trial.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    for layer in trial.modules():
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0
    with torch.no_grad():
        for one in trial.parameters():
            if one.requires_grad:
                one.add_(0.01 * torch.randn(one.shape, generator=draw).to(one))
    return trial


def _differs(network: nn.Module, what: str) -> bool:
    log.info(
        "%s trains by torch alone: run side by side, its samples influence each other or choices are made that a "
        "trace does not follow (%s)",
        type(network.network if isinstance(network, Members) else network).__name__,
        what,
    )
    return False
