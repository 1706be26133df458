"""What a call keeps for backward, and how high memory goes."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from .saved.recipe import Handle, Packed, node_name, storage_key
from .saved.scope import offloader_on_top, watched


@dataclass(frozen=True)
class Row:
    """One storage that autograd keeps."""

    bytes: int
    op: str  # the graph node that keeps it, e.g. "LayerNorm" or "Addmm"; several joined by " + "
    shape: tuple
    dtype: torch.dtype
    parameter: bool  # a parameter's own storage: alive anyway


@dataclass
class Kept:
    """The result of `kept`: a row a storage, largest first.

    bytes: of all storages but the parameters'.  parameter_bytes: of those.  output: what the call returned.
    """

    rows: list = field(default_factory=list)
    output: object = None

    @property
    def bytes(self):
        return sum(row.bytes for row in self.rows if not row.parameter)

    @property
    def parameter_bytes(self):
        return sum(row.bytes for row in self.rows if row.parameter)

    def __str__(self):
        lines = [f"{self.bytes:,} bytes kept for backward (and {self.parameter_bytes:,} in parameters)"]
        for row in self.rows:
            dtype = str(row.dtype).removeprefix("torch.")
            lines.append(f"{row.bytes:>14,}  {dtype} {list(row.shape)}  {row.op}" + ("  (parameter)" if row.parameter else ""))
        return "\n".join(lines)


def kept(fn, *args, **kwargs):
    """What autograd keeps alive between the forward `fn(*args, **kwargs)` and its backward.

    Each storage counts once and whole, however many tensors view it. Seen through
    torch.autograd.graph.saved_tensors_hooks: what hooks that fn installs itself do with a tensor is not seen, but for this
    package's engine, whose handles count as what their recipes start from, and `offloading`: what it moves does not count.

    Returns: `Kept`, with `.bytes`, `.parameter_bytes`, `.rows`, `.output`.
    """
    packed, parameters = [], _parameter_storages(fn, args, kwargs)

    def pack(t):
        if isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter):
            parameters.add(storage_key(t))
        moved = offloader.replace(t) if offloader is not None else t
        # Detached: a kept output must not hold its own graph.
        packed.append(moved if isinstance(moved, Handle) else _Counted(t.detach()))
        return packed[-1]

    def unpack(saved):
        return saved.tensor() if isinstance(saved, Handle) else saved.tensor

    offloader = pack.offloader = offloader_on_top()
    pack.counts_only = True  # an engine may stand on top of it: what that keeps is counted by the watch
    with watched(packed.append), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = fn(*args, **kwargs)
    saved = {storage_key(t): t.detach() for value in packed for t in _held(value)}
    keepers = _keepers(output)
    rows = [
        Row(t.untyped_storage().nbytes(), " + ".join(keepers.get(key, _ELSEWHERE)), tuple(t.shape), t.dtype, key in parameters)
        for key, t in saved.items()
    ]
    return Kept(sorted(rows, key=lambda row: -row.bytes), output)


def peak(fn, *args, **kwargs):
    """The most bytes that fn(*args, **kwargs) has allocated at once, beyond what was alive before.

    On a CUDA device from the caching allocator, else from the profiler's allocation events.
    """
    if any(isinstance(t, torch.Tensor) and t.is_cuda for t in (*args, *kwargs.values())):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn(*args, **kwargs)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fn(*args, **kwargs)
    alive = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            highest = max(highest, alive)
    return highest


_ELSEWHERE = ("outside the output's graph",)  # e.g. a checkpoint's inputs


class _Counted(NamedTuple):
    tensor: torch.Tensor


def _held(value):
    """The tensors behind what autograd was given instead of a saved tensor."""
    if isinstance(value, _Counted):
        yield value.tensor
    elif isinstance(value, Packed):
        yield from value.held()
    elif isinstance(value, torch.Tensor):
        yield value


def _parameter_storages(fn, args, kwargs):
    modules = [m for m in (fn, getattr(fn, "__self__", None), *args, *kwargs.values()) if isinstance(m, nn.Module)]
    return {storage_key(p) for m in modules for p in m.parameters()}


def _keepers(output):
    """The names of the graph nodes that keep each storage, found by walking the graph behind the output."""
    keepers, seen = {}, set()
    todo = [t.grad_fn for t in _tensors(output) if t.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node_name(node)
        for value in _saved_by(node):
            label = f"{name} (through {value.recipe.name})" if isinstance(value, Handle) else name
            for t in _held(value):
                keepers.setdefault(storage_key(t), []).append(label)
        todo.extend(next_node for next_node, _ in node.next_functions)
    return {key: sorted(set(names)) for key, names in keepers.items()}


def _saved_by(node):
    """What autograd holds for this node, as packed: reading the tensors would run a checkpoint's recomputation."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            for saved in raw if isinstance(raw, (list, tuple)) else (raw,):
                if saved is not None:
                    yield saved.data


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)
