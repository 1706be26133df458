"""Part B of the collected bug reports: norms and dropout + residual + norm. The number in a name is the row's."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import ckpt_ops
from helpers_numerics import SEED, assert_close, assert_close_for, error
from helpers_ops import ALL_OPS, DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM, NORM_OPS, layer_norm_op, make, rms_norm_op, run

LN, RMS = layer_norm_op("input"), rms_norm_op("input")
NORMS = [*NORM_OPS, DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM]
norms = pytest.mark.parametrize("op", NORMS, ids=str)


@pytest.mark.parametrize("shape, mean", [((8, 1024), 1e4), ((5, 4), 2000)])
@pytest.mark.parametrize("op", [LN, layer_norm_op("output"), DROPOUT_ADD_LAYER_NORM], ids=str)
def test_case_13_large_mean(backend, op, shape, mean):
    t = {"x": (torch.randn(shape) + mean).to(backend.device), "residual": torch.zeros(shape, device=backend.device)}
    y = op.ours(t, p=0.0)[0]
    true = F.layer_norm(t["x"].double(), shape[-1:])
    assert (y - true).abs().max() <= 2e-3
    variance = y.double().var(-1, unbiased=False)
    assert ((variance >= 0.99) & (variance <= 1.01)).all()


@pytest.mark.parametrize("function", [ckpt_ops.layer_norm, ckpt_ops.dropout_add_layer_norm])
def test_case_15_half_precision_zeros(backend, function):
    """A constant row in float16 at an eps far below its smallest number (of RMSNorm the true gradient is 1e6, its inf)."""
    x = torch.zeros(2, 8, dtype=torch.float16, device=backend.device, requires_grad=True)
    bias = torch.randn(8, device=backend.device).half()
    if function is ckpt_ops.layer_norm:
        y = function(x, (8,), None, bias, 1e-12)
    else:
        y, _ = function(x, x, (8,), None, bias, 1e-12)
    assert torch.equal(y, bias.expand(2, 8))
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_case_15_large_half_precision_values(backend):
    x = torch.full((2, 128), 3e4, dtype=torch.float16, device=backend.device, requires_grad=True)
    y = ckpt_ops.rms_norm(x, (128,))
    y.sum().backward()
    assert (y == 1.0).all() and x.grad.isfinite().all()
    y = ckpt_ops.dropout_add_rms_norm(x, torch.zeros_like(x), (128,))[0]
    assert (y == 1.0).all()


@norms
@pytest.mark.parametrize("shape", [(65539, 8), (70001, 16)])
def test_case_16_more_than_65535_rows(backend, op, shape):
    backend.skip_if_slow(shape[0] * shape[1])
    t = make(op, shape, device=backend.device)
    ours = run(op, t, dict(p=0.3, seed=SEED))
    with ckpt_ops.use_backend("reference"):
        true = run(op, {n: x.detach().double().requires_grad_() for n, x in t.items()}, dict(p=0.3, seed=SEED))
    for name, value in true.items():
        end = slice(-5, None) if value.dim() == 2 else slice(None)
        assert error(ours[name][end], value[end]) < 2e-6, name


@norms
@pytest.mark.parametrize("weight, bias", list(itertools.product([True, False], repeat=2)))
def test_case_17_any_parameters_may_be_absent(backend, op, weight, bias):
    without = {name for name, there in (("weight", weight), ("bias", bias), ("input_bias", bias)) if not there}
    t = make(op, (6, 10), device=backend.device, without=without)
    assert_close(op, t, p=0.3, shape=(6, 10))


@pytest.mark.parametrize("op", [op for op in ALL_OPS if op.stem != "attention"], ids=str)
@pytest.mark.parametrize("shape", [(3, 0, 16), (0, 16), (4, 0)])
def test_case_18_empty(backend, op, shape):
    """Shapes are kept, and parameters get gradients of zeros (not None), which data-parallel training reduces."""
    results = run(op, make(op, shape, device=backend.device), dict(p=0.3, seed=SEED))
    assert all(results[name].shape == shape for name in (*op.outputs, "dx"))
    for name in set(results) & {"dweight", "dbias", "dinput_bias"}:
        assert results[name].shape == shape[-1:] and (results[name] == 0).all(), name


@pytest.mark.parametrize("op", ALL_OPS, ids=str)
def test_case_19_devices_do_not_mix(backend, op):
    """Any one input on another device is an error before any kernel runs."""
    t = make(op, device=backend.device)
    with pytest.raises((ValueError, RuntimeError), match="must share a device"):
        if op.random:
            op.ours(t, p=0.3, seed=torch.empty(1, dtype=torch.int64, device="meta"))
        else:
            ckpt_ops.layer_norm(t["x"], (40,), t["weight"].to("meta"))
    for name in t if len(t) > 1 else ():
        mixed = {n: x.to("meta") if n == name else x for n, x in t.items()}
        with pytest.raises((ValueError, RuntimeError), match="must share a device"):
            op.ours(mixed, p=0.3, seed=SEED)


@norms
def test_case_20_the_upstream_gradient_stays(backend, op):
    t = make(op, device=backend.device)
    g = torch.randn(op.shape, device=backend.device)
    before, version = g.clone(), g._version
    torch.autograd.grad(op.ours(t, p=0.3, seed=SEED), list(t.values()), [g] * len(op.outputs))
    assert torch.equal(g, before) and g._version == version


@pytest.mark.parametrize("op", NORM_OPS, ids=str)
def test_case_20_a_diamond(backend, op):
    """r + norm(norm(r)): the gradient of r is needed twice."""

    def gradient(x):
        return torch.autograd.grad((x + op.ours({"x": op.ours({"x": x})[0]})[0]).square().sum(), x)[0]

    x = torch.randn(6, 40, device=backend.device, requires_grad=True)
    ours = gradient(x)
    with ckpt_ops.use_backend("reference"):
        true = gradient(x.detach().double().requires_grad_())
    assert error(ours, true) < 1e-6


def test_case_22_what_frozen_parameters_save(fused):
    """dW's input is not kept for a frozen weight; only what each gradient needs is."""
    x = torch.randn(64, 256, device=fused.device)
    w, b = torch.ones(256, device=fused.device), torch.zeros(256, device=fused.device)

    def bytes_of(call, *tensors, grads):
        tensors = [t.clone().requires_grad_(wanted) for t, wanted in zip(tensors, grads)]
        return ckpt_ops.memory.kept(lambda: call(*tensors)).bytes

    def layer_norm(x, w, b):
        return ckpt_ops.layer_norm(x, (256,), w, b)

    rows, statistics, parameter = x.nbytes, 64 * 8, w.nbytes
    assert bytes_of(layer_norm, x, w, b, grads=(True, True, True)) == rows + statistics + parameter
    assert bytes_of(layer_norm, x, w, b, grads=(False, True, True)) == rows + statistics  # dw needs no w
    assert bytes_of(layer_norm, x, w, b, grads=(True, False, False)) == rows + statistics + parameter
    assert bytes_of(layer_norm, x, w, b, grads=(False, False, True)) == 0
    assert bytes_of(layer_norm, x, w, b, grads=(False, False, False)) == 0

    def dropout_add(x, r, b):
        return ckpt_ops.dropout_add(x, r, 0.1, b)

    assert bytes_of(dropout_add, x, x, b, grads=(True, True, True)) == 8
    assert bytes_of(dropout_add, x, x, b, grads=(False, False, True)) == 8


@pytest.mark.parametrize("op", ALL_OPS, ids=str)
def test_case_22_frozen_parameters_cost_no_kernel_work(fused, op):
    """The backward kernels are told what is wanted: a frozen parameter's gradient is not made."""
    names = [n for n in op.shapes(op.shape) if n in ("weight", "bias", "input_bias")]
    if not names:
        pytest.skip("no parameters")
    calls = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
            result = fn(*args, **(kwargs or {}))
            if "_bwd" in str(fn):
                calls.append(dict(zip((a.name for a in fn._schema.arguments), args)))
            return result

    t = make(op, device=fused.device, frozen=names)
    with Watch():
        run(op, t, dict(p=0.3, seed=SEED))
    assert calls
    for call in calls:
        assert not any(call[need] for need in ("need_dw", "need_db", "need_dbias", "need_dinput_bias") if need in call)


def test_case_23_the_offset_is_added_in_float32(backend):
    """bfloat16(1 + 0.00390625) would be 1.0; the factor is 1.00390625."""
    x = torch.ones(1, 8, dtype=torch.bfloat16, device=backend.device)
    w = torch.full((8,), 0.00390625, dtype=torch.bfloat16, device=backend.device)
    x = x * 128  # so that the factor survives the result's own rounding
    y = ckpt_ops.dropout_add_rms_norm(x.float(), torch.zeros(1, 8, device=x.device), (8,), w.float(), 1e-12, offset=1.0)[0]
    torch.testing.assert_close(y, torch.full_like(y, 1.00390625), rtol=1e-6, atol=0)
    y = ckpt_ops.rms_norm(x.float(), (8,), w, 1e-12, offset=1.0)
    torch.testing.assert_close(y, torch.full_like(y, 1.00390625), rtol=1e-6, atol=0)


def test_case_23_eps_is_the_sources(backend):
    x = torch.full((1, 64), 1e-5, device=backend.device)
    for eps, expected in ((None, 0.02895), (1e-6, 0.0100)):
        assert abs(ckpt_ops.rms_norm(x, (64,), eps=eps)[0, 0].item() - expected) < 1e-5
        torch.testing.assert_close(ckpt_ops.rms_norm(x, (64,), eps=eps), F.rms_norm(x, (64,), eps=eps))


@norms
def test_case_24_autocast_and_no_float32_copy(fused, op):
    shape = (4, 4096)
    t = make(op, shape, torch.bfloat16, fused.device, param_dtype=torch.float32)
    copy = 4 * 4096 * 4
    with torch.autocast("cpu", torch.bfloat16):
        results = run(op, t, dict(p=0.3, seed=SEED))
        outputs = copy // 2 * len(op.outputs)
        parameters = 3 * 4096 * 4  # widened weights: not a function of the number of rows
        extra = ckpt_ops.memory.peak(lambda: op.ours(t, p=0.3, seed=SEED)) - outputs
    assert results["y"].dtype == results["dx"].dtype == torch.bfloat16
    assert all(results[n].dtype == torch.float32 for n in results if n in ("dweight", "dbias", "dinput_bias"))
    assert extra < min(copy, parameters + 1024)


@norms
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_case_25_compiled_is_eager_to_the_bit(fused, op, compiler):
    if compiler == "inductor" and op not in (NORM_OPS[2], DROPOUT_ADD_LAYER_NORM):
        pytest.skip("inductor is slow: two ops speak for all, their kernels being opaque to it alike")
    torch._dynamo.reset()
    t = {n: x.detach() for n, x in make(op, (64, 4096), torch.bfloat16, fused.device).items()}
    seed = torch.tensor([SEED], device=fused.device)
    compiled = torch.compile(lambda t, seed: op.ours(t, p=0.3, seed=seed), backend=compiler, fullgraph=True)
    for mine, expected in zip(compiled(t, seed), op.ours(t, p=0.3, seed=SEED)):
        assert torch.equal(mine, expected)


@norms
def test_case_26_second_derivatives(backend, op):
    """The reference has them; a kernel says that it has not."""
    t = make(op, (3, 5), torch.float64, backend.device)
    fn = lambda *values: op.ours(dict(zip(t, values)), p=0.3, seed=SEED)  # noqa: E731
    if not backend.fused:
        assert torch.autograd.gradgradcheck(fn, tuple(t.values()))
        return
    grads = torch.autograd.grad(fn(*t.values())[0].square().sum(), t["x"], create_graph=True)
    with pytest.raises(RuntimeError, match='double backward.*backend="reference"'):
        torch.autograd.grad(grads[0].sum(), t["x"])


HIDDEN = [1, 2, 3, 7, 127, 129, 1000, 5120, 12288, 16384, 16411, 65537]  # a slow backend loops over a row of 16411


@norms
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_case_28_any_hidden_size(backend, op, hidden, rows):
    backend.skip_if_slow(hidden * rows)
    backend.skip_alike(hidden in (2, 127, 1000, 5120) or (rows == 1 and hidden > 7))
    if hidden > 2 or op.stem == "rms_norm" or op is DROPOUT_ADD_RMS_NORM:
        assert_close_for(op, (rows, hidden), torch.float32, backend.device, p=0.3)
        return
    # Of one or two elements LayerNorm's gradient is what is left of terms of size rstd * dy that cancel: it can be no
    # better than a few ulps of those.
    t = make(op, (rows, hidden), device=backend.device)
    ours = run(op, t, dict(p=0.3, seed=SEED))
    with ckpt_ops.use_backend("reference"):
        true = run(op, {n: x.detach().double().requires_grad_() for n, x in t.items()}, dict(p=0.3, seed=SEED))
    largest = 1e-5**-0.5  # rstd where the variance is 0
    for name, value in true.items():
        scale = value.abs().max() if name in op.outputs else 5 * largest * rows
        assert (ours[name] - value).abs().max() <= 4 * torch.finfo(torch.float32).eps * scale, name
