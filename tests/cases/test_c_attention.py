"""Part C of the collected bug reports: attention. The number in a name is the row's."""

import pytest
import torch
import torch.nn.functional as F

import ckpt_ops
from helpers_numerics import SEED, assert_close, assert_close_for
from helpers_ops import attention_op, make, run

sdpa = ckpt_ops.scaled_dot_product_attention
CAUSALS = [None, "upper_left", "lower_right"]


def _hidden(kind, device):
    seen = torch.ones(3, 4, dtype=torch.bool, device=device)
    seen[1] = False
    if kind == "bool":
        return seen
    return torch.zeros(3, 4, device=device).masked_fill(~seen, -torch.inf if kind == "inf" else torch.finfo(torch.float32).min)


@pytest.mark.parametrize("causal", CAUSALS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["bool", "inf", "finfo.min"])
def test_case_29_a_fully_masked_row(backend, kind, p, causal):
    q, k, v = (torch.randn(1, 1, n, 4, device=backend.device, requires_grad=True) for n in (3, 4, 4))
    o = sdpa(q, k, v, _hidden(kind, backend.device), p, causal_align=causal, seed=SEED)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    assert (o[0, 0, 1] == 0).all() and (dq[0, 0, 1] == 0).all()
    assert all(t.isfinite().all() for t in (o, dq, dk, dv))


def test_case_29_rows_before_the_first_key(backend):
    """Lower right with more queries than keys: the first rows see nothing."""
    q, k, v = (torch.randn(1, 2, n, 8, device=backend.device, requires_grad=True) for n in (70, 5, 5))
    o = sdpa(q, k, v, causal_align="lower_right")
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
    assert (o[:, :, :65] == 0).all() and (dq[:, :, :65] == 0).all() and (o[:, :, 65:] != 0).all()
    assert dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize("heads, kv_heads", [(3, 2), (2, 4), (5, 3)])
def test_case_33_heads_must_divide(backend, heads, kv_heads):
    q, k, v = (torch.randn(1, h, 5, 8, device=backend.device) for h in (heads, kv_heads, kv_heads))
    with pytest.raises(ValueError, match=f"query heads \\({heads}\\) must be a multiple of the key heads \\({kv_heads}\\)"):
        sdpa(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (8, 1), (6, 3)])
@pytest.mark.parametrize("widths", [(16, 16), (16, 24)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_case_33_grouped_heads(backend, heads, kv_heads, widths, p):
    """Query head h uses key head h // G, in forward and backward."""
    backend.skip_alike((p == 0 or heads == 8) and widths != (16, 24))
    op = attention_op("upper_left")
    assert_close_for(op, (2, heads, kv_heads, 19, 19, *widths), torch.float32, backend.device, p=p)
    q, k, v = make(op, (1, heads, kv_heads, 7, 7, *widths), device=backend.device).values()
    group = heads // kv_heads
    expected = F.scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    torch.testing.assert_close(sdpa(q, k, v, enable_gqa=True), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3, 8, 40, 72, 80, 104, 129])
@pytest.mark.parametrize("n", [1, 17, 63, 65])
def test_case_34_any_width_and_length(backend, width, n):
    """Fresh memory is NaN here, so an element left unwritten would show."""
    op, shape = attention_op("upper_left"), (1, 2, 2, n, n, width, width)
    if n > 1:
        assert_close_for(op, shape, torch.float32, backend.device)
        return
    results = run(op, make(op, shape, device=backend.device))  # one key: o is v, and dq and dk are 0 plus rounding
    assert torch.equal(results["y"], make(op, shape)["v"].to(backend.device))
    assert results["dq"].abs().max() < 1e-5 and results["dk"].abs().max() < 1e-5


def test_case_34_nothing_is_written_beyond_the_result(backend):
    """Inputs in the middle of a larger buffer: what lies around them stays."""
    buffers = [torch.full((3, 2, 17, 13), 7.0, device=backend.device) for _ in range(3)]
    q, k, v = (b[1:2].copy_(torch.randn(1, 2, 17, 13)).detach().requires_grad_() for b in buffers)
    before = [b.clone() for b in buffers]
    sdpa(q, k, v).sum().backward()
    assert all(torch.equal(b, old) for b, old in zip(buffers, before))


def test_case_36_dropout_is_off_in_eval(backend):
    q, k, v = (torch.randn(1, 2, 9, 8, device=backend.device) for _ in range(3))
    module = ckpt_ops.nn.Attention(dropout_p=0.5).eval()
    state = torch.get_rng_state()
    one, two = module(q, k, v), module(q, k, v)
    assert torch.equal(torch.get_rng_state(), state)
    assert (
        torch.equal(one, two)
        and torch.equal(one, sdpa(q, k, v))
        and torch.equal(one, sdpa(q, k, v, dropout_p=0.5, training=False))
    )
    assert not torch.equal(module.train()(q, k, v), one)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_case_37_30_repeats(fused, p):
    op = attention_op("upper_left")
    t = make(op, (1, 2, 1, 130, 130, 16, 16) if fused.slow else (2, 4, 2, 130, 130, 16, 16), device=fused.device)
    first = run(op, t, dict(p=p, seed=SEED))
    for _ in range(1 if fused.slow else 29):
        again = run(op, t, dict(p=p, seed=SEED))
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_masks_of_finfo_min_hide_in_every_dtype(backend):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(1, 1, 5, 8, dtype=dtype, device=backend.device) for _ in range(3))
        hide = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0], device=backend.device) == 1
        mask = torch.zeros(5, 5, dtype=dtype, device=backend.device).masked_fill(hide, torch.finfo(dtype).min)
        assert_close(
            attention_op(), {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_(), "attn_mask": mask}
        )
