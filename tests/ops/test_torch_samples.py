"""torch's own test samples (OpInfo) through our functions, against torch's results; and opcheck of every schema."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

import ckpt_ops
from ckpt_ops.library import kernels
from ckpt_ops.schemas import SCHEMAS
from helpers_numerics import error
from helpers_ops import LAYOUTS, relayout


def samples(name, device, dtype):
    (info,) = [op for op in op_db if op.name == name and not op.variant_test_name]
    return info, list(info.sample_inputs(device, dtype, requires_grad=True))


def _norm(mine):
    def call(sample):
        return mine(sample.input, *sample.args, **sample.kwargs)

    return call


def _gelu(sample):
    return ckpt_ops.gelu_dropout(sample.input, 0.0, **sample.kwargs)


def _dropout(sample):
    return ckpt_ops.dropout(sample.input, 0.0, training=sample.kwargs.get("training", True))


def _attention(sample):
    return ckpt_ops.scaled_dot_product_attention(sample.input, *sample.args, **sample.kwargs)


def _plain_dropout(sample):
    return F.dropout(sample.input, 0.0)


# name: ours, torch's where not the OpInfo's own, how many samples must have run
FUNCTIONS = {
    "nn.functional.layer_norm": (_norm(ckpt_ops.layer_norm), None, 4),
    "nn.functional.rms_norm": (_norm(ckpt_ops.rms_norm), None, 4),
    "nn.functional.gelu": (_gelu, None, 4),
    "nn.functional.dropout": (_dropout, _plain_dropout, 5),
    "nn.functional.scaled_dot_product_attention": (_attention, None, 9),
}


def _refused(sample):
    """What is left out: torch's own random numbers, a query of fewer dimensions than the keys, and a norm over one
    element, whose gradient is 0 plus rounding."""
    if sample.kwargs.get("dropout_p", 0.0) != 0:
        return True
    if sample.args and sample.args[0] == (1,):
        return True
    tensors = [t for t in sample.args[:2] if isinstance(t, torch.Tensor)]
    return len(tensors) == 2 and any(t.dim() != sample.input.dim() for t in tensors)


def _floating(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def _prepared(t, name):
    """Attention's samples of up to 9 make scores of some hundred, where one float32 a row cannot hold the log-sum-exp
    to what two (a maximum, a sum) can: its samples are made smaller."""
    if not _floating(t) or "attention" not in name:
        return t
    return (t.detach() / 5).requires_grad_(t.requires_grad)


def _results(call, sample):
    """The output and the gradient of every input that wants one."""
    y = call(sample)
    wrt = [t for t in (sample.input, *sample.args, *sample.kwargs.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad(y, wrt, g, materialize_grads=True)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_opinfo_samples(backend, name):
    """By the numerics rule over all samples together, torch's own function in float64 being the truth."""
    ours, theirs, least = FUNCTIONS[name]
    info, inputs = samples(name, backend.device, torch.float32)
    theirs = theirs or (lambda sample: info(sample.input, *sample.args, **sample.kwargs))
    pooled, ran = {}, 0
    for sample in inputs:
        if _refused(sample):
            continue
        sample = sample.transform(lambda t: _prepared(t, name))
        if isinstance(mask := sample.kwargs.get("attn_mask"), torch.Tensor):
            sample.kwargs["attn_mask"] = mask.detach()
        double = sample.transform(lambda t: t.detach().double().requires_grad_(t.requires_grad) if _floating(t) else t)
        results = (_results(*pair) for pair in ((ours, sample), (theirs, sample), (theirs, double)))
        for i, (mine, plain, true) in enumerate(zip(*results)):
            assert (mine.shape, mine.dtype) == (plain.shape, plain.dtype)
            pooled.setdefault(i, []).append([t.detach().double().reshape(-1) for t in (mine, plain, true)])
        ran += 1
    assert ran >= least, f"only {ran} of {len(inputs)} samples ran"
    for i, parts in pooled.items():
        mine, plain, true = (torch.cat(part) for part in zip(*parts))
        allowed = 2 * error(plain, true) + torch.finfo(torch.float32).eps
        assert error(mine, true) <= allowed, f"result {i}: {error(mine, true)}, allowed {allowed}"


# --- opcheck --------------------------------------------------------------------------------------------------------

M, N = 6, 40
SEED = torch.tensor([5])
PLACE = (SEED, 0.3, 1, (0, 1, 2))


def _rows(*shape, layout="contiguous"):
    return relayout(torch.randn(*(shape or (M, N))), layout)


def _sample(name, layout):
    """Arguments of a schema by its name."""
    x, dy, weight, column, seed = _rows(layout=layout), _rows(layout=layout), torch.randn(N), torch.randn(M), PLACE
    rstd = column.abs() + 0.5
    q, k, v = _rows(1, 4, 5, 8, layout=layout), _rows(1, 2, 7, 8, layout=layout), _rows(1, 2, 7, 6, layout=layout)
    o, lse = torch.randn(1, 4, 5, 6), torch.randn(1, 4, 5) + 5
    scores = (1, 0.3, *seed, 4)
    return {
        "dropout_mask": (SEED, (M, N), *PLACE[1:]),
        "dropout_fwd": (x, *seed),
        "act_dropout_fwd": (x, weight, "gelu", *seed),
        "act_dropout_bwd": (dy, x, weight, "gelu", *seed, True),
        "dropout_add_fwd": (x, dy, weight, *seed),
        "dropout_add_bwd": (dy, *seed, True),
        "layer_norm_fwd": (x, weight, weight, (N,), 1e-5),
        "layer_norm_bwd": (dy, x, column, rstd, weight, None, (N,), False, True, True, True),
        "rms_norm_fwd": (x, weight, (N,), 1e-5, 0.0),
        "rms_norm_bwd": (dy, x, rstd, weight, (N,), 0.0, False, True, True),
        "dropout_add_layer_norm_fwd": (x, dy, weight, weight, weight, (N,), 1e-5, *seed),
        "dropout_add_layer_norm_bwd": (dy, x, x.clone(), column, rstd, weight, (N,), *seed, True, True, True),
        "dropout_add_rms_norm_fwd": (x, dy, weight, weight, (N,), 1e-5, 0.0, *seed),
        "dropout_add_rms_norm_bwd": (dy, x, x.clone(), rstd, weight, (N,), 0.0, *seed, True, True),
        "attention_fwd": (q, k, v, None, *scores),
        "attention_bwd": (torch.randn_like(o), q, k, v, o, lse, None, *scores),
    }[name]


NAMES = [schema.split("(")[0] for schema in SCHEMAS]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(fused, name):
    """Schema (nothing mutated or aliased that is not declared), fake against real (shapes, dtypes, strides), aot."""
    from ckpt_ops.dispatch import NAMESPACE

    op = getattr(kernels(NAMESPACE[fused.name]), name).default
    for layout in LAYOUTS:
        arguments = _sample(name, layout)
        tests = (
            ("test_schema", "test_faketensor")
            if layout != "contiguous"
            else ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        )
        torch.library.opcheck(op, arguments, test_utils=tests)


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("_bwd") or n == "dropout_fwd"])
def test_opcheck_without_what_is_optional(fused, name):
    """No seed, no parameters, nothing asked for beyond dx."""
    from ckpt_ops.dispatch import NAMESPACE

    op = getattr(kernels(NAMESPACE[fused.name]), name).default
    for p in (0.0, 1.0):
        arguments = [
            _without(a.name, value, p) for a, value in zip(op._schema.arguments, _sample(name, "contiguous"), strict=True)
        ]
        torch.library.opcheck(op, tuple(arguments), test_utils=("test_schema", "test_faketensor"))


def _without(name, value, p):
    if name in ("seed", "weight", "bias", "input_bias", "attn_mask", "dr"):
        return None
    return {"p": p, "need_dw": False, "need_db": False, "need_dbias": False, "need_dinput_bias": False}.get(name, value)
