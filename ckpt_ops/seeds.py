"""Seeds: drawn outside the kernels, passed in as tensors, replayed in recomputation.

A seed is an int64 tensor of one element on the device of the data. A kernel only ever reads it, so a recomputation
that gets the same tensor gets the same mask, under any checkpoint, compiler or memory budget.
"""

import contextlib
import threading
from typing import NamedTuple

import torch

from . import reference

_INT64 = (-(2**63), 2**63 - 1)
_LIMITS = {"plane": 2**32, "row": 2**32, "col": 2**35}


class Random(NamedTuple):
    """What a random op needs to know: its mask is a pure function of these and the shape."""

    seed: torch.Tensor | None
    p: float
    stream: int
    origin: tuple


# --- drawing ---------------------------------------------------------------------------------------------------


def draw(device=None, generator=None):
    """A fresh seed from torch's generator of `device` (or from `generator`): int64 tensor of one element.

    `torch.manual_seed` reproduces it. Within `replay()` it is taped, within `scope()` it is a function of the scope.
    """
    device = torch.device(device) if device is not None else torch.get_default_device()
    if torch.compiler.is_compiling():
        _refuse_recomputed_draw()
        return _draw(device, generator)
    state = _threads.top()
    return state.seed(lambda: _draw(device, generator), device) if state is not None else _draw(device, generator)


def _draw(device, generator):
    try:
        return torch.randint(*_INT64, (1,), dtype=torch.int64, device=device, generator=generator)
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        raise RuntimeError(
            "ckpt_ops draws a seed here, and vmap was called with randomness='error': pass seed=, or call vmap with "
            "randomness='different' (a seed for every sample) or 'same' (one for all)"
        ) from error


def _refuse_recomputed_draw():
    import torch._functorch.config as config

    if config.activation_memory_budget < 1:
        raise RuntimeError(
            "torch.compile with an activation_memory_budget below 1 draws again what it recomputes, so a seed drawn "
            "inside the graph would give the backward another mask: pass seed=, or call ckpt_ops.seeds.attach(model)"
        )


def as_tensor(op, seed, device):
    """An int or a tensor, checked, as the int64 tensor of one element that kernels take."""
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"{op}: a seed tensor has dtype int64 and one element, got {seed.dtype} of shape {tuple(seed.shape)}"
            )
        if seed.device != device and device.type != "meta":
            raise ValueError(f"{op}: the seed is on {seed.device} and the data on {device}; they must share a device")
        return seed.reshape(1)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{op}: seed must be an int or an int64 tensor of one element, got {type(seed).__name__}")
    if not _INT64[0] <= seed <= _INT64[1]:
        raise ValueError(f"{op}: seed must fit in int64, got {seed}")
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def resolve(op, shape, device, p, training=True, *, seed=None, stream=0, origin=(0, 0, 0), generator=None):
    """The checked `Random` of a call. Draws a seed if none is given and 0 < p < 1; at p = 0, 1 or in eval there is none."""
    p, origin = check_place(op, shape, p, stream, origin)
    p = p if training else 0.0
    if seed is not None:
        seed = as_tensor(op, seed, device)
    if p == 0 or p == 1:
        seed = None
    elif seed is None:
        seed = draw(device, generator)
    return Random(seed, p, stream, origin)


def check_place(op, shape, p, stream, origin):
    """Raises ValueError for what the mask contract does not allow; returns p as float and origin as a tuple."""
    if not 0 <= p <= 1:
        raise ValueError(f"{op}: the drop probability must be between 0 and 1, got {p}")
    if not 0 <= stream < 2**32:
        raise ValueError(f"{op}: stream must be in [0, 2**32), got {stream}")
    origin = tuple(origin)
    if len(origin) != 3 or any(o < 0 for o in origin):
        raise ValueError(f"{op}: origin is three ints (plane0, row0, col0), none negative, got {origin}")
    planes = 1
    for n in shape[:-2]:
        planes = planes * n
    sizes = (planes, shape[-2] if len(shape) > 1 else 1, shape[-1] if len(shape) > 0 else 1)
    for (name, limit), first, size in zip(_LIMITS.items(), origin, sizes):
        if first + size > limit:
            raise ValueError(f"{op}: a mask has fewer than {limit} {name}s; origin {origin} and shape {tuple(shape)} pass that")
    return float(p), origin


def fold_in(seed, *ints):
    """A new seed, a pure function of `seed` and the ints (one Philox call each): per rank, layer, step, ...

    seed: an int gives an int, an int64 tensor of one element gives such a tensor (never read on the host).
    Data-parallel ranks fold in their rank; ranks that hold the same activations (tensor parallel) must not.
    """
    words = as_tensor("fold_in", seed, seed.device if isinstance(seed, torch.Tensor) else torch.device("cpu"))
    for i in ints:
        if not _INT64[0] <= i <= _INT64[1]:
            raise ValueError(f"fold_in: every int must fit in int64, got {i}")
        number = torch.full_like(words, i)
        low, high = reference.split_seed(number)
        counter = (low, high, torch.full_like(words, 0x666F6C64), torch.full_like(words, 0xFFFFFFFF))
        w = reference.philox4x32(counter, reference.split_seed(words))
        words = w[0] | (w[1] << 32)
    return words if isinstance(seed, torch.Tensor) else int(words.item())


# --- what a draw means in this thread: a tape, or a scope -------------------------------------------------------


class _Threads(threading.local):
    """The stack of tapes and scopes this thread is in."""

    def __init__(self):
        self.stack = []

    def top(self):
        return self.stack[-1] if self.stack else None


_threads = _Threads()


@contextlib.contextmanager
def _entered(state):
    _threads.stack.append(state)
    try:
        yield
    finally:
        _threads.stack.remove(state)


class _Scope:
    def __init__(self, seed):
        self._seed, self._calls = seed, 0

    def seed(self, _draw_one, device):
        self._calls += 1
        return as_tensor("scope", fold_in(self._seed, self._calls), device)


@contextlib.contextmanager
def scope(seed, *fold):
    """Within the context, the n-th seed drawn is fold_in(seed, *fold, n): torch's generators are left alone.

    seed: int.  fold: e.g. the data-parallel rank; leave it out where ranks hold the same activations.
    """
    with _entered(_Scope(fold_in(seed, *fold))):
        yield


class _Recording:
    def __init__(self, tape, outer):
        self._tape, self._outer = tape, outer

    def seed(self, draw_one, device):
        value = self._outer.seed(draw_one, device) if self._outer is not None else draw_one()
        self._tape.append(value)
        return value


class _Replaying:
    def __init__(self, tape):
        self._seeds = iter(tape)

    def seed(self, _draw_one, _device):
        try:
            return next(self._seeds)
        except StopIteration:
            raise RuntimeError(
                "the recomputation of this checkpoint region asks for more seeds than its forward drew: "
                "the region does not run the same ops twice"
            ) from None


class _Tape:
    """A context manager over one tape, entered anew for every pass."""

    def __init__(self, state_of_pass):
        self._state_of_pass, self._open = state_of_pass, []

    def __enter__(self):
        entered = _entered(self._state_of_pass())
        entered.__enter__()
        self._open.append(entered)

    def __exit__(self, *error):
        return self._open.pop().__exit__(*error)


def replay(context_fn=None):
    """A `context_fn` for torch.utils.checkpoint: seeds drawn in forward are taped (8 bytes each) and replayed.

        checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=ckpt_ops.seeds.replay())

    Right without preserve_rng_state, as long as all randomness of the region is this package's. `context_fn`: another
    one to combine with, e.g. a selective policy's.
    """

    def contexts():
        tape = []
        forward = _Tape(lambda: _Recording(tape, _threads.top()))
        recompute = _Tape(lambda: _Replaying(tape))
        if context_fn is None:
            return forward, recompute
        others = context_fn()
        return _Both(forward, others[0]), _Both(recompute, others[1])

    return contexts


class _Both:
    def __init__(self, *contexts):
        self._contexts = contexts

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *error):
        return self._stack.__exit__(*error)


# --- one seed a forward of a whole model -----------------------------------------------------------------------


class Source:
    """The seed that a model's random modules share during one forward of the model (see `attach`)."""

    def __init__(self, fold=()):
        self.fold = tuple(fold)
        self.seed = None  # a new int64 tensor of one element each forward
        self._forwards = 0  # since a backward last recomputed one of this model's regions
        self._recomputed = False

    def __call__(self, model, args, kwargs):
        """The pre-hook: draws outside any compiled graph."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "ckpt_ops.seeds.attach: this model was compiled after its seed was attached, so the draw would move "
                "into the graph: call torch.compile first, then seeds.attach(compiled_model)"
            )
        if not model.training or _in_backward():
            return
        seed = draw(_device_of(model, args, kwargs))
        self.seed = fold_in(seed, *self.fold) if self.fold else seed
        if torch.is_grad_enabled():
            self._forwards = 1 if self._recomputed else self._forwards + 1
            self._recomputed = False

    def current(self, stream):
        """The seed for a module of this stream. In a recomputation it must be the forward's."""
        if torch.compiler.is_compiling():
            return self.seed
        state = _threads.top()
        if state is not None and not isinstance(state, _Scope):
            return state.seed(lambda: self.seed, None)
        if _in_backward():
            if self._forwards > 1:
                raise RuntimeError(
                    f"ckpt_ops.seeds.attach: {self._forwards} forwards ran since a backward last recomputed this model, so "
                    f"the recomputation cannot know whose seed to use (stream {stream}): checkpoint with "
                    "context_fn=ckpt_ops.seeds.replay()"
                )
            self._recomputed = True
        return self.seed


def attach(model, *fold):
    """One seed a forward of the whole model, and a fixed `stream` for each random module of this package in it.

    A forward pre-hook draws the seed (8 bytes) while the model trains; the modules read it as an input, so the masks
    are right under every checkpoint and every torch.compile memory budget. Compile first, then attach. A module that
    is called twice in a forward has the same mask in both calls.

    fold: ints folded into every drawn seed, e.g. the data-parallel rank.
    Returns a handle; `handle.remove()` undoes it.
    """
    modules = [m for m in model.modules() if hasattr(m, "seed_source")]
    if not modules:
        raise ValueError("seeds.attach: the model has no random module of ckpt_ops.nn")
    source = Source(fold)
    before = [(m, m.seed_source, m.stream) for m in modules]
    for stream, module in enumerate(modules, start=1):
        module.seed_source, module.stream = source, stream
    return Attached(model.register_forward_pre_hook(source, with_kwargs=True, prepend=True), before)


class Attached:
    """What `attach` returns."""

    def __init__(self, hook, before):
        self._hook, self._before = hook, before

    def remove(self):
        """Takes the hook away and gives every module back its own seed source and stream."""
        self._hook.remove()
        for module, source, stream in self._before:
            module.seed_source, module.stream = source, stream


def _device_of(model, args, kwargs):
    tensors = [t for t in (*model.parameters(), *args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    return tensors[0].device if tensors else torch.get_default_device()


def _in_backward():
    return torch._C._current_graph_task_id() != -1
