"""What a checkpoint region keeps outside of autograd's sight, brought within an offloader's: its inputs, a policy's outputs."""

import dis
import functools
import types

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils._pytree import tree_map

from ..saved.recipe import Handle


class Region:
    """A function and its arguments. Its tensors, wherever they are in them, are `tensors`, for autograd to keep.

    The first call is of the function itself. Later ones are of its like, made from the tensors that autograd gives back.
    """

    def __init__(self, function, args, kwargs):
        self.tensors, self._first = [], (function, args, kwargs)
        self._build = _apart(self._first, self.tensors, set())

    def parts(self, tensors):
        """(function, args, kwargs)"""
        first, self._first, self.tensors = self._first, None, None
        return first if first is not None else self._build(tensors)


def _apart(value, found, within):
    """build(tensors), which makes the value again; its tensors are appended to `found`.

    within: ids of the functions that the value is a part of.
    """
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        place = len(found)
        found.append(value)
        return lambda tensors: tensors[place]
    before, build = len(found), None
    if type(value) in (list, tuple):
        build = _build_sequence(type(value), [_apart(v, found, within) for v in value])
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        build = _build_sequence(value._make, [_apart(v, found, within) for v in value])
    elif type(value) is dict:
        build = _build_dict({k: _apart(v, found, within) for k, v in value.items()})
    elif type(value) is functools.partial:
        build = _build_partial(_apart((value.func, value.args, value.keywords), found, within))
    elif type(value) is types.FunctionType and id(value) not in within:
        build = _build_function(value, found, within | {id(value)})
    return build if len(found) > before else lambda tensors: value


def _build_sequence(kind, builds):
    return lambda tensors: kind([build(tensors) for build in builds])


def _build_dict(builds):
    return lambda tensors: {k: build(tensors) for k, build in builds.items()}


def _build_partial(build):
    def again(tensors):
        func, args, keywords = build(tensors)
        return functools.partial(func, *args, **keywords)

    return again


def _build_function(function, found, within):
    """A function over cells of its own, where the function only reads them and they lead to tensors."""
    code, names, scope = function.__code__, function.__name__, function.__globals__
    defaults = _apart((function.__defaults__, function.__kwdefaults__, vars(function)), found, within)
    cells = []
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        before = len(found)
        build = None if name in _assigned(code) or _empty(cell) else _apart(cell.cell_contents, found, within)
        cells.append((build, None) if len(found) > before else (None, cell))

    def again(tensors):
        closure = tuple(cell if build is None else types.CellType(build(tensors)) for build, cell in cells)
        positional, keyword, attributes = defaults(tensors)
        made = types.FunctionType(code, scope, names, positional, closure)
        made.__kwdefaults__ = keyword
        vars(made).update(attributes)
        return made

    return again


@functools.lru_cache
def _assigned(code):
    """Names that the code, or code in it, may bind anew (`nonlocal`)."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
    return own.union(*(_assigned(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _empty(cell):
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


class SavedByPolicy:
    """The forward context of torch's selective checkpointing: once the forward has run, its saved outputs are moved."""

    def __init__(self, inner, offloader):
        self._inner, self._offloader = inner, offloader

    def __enter__(self):
        return self._inner.__enter__()

    def __exit__(self, *error):
        suppressed = self._inner.__exit__(*error)
        with self._offloader.because("saved by a checkpoint's policy"):
            for outputs in self._inner.storage.values():  # of an op: {number of its call: outputs}, in torch 2.11 a list
                for call, output in list(outputs.items() if isinstance(outputs, dict) else enumerate(outputs)):
                    outputs[call] = tree_map(self._moved, output)
        return suppressed

    def _moved(self, saved):
        value = getattr(saved, "val", None)
        if not isinstance(value, torch.Tensor) or value._version != saved.version:
            return saved
        packed = self._offloader.replace(value)
        return _Fetched(packed) if type(packed) is Handle else saved


class _Fetched(torch_checkpoint._VersionWrapper):
    def __init__(self, handle):
        self._handle = handle

    def get_val(self, allow_cache_entry_mutation):
        value = self._handle.tensor()
        # As torch detaches what it caches: a tensor without autograd's data about views.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return value.detach()
