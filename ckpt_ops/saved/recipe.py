"""A recipe makes the outputs of one call again; a handle stands for one tensor on such an output."""

import abc
import contextlib
import functools
import threading

import torch
from torch import Tensor

# One regeneration at a time: recipes nest, and consumers of one value may run in several threads.
_lock = threading.RLock()


class Recipe:
    """fn(*inputs) gives the outputs again, a tensor or a tuple of them.

    inputs: tensors that are kept, handles of tensors that are themselves regenerated, or other values.
    guards: more tensors (parameters) that fn reads and that must not have changed by then.
    source: within a verify(), what its originals are kept under.
    """

    __slots__ = ("name", "fn", "inputs", "guards", "autocast", "nbytes", "handles", "runs", "source", "_values", "_left")

    def __init__(self, name, fn, inputs, guards, outputs):
        self.name, self.fn, self.inputs = name, fn, inputs
        self.guards = [(t, t._version) for t in (*guards, *inputs) if isinstance(t, Tensor)]
        self.autocast = autocast_state(outputs[0].device)
        self.nbytes = [out.untyped_storage().nbytes() for out in outputs]
        self.handles = self.runs = self._left = 0
        self._values = self.source = None

    def held(self):
        """The tensors that it keeps alive: what it starts from, and the recipes of its inputs."""
        for i in self.inputs:
            if isinstance(i, Handle):
                yield from i.held()
            elif isinstance(i, Tensor):
                yield i

    def take(self, index):
        """Output `index`, made again if need be. Dropped once every handle has taken it, or with the backward."""
        with _lock:
            if self._values is None:
                self._values, self._left = self._run(), self.handles
                if torch._C._current_graph_task_id() != -1:
                    torch.autograd.Variable._execution_engine.queue_callback(self._drop)
            value = self._values[index]
            self._left -= 1
            if self._left <= 0:
                self._drop()
            return value

    def _drop(self):
        self._values = None

    def _run(self):
        for t, version in self.guards:
            if t._version != version:
                raise RuntimeError(
                    f"ckpt_ops: the output of {self.name} cannot be made again for backward: a tensor of shape "
                    f"{tuple(t.shape)} that it was made from has been modified in place since. Leave this module out of "
                    "what is regenerated, or do not modify its inputs and parameters between forward and backward"
                )
        inputs = [i.tensor() if isinstance(i, Handle) else i for i in self.inputs]
        with torch.no_grad(), restored_autocast(self.autocast):
            values = self.fn(*inputs)
        values = values if isinstance(values, tuple) else (values,)
        for value, nbytes in zip(values, self.nbytes, strict=True):
            if value.untyped_storage().nbytes() != nbytes:
                raise RuntimeError(
                    f"ckpt_ops: {self.name} did not give the same output again: a storage of "
                    f"{value.untyped_storage().nbytes()} bytes, {nbytes} in forward"
                )
        self.runs += 1
        return values


class Packed(abc.ABC):
    """What autograd holds instead of a tensor. csrc/saved has such classes too, known here to isinstance()."""

    __slots__ = ()

    @abc.abstractmethod
    def held(self):
        """The tensors that it keeps alive."""

    @abc.abstractmethod
    def tensor(self):
        """The tensor."""


class Handle(Packed):
    """A place on a recipe's output, or all of it.  Twin: csrc/saved/handle.h."""

    __slots__ = ("recipe", "index", "place", "original")

    def __init__(self, recipe, index, t=None):
        recipe.handles += 1
        self.recipe, self.index = recipe, index
        self.place = None if t is None else (t.size(), t.stride(), t.storage_offset())
        self.original = None if t is None or recipe.source is None else recipe.source.original(t)

    def held(self):
        return self.recipe.held()

    def tensor(self):
        if self.original is None:
            return self._made()
        value = self.original.source.computed(self._made)
        self.original.compare(value)
        return value

    def _made(self):
        value = self.recipe.take(self.index)
        return value if self.place is None else value.as_strided(*self.place)


class Stored(Packed):
    """A tensor that is kept. Where hooks stand, autograd leaves the check of the version to them.  Twin: csrc/saved/stored.h.

    kept: detached, as a graph node that holds its own output would never be freed, unless a backward frees what it holds.
    """

    __slots__ = ("kept", "version")

    def __init__(self, t):
        self.kept, self.version = t if t.grad_fn is None else t.detach(), t._version

    def held(self):
        yield self.kept

    def tensor(self):
        if self.kept._version != self.version:
            raise_modified(self.kept, self.version)
        return self.kept


def raise_modified(kept, version):
    """The error of a kept tensor that is no longer what was saved."""
    raise RuntimeError(
        "ckpt_ops: one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a {kept.dtype} tensor of shape {tuple(kept.shape)} is at version {kept._version}, and was saved at version {version}"
    )


def cast_of(recipe, index, cast, verifier):
    """The recipe of `cast`, which is a recipe's output in another dtype."""
    again = functools.partial(_cast, cast.dtype)
    made = Recipe(f"{recipe.name} in {cast.dtype}", again, [Handle(recipe, index)], (), [cast])
    if verifier is not None:
        made.source = verifier.source(made.name, None)
    return made


def _cast(dtype, x):
    return x.to(dtype)


def node_name(node):
    """What a graph node computes the gradient of: "LayerNorm", "Addmm"."""
    return node.name().rpartition("::")[2].removesuffix(">").removesuffix("0").removesuffix("Backward")


def storage_key(t):
    return t.untyped_storage()._cdata


def autocast_state(device):
    """(device, whether autocast is on for what runs there now, its dtype)"""
    enabled = _autocasts(device)
    return (device, enabled, torch.get_autocast_dtype(device.type) if enabled else None)


def restored_autocast(state):
    device, enabled, dtype = state
    if not enabled and not _autocasts(device):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False)


def _autocasts(device):
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type)  # the first is quick
