"""The hooks that register a module's output while an engine is active."""

import contextlib
import threading

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from ..saved.scope import current

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


class _Threads(threading.local):
    def __init__(self):
        self.before = {}  # {Registers: its module's state before the call}


_threads = _Threads()


class Registers:
    """For any other module: its output is registered with the recipe "call its forward again".

    refused: why that is not done, or None. What a first call in training or in eval shows (its state or a generator
    changed) refuses for good.
    """

    def __init__(self, name):
        self.name = name
        self._module = self._shown = None
        self._checked = set()  # of True (training) and False

    @property
    def refused(self):
        return _why_not(self._module) or self._shown

    def install(self, module):
        self._module = module
        return [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, with_kwargs=True),
        ]

    def _ready(self):
        engine = current()
        return engine is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling() and engine.on_top()

    def _enter(self, module, args):
        if module.training not in self._checked and self._ready():
            _threads.before[self] = _state(module)

    def _leave(self, module, args, kwargs, output):
        if not self._ready():
            return
        engine, reason = current(), _why_not(module)
        if _threads.before and (before := _threads.before.pop(self, None)) is not None and reason is None:
            self._checked.add(module.training)
            self._shown = self._shown or _difference(before, _state(module))
        inputs = (*args, *kwargs.values())
        outputs = output if isinstance(output, tuple) else (output,)
        reason = reason or self._shown or _unfit(inputs, outputs)
        if reason is not None:
            engine.refused[self.name] = reason
            return
        again = _Again(module, tuple(kwargs))
        engine.register(self.name, again, inputs, outputs, tuple(again.tensors.values()), module)


class _Again:
    """Calls a module's forward as in the forward: with the parameters, buffers and training flags that it had then."""

    __slots__ = ("_module", "_names", "_training", "tensors")

    def __init__(self, module, names):
        self._module, self._names, self._training, self.tensors = module, names, _flags(module), _tensors(module)

    def __call__(self, *inputs):
        module, positional = self._module, len(inputs) - len(self._names)
        arguments = dict(zip(self._names, inputs[positional:], strict=True))
        with contextlib.ExitStack() as stack:
            now = _tensors(module)
            if any(now.get(name) is not t for name, t in self.tensors.items()):  # torch.func.functional_call's are gone
                stack.enter_context(_reparametrize_module(module, self.tensors))
            if (flags := _flags(module)) != self._training:
                stack.callback(_set_flags, module, flags)
                _set_flags(module, self._training)
            return module.forward(*inputs[:positional], **arguments)


def _tensors(module):
    """Parameters and buffers by name."""
    if module._modules:
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = {**module._parameters, **module._buffers} if module._buffers else module._parameters
    return {name: t for name, t in own.items() if t is not None}


def _flags(module):
    return tuple(m.training for m in module.modules()) if module._modules else (module.training,)


def _set_flags(module, flags):
    for m, training in zip(module.modules(), flags, strict=True):
        m.training = training


def _unfit(inputs, outputs):
    for value in inputs:
        if isinstance(value, (list, dict, set)):
            return f"an argument is a {type(value).__name__}, which may change before backward"
    if not all(isinstance(out, torch.Tensor) for out in outputs):
        return "its output is not a tensor or a tuple of tensors"
    return None


def _why_not(module):
    """What can be seen without calling the module."""
    for path, m in module.named_modules():
        where = f"{path} in it" if path else "it"
        if isinstance(m, _RANDOM) and m.training and getattr(m, "p", 1) > 0 and not hasattr(m, "seed_source"):
            return f"{where} draws unseeded randomness ({type(m).__name__}); ckpt_ops.replace gives it a seed"
        if getattr(m, "inplace", False):
            return f"{where} works in place"
        if isinstance(m, nn.modules.batchnorm._NormBase) and m.training and m.track_running_stats:
            return f"{where} updates its statistics"
    if len(module._forward_hooks) > 1 or len(module._forward_pre_hooks) > 1:
        return "it has forward hooks of its own, which calling its forward again would not run"
    return None


def _state(module):
    """What a call may change: buffers, plain attributes, the random generators."""
    attributes = {
        (path, key): value
        for path, m in module.named_modules()
        for key, value in vars(m).items()
        if not key.startswith("_") and isinstance(value, (int, float, str, bool, type(None)))
    }
    sizes = {
        (path, key): len(value)
        for path, m in module.named_modules()
        for key, value in vars(m).items()
        if not key.startswith("_") and isinstance(value, (list, dict, set))
    }
    buffers = {name: (id(b), b._version) for name, b in module.named_buffers()}
    generators = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.get_rng_state()
    return {"an attribute": attributes, "a container": sizes, "a buffer": buffers}, generators


def _difference(before, after):
    for what in before[0]:
        for key, value in before[0][what].items():
            if after[0][what].get(key, value) != value:
                name = key if isinstance(key, str) else ".".join(part for part in key if part)
                return f"a call changes {what} of it: {name}"
    for device, state in before[1].items():
        if not torch.equal(state, after[1][device]):
            return f"a call draws from torch's {device} generator: unseeded randomness"
    return None
