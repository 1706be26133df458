"""scaled_dot_product_attention: numerics over sizes, heads and masks; bytes; errors."""

import pytest
import torch
import torch.nn.functional as F

import ckpt_ops
from helpers_numerics import SEED, assert_close, assert_close_for
from helpers_ops import DTYPES, LAYOUTS, attention_op, make

PLAIN = attention_op()
UPPER = attention_op("upper_left")
LOWER = attention_op("lower_right")
causals = pytest.mark.parametrize("op", [PLAIN, UPPER, LOWER], ids=str)
sdpa = ckpt_ops.scaled_dot_product_attention

# batch, query heads, key heads, queries, keys, head_dim, value's head_dim
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 3, 17, 17, 8, 8),
    (1, 2, 1, 63, 65, 40, 40),
    (1, 2, 2, 65, 129, 64, 64),
    (1, 6, 2, 130, 33, 16, 24),
    (2, 8, 1, 3, 70, 72, 5),
    (1, 1, 1, 9, 300, 256, 129),
    (1, 1, 1, 257, 64, 80, 104),
]
EMPTY = [(0, 2, 2, 3, 4, 8, 8), (2, 2, 2, 0, 4, 8, 8), (2, 2, 2, 3, 0, 8, 8)]


@causals
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numerics(backend, op, shape, dtype):
    backend.skip_alike(op is not LOWER and dtype != torch.float32)
    assert_close_for(op, shape, dtype, backend.device)


@causals
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (1, 4, 5)])
def test_numerics_with_dropout(backend, op, shape, dtype):
    backend.skip_alike((op is not LOWER or shape == SHAPES[5]) and (dtype != torch.float32 or shape == SHAPES[4]))
    assert_close_for(op, shape, dtype, backend.device, p=0.3)


@causals
@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_empty(backend, op, shape, p):
    t = make(op, shape, device=backend.device)
    (o,) = op.ours(t, p=p)
    assert o.shape == (shape[0], shape[1], shape[3], shape[6]) and (o == 0).all()
    o.sum().backward()
    assert all((x.grad == 0).all() and x.grad.shape == x.shape for x in t.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend, layout):
    assert_close_for(UPPER, (2, 4, 2, 19, 19, 16, 16), torch.float32, backend.device, p=0.3, layout=layout)


def test_heads_that_are_views_of_one_projection(backend):
    """q, k, v as a model makes them: unbind of [B, N, 3, H, D], transposed."""
    qkv = torch.randn(2, 21, 3, 4, 16, device=backend.device)
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in qkv.unbind(2))
    assert_close(UPPER, {"q": q, "k": k, "v": v}, p=0.2, shape=(2, 4, 4, 21, 21, 16, 16))


MASKS = {
    "bool": lambda n, m: torch.rand(n, m) < 0.7,
    "float": lambda n, m: torch.randn(n, m),
    "inf": lambda n, m: torch.zeros(n, m).masked_fill(torch.rand(n, m) < 0.3, -torch.inf),
}


@causals
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("lead", [(), (2, 1), (1, 3), (2, 3)])
def test_masks_broadcast(backend, op, kind, lead):
    backend.skip_alike(op is not LOWER and lead != (2, 1))
    shape = (2, 3, 3, 10, 37, 8, 8)
    mask = torch.stack([MASKS[kind](10, 37) for _ in range(max(1, torch.Size(lead).numel()))]).reshape(*lead, 10, 37)
    t = make(op, shape, device=backend.device)
    assert_close(op, t | {"attn_mask": mask.to(backend.device)}, p=0.25, shape=shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float_mask_of_the_inputs_dtype(backend, dtype):
    shape = (1, 2, 2, 10, 37, 8, 8)
    mask = torch.zeros(10, 37, dtype=dtype).masked_fill(torch.rand(10, 37) < 0.3, torch.finfo(dtype).min)
    t = make(PLAIN, shape, dtype, backend.device)
    assert_close(PLAIN, t | {"attn_mask": mask.to(backend.device)}, shape=shape)


@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_leading_dimensions_are_torchs(backend, dims):
    lead = {2: (), 3: (3,), 4: (2, 3), 5: (2, 2, 3)}[dims]
    q, k, v = (torch.randn(*lead, n, 8, device=backend.device) for n in (5, 7, 7))
    torch.testing.assert_close(sdpa(q, k, v), F.scaled_dot_product_attention(q, k, v), rtol=1e-5, atol=1e-6)


def test_leading_dimensions_broadcast(backend):
    q = torch.randn(2, 3, 5, 8, device=backend.device)
    k, v = torch.randn(2, 1, 3, 7, 8, device=backend.device)
    expected = F.scaled_dot_product_attention(q, k.expand(2, 3, 7, 8), v.expand(2, 3, 7, 8))
    torch.testing.assert_close(sdpa(q, k, v), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 30.0])
def test_scale(backend, scale):
    q, k, v = (torch.randn(1, 2, 9, 8, device=backend.device) for _ in range(3))
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    torch.testing.assert_close(sdpa(q, k, v, scale=scale).double(), expected, rtol=1e-4, atol=1e-4)


def test_large_scores_do_not_overflow(backend):
    """exp of the plain scores would be inf."""
    q = torch.full((1, 1, 3, 4), 60.0, device=backend.device)
    v = torch.randn(1, 1, 5, 4, device=backend.device)
    torch.testing.assert_close(sdpa(q, torch.full((1, 1, 5, 4), 60.0), v), v.mean(2, keepdim=True).expand(1, 1, 3, 4))


def test_is_causal_is_upper_left(backend):
    q, k, v = (torch.randn(1, 2, n, 8, device=backend.device) for n in (5, 9, 9))
    assert torch.equal(sdpa(q, k, v, is_causal=True), sdpa(q, k, v, causal_align="upper_left"))
    torch.testing.assert_close(sdpa(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_kept_bytes(fused, dtype, p):
    """q, k, v, o, 4 bytes a query row (8 for float64), and the seed: nothing of size Nq x Nk."""
    t = make(PLAIN, (2, 4, 2, 64, 96, 16, 24), dtype, fused.device)
    statistic = 8 if dtype == torch.float64 else 4
    kept = ckpt_ops.memory.kept(lambda: PLAIN.ours(t, p=p)[0])
    o = kept.output
    expected = sum(x.nbytes for x in (*t.values(), o)) + 2 * 4 * 64 * statistic + (8 if p else 0)
    assert kept.bytes == expected


def test_memory_is_linear_in_sequence_length(fused):
    """Forward and backward: scratch stays below one score matrix."""
    n = 256 if fused.slow else 1024
    q, k, v = (torch.randn(1, 2, n, 16, device=fused.device, requires_grad=True) for _ in range(3))
    peak = ckpt_ops.memory.peak(lambda: sdpa(q, k, v, dropout_p=0.1).sum().backward())
    assert peak < 2 * n * n * 4


def test_a_shard_of_heads_and_batch_has_the_whole_tensors_mask(backend):
    q, k, v = (torch.randn(3, 4, 9, 8, device=backend.device) for _ in range(3))
    whole = sdpa(q, k, v, dropout_p=0.4, seed=SEED)
    part = tuple(t[1:, 2:] for t in (q, k, v))
    shard = sdpa(*part, dropout_p=0.4, seed=SEED, heads_total=4, origin=(1 * 4 + 2, 0, 0))
    torch.testing.assert_close(shard, whole[1:, 2:], rtol=1e-5, atol=1e-6)


def _qkv(shape=(1, 2, 2, 3, 5, 4, 4)):
    return make(PLAIN, shape).values()


def test_bad_arguments(backend):
    q, k, v = (t.detach().to(backend.device) for t in _qkv())
    wide = torch.randn(1, 2, 3, 257, device=backend.device)
    cases = [
        (ValueError, "causal_align must be", lambda: sdpa(q, k, v, causal_align="lower_left")),
        (ValueError, "head_dim is at most 256", lambda: sdpa(wide, wide, wide)),
        (ValueError, "does not broadcast", lambda: sdpa(q, k, v, torch.ones(3, 4, dtype=torch.bool, device=q.device))),
        (TypeError, "attn_mask must be bool or floating", lambda: sdpa(q, k, v, torch.ones(3, 5, dtype=torch.int32))),
        (ValueError, "share head_dim", lambda: sdpa(q[..., :3], k, v)),
        (ValueError, "heads and length", lambda: sdpa(q, k, v[:, :, :4])),
        (ValueError, "same number of dimensions", lambda: sdpa(q[0], k, v)),
        (TypeError, "share a dtype", lambda: sdpa(q.double(), k, v)),
        (ValueError, "pass enable_gqa=True", lambda: sdpa(q, k[:, :1], v[:, :1])),
        (ValueError, "leading dimensions .* do not broadcast", lambda: sdpa(q.repeat(2, 1, 1, 1), k.repeat(3, 1, 1, 1), v)),
        (ValueError, "heads_total", lambda: sdpa(q, k, v, heads_total=1)),
        (TypeError, "key must be a tensor", lambda: sdpa(q, [1.0], v)),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()


def test_a_mask_that_wants_a_gradient(fused):
    q, k, v = _qkv()
    mask = torch.zeros(3, 5, requires_grad=True)
    with pytest.raises(ValueError, match="attn_mask requires a gradient.*reference"):
        sdpa(q, k, v, mask)
    sdpa(q, k, v, mask, backend="reference").sum().backward()
    assert mask.grad is not None
