"""The C++ functions of csrc/autograd do what the Python ones do: same bits, same tensors kept; the rest they decline."""

import itertools

import pytest
import torch
from torch.overrides import TorchFunctionMode

import ckpt_ops
from ckpt_ops import native
from helpers_backends import READY

pytestmark = pytest.mark.skipif("cpu" not in READY or native.loaded() is None, reason="no compiled extension")

NORMS = {
    "LayerNorm": lambda x, w, b: ckpt_ops.layer_norm(x, (24,), w, b, backend="cpu"),
    "RMSNorm": lambda x, w, b: ckpt_ops.rms_norm(x, 24, w, offset=0.5, backend="cpu"),
}
each = pytest.mark.parametrize("name", NORMS)


def in_python(monkeypatch):
    monkeypatch.setattr(native, "loaded", lambda: None)


def inputs(dtype=torch.float32, parameters=torch.float32, needs=(True, True, True), given=(True, True)):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 24, generator=generator).to(dtype).requires_grad_(needs[0])
    w, b = (
        torch.randn(24, generator=generator).to(parameters).requires_grad_(n) if g else None for g, n in zip(given, needs[1:])
    )
    return x, w, b


def run(norm, x, w, b):
    """(output, gradients, what is kept)"""
    kept = []

    def pack(t):
        kept.append((tuple(t.shape), t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = norm(x, w, b)
    wanted = [t for t in (x, w, b) if t is not None and t.requires_grad]
    grads = torch.autograd.grad(y, wanted, torch.ones_like(y).cumsum(-1), allow_unused=True) if y.requires_grad else ()
    return y, grads, sorted(kept, key=str)


def is_plain(y):
    return "CppNode" in y.grad_fn.name()


@each
@pytest.mark.parametrize(
    "dtype, parameters", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2]
)
def test_same_bits_and_same_tensors_kept(name, dtype, parameters, monkeypatch):
    for needs, given in itertools.product(
        itertools.product((True, False), repeat=3), itertools.product((True, False), repeat=2)
    ):
        arguments = inputs(dtype, parameters, needs, given)
        y, grads, kept = run(NORMS[name], *arguments)
        with monkeypatch.context() as patch:
            in_python(patch)
            expected, expected_grads, expected_kept = run(NORMS[name], *arguments)
        assert torch.equal(y, expected) and y.requires_grad == expected.requires_grad
        assert kept == expected_kept, (needs, given)
        for grad, other in zip(grads, expected_grads, strict=True):
            assert (grad is None) == (other is None)
            assert grad is None or torch.equal(grad, other) and grad.dtype == other.dtype
        if y.requires_grad:
            assert is_plain(y) and not is_plain(expected)


class Subclass(torch.Tensor):
    pass


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_what_is_not_plain_is_declined():
    x, w, b = inputs()
    assert is_plain(ckpt_ops.layer_norm(x, (24,), w, b))
    assert is_plain(ckpt_ops.layer_norm(torch.nn.Parameter(x.detach()), torch.Size([24]), w, b))
    for change in (
        dict(normalized_shape=[24]),
        dict(eps=1),
        dict(save="output"),
        dict(backend="reference"),
        dict(input=x.as_subclass(Subclass)),
    ):
        arguments = dict(input=x, normalized_shape=(24,), weight=w, bias=b) | change
        y = ckpt_ops.layer_norm(**arguments)
        assert not is_plain(y)
        expected = ckpt_ops.layer_norm(x, (24,), w, b, float(arguments.get("eps", 1e-5)))
        torch.testing.assert_close(y.as_subclass(torch.Tensor), expected)
    with Mode():
        assert not is_plain(ckpt_ops.layer_norm(x, (24,), w, b))


@pytest.mark.parametrize(
    "change, error",
    [
        (dict(normalized_shape=(23,)), ValueError),
        (dict(normalized_shape=()), ValueError),
        (dict(weight=torch.ones(23)), ValueError),
        (dict(weight=torch.ones(24, dtype=torch.int64)), TypeError),
        (dict(weight=torch.ones(24, device="meta")), ValueError),
        (dict(input=torch.ones(5, 24, dtype=torch.int64)), TypeError),
        (dict(input=[1.0]), TypeError),
        (dict(save="nothing"), ValueError),
        (dict(backend="nonsense"), ValueError),
    ],
    ids=str,
)
def test_errors_are_the_python_functions(change, error):
    with pytest.raises(error, match="layer_norm|backend"):
        ckpt_ops.layer_norm(**(dict(input=torch.ones(5, 24), normalized_shape=(24,)) | change))


@each
def test_a_second_backward_is_torchs_error(name):
    x, w, b = inputs()
    y = NORMS[name](x, w, b).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@each
def test_an_in_place_change_of_what_is_kept_is_torchs_error(name):
    x, w, b = inputs()
    z = x * 1
    y = NORMS[name](z, w, b)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@each
def test_compiled_autograd(name):
    x, w, b = inputs()
    y, grads, _ = run(NORMS[name], x, w, b)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        _, compiled, _ = run(NORMS[name], x, w, b)
    for grad, other in zip(grads, compiled, strict=True):
        assert grad is other or torch.equal(grad, other)
