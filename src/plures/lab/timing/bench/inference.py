"""What prediction with k members costs, against k networks of their own."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from plures.lab.timing.bench.measure import Action, LeftOut, Ratio, race, seconds
from plures.lab.timing.bench.subjects import Subject, finished, images

FEW_SECONDS = 5.0  # a pass of k plain networks that takes longer is compared with the engines alone, and once
LONGEST_PASS = 30.0  # one that takes longer is left out


def prediction_ratios(
    subject: Subject,
    batch: int,
    precision: str,
    rounds: int,
    *,
    members: int = 5,
    compiled: bool = False,
    engines_only: bool = False,
) -> Iterator[Ratio]:
    """Compare the engines, the ensemble's own forward and vmap with k plain networks run one after the other.

        for ratio in prediction_ratios(RESNET18, batch=128, precision="float32", rounds=3): print(ratio)

    With `engines_only` the two engines alone, without a run to warm up: for passes of many seconds.
    """
    ensemble = finished(subject.make(), members)
    networks = [ensemble.checkout(member) for member in range(members)]
    inputs = images(batch)
    plain = predicting(lambda x: [network(x) for network in networks], inputs, precision)
    unfolded, lean = ensemble.engine("unfolded"), ensemble.engine("lean")
    rivals: dict[str, Callable[[Tensor], Any]] = {"unfolded prediction": unfolded, "lean prediction": lean}
    if not engines_only:
        rivals |= {"the ensemble's own forward": ensemble, "vmap over stacked members": stacked(networks)}
    if compiled:
        rivals["unfolded prediction, compiled"] = torch.compile(unfolded)
    setting = f"{subject.name}, batch {batch}, {precision}"
    bars = {"unfolded prediction": 0.95, "lean prediction": 1.10} if batch == 128 else {}
    suffix = f" / {members} plain networks"
    named = {name + suffix: predicting(rival, inputs, precision) for name, rival in rivals.items()}
    bars = {name + suffix: bar for name, bar in bars.items()}
    yield from race(setting, plain, named, rounds, bars, warm_up=not engines_only)


def affordable_ratios(
    subject: Subject, batches: Sequence[int], precision: str, rounds: int, *, members: int = 5
) -> Iterator[Ratio | LeftOut]:
    """Compare predictions at each of the batch sizes that a large network gets through in reasonable time.

        for found in affordable_ratios(WIDE_RESNET, [1, 32, 128], "float32", rounds=2): print(found)

    What a pass of k plain networks will take is reckoned from one image. Up to 32 images it may take half a minute,
    above that a few seconds.
    """
    network = subject.make().eval()
    one_image = predicting(network, images(1), precision)
    one_image()
    per_image = members * min(seconds(one_image) for _ in range(3))
    for batch in batches:
        expected = per_image * batch
        longest = LONGEST_PASS if batch <= 32 else FEW_SECONDS
        if expected > longest:
            why = f"a pass of {members} plain networks would take {expected:.0f} s, more than {longest:.0f} s"
            yield LeftOut(f"prediction / {members} plain networks", f"{subject.name}, batch {batch}, {precision}", why)
            continue
        slow = expected > FEW_SECONDS
        passes = 1 if slow else rounds
        yield from prediction_ratios(subject, batch, precision, passes, members=members, engines_only=slow)


def bf16_ratio(subject: Subject, rounds: int) -> Ratio:
    """Compare prediction of the plain network in bf16 with float32, one image.

    print(bf16_ratio(RESNET18, rounds=3))
    """
    network = subject.make().eval()
    float32, bf16 = (predicting(network, images(1), precision) for precision in ("float32", "bf16"))
    name = "plain prediction in bf16 / in float32"
    return next(race(f"{subject.name}, batch 1", float32, {name: bf16}, rounds))


def side_by_side_ratio(subject: Subject, batch: int, rounds: int, *, members: int = 10) -> Ratio:
    """Compare members that run side by side, on a thread each, with one after the other on all threads.

    print(side_by_side_ratio(NARROW_RESNET, batch=1, rounds=9))
    """
    threads = torch.get_num_threads()
    ensemble = finished(subject.make(), members)
    plain, together = (
        predicting(ensemble.engine("unfolded", threads=number), images(batch), "float32") for number in (None, threads)
    )
    name = "members side by side, a thread each / one after the other"
    setting = f"{subject.name}, {members} members, batch {batch}, float32, {threads} threads"
    return next(race(setting, plain, {name: together}, rounds))


def predicting(function: Callable[[Tensor], Any], inputs: Tensor, precision: str) -> Action:
    """Make an action that predicts in float32 or bf16.

    predicting(network, images(8), "bf16")()
    """

    def run() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            function(inputs)

    return run


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
