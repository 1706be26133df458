"""The numerics rule and the mask over random shapes, layouts, dtypes and probabilities."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt_ops
from helpers_backends import DEVICES, READY
from helpers_numerics import assert_close
from helpers_ops import (
    ACT_DROPOUTS,
    ATTENTIONS,
    DROPOUT,
    DROPOUT_ADD,
    DROPOUT_ADD_LAYER_NORM,
    DROPOUT_ADD_RMS_NORM,
    LAYOUTS,
    NORM_OPS,
    PARAMETERS,
    make,
)

names = pytest.mark.parametrize("name", READY)
# At least some 50 kept elements: of fewer, an error is not a mean. Small sizes are listed in the other tests.
shapes = st.lists(st.integers(1, 4), max_size=3).flatmap(lambda lead: st.integers(100, 200).map(lambda n: (*lead, n)))
layouts = st.sampled_from(LAYOUTS)
# Not float64: of a handful of elements, the truth's own last bit is no smaller than what is measured.
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
ps = st.sampled_from([0.0, 0.1, 0.5])
seeds = st.integers(-(2**63), 2**63 - 1)
ROW_OPS = [DROPOUT, *ACT_DROPOUTS, DROPOUT_ADD, DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM, *NORM_OPS]


@names
@pytest.mark.parametrize("op", ROW_OPS, ids=str)
@given(shape=shapes, dtype=dtypes, layout=layouts, p=ps, seed=seeds, drop=st.sets(st.sampled_from(PARAMETERS)))
def test_row_ops(name, op, shape, dtype, layout, p, seed, drop):
    with ckpt_ops.use_backend(name):
        if op is DROPOUT:
            p = p or 0.5  # at 0 it returns its input, strides and all
        t = make(op, shape, dtype, DEVICES[name], layout=layout, without=drop)
        assert_close(op, t, p if op.random else 0.0, seed, shape=shape)


# batch, heads a group, key heads, queries, keys beyond them, head_dim, value's. A query that sees one key has
# gradients of 0 plus rounding, so there are enough queries for those not to be all.
attention_shapes = st.tuples(*(st.integers(*r) for r in [(1, 2), (1, 3), (1, 2), (16, 40), (0, 40), (8, 40), (8, 40)])).map(
    lambda s: (s[0], s[1] * s[2], s[2], s[3], s[3] + s[4], *s[5:])
)


# float32 has its listed sizes: at some small ones the log-sum-exp's own rounding takes all that the rule allows.
half = st.sampled_from([torch.bfloat16, torch.float16])
unequal = layouts.filter(lambda name: name != "expanded")  # equal keys have gradients of 0 plus rounding


@names
@pytest.mark.parametrize("op", ATTENTIONS[:3], ids=str)
@given(shape=attention_shapes, dtype=half, layout=unequal, p=ps, seed=seeds)
def test_attention(name, op, shape, dtype, layout, p, seed):
    with ckpt_ops.use_backend(name):
        assert_close(op, make(op, shape, dtype, DEVICES[name], layout=layout), p, seed, shape=shape)


@names
@given(shape=shapes, layout=layouts, seed=seeds)
def test_seeded_results_do_not_depend_on_the_layout(name, shape, layout, seed):
    with ckpt_ops.use_backend(name):
        t = make(DROPOUT, shape, torch.float32, DEVICES[name], layout=layout)["x"]
        assert torch.equal(ckpt_ops.dropout(t, 0.5, seed=seed), ckpt_ops.dropout(t.contiguous(), 0.5, seed=seed))
