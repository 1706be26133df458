"""Which modules of this package register their outputs, where `regenerate` chose some of them."""

import functools

import torch

from .scope import current


class Accepts:
    """A mark on a module of this package: while it runs, its ops register their outputs themselves.

    A hook would cost more than what it is there for; and hooks are not called where a KeyboardInterrupt ends the forward.
    """

    refused = None

    def __init__(self, name):
        self.name = name

    def install(self, module):
        vars(module).setdefault("_accepts", []).append(self)
        return [_Mark(self, module)]


class _Mark:
    def __init__(self, accepts, module):
        self._accepts, self._module = accepts, module

    def remove(self):
        marks = vars(self._module).get("_accepts", [])
        if self._accepts in marks:
            marks.remove(self._accepts)
        if not marks:
            vars(self._module).pop("_accepts", None)


def registers(forward):
    """Decorates the forward of a module of this package whose ops may register outputs: they do if the module is marked."""

    @functools.wraps(forward)
    def call(module, *args, **kwargs):
        return call_for(module, forward, module, *args, **kwargs)

    return call


def call_for(module, fn, *args, **kwargs):
    """fn(*args, **kwargs), which does the module's work: it registers its output if the module is marked."""
    if "_accepts" not in module.__dict__ or torch.compiler.is_compiling():
        return fn(*args, **kwargs)
    engine = current()
    if engine is None:
        return fn(*args, **kwargs)
    before = engine.accepts, engine.caller
    engine.accepts, engine.caller = True, module._accepts[-1].name
    try:
        return fn(*args, **kwargs)
    finally:
        engine.accepts, engine.caller = before


def refuse_for(module, reason):
    """Notes for the report why the module's output stays kept, if it was to be regenerated."""
    engine = None if torch.compiler.is_compiling() else current()
    if engine is not None:
        for accepts in vars(module).get("_accepts", ()):
            engine.refused[accepts.name] = reason


def has_own_hooks(module):
    """Whether calling the module runs hooks that a fused kernel in its place would leave out."""
    return bool(module._backward_hooks or module._backward_pre_hooks or module._forward_pre_hooks or module._forward_hooks)
