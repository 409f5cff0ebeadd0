"""Errors of export: which operator of which module cannot be exported."""

import re
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name

from plures.errors import PluresError

_OPERATOR = re.compile(r"OpOverload\(op='([^']+)', overload='([^']+)'\)")
ADVICE = "write it with torch operations whose shapes and branches do not depend on numbers in the batch"


def untraceable(answer: nn.Module, tensors: Sequence[Tensor], failures: Sequence[Exception]) -> PluresError:
    """Find where tracing stopped, by tracing once more with an eye on every module and operator."""
    own = next((error for error in failures if isinstance(error, PluresError)), None)
    if own is not None:
        return own
    watch = _Watch(answer)
    try:
        with watch:
            torch.export.export(answer, tuple(tensors), strict=False)
    except Exception as error:  # the one we look for, or another one of the same place
        where = f"{watch.operator} in {watch.module}"
        return PluresError(f"cannot export the network: {where} cannot be traced ({_brief(error)}); {ADVICE}")
    return PluresError(
        f"cannot export the network: its code works only for a fixed number of samples ({_brief(failures[-1])}); "
        f"{ADVICE}"
    )


def unwritable(program: ExportedProgram, error: Exception) -> PluresError:
    """Find the operator that ONNX lacks in the message of torch, and the module that calls it."""
    reasons: list[BaseException] = [error]
    while (before := reasons[-1].__cause__ or reasons[-1].__context__) is not None and len(reasons) < 10:
        reasons.append(before)
    missing = _OPERATOR.findall("\n".join(map(str, reversed(reasons))))
    if not missing:
        return PluresError(f"cannot export the network to ONNX: {_brief(reasons[-1])}; use format='pt2'")
    operator = ".".join(missing[0])
    plain = missing[0][0].partition(".")[2]  # the exporter takes some apart first: special_bessel_j0 into bessel_j0
    callers = [node for node in program.graph.nodes if plain in str(node.target)]
    modules = [path for node in callers for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    place = _place(modules[-1]) if modules else "the network"
    return PluresError(f"cannot export the network: ONNX has no {operator}, which {place} calls; use format='pt2'")


class _Watch(TorchFunctionMode):
    """Remember the module that runs and the operator that it called last."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.operator = "the code"
        self._running = ["the network"]
        self._names = {id(module): name for name, module in _all_modules(root).items()}
        self._hooks: list[Any] = []

    @property
    def module(self) -> str:
        return self._running[-1]

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(lambda module, _: self._running.append(self._name(module))),
            register_module_forward_hook(lambda *_: self._leave()),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            if self.operator == "the code":  # the innermost is told first
                self.operator = resolve_name(func) or str(getattr(func, "__name__", func))
            raise

    def _name(self, module: nn.Module) -> str:
        name = _place(self._names.get(id(module), ""))
        return f"{name} ({type(module).__name__})" if name != "the network" else name

    def _leave(self) -> None:
        self._running.pop()


def _all_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Name every module, also those of a network that is run without being a part."""
    found = dict(root.named_modules())
    for name, module in list(found.items()):
        hidden = getattr(module, "_network", ())
        for network in hidden if isinstance(hidden, tuple) else ():
            found |= {f"{name}.{inner}": part for inner, part in network.named_modules()}
    return found


def _place(name: str) -> str:
    """Call a module as its owner does: without the path of what is wrapped around the network."""
    own = re.sub(r"^(L\['self'\]\.)?(members|network|networks\.\d+|_network\.\d+|\.)*\.?", "", name)
    return own or "the network"


def _brief(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
