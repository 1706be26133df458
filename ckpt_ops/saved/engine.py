"""Which tensors are registered, and the hooks that replace them."""

import contextlib
import functools
import threading
from collections import Counter

import torch
from torch import Tensor, strided
from torch.nn import Parameter

from .recipe import Entry, Handle, Recipe, Refused, Stored, storage_key
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
    """Whether an op should register its output: an engine is on top of the saved-tensor hooks, and a graph is recorded.

    Inside a torch.utils.checkpoint region (or save_on_cpu, ...) other hooks are on top, and the engine is inert: what
    is saved there is their business.
    """
    if torch.compiler.is_compiling():
        return False
    engine = _threads.engine
    return engine is not None and engine.accepts and torch.is_grad_enabled() and engine.on_top()


def register(name, fn, inputs, outputs, guards=(), module=None):
    """Registers `outputs` of the call fn(*inputs) with the active engine. Call it only while `active()`.

    fn must give bit-identical outputs for the same inputs. guards: tensors it reads besides the inputs. module: whose call
    this is, where it is not the one that is running.
    What cannot be registered stays kept, and the engine remembers why.
    """
    engine = _threads.engine
    try:
        engine.register(name, fn, inputs, outputs, guards, module)
    except Refused as reason:
        engine.refused[name] = str(reason)


class Engine:
    """Registered storages of one forward, and the pack and unpack hooks.

    accepts: whether ops of this package register on their own.
    replaced, refused: per module or op name, how many saved tensors were replaced; why an output was not registered.
    """

    def __init__(self, accepts=True, verifier=None):
        self.accepts, self.verifier = accepts, verifier
        self.replaced, self.refused = Counter(), {}
        self._entries, self._sweep_at = {}, 256  # by storage
        self._results = {}  # (graph node, number of its result): entry
        self._dtype = None  # of all registered outputs, False where they differ

    def register(self, name, fn, inputs, outputs, guards=(), module=None):
        try:
            held = {storage_key(t) for t in (*inputs, *guards) if isinstance(t, Tensor)}
        except NotImplementedError:
            raise Refused("an input has no storage: it is sparse, or of another layout without one") from None
        for out in outputs:
            if type(out) is not Tensor or out.layout is not strided or torch._C._functorch.is_functorch_wrapped_tensor(out):
                raise Refused(f"an output is a {type(out).__name__}, not a plain tensor")
            if storage_key(out) in held:
                raise Refused("it returns its input's own memory (in place, or a view)")
        recipe = Recipe(name, fn, [self._input(t) for t in inputs], guards, outputs)
        if self.verifier is not None:
            recipe.source = self.verifier.source(name, module)
        for index, out in enumerate(outputs):
            self._entries[storage_key(out)] = entry = Entry(recipe, index, out)
            self._dtype = entry.dtype if self._dtype in (None, entry.dtype) else False
            if (node := out.grad_fn) is not None:
                self._results[node, out.output_nr] = entry
        if max(len(self._entries), len(self._results)) > self._sweep_at:
            self._sweep()

    def _input(self, t):
        """What a recipe holds of its input."""
        if type(t) is Parameter or not isinstance(t, Tensor):
            return t
        packed = self.replace(t)
        if packed is t and t.grad_fn is not None:
            packed = t = t.detach()
        if _threads.offloader is None or type(packed) is Handle:
            return packed
        with _threads.offloader.because("made again from"):
            packed = _threads.offloader.replace(t)
        return packed if type(packed) is Handle else t

    def knows(self, t):
        """Whether the tensor lies in a registered storage."""
        entry = self._entries.get(storage_key(t)) if type(t) is Tensor else None
        return entry is not None and not entry.expired() and entry.version == t._version

    def _sweep(self):
        """Drops storages that are gone, and with them the inputs that their recipes hold, and their graph nodes."""
        self._entries = {key: entry for key, entry in self._entries.items() if not entry.expired()}
        self._results = {key: entry for key, entry in self._results.items() if not entry.expired()}
        self._sweep_at = max(256, 2 * len(self._entries), 2 * len(self._results))

    def pack(self, t):
        """The pack hook of autograd. It sees every saved tensor, and most of them are not registered: it is kept short."""
        packed = self.replace(t)
        if packed is not t:
            self.replaced[packed.recipe.name] += 1
        else:
            packed = Stored(t) if _threads.offloader is None else _threads.offloader.keep(t)
        return handed_over(packed)

    def replace(self, t):
        """A handle if the tensor lies in a registered storage that has not changed since, else the tensor."""
        if type(t) is not Tensor or t.layout is not strided:
            return t
        entry = self._entries.get(storage_key(t))
        if entry is None:
            return t if t.dtype is self._dtype else self._replace_cast(t)
        return self._replace_registered(entry, t)

    def _replace_registered(self, entry, t):
        if entry.expired():
            del self._entries[storage_key(t)]
            return t
        name = entry.recipe.name
        if t._version != entry.version:
            self.refused.setdefault(name, "its output was modified in place afterwards")
            return t
        if t.dtype != entry.dtype or t.is_conj() or t.is_neg():
            return t
        return Handle(entry.recipe, entry.index, t)

    def _replace_cast(self, t):
        """A handle if the tensor is a registered output in another dtype, as autocast makes it for each consumer."""
        cast = t if t._base is None else t._base  # a Linear saves a view of its cast input
        node = cast.grad_fn
        if node is None or node.name() != "ToCopyBackward0":
            return t
        source = self._results.get(node.next_functions[0])
        if source is None:
            return t
        made_from = [Handle(source.recipe, source.index)]
        recipe = Recipe(f"{source.recipe.name} in {t.dtype}", functools.partial(_cast, t.dtype), made_from, (), [cast])
        if self.verifier is not None:
            recipe.source = self.verifier.source(recipe.name, None)
        self._entries[storage_key(t)] = Entry(recipe, 0, cast)
        return Handle(recipe, 0, t)

    def unpack(self, packed):
        return packed.tensor()

    def on_top(self):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is not None and getattr(hooks[0], "__self__", None) is self

    def clear(self):
        """Forgets the registrations; handles keep the recipes that they need."""
        self._entries.clear()
        self._results.clear()


def _cast(dtype, x):
    return x.to(dtype)


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
    try:
        with torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack):
            yield engine
    finally:
        _threads.engine = before
        engine.clear()


@contextlib.contextmanager
def offloads(offloader):
    """Within the context, engines of this thread give what they keep to the offloader."""
    before, _threads.offloader = _threads.offloader, offloader
    try:
        yield
    finally:
        _threads.offloader = before


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
    with entered(Engine(verifier=current_verifier())) as engine:
        yield engine
