"""The hooks that register a module's output while an engine is active."""

import torch
from torch import nn

from ..saved.engine import current, register

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


class Registers:
    """For any other module: its output is registered with the recipe "call its forward again".

    refused: why that is not done, or None. What a first call shows (its state or a generator changed) refuses for good.
    """

    def __init__(self, name):
        self.name = name
        self.refused = None
        self._checked = False
        self._before = None

    def install(self, module):
        self.refused = _why_not(module)
        return [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, with_kwargs=True),
        ]

    def _ready(self):
        engine = current()
        return engine is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling() and engine.on_top()

    def _enter(self, module, args):
        self._before = _state(module) if not self._checked and self._ready() else None

    def _leave(self, module, args, kwargs, output):
        if not self._ready():
            return
        engine = current()
        if self._before is not None:
            before, self._before, self._checked = self._before, None, True
            self.refused = self.refused or _difference(before, _state(module))
        reason = self.refused or _why_not(module)
        outputs = output if isinstance(output, tuple) else (output,)
        if reason is None and not all(isinstance(out, torch.Tensor) for out in outputs):
            reason = "its output is not a tensor or a tuple of tensors"
        if reason is not None:
            engine.refused[self.name] = reason
            return
        names = list(kwargs)

        def again(*inputs):
            positional = len(inputs) - len(names)
            return module.forward(*inputs[:positional], **dict(zip(names, inputs[positional:], strict=True)))

        register(self.name, again, (*args, *kwargs.values()), outputs, tuple(module.parameters()), module)


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
