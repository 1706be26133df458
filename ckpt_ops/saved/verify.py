"""Does what is recomputed equal what the forward computed? `with ckpt_ops.verify() as v:` compares, bit for bit."""

import contextlib
import itertools
import threading

import torch.utils.checkpoint as torch_checkpoint
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .compare import Finding, difference, generator_states, likely_cause


class _Threads(threading.local):
    verifier = None


_threads = _Threads()


def current_verifier():
    """The verifier of the innermost `verify()` in this thread, or None."""
    return _threads.verifier


@contextlib.contextmanager
def verify(model=None):
    """Within the context, whatever is computed again for backward is compared with what the forward computed.

        with ckpt_ops.verify(model) as v:
            model(x).sum().backward()
        print(v)

    Both forward and backward belong inside. Compared are the values that `regenerate` and `regenerating` make again, and
    all tensors that a torch.utils.checkpoint region (use_reentrant=False) saves, also one of `ckpt_ops.checkpoint` or of
    the rung "block". Compiled regions are not seen. Originals are copied and kept, so memory is that of the plain model
    and more: a tool for finding out, not for training.

    model: findings name modules by their path in it; without it by their class.
    Yields: `Verifier`, with ok, compared, findings (in the order of the forward), raise_if_different(); printable.
    """
    verifier = Verifier(model)
    before, _threads.verifier = _threads.verifier, verifier
    _shared.enter()
    try:
        yield verifier
    finally:
        _shared.leave()
        _threads.verifier = before


class Verifier:
    """What `verify` yields.

    compared: how many tensors were compared.
    """

    def __init__(self, model):
        self.compared = 0
        self._paths = {id(m): path or "(the model)" for path, m in model.named_modules()} if model is not None else {}
        self._running = []  # the modules whose forward is running, innermost last
        self._found, self._order = [], itertools.count()

    @property
    def findings(self):
        """What differed, a `Finding` each. The first is the likely origin: what comes later was made from it."""
        return [finding for _, finding in sorted(self._found, key=lambda found: found[0])]

    @property
    def ok(self):
        return not self._found

    def summary(self):
        """The first line of the report."""
        if not self.compared:
            return "verify: nothing was recomputed, so nothing was compared"
        return f"verify: {self.compared} tensors compared, {len(self._found)} differ"

    def __str__(self):
        return "\n    ".join([self.summary(), *map(str, self.findings)])

    def raise_if_different(self):
        """Raises RuntimeError with the report if anything differed."""
        if not self.ok:
            raise RuntimeError(str(self))

    def source(self, name, module=None):
        """For what is being registered: `module`, or the one that is running."""
        return Source(self, name, module or self.running())

    def running(self):
        return self._running[-1] if self._running else None

    def called(self, module):
        """The module's path in the model, or its class."""
        if module is None:
            return "(outside of any module)"
        return self._paths.get(id(module), type(module).__name__)


class Source:
    """What is computed again, a recipe or a checkpoint region, and the module that it belongs to (None: each saver's own).

    moved: whether computing it again moved one of torch's generators.
    """

    __slots__ = ("verifier", "name", "module", "moved")

    def __init__(self, verifier, name, module):
        self.verifier, self.name, self.module, self.moved = verifier, name, module, False

    def original(self, t):
        return Original(self, t, self.module)

    def computed(self, compute):
        """compute(), which may or may not run the recomputation."""
        before = generator_states()
        value = compute()
        self.moved = self.moved or before != generator_states()
        return value


class Original:
    """A copy of one saved tensor, as the forward had it."""

    __slots__ = ("source", "value", "module", "order")

    def __init__(self, source, t, module):
        self.source, self.value, self.module = source, t.detach().clone(), module
        self.order = next(source.verifier._order)

    def compare(self, again):
        verifier = self.source.verifier
        verifier.compared += 1
        if (found := difference(self.value, again)) is not None:
            cause = likely_cause(self.value, again, found, self.source.moved)
            self._add(tuple(self.value.shape), self.value.dtype, *found, cause)

    def _add(self, *facts):
        verifier = self.source.verifier
        verifier._found.append((self.order, Finding(verifier.called(self.module), self.source.name, *facts)))


class _ComparedCheckpoint(torch_checkpoint._checkpoint_hook):
    """A checkpoint region's hooks: they also keep the originals, and compare what the recomputation gives."""

    def __init__(self, frame):
        super().__init__(frame)
        verifier = current_verifier()
        if verifier is None:
            return
        source = Source(verifier, "checkpoint", None)
        save, unpack = self.pack_hook, self.unpack_hook

        def remember(t):
            holder = save(t)
            holder.original = Original(source, t, verifier.running())
            return holder

        def compare(holder):
            try:
                value = source.computed(lambda: unpack(holder))
            except torch_checkpoint.CheckpointError:
                _compare_all(frame)  # it stops at another shape or dtype, without a word about where that is
                raise
            holder.original.compare(value)
            return value

        self.pack_hook, self.unpack_hook = remember, compare


def _compare_all(frame):
    """Compares all that the region has recomputed so far."""
    for holder in filter(None, (reference() for reference in frame.weak_holders)):
        for group, handle in holder.handles.items():
            if handle is not None and handle in frame.recomputed[group]:
                holder.original.compare(frame.recomputed[group][handle])


class _Shared:
    """What is patched while any thread is inside of a verify(): checkpoint's hooks, and hooks around every module."""

    def __init__(self):
        self._lock, self._inside, self._hooks = threading.Lock(), 0, []

    def enter(self):
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = torch_checkpoint._checkpoint_hook
                torch_checkpoint._checkpoint_hook = _ComparedCheckpoint
                self._hooks = [
                    register_module_forward_pre_hook(_module_begins),
                    register_module_forward_hook(_module_ends, always_call=True),
                ]

    def leave(self):
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch_checkpoint._checkpoint_hook = self._before
                for hook in self._hooks:
                    hook.remove()


_shared = _Shared()


def _module_begins(module, args):
    if (verifier := current_verifier()) is not None:
        verifier._running.append(module)


def _module_ends(module, args, output):
    if (verifier := current_verifier()) is not None and verifier.running() is module:
        verifier._running.pop()
