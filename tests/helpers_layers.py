"""What the tests of attention and transformer layers share: torch's twins, their comparison, rungs."""

import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn

import ckpt_ops
from helpers_numerics import error

ours = ckpt_ops.nn
E, HEADS, WIDE = 32, 4, 64


def assert_equals_torchs(mine, twin, call, inputs, dtype=torch.float32):
    """The numerics rule for outputs and all gradients. call(module, *inputs) -> tensor."""
    mine.load_state_dict(twin.state_dict(), strict=True)
    mine, twin, true = mine.to(dtype), twin.to(dtype), copy.deepcopy(twin).double()
    results, upstream = [], None
    for module, kind in ((true, torch.float64), (twin, dtype), (mine, dtype)):
        values = [x.detach().to(dtype).to(kind).requires_grad_() for x in inputs]
        y = call(module, *values)
        upstream = torch.randn(y.shape) if upstream is None else upstream
        names = ["y", *(f"dx{i}" for i in range(len(values))), *(f"d{n}" for n, _ in module.named_parameters())]
        grads = torch.autograd.grad(y, [*values, *module.parameters()], upstream.to(dtype).to(kind), allow_unused=True)
        results.append(dict(zip(names, (y, *grads))))
    truth, plain, fused = results
    assert truth.keys() == plain.keys() == fused.keys()
    for name, expected in truth.items():
        if expected is None:
            assert fused[name] is None, name
            continue
        if name.endswith("in_proj_bias"):  # a key's bias shifts all scores of a query alike: its gradient is 0 but for rounding
            expected, plain[name], fused[name] = (torch.cat([t[:E], t[2 * E :]]) for t in (expected, plain[name], fused[name]))
        assert (fused[name].shape, fused[name].dtype) == (plain[name].shape, dtype), name
        allowed = 2 * error(plain[name], expected) + torch.finfo(dtype).eps
        assert error(fused[name], expected) <= allowed, f"{name}: {error(fused[name], expected):.3g}, allowed {allowed:.3g}"


def hidden_keys(batch, length):
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[0, -2:] = True
    return mask


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": F.silu,
    "GELU tanh": nn.GELU("tanh"),
    "partial": functools.partial(F.gelu, approximate="tanh"),
    "ReLU in place": nn.ReLU(inplace=True),
    "SiLU": nn.SiLU(),
    "another": torch.tanh,
}
ENCODERS = (ours.TransformerEncoderLayer, nn.TransformerEncoderLayer)
DECODERS = (ours.TransformerDecoderLayer, nn.TransformerDecoderLayer)


def layers(classes, **options):
    return [cls(E, HEADS, WIDE, **{"dropout": 0.0, **options}) for cls in classes]


def stack(layer, depth=2):
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def step(model, rung, *inputs):
    handle = ckpt_ops.regenerate(model, rung)
    torch.manual_seed(3)
    kept = ckpt_ops.memory.kept(model, *inputs)
    grads = torch.autograd.grad(kept.output, [*inputs, *model.parameters()], torch.ones_like(kept.output))
    handle.remove()
    return kept, grads
