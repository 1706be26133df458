"""The third fate of a saved tensor: it waits for backward in another memory. `with ckpt_ops.offloading(): ...`"""

import contextlib
import sys
import weakref
from collections import Counter, deque
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from . import copies
from .recipe import Handle, Recipe, Stored, node_name, storage_key
from .scope import current, handed_over, offloads

_UNDER_WAY = 2  # copies whose originals are still held


@contextlib.contextmanager
def offloading(device="cpu", *, pin_memory=True, min_bytes=2**16, streams=True):
    """Within the context, what autograd keeps is moved to host memory (or another device), and back when backward needs it.

        with ckpt_ops.offloading() as offloader:
            loss = model(x)
        loss.backward()
        print(offloader.report(model))

    As torch.autograd.graph.save_on_cpu, and: a storage is moved once, however many tensors lie on it, and comes back once
    for all of them; parameters stay. Together with `regenerate`, a value that is made again is not moved, but what it is
    made from is. `ckpt_ops.checkpoint` and the rung "block" have their regions' inputs moved (arguments, also in dicts and
    lists, and what the function closes over), and the outputs that a selective policy saves. Gradients have the same bits.

    Args:
        device: where to.  pin_memory: for copies from an accelerator to "cpu": page-locked memory, which streams need.
        min_bytes: smaller storages stay.
        streams: copies to pinned memory run on a stream of their own, beside the computation, at most two at a time.
            False for finding errors: every copy is waited for, with the same results.
    Without an accelerator the copies are made all the same, to other memory of the same kind.

    Yields: `Offloader`, with report().
    """
    offloader = Offloader(torch.device(device), pin_memory, min_bytes, streams)
    engine = current()
    on_top = engine is not None and engine.on_top()  # it hands over what it keeps
    with offloads(offloader), contextlib.nullcontext() if on_top else _hooks(offloader):
        try:
            yield offloader
        finally:
            offloader.settle()


def _hooks(offloader):
    return torch.autograd.graph.saved_tensors_hooks(offloader.pack, lambda packed: packed.tensor())


class Moved(Recipe):
    """A storage that was moved: the recipe of its value is to copy it back. Only handles keep it alive."""

    __slots__ = ("storage", "version", "__weakref__")

    def __init__(self, fn, t):
        super().__init__("offloaded", fn, (), (), [t])
        self.storage, self.version = StorageWeakRef(t.untyped_storage()), t._version


class Offloader:
    """What `offloading` yields."""

    def __init__(self, device, pin_memory=True, min_bytes=0, streams=True):
        self.device, self._pin, self._min_bytes, self._streams = device, pin_memory, min_bytes, streams
        self._moved = weakref.WeakValueDictionary()  # (storage, dtype): Moved
        self._pending = deque()  # copies that may still run
        self._sides = {}  # a stream for each device
        self._why = "saved for backward"
        self.rows, self.stayed = [], Counter()

    def pack(self, t):
        """The pack hook of autograd."""
        return handed_over(self.keep(t))

    def keep(self, t):
        """What autograd holds of a tensor that is not made again."""
        packed = self.replace(t)
        return packed if type(packed) is Handle else Stored(packed)

    def replace(self, t):
        """A handle of the tensor on its moved storage, or the tensor if it stays."""
        if (reason := self._stays(t)) is not None:
            self.stayed[reason] += 1
            return t
        key = storage_key(t), t.dtype
        moved = self._moved.get(key)
        if moved is None or moved.storage.expired() or moved.version != t._version:
            moved = self._moved[key] = Moved(self._copied(t), t)
            self.rows.append(Row.of(t, self._why))
        return Handle(moved, 0, t)

    def origin(self, t):
        """What a recipe holds of a tensor that it makes its output from."""
        with self.because("made again from"):
            return self.replace(t)

    @contextlib.contextmanager
    def because(self, why):
        before, self._why = self._why, why
        try:
            yield
        finally:
            self._why = before

    def report(self, model=None):
        """What was moved; with the model, its modules go by their paths in it."""
        paths = {m: path or "(the model)" for path, m in model.named_modules()} if model is not None else {}
        return Report(self.rows, dict(self.stayed), self.device, paths)

    def settle(self):
        """Lets go of the originals of all copies that are under way."""
        while self._pending:
            self._pending.popleft().settle()

    def _stays(self, t):
        if isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter) or _is_cast_parameter(t):
            return "a parameter"
        if type(t) is not torch.Tensor or t.layout != torch.strided or t.is_meta:
            return "not a plain strided tensor"
        if t.is_conj() or t.is_neg() or torch._C._functorch.is_functorch_wrapped_tensor(t):
            return "not a plain strided tensor"
        nbytes = t.untyped_storage().nbytes()
        if nbytes == 0:
            return "empty"
        return f"smaller than {self._min_bytes:,} bytes" if nbytes < self._min_bytes else None

    def _copied(self, t):
        """Begins the copy of the tensor's storage; returns what makes it again."""
        pinned = self._pin and self.device.type == "cpu" and t.device.type != "cpu"
        module = copies.stream_module(t.device) if self._streams and self._pin and self.device.type == "cpu" else None
        target = torch.empty(t.untyped_storage().nbytes(), dtype=torch.uint8, device=self.device, pin_memory=pinned)
        if module is None:
            return copies.Copy(t, target).back
        if t.device not in self._sides:
            self._sides[t.device] = module.Stream(t.device)
        copy = copies.StreamCopy(t, target, module, self._sides[t.device])
        self._pending.append(copy)
        while len(self._pending) > _UNDER_WAY:
            self._pending.popleft().settle()
        return copy.back


def _is_cast_parameter(t):
    """A parameter in autocast's dtype, which autocast itself holds."""
    cast = t if t._base is None else t._base  # a Linear saves a view
    node = cast.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


@dataclass(frozen=True)
class Row:
    """One storage that was moved."""

    module: weakref.ref | None  # the one that was running
    op: str  # the graph node that made the tensor, "" for a leaf
    shape: tuple
    dtype: torch.dtype
    bytes: int
    why: str

    @classmethod
    def of(cls, t, why):
        op = node_name(t.grad_fn) if t.grad_fn is not None else ""
        module = _running_module()
        module = weakref.ref(module) if module is not None else None
        return cls(module, op, tuple(t.shape), t.dtype, t.untyped_storage().nbytes(), why)


_CALL = nn.Module._call_impl.__code__


def _running_module():
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame.f_locals["self"] if frame is not None else None


@dataclass
class Report:
    """`rows`: a Row a moved storage, in order.  `stayed`: {why: how many tensors}.  Printable."""

    rows: list
    stayed: dict
    device: torch.device
    paths: dict

    @property
    def bytes(self):
        return sum(row.bytes for row in self.rows)

    def __str__(self):
        lines = [f"{self.bytes:,} bytes moved to {self.device}, in {len(self.rows)} storages"]
        for row in self.rows:
            module = row.module() if row.module is not None else None
            where = self.paths.get(module, type(module).__name__) if module is not None else "(outside of any module)"
            what = f"{str(row.dtype).removeprefix('torch.')} {list(row.shape)}"
            lines.append(f"{row.bytes:>14,}  {what}  {where}{', ' + row.op if row.op else ''}: {row.why}")
        return "\n".join([*lines, *(f"stayed: {why}: {n} tensors" for why, n in self.stayed.items())])
