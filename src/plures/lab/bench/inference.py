"""What prediction with k members costs, against k networks of their own."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from plures.lab.bench.measure import Action, Ratio, race
from plures.lab.bench.subjects import Subject, finished, images


def prediction_ratios(
    subject: Subject, batch: int, precision: str, rounds: int, *, members: int = 5, compiled: bool = False
) -> Iterator[Ratio]:
    """Compare the engines, the ensemble's own forward and vmap with k plain networks run one after the other.

    for ratio in prediction_ratios(RESNET18, batch=128, precision="float32", rounds=3): print(ratio)
    """
    ensemble = finished(subject.make(), members)
    networks = [ensemble.checkout(member) for member in range(members)]
    inputs = images(batch)

    def predict(function: Callable[[Tensor], Any]) -> Action:
        def run() -> None:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                function(inputs)

        return run

    plain = predict(lambda x: [network(x) for network in networks])
    unfolded, lean = ensemble.engine("unfolded"), ensemble.engine("lean")
    rivals = {"unfolded prediction": predict(unfolded), "lean prediction": predict(lean)}
    rivals |= {"the ensemble's own forward": predict(ensemble), "vmap over stacked members": predict(stacked(networks))}
    if compiled:
        rivals["unfolded prediction, compiled"] = predict(torch.compile(unfolded))
    setting = f"{subject.name}, batch {batch}, {precision}"
    bars = {"unfolded prediction": 0.95, "lean prediction": 1.10} if batch == 128 else {}
    suffix = f" / {members} plain networks"
    named = {name + suffix: rival for name, rival in rivals.items()}
    yield from race(setting, plain, named, rounds, {name + suffix: bar for name, bar in bars.items()})


def stacked(networks: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    """Run all networks at once by vmap over their stacked parameters.

    logits = stacked([network, other])(images)
    """
    parameters, buffers = stack_module_state(networks)
    skeleton = copy.deepcopy(networks[0]).to("meta")

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        result: Tensor = functional_call(skeleton, (parameters, buffers), (inputs,))
        return result

    every = vmap(one, in_dims=(0, 0, None))

    def run(inputs: Tensor) -> Tensor:
        result: Tensor = every(parameters, buffers, inputs)
        return result

    return run
