"""Tracing by torch.fx, which changes how modules are called in all threads for as long as it takes."""

import os
import threading
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.nn.utils import parametrize


class _OfThisThread(fx.Tracer):
    """Trace what this thread calls; the modules that other threads call meanwhile run as always."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: int | None = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return parametrize.is_parametrized(m) or super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


class _Turn:
    """One trace at a time: each puts back what it found, which must not be the change of another."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.renew)  # the thread that held it is not in the child

    def renew(self) -> None:
        self.lock = threading.RLock()  # a network may make an engine of another one while it is traced


_turn = _Turn()


def trace(network: nn.Module) -> fx.Graph:
    """Trace a network while others predict.

    nodes = list(trace(network).nodes)
    """
    with _turn.lock:
        tracer = _OfThisThread()
        try:
            return tracer.trace(network)
        finally:
            tracer.thread = None  # a trace of somebody else may leave our changes behind: they pass everything by
