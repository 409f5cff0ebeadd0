"""The trunk: modules with the same tensors in all members run once for all of them, while their inputs are the same."""

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from plures.calling import call, copied, logits_of, rows_of
from plures.graph import has_hooks
from plures.prediction import Predictor
from plures.tensors import shell

log = logging.getLogger("plures")
CLOSE = 1e-5  # what outputs may differ by, relative to their size
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)  # arguments that are compared by their value
Run = Callable[[Any], Tensor]  # one member on a batch


class Trunk:
    """Run members one after the other on a batch, and the modules that would compute the same only once.

    `networks` are the structures that run, which no other call uses: one for each member, or one whose tensors change.
    Members have the tensors at the places `differing` for themselves. A module whose tensors are the same for all,
    without hooks and in eval mode, returns what it returned to an earlier member if it is called with the same tensors,
    or equal ones. The first two samples of the first batch show which modules do. If they change their inputs or keep a
    state, or if the outputs of members differ from those without a trunk, they run as always. So does everything if
    the user has put hooks on it, other than the `hooks` in which members differ.

    Members that train together share what needs no gradient, in training mode too: dropout there is drawn once.
    """

    def __init__(
        self,
        networks: Iterable[nn.Module],
        differing: Container[str],
        hooks: Sequence[Any] = (),
        *,
        training: bool = False,
    ) -> None:
        self.networks = tuple(networks)
        self.share = 0.0  # of the parameters, those in modules that run once
        self.known = False  # whether a batch has shown which modules run once
        self.active = {path for network in self.networks for path in _put_on(self, network, differing, hooks, training)}
        self.cloned: set[str] = set()  # what they return is changed in place by what follows
        self.records: dict[tuple[str, int], Record] | None = None  # while a batch runs
        self.calls: Counter[str] = Counter()  # of each module by the running member
        self.seen: set[str] = set()
        self.hits: set[str] = set()
        self.inside = False  # a module that is being recorded

    def outputs(self, batches: Sequence[Any], members: Sequence[Callable[[], Run]]) -> Tensor:
        """Return the logits of members for several batches, joined; each member is made ready before it runs."""
        plain = torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling()
        if plain or len(members) < 2 or not self.active:
            return apart(batches, members)
        if torch.is_inference_mode_enabled():  # there, tensors do not tell whether they were changed
            with torch.inference_mode(False), torch.no_grad():
                return self.outputs(batches, members)
        if not self.known and not torch.compiler.is_exporting():
            self._learn(batches[0], members)
            return self.outputs(batches, members)
        return torch.cat([self._once(batch, members) for batch in batches], dim=1)

    def trained(self, batch: Any, members: Sequence[Callable[[], Run]]) -> Tensor:
        """Return the logits of members that train on a batch; modules that run once are found in eval mode."""
        if torch.compiler.is_dynamo_compiling() or not self.active:
            return apart([batch], members)
        if not self.known:
            modes = [(one, one.training) for network in self.networks for one in network.modules()]
            dropouts = {path for path, one in self.networks[0].named_modules() if isinstance(one, _DropoutNd)}
            dropouts &= self.active  # in eval mode they do nothing
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    for network in self.networks:
                        network.eval()
                    self._learn(batch, members)
            finally:
                for module, mode in modes:
                    module.training = mode
            self.active |= dropouts if self.active else set()
        return self._once(batch, members)

    def _once(self, batch: Any, members: Sequence[Callable[[], Run]]) -> Tensor:
        given = copied(batch)
        self.records, self.seen, self.hits = {}, set(), set()
        results = []
        try:
            for make in members:
                self.calls.clear()
                if any(map(_version, tree_flatten(tuple(given))[0])):  # a member has changed its inputs
                    given = copied(batch)
                results.append(make()(given))
        finally:
            self.records = None
        self.active -= self.seen - self.hits
        return torch.stack(results)

    def _learn(self, batch: Any, members: Sequence[Callable[[], Run]]) -> None:
        """Find the modules that run once: a module that does not may have some inside."""
        self.known = True
        few, before = rows_of(batch, slice(2)), -1
        try:
            expected = apart([few], members)
        except Exception:  # whatever a network raises that takes the whole batch only
            few, expected = batch, apart([batch], members)
        try:
            while before != len(self.active):
                before = len(self.active)
                found = self._once(few, members)
            right = not _has_numbers(found) or torch.allclose(found, expected, rtol=CLOSE, atol=CLOSE, equal_nan=True)
        except Exception:  # whatever a network raises if a module has not kept what another one asks it for
            right = False
        self.active &= self.hits
        if not right:
            log.warning("each member runs all of its layers: with shared ones run once, their outputs differ")
            self.active.clear()
        modules = dict(self.networks[0].named_modules())
        once = {one for path in self.active for one in modules[path].parameters()}
        total = sum(one.numel() for one in self.networks[0].parameters())
        self.share = sum(one.numel() for one in once) / max(1, total)


def apart(batches: Sequence[Any], members: Sequence[Callable[[], Run]]) -> Tensor:
    """Return the logits of members for several batches, joined; nothing is shared."""

    def of(run: Run) -> Tensor:
        return torch.cat([run(copied(batch)) for batch in batches])

    return torch.stack([of(make()) for make in members])


def of_networks(owner: Predictor, networks: nn.ModuleList, places: Sequence[int], batches: list[Any]) -> Tensor:
    """Return the logits of some members, each a network of the owner's, for several batches, joined."""

    def ready(network: nn.Module) -> Callable[[], Run]:
        return lambda: lambda batch: logits_of(call(network, batch))

    chosen = [ready(networks[place]) for place in places]
    hooked = any(map(has_hooks, networks.modules()))
    if len(places) < 2 or torch.is_grad_enabled() or torch.compiler.is_compiling() or hooked:
        return apart(batches, chosen)

    def run(trunk: Trunk) -> Tensor:
        outputs = trunk.outputs(batches, [ready(trunk.networks[place]) for place in places])
        owner._run_once = trunk.share
        return outputs

    # Of the networks, not of the owner: another thread may give it others meanwhile.
    made: Tensor = owner._lender.lend(networks, lambda: Trunk(shell(tuple(networks)), _differing(networks)), run)
    return made


def _differing(networks: Iterable[nn.Module]) -> set[str]:
    """Return the places of tensors that are not the same, or equal, in all networks."""
    kinds = (nn.Module.named_parameters, nn.Module.named_buffers)
    first, *others = [{name: t for kind in kinds for name, t in kind(one, remove_duplicate=False)} for one in networks]
    return {place for place, one in first.items() if not all(same(one, other.get(place)) for other in others)}


class Record(NamedTuple):
    """What a module was called with and returned, and how often each tensor had been changed by then."""

    given: list[Any]
    made: list[Any]
    versions: tuple[list[int], list[int]]
    specs: tuple[TreeSpec, TreeSpec]
    plain: list[Any]  # what the module held beside tensors and modules

    def fits(self, given: list[Any], spec: TreeSpec, plain: list[Any]) -> bool:
        """Return whether a call is the same."""
        unchanged = plain == self.plain and list(map(_version, self.given)) == self.versions[0]
        return unchanged and spec == self.specs[0] and all(map(same, self.given, given))


class Once:
    """Stand for the `forward` of a module in the trunk."""

    def __init__(self, trunk: Trunk, path: str, module: nn.Module) -> None:
        self.trunk, self.path, self.forward = trunk, path, module.forward
        self.modules = list(module.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns, or has returned to an earlier member."""
        trunk = self.trunk
        if trunk.records is None or trunk.inside or self.path not in trunk.active:
            return self.forward(*args, **kwargs)
        key = self.path, trunk.calls[self.path]
        trunk.calls[self.path] += 1
        given, spec = tree_flatten((args, kwargs))
        record = trunk.records.get(key)
        if record is None:
            return self._record(key, given, spec, args, kwargs)
        if not record.fits(given, spec, _plain(self.modules)):
            return self.forward(*args, **kwargs)
        trunk.hits.add(self.path)
        if list(map(_version, record.made)) != record.versions[1]:
            trunk.cloned.add(self.path)  # next time
            return self.forward(*args, **kwargs)
        return tree_unflatten(self._handed_out(record.made), record.specs[1])

    def _record(self, key: tuple[str, int], given: list[Any], spec: TreeSpec, args: Any, kwargs: Any) -> Any:
        trunk, before, state = self.trunk, list(map(_version, given)), _state(self.modules)
        trunk.seen.add(self.path)
        trunk.inside = True
        try:
            output = self.forward(*args, **kwargs)
        finally:
            trunk.inside = False
        made, made_spec = tree_flatten(output)
        storages = {one.untyped_storage()._cdata for one in given if isinstance(one, Tensor)}
        safe = (
            all(isinstance(one, (Tensor, *PLAIN)) for one in (*given, *made))
            and before == list(map(_version, given))
            and state == _state(self.modules)
            and not any(isinstance(one, Tensor) and one.untyped_storage()._cdata in storages for one in made)
            and not (torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in made))
        )
        if safe and trunk.records is not None:
            made = self._handed_out(made)
            versions = before, list(map(_version, made))
            trunk.records[key] = Record(given, made, versions, (spec, made_spec), _plain(self.modules))
        return output

    def _handed_out(self, made: list[Any]) -> list[Any]:
        cloned = self.path in self.trunk.cloned
        return [one.clone() if cloned and isinstance(one, Tensor) else one for one in made]


def _put_on(
    trunk: Trunk, network: nn.Module, differing: Container[str], hooks: Sequence[Any], training: bool
) -> set[str]:
    """Let the modules of a network that may run once know their trunk; return their paths."""
    found, worth = {}, False  # a module without tensors takes hardly longer than to compare its inputs
    for path, module in network.named_modules():
        named = (
            *module.named_parameters(path, remove_duplicate=False),
            *module.named_buffers(path, remove_duplicate=False),
        )
        usual = not any((one.training and not training) or has_hooks(one) for one in module.modules())
        if usual and not any(name in differing for name, _ in named) and not isinstance(module, torch.jit.ScriptModule):
            found[path] = module
            worth = worth or bool(named)
    held = [(*one._forward_hooks.values(), *one._forward_pre_hooks.values()) for one in network.modules()]
    users = any(hook not in hooks for hook in sum(held, ())) or _has_any_global_hook()  # type: ignore[no-untyped-call]
    if not worth or users:  # the user's hooks see every call, and no others
        return set()
    for path, module in found.items():
        module.forward = Once(trunk, path, module)
    return set(found)


def _state(modules: Sequence[nn.Module]) -> list[int]:
    """Identify the attributes and buffers of a module and those inside it, and count the changes of the buffers."""
    buffers = [buffer for one in modules for buffer in one._buffers.values()]
    return [*(id(value) for one in modules for value in vars(one).values()), *map(id, buffers), *map(_version, buffers)]


def _plain(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the numbers and words that a module and those inside it hold: a parent may set them."""
    return [value for one in modules for value in vars(one).values() if isinstance(value, PLAIN)]


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def same(first: Any, second: Any) -> bool:
    """Return whether two arguments are the same tensor or have the same value."""
    if first is second or type(first) is not type(second):
        return first is second
    if type(first) in PLAIN:
        return bool(first == second)
    plain = isinstance(first, Tensor) and first.layout is torch.strided and not first.is_nested
    if not plain or not _has_numbers(first) or torch.compiler.is_exporting():
        return False
    alike = (first.dtype, first.device, first.stride()) == (second.dtype, second.device, second.stride())
    return alike and torch.equal(first, second)


def _has_numbers(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)
