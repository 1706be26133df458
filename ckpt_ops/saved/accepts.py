"""Which modules of this package register their outputs, where `regenerate` chose some of them."""

import threading

import torch

from .engine import current


class _Stack(threading.local):
    """(engine, whether it accepted before) of each call that this thread is in."""

    def __init__(self):
        self.calls = []


class Accepts:
    """For a module of this package: while it runs, its ops register their outputs themselves."""

    refused = None

    def __init__(self, name):
        self.name, self._stack = name, _Stack()

    def __reduce__(self):
        return Accepts, (self.name,)

    def install(self, module):
        return [
            module.register_forward_pre_hook(self.enter),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, module=None, args=None):
        engine, calls = current(), self._stack.calls
        if calls and calls[-1][0] is not engine:
            calls.clear()  # left by calls that a KeyboardInterrupt ended: hooks do not see it
        calls.append((engine, engine is not None and engine.accepts))
        if engine is not None:
            engine.accepts = True

    def leave(self, module=None, args=None, output=None):
        engine, accepted = self._stack.calls.pop() if self._stack.calls else (None, False)
        if engine is not None:
            engine.accepts = accepted


def call_for(module, fn, *args, **kwargs):
    """fn(*args, **kwargs), one kernel that does a child's work as well: it registers its output where the child would."""
    accepts = _accepts(module)
    if accepts is None:
        return fn(*args, **kwargs)
    accepts.enter()
    try:
        return fn(*args, **kwargs)
    finally:
        accepts.leave()


def refuse_for(module, reason):
    """Notes for the report why the module's output stays kept, if it was to be regenerated."""
    accepts, engine = _accepts(module), None if torch.compiler.is_compiling() else current()
    if accepts is not None and engine is not None:
        engine.refused[accepts.name] = reason


def has_own_hooks(module):
    """Whether calling the module runs hooks that a fused kernel in its place would leave out."""
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not isinstance(getattr(hook, "__self__", None), Accepts) for hook in hooks)


def _accepts(module):
    for hook in module._forward_pre_hooks.values():
        if isinstance(getattr(hook, "__self__", None), Accepts):
            return hook.__self__
    return None
