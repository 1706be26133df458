"""Which engine is active in this thread, and the contexts that say so."""

import contextlib
import threading

import torch

from .engine import new_engine
from .verify import current_verifier


class _Threads(threading.local):
    engine = None
    offloader = None  # of the innermost offloading()
    watch = None  # memory.kept's: called with everything that an engine or offloader hands to autograd


_threads = _Threads()


def current():
    """The engine active in this thread, or None."""
    return _threads.engine


def active():
    """The engine that an op should register its output with, or None.

    It is on top of the saved-tensor hooks, and a graph is recorded. Inside a torch.utils.checkpoint region (or
    save_on_cpu, ...) other hooks are on top, and the engine is inert: what is saved there is their business.
    """
    if torch.compiler.is_compiling():
        return None
    engine = _threads.engine
    return engine if engine is not None and engine.takes() else None


def wanted():
    """Whether a forward that begins now gets an engine: a graph is recorded, and what it saves is nobody's business yet.

    Other hooks may be on top (a checkpoint's, save_on_cpu's; memory.kept's and offloading's do not count), or forbidden
    (torch.func).
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or current() is not None:
        return False
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is None or getattr(hooks[0], "counts_only", False) or offloader_on_top() is not None


@contextlib.contextmanager
def entered(engine):
    """Makes an engine the active one, with its hooks on top."""
    before, _threads.engine = _threads.engine, engine
    engine.offloader, engine.watch = _threads.offloader, _threads.watch
    try:
        with torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack):
            yield engine
    finally:
        _threads.engine = before
        engine.clear()


@contextlib.contextmanager
def offloads(offloader):
    """Within the context, engines of this thread give what they keep to the offloader."""
    before = _threads.offloader
    _set_offloader(offloader)
    try:
        yield
    finally:
        _set_offloader(before)


def _set_offloader(offloader):
    _threads.offloader = offloader
    if _threads.engine is not None:
        _threads.engine.offloader = offloader


def offloader_on_top():
    """The offloader that gets what is saved now, or None: there is none, or other hooks (a checkpoint's) are on top."""
    offloader = _threads.offloader
    if offloader is None:
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    owner = getattr(hooks[0], "__self__", getattr(hooks[0], "offloader", None)) if hooks is not None else None
    return offloader if owner is offloader or owner is not None and owner is _threads.engine else None


def handed_over(packed):
    """`packed`, on its way to autograd."""
    if _threads.watch is not None:
        _threads.watch(packed)
    return packed


@contextlib.contextmanager
def watched(watch):
    """Within the context, calls watch(tensor or Handle) for all that engines of this thread hand to autograd."""
    before, _threads.watch = _threads.watch, watch
    try:
        yield
    finally:
        _threads.watch = before


def is_watched():
    """Whether memory.kept counts what is saved now. It names the graph nodes that keep it, and asks them what they keep."""
    return _threads.watch is not None


@contextlib.contextmanager
def regenerating():
    """For hand-written models: within the context, outputs of this package's norms and activations are regenerated.

        with ckpt_ops.regenerating():
            loss = model(x)
        loss.backward()

    Without a recorded graph (no_grad, inference_mode), and where other saved-tensor hooks are on top, it does nothing.
    """
    if not wanted():
        yield current()
        return
    with entered(new_engine(verifier=current_verifier())) as engine:
        yield engine
