"""Backends: what is ready, what is chosen, what is refused and with which words."""

import os
import subprocess
import sys

import pytest
import torch

import ckpt_ops
from ckpt_ops import dispatch
from helpers_backends import READY
from helpers_ops import EACH_OP, make

each = pytest.mark.parametrize("op", EACH_OP, ids=str)


def test_backends_says_ready_or_why_not():
    states = ckpt_ops.backends()
    assert list(states) == list(dispatch.BACKENDS) and states["reference"] == "ready"
    for name in ("cuda", "triton"):
        assert states[name] == "ready" or len(states[name]) > 10


@pytest.mark.skipif("CKPT_OPS_TEST_BACKENDS" in os.environ, reason="CKPT_OPS_TEST_BACKENDS narrows this run")
def test_the_suite_covers_the_compiled_kernels():
    assert "cpu" in READY, ckpt_ops.backends()["cpu"]


@each
def test_unknown_backend(op):
    t = make(op)
    refused = pytest.raises(ValueError, match="unknown backend 'cud'; choose one of reference, cpu, cuda, triton")
    with refused, ckpt_ops.use_backend("cud"):
        op.ours(t, p=0.5)
    public = {"attention": "scaled_dot_product_attention"}.get(op.stem, op.name.split("-")[0])
    call = getattr(ckpt_ops, public)
    with pytest.raises(ValueError, match="unknown backend 'cud'"):
        call(*_arguments(op, t), backend="cud")


def _arguments(op, t):
    x = t.get("x")
    return {
        "dropout": lambda: (x,),
        "act_dropout": lambda: (x, "gelu"),
        "dropout_add": lambda: (x, x),
        "layer_norm": lambda: (x, x.shape[-1:]),
        "rms_norm": lambda: (x, x.shape[-1:]),
        "dropout_add_norm": lambda: (x, x, x.shape[-1:]),
        "attention": lambda: (t["q"], t["q"], t["q"]),
    }[op.stem]()


@each
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_named_backend_is_refused_with_every_reason(op, name):
    if ckpt_ops.backends()[name] == "ready":
        pytest.skip(f"{name} is ready here")
    text = f"backend '{name}' cannot serve this call: .*; it runs on cuda"
    with ckpt_ops.use_backend(name), pytest.raises(RuntimeError, match=text):
        op.ours(make(op), p=0.5)


def test_the_nearest_name_wins():
    """backend= over use_backend over the environment; use_backend nests and is undone by an error."""
    x = torch.randn(3, 4, requires_grad=True)

    def served_by(**k):
        return "reference" if "MulBackward" in _names(ckpt_ops.dropout(x, 0.5, **k)) else "kernel"

    with ckpt_ops.use_backend("reference"):
        assert served_by() == "reference"
        if "cpu" in READY:
            assert served_by(backend="cpu") == "kernel"
            with ckpt_ops.use_backend("cpu"):
                assert served_by() == "kernel" and served_by(backend="reference") == "reference"
        with pytest.raises(ZeroDivisionError), ckpt_ops.use_backend("cpu"):
            raise ZeroDivisionError
        assert served_by() == "reference"


def _names(y):
    names, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        names.add(node.name().rstrip("0123456789"))
        todo.extend(n for n, _ in node.next_functions if n is not None)
    return names


def test_the_automatic_choice_is_the_kernel(fused):
    if fused.name != "cpu":
        pytest.skip("the automatic choice on CPU tensors is cpu")
    assert dispatch.choose("dropout", None, torch.randn(3)) == "cpu"


def _python(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


def test_the_environment_names_a_backend():
    code = "import torch, ckpt_ops; x = torch.ones(3, requires_grad=True); print(ckpt_ops.dropout(x, .5).grad_fn.name())"
    assert "Dropout" not in _python(code, CKPT_OPS_BACKEND="reference").stdout
    refused = _python(code, CKPT_OPS_BACKEND="nonsense")
    assert refused.returncode != 0 and "unknown backend 'nonsense'" in refused.stderr


def test_falling_back_warns_once_and_says_why(monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch, "_named", None)
    monkeypatch.setattr(dispatch.native, "why_not", lambda: "no compiler was found")
    x = torch.randn(3, 4)
    with pytest.warns(RuntimeWarning, match="reference backend: cpu: no compiler was found") as caught:
        for _ in range(3):
            ckpt_ops.dropout(x, 0.5)
            ckpt_ops.layer_norm(x, (4,))
    assert len(caught) == 1
    with pytest.raises(RuntimeError, match="backend 'cpu' cannot serve this call: no compiler was found"):
        ckpt_ops.dropout(x, 0.5, backend="cpu")


@each
def test_meta_tensors_get_shapes(op):
    """Without a kernel or data: the fake kernels' shapes and dtypes are the real ones."""
    t = {n: x.to("meta") for n, x in make(op).items()}
    real = op.ours(make(op), p=0.5, seed=1)
    for mine, expected in zip(op.ours(t, p=0.5, seed=1), real):
        assert mine.is_meta and (mine.shape, mine.dtype, mine.stride()) == (expected.shape, expected.dtype, expected.stride())
