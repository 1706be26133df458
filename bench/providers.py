"""Who runs a case: this package's backends, torch in three ways, other packages where they are installed."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ckpt_ops import dispatch

DEFAULT = ("ours", "eager", "compile", "fused", "liger_kernel", "apex", "flash_attn")
_OTHERS = ("liger_kernel", "apex", "flash_attn")


@dataclass(frozen=True)
class Provider:
    """One side of a comparison.

    bind: case -> the callable of the case's tensors, or None where this provider has no such op.
    backend: (case, device) -> what runs below, for the table.
    opaque: its ops cannot be seen one by one, so that traffic is a lower bound.
    """

    name: str
    bind: Callable
    backend: Callable
    opaque: bool = False


def providers(names=DEFAULT):
    """(the providers of these names, {name: why it is absent}). ValueError for a name that means nothing.

    ours: the backend that serves by itself. ours:all: every ready kernel backend. ours:NAME: that backend.
    """
    found, absent = [], {}
    for name in names:
        if name == "ours:all":
            ready = [b for b in dispatch.BACKENDS if b != "reference" and dispatch.not_ready(b) is None]
            found += [_ours(f"ours:{b}", b) for b in ready]
        elif reason := _why_absent(name):
            absent[name] = reason
        else:
            found.append(_make(name))
    return found, absent


def _make(name):
    if name.startswith("ours:"):
        return _ours(name, name.removeprefix("ours:"))
    if name in _OTHERS:
        return Provider(name, lambda case: _other(case, name), lambda case, device: name)
    makers = {
        "ours": lambda: _ours("ours", None),
        "reference": lambda: _ours("reference", "reference"),
        "eager": lambda: Provider("eager", eager, lambda case, device: "torch"),
        "fused": lambda: Provider("fused", _fused, lambda case, device: "torch"),
        "compile": lambda: Provider("compile", compiled, lambda case, device: "inductor", opaque=True),
    }
    return makers[name]()


def _why_absent(name):
    """Why a provider cannot take part at all, or None."""
    backend = name.removeprefix("ours:")
    if name.startswith("ours:") and backend in dispatch.BACKENDS:
        return dispatch.not_ready(backend)
    if name in _OTHERS:
        return None if importlib.util.find_spec(name) else "not installed"
    if name not in (*DEFAULT, "reference"):
        known = ", ".join((*DEFAULT, "reference", "ours:all", *(f"ours:{b}" for b in dispatch.BACKENDS)))
        raise ValueError(f"unknown provider {name!r}; choose from {known}")
    return None


def _ours(name, backend):
    def bind(case):
        if backend is not None and case.stem in dispatch.lacking(backend):
            return None
        return lambda *tensors: case.op.ours(*tensors, p=case.p, backend=backend)

    return Provider(name, bind, lambda case, device: dispatch.choose(case.stem, backend, torch.empty(0, device=device)))


def eager(case):
    return lambda *tensors: case.op.eager(*tensors, p=case.p)


def _fused(case):
    return case.op.fused and (lambda *tensors: case.op.fused(*tensors, p=case.p))


def compiled(case, backend="inductor"):
    """torch.compile of the eager expression. A graph of this shape alone: earlier cases must not make sizes symbolic."""
    torch.compiler.reset()
    return torch.compile(eager(case), backend=backend, dynamic=False, fullgraph=True)


def _other(case, package):
    make = case.op.others.get(package)
    if make is None:
        return None
    run = make()
    return lambda *tensors: run(*tensors, p=case.p)
