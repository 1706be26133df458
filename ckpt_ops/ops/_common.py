"""What the autograd.Functions of all ops share."""

import torch

from .. import dispatch, native, saved
from ..library import kernels


def op(namespace, name):
    """The dispatcher op that a Function calls."""
    return getattr(kernels(namespace), name)


def check_floating(name, **tensors):
    """TypeError unless every given tensor has a dtype the ops are written for; ValueError where devices differ."""
    first = None
    for label, t in tensors.items():
        if t is None:
            continue
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: {label} must be a tensor, got {type(t).__name__}")
        if t.dtype not in dispatch.DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in dispatch.DTYPES)
            raise TypeError(f"{name}: {label} has dtype {t.dtype}; allowed are {allowed}")
        if first is None:
            first = label, t
        elif t.device != first[1].device:
            raise ValueError(f"{name}: {first[0]} is on {first[1].device} and {label} on {t.device}; they must share a device")


def check_bias(name, label, bias, columns):
    """ValueError unless an optional bias is [columns]."""
    if bias is not None and tuple(bias.shape) != (columns,):
        raise ValueError(f"{name}: {label} must have shape ({columns},), the input's last dimension, got {tuple(bias.shape)}")


def promote(x, other):
    """Both in their common dtype, as torch's binary ops do."""
    dtype = torch.promote_types(x.dtype, other.dtype)
    return x.to(dtype), other.to(dtype)


def distinct(*tensors):
    """The tensors, none twice while compiling: torch.compile cannot trace a Function that gets one tensor in two places."""
    if not torch.compiler.is_compiling():
        return tensors
    return tuple(
        t.view_as(t) if t is not None and any(t is before for before in tensors[:i]) else t for i, t in enumerate(tensors)
    )


def statistics_dtype(dtype):
    """Statistics and parameter gradients leave the kernels in float32; in float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def param_grad(grad, param_dtype, needed):
    """A kernel's parameter gradient as autograd wants it: the parameter's dtype, or None where not asked for."""
    return grad.to(param_dtype) if needed else None


def call(function, *args):
    """function.apply(*args), all arguments given. torch's own apply binds them to the signature: twice a small op's time.

    Where csrc/autograd has the function, it serves what it does not decline, in a fraction of the time.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    if (twin := getattr(_extension(), function.__name__, None)) and (outputs := twin(*args)) is not None:
        return outputs
    unwrap = torch._C._functorch.unwrap_if_dead  # of a torch.func transform that has ended
    return super(torch.autograd.Function, function).apply(*[unwrap(a) if isinstance(a, torch.Tensor) else a for a in args])


def plain_call(name, input, backend, *args):
    """The result of an op whose function in csrc/autograd does all, its checks too; None where it declines."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    extension = _extension()
    return extension and getattr(extension, name)(input, dispatch.named(backend), *args)


def _extension():
    """The extension with the functions of csrc/autograd, or None.

    They take plain tensors that a compiled kernel serves, and decline all else with None. Their graph nodes do not show what
    they saved: where that is asked, they are not called.
    """
    return None if saved.is_watched() else native.loaded()


class _FirstDerivativeOnly(torch.autograd.Function):
    """Passes gradients on; differentiating them raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name, count, *tensors):
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"ckpt_ops: {ctx.name} has no double backward (its gradient is a fused kernel). "
            'Call it with backend="reference", which can be differentiated as often as you like.'
        )


def first_derivative_only(name, grads, *inputs):
    """`grads` as a Function's backward returns them; under create_graph, a second derivative becomes a clear error."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return grads
    present = [g for g in grads if g is not None]
    guarded = iter(_FirstDerivativeOnly.apply(name, len(present), *present, *(t for t in inputs if t is not None)))
    return tuple(None if g is None else next(guarded) for g in grads)


def vmap_by_sample(function, info, in_dims, args):
    """A vmap rule: one call a sample, stacked. Every sample gets what a call of its own would give it.

    With one seed for all samples they share its mask, with a batch of seeds each has its own.
    """
    outputs = []
    for i in range(info.batch_size):
        sample = [a.select(d, i) if isinstance(d, int) else a for a, d in zip(args, in_dims)]  # d of a tuple is a tuple
        outputs.append(function.apply(*sample))
    if isinstance(outputs[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*outputs)), (0,) * len(outputs[0])
    return torch.stack(outputs), 0
