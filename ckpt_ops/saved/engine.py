"""What is registered, and the hooks that replace what autograd saves."""

from collections import Counter

import torch
from torch import Tensor, strided
from torch.nn import Parameter

from .. import native
from .recipe import Handle, Recipe, Stored, cast_of, storage_key


def new_engine(accepts=True, verifier=None):
    """An engine for one forward: that of csrc/saved, which costs a fraction of the time, or where it is not there, `Engine`."""
    kind = getattr(native.loaded(), "Engine", Engine)
    return kind(accepts, verifier)


class Engine:
    """Registered storages of one forward, and the pack and unpack hooks.  Twin: csrc/saved/engine.h.

    accepts: whether ops of this package register on their own.  caller: the name of the chosen module that is running, or None.
    verifier, offloader, watch: of the contexts that it works in (verify(), offloading(), memory.kept's), or None.
    replaced, refused: per module or op name, how many saved tensors were replaced; why an output was not registered.
    """

    def __init__(self, accepts=True, verifier=None):
        self.accepts, self.caller, self.verifier = accepts, None, verifier
        self.offloader = self.watch = None
        self.replaced, self.refused = Counter(), {}
        self._entries, self._sweep_at = {}, 256  # by storage
        self._results = {}  # (graph node, number of its result): entry
        self._dtype = None  # of all registered outputs, False where they differ

    @property
    def registered(self):
        """How many outputs it remembers."""
        return max(len(self._entries), len(self._results))

    def register(self, name, fn, inputs, outputs, guards=(), module=None):
        """Registers `outputs` of the call fn(*inputs).

        fn must give bit-identical outputs for the same inputs. guards: tensors it reads besides the inputs. module: whose
        call this is, called `name`. Without it `name` is an op's: in the call of a chosen module, that one's name counts.
        What cannot be registered stays kept; `refused` says why.
        """
        if module is None and self.caller is not None:
            name = self.caller
        if (reason := _unfit((*inputs, *guards), outputs)) is not None:
            self.refused[name] = reason
            return
        recipe = Recipe(name, fn, [self._input(t) for t in inputs], guards, outputs)
        if self.verifier is not None:
            recipe.source = self.verifier.source(name, module)
        for index, out in enumerate(outputs):
            self._entries[storage_key(out)] = entry = Entry(recipe, index, out)
            self._dtype = entry.dtype if self._dtype in (None, entry.dtype) else False
            if (node := out.grad_fn) is not None:
                self._results[node, out.output_nr] = entry
        if self.registered > self._sweep_at:
            self._sweep()

    def _input(self, t):
        """What a recipe holds of its input."""
        if type(t) is Parameter or not isinstance(t, Tensor):
            return t
        packed = self.replace(t)
        if packed is t and t.grad_fn is not None:
            packed = t = t.detach()
        return packed if self.offloader is None or type(packed) is Handle else self.offloader.origin(t)

    def knows(self, t):
        """Whether the tensor lies in a registered storage."""
        entry = self._entries.get(storage_key(t)) if type(t) is Tensor else None
        return entry is not None and not entry.expired() and entry.version == t._version

    def _sweep(self):
        """Drops storages that are gone, and with them the inputs that their recipes hold, and their graph nodes."""
        self._entries = {key: entry for key, entry in self._entries.items() if not entry.expired()}
        self._results = {key: entry for key, entry in self._results.items() if not entry.expired()}
        self._sweep_at = max(256, 2 * self.registered)

    def pack(self, t):
        """The pack hook of autograd. It sees every saved tensor, and most of them are not registered."""
        packed = self.replace(t)
        if packed is not t:
            self.replaced[packed.recipe.name] += 1
        else:
            packed = Stored(t) if self.offloader is None else self.offloader.keep(t)
        if self.watch is not None:
            self.watch(packed)
        return packed

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
        if t._version != entry.version:
            self.refused.setdefault(entry.recipe.name, "its output was modified in place afterwards")
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
        recipe = cast_of(source.recipe, source.index, cast, self.verifier)
        self._entries[storage_key(t)] = Entry(recipe, 0, cast)
        return Handle(recipe, 0, t)

    def unpack(self, packed):
        return packed.tensor()

    def on_top(self):
        """Whether its hooks are those that see what is saved now."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is not None and getattr(hooks[0], "__self__", None) is self

    def takes(self):
        """Whether what an op registers now is of use."""
        return self.accepts and torch.is_grad_enabled() and self.on_top()

    def clear(self):
        """Forgets the registrations; handles keep the recipes that they need."""
        self._entries.clear()
        self._results.clear()
        self.offloader = self.watch = None


class Entry:
    """A registered storage. It is known by a weak reference: an address is reused as soon as it is freed."""

    __slots__ = ("recipe", "index", "version", "dtype", "_weak")

    def __init__(self, recipe, index, t):
        self.recipe, self.index, self.version, self.dtype = recipe, index, t._version, t.dtype
        self._weak = t.untyped_storage()._weak_ref()  # what torch.multiprocessing's StorageWeakRef wraps

    def expired(self):
        return torch.UntypedStorage._expired(self._weak)

    def __del__(self, free=torch.UntypedStorage._free_weak_ref):
        free(self._weak)


def _unfit(given, outputs):
    """Why the outputs of a call cannot be registered, or None. given: what it reads."""
    tensors = [t for t in given if isinstance(t, Tensor)]
    try:
        held = {storage_key(t) for t in tensors}
    except NotImplementedError:
        return "an input has no storage: it is sparse, or of another layout without one"
    if any(t.is_inference() for t in tensors):
        return "an input is an inference tensor, which does not tell whether it was modified since"
    if not outputs:
        return "it returns nothing"
    for out in outputs:
        if type(out) is not Tensor or out.layout is not strided or torch._C._functorch.is_functorch_wrapped_tensor(out):
            return f"an output is a {type(out).__name__}, not a plain tensor"
        if storage_key(out) in held:
            return "it returns its input's own memory (in place, or a view)"
    return None
