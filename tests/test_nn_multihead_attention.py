"""MultiheadAttention: torch's results and gradients for every mask and option, and no copies."""

import functools

import pytest
import torch
from torch import nn

import ckpt_ops
from helpers_layers import HEADS, E, assert_equals_torchs, causal, hidden_keys, ours

each = pytest.mark.parametrize

MASKS = {
    "none": lambda b, n, m: {},
    "bool": lambda b, n, m: dict(attn_mask=torch.ones(n, m, dtype=torch.bool).triu(1)),
    "floating": lambda b, n, m: dict(attn_mask=torch.randn(n, m)),
    "a head each": lambda b, n, m: dict(attn_mask=(torch.rand(b * HEADS, n, m) < 0.3).index_fill(2, torch.tensor(0), False)),
    "padding": lambda b, n, m: dict(key_padding_mask=hidden_keys(b, m)),
    "both": lambda b, n, m: dict(attn_mask=torch.ones(n, m, dtype=torch.bool).triu(1), key_padding_mask=hidden_keys(b, m)),
    "both, floating": lambda b, n, m: dict(
        attn_mask=torch.randn(n, m), key_padding_mask=torch.zeros(b, m).masked_fill(hidden_keys(b, m), -torch.inf)
    ),
    "causal hint": lambda b, n, m: dict(attn_mask=torch.ones(n, m, dtype=torch.bool).triu(1), is_causal=True),
    "causal hint and padding": lambda b, n, m: dict(
        attn_mask=torch.ones(n, m, dtype=torch.bool).triu(1), is_causal=True, key_padding_mask=hidden_keys(b, m)
    ),
}
OPTIONS = {
    "plain": {},
    "no bias": dict(bias=False),
    "other key and value sizes": dict(kdim=24, vdim=40),
    "add_bias_kv": dict(add_bias_kv=True),
    "add_zero_attn": dict(add_zero_attn=True),
}


def as_masks_of(x, masks):
    return {k: m.to(x.dtype) if isinstance(m, torch.Tensor) and m.is_floating_point() else m for k, m in masks.items()}


def attend(masks, module, *inputs):
    query, key, value = inputs if len(inputs) == 3 else (inputs[0], inputs[-1], inputs[-1])
    y, weights = module(query, key, value, need_weights=False, **as_masks_of(query, masks))
    assert weights is None
    return y


@each("batch_first", [True, False])
@each("masks", MASKS)
@each("same", [1, 2, 3], ids=["self", "memory", "three"])
def test_attention(backend, batch_first, masks, same):
    b, n, m = 2, 6, 6 if same == 1 else 9
    shapes = [(b, n, E), (b, m, E), (b, m, E)][:same]
    inputs = [torch.randn(s if batch_first else (s[1], s[0], s[2])) for s in shapes]
    mine, twin = (cls(E, HEADS, batch_first=batch_first) for cls in (ours.MultiheadAttention, nn.MultiheadAttention))
    assert_equals_torchs(mine, twin, functools.partial(attend, MASKS[masks](b, n, m)), inputs)


@each("options", OPTIONS)
@each("masks", ["none", "both"])
def test_attention_options(backend, options, masks):
    mine, twin = (
        cls(E, HEADS, batch_first=True, **OPTIONS[options]) for cls in (ours.MultiheadAttention, nn.MultiheadAttention)
    )
    inputs = [torch.randn(2, n, size) for n, size in ((6, E), (9, twin.kdim), (9, twin.vdim))]
    assert_equals_torchs(mine, twin, functools.partial(attend, MASKS[masks](2, 6, 9)), inputs)


@each("masks", MASKS)
def test_attention_without_a_batch(backend, masks):
    made = {k: m[0] if k == "key_padding_mask" else m for k, m in MASKS[masks](1, 6, 6).items()}
    mine, twin = (cls(E, HEADS) for cls in (ours.MultiheadAttention, nn.MultiheadAttention))
    assert_equals_torchs(mine, twin, functools.partial(attend, made), [torch.randn(6, E)])


def test_attention_weights_come_from_torch(backend):
    mine, twin = (cls(E, HEADS, dropout=0.5, batch_first=True) for cls in (ours.MultiheadAttention, nn.MultiheadAttention))
    mine.load_state_dict(twin.state_dict())
    x = torch.randn(2, 6, E)
    for options in ({}, dict(average_attn_weights=False), dict(attn_mask=causal(6))):
        torch.manual_seed(1)
        expected = twin(x, x, x, **options)
        torch.manual_seed(1)
        for one, two in zip(mine(x, x, x, **options), expected):
            assert torch.equal(one, two)


def test_attention_learns_a_mask_that_requires_a_gradient(backend):
    mine, twin = (cls(E, HEADS, batch_first=True) for cls in (ours.MultiheadAttention, nn.MultiheadAttention))

    def call(module, x, bias):
        return module(x, x, x, attn_mask=bias, need_weights=False)[0]

    assert_equals_torchs(mine, twin, call, [torch.randn(2, 6, E), torch.randn(6, 6)])


def test_a_query_that_sees_nothing_is_0(backend):
    module = ours.MultiheadAttention(E, HEADS, batch_first=True)
    x = torch.randn(2, 6, E, requires_grad=True)
    hidden = torch.zeros(6, 6, dtype=torch.bool)
    hidden[1] = True
    y, _ = module(x, x, x, attn_mask=hidden, need_weights=False)
    y[:, [0, 2, 3, 4, 5]].sum().backward()
    assert torch.equal(y[:, 1], module.out_proj.bias.expand(2, E)) and x.grad.isfinite().all()


def test_the_causal_hint_needs_its_mask():
    x = torch.randn(2, 6, E)
    for cls in (ours.MultiheadAttention, nn.MultiheadAttention):
        with pytest.raises(RuntimeError, match="is_causal"):
            cls(E, HEADS)(x, x, x, need_weights=False, is_causal=True)


B, N, H, A = 2, 128, 128, 4


def test_no_copies_of_what_attention_needs(fused):
    """Self-attention alone: the input, one storage for q, k, v, the result, statistics."""
    module = ours.MultiheadAttention(H, A, dropout=0.1)
    x = torch.randn(N, B, H, requires_grad=True)
    kept = ckpt_ops.memory.kept(lambda x: module(x, x, x, need_weights=False)[0], x)
    assert kept.bytes == 5 * x.nbytes + 4 * B * N * A + 8
