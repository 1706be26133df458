"""torch.utils.checkpoint, set up so that the recomputation is the forward again."""

import contextlib
import functools

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .. import seeds
from ..saved.scope import offloader_on_top
from .boundary import Region, SavedByPolicy
from .forwards import WrappedForward


def checkpoint(function, *args, context_fn=None, **kwargs):
    """torch.utils.checkpoint.checkpoint(function, *args), non-reentrant, as training needs it.

    * Seeds that this package draws are taped and replayed; torch's generators are restored for other randomness.
    * Autocast's weight cache is off inside, so that a weight used in several regions is cast in each.
    * Buffers of an nn.Module (BatchNorm's statistics and counters) are updated once, not again in recomputation.
    * A list, dict or cache object among the arguments must not grow: a KV cache would be appended to twice.
    * Without a recorded graph, the function is simply called.

    context_fn: another one to combine with, e.g. from torch.utils.checkpoint.create_selective_checkpoint_contexts.
    Kept for backward: the arguments, 8 bytes for each seed drawn.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():  # the graph is recomputed with its seeds, autocast and buffers
        options = {} if context_fn is None else {"context_fn": context_fn}
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    offloader = offloader_on_top()
    contexts = seeds.replay(functools.partial(_contexts, _module_of(function), offloader, context_fn))
    if offloader is None:
        run = functools.partial(_run, function, _autocast_states())
        return torch_checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
    region = Region(function, args, kwargs)
    run = functools.partial(_run_region, region, _autocast_states())
    with offloader.because("input of a checkpoint region"):
        return torch_checkpoint(run, *region.tensors, use_reentrant=False, context_fn=contexts, **options)


_OPTIONS = {"preserve_rng_state", "determinism_check", "debug", "early_stop"}  # of torch's own checkpoint


def _run_region(region, autocast, *tensors):
    function, args, kwargs = region.parts(tensors)
    return _run(function, autocast, *args, **kwargs)


def _autocast_states():
    types = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [(t, torch.get_autocast_dtype(t)) for t in types if torch.is_autocast_enabled(t)]


def _run(function, autocast, *args, **kwargs):
    before = _fingerprint((args, kwargs))
    with contextlib.ExitStack() as stack:
        for device_type, dtype in autocast:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=False))
        output = function(*args, **kwargs)
    if _fingerprint((args, kwargs)) != before:
        raise RuntimeError(
            "ckpt_ops.checkpoint: the region changed a cache or container that was passed to it (a KV cache?). Recomputation "
            "would change it again; call the model with use_cache=False while it trains"
        )
    return output


def _fingerprint(value, depth=8, in_cache=False):
    """The sizes of all containers in the arguments, and of what cache objects hold: lists of layers that hold tensors, ..."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple, set, dict)):
        values = value.values() if isinstance(value, dict) else value
        return (len(value), *(_fingerprint(v, depth - 1, in_cache) for v in values)) if depth else len(value)
    in_cache = in_cache or "cache" in type(value).__name__.lower()
    if in_cache and depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        return _fingerprint(vars(value), depth - 1, True)
    return None


def _module_of(function):
    if isinstance(function, nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _contexts(module, offloader, context_fn):
    """(around the forward, around the recomputation)"""
    forward, recompute = context_fn() if context_fn is not None else (contextlib.nullcontext(), contextlib.nullcontext())
    if offloader is not None and hasattr(forward, "storage"):
        forward = SavedByPolicy(forward, offloader)
    if module is None:
        return forward, recompute
    changed = []
    return _WatchedBuffers(module, forward, changed), _RestoredBuffers(recompute, changed)


class _WatchedBuffers:
    """In forward: notes which buffers it changes, as (the module that has it, name)."""

    def __init__(self, module, inner, changed):
        self._module, self._inner, self._changed = module, inner, changed

    def __enter__(self):
        self._before = [(m, n, b, b._version) for m in self._module.modules() for n, b in m._buffers.items() if b is not None]
        self._inner.__enter__()

    def __exit__(self, *error):
        for m, name, buffer, version in self._before:
            # The kernels of batch_norm change running statistics without counting it as a new version.
            statistics = isinstance(m, _NormBase) and m.training
            if statistics or m._buffers.get(name) is not buffer or buffer._version != version:
                self._changed.append((m, name))
        self._before = None
        return self._inner.__exit__(*error)


class _RestoredBuffers:
    """In recomputation: afterwards, those buffers are as they were before it."""

    def __init__(self, inner, changed):
        self._inner, self._changed = inner, changed

    def __enter__(self):
        self._before = [(m, name, m._buffers[name], m._buffers[name].clone()) for m, name in self._changed]
        self._inner.__enter__()

    def __exit__(self, *error):
        for m, name, buffer, value in self._before:
            m._buffers[name] = buffer
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffer):
                buffer.copy_(value)
        self._before = None
        return self._inner.__exit__(*error)


class CheckpointedForward(WrappedForward):
    """Runs a module's forward as one checkpoint."""

    def around(self, module, forward, args, kwargs):
        return checkpoint(forward, *args, **kwargs)


def refuse_checkpointed(model, blocks):
    """Raises ValueError where a checkpoint of these blocks would be one inside another: three forwards instead of two."""
    for m in model.modules():
        if getattr(m, "gradient_checkpointing", False):
            raise ValueError(
                f"regenerate: {type(m).__name__} has gradient checkpointing of its own switched on; call "
                "model.gradient_checkpointing_disable() first, or its activations would be recomputed twice"
            )
    for block in blocks:
        if "forward" in vars(block) or any(type(m).__name__ == "CheckpointWrapper" for m in block.modules()):
            raise ValueError(
                f"regenerate: the forward of a {type(block).__name__} is wrapped already (a checkpoint of its own?); "
                "undo that first, or its activations would be recomputed twice"
            )


@contextlib.contextmanager
def caches_off(model):
    """`config.use_cache` of the model and what is in it is off, during a call that trains.

    A recomputed block would append its keys and values to the cache once more.
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values()
    off = [c for c in configs if getattr(c, "use_cache", False)] if torch.is_grad_enabled() else []
    for config in off:
        config.use_cache = False
    try:
        yield
    finally:
        for config in off:
            config.use_cache = True
