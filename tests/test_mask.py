"""The mask contract: pinned vectors, an independent Philox, shards, statistics, and the masks that ops really apply."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt_ops
import helpers_philox
from ckpt_ops import native, reference
from helpers_backends import READY
from helpers_numerics import SEED
from helpers_ops import ACT_DROPOUTS, DROPOUT, DROPOUT_ADD, DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM, LAYOUTS, relayout
from helpers_philox import threshold, torch_mask

VECTORS = json.loads((Path(__file__).parent / "mask_vectors.json").read_text())


# --- vectors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["philox4x32_7"], ids=lambda v: f"{v['key'][0]:x}")
def test_philox_words(vector):
    counter, key, words = vector["counter"], vector["key"], vector["words"]
    assert [int(w) for w in helpers_philox.philox(counter, key, vector["rounds"])] == words
    tensors = [torch.tensor(c, dtype=torch.int64) for c in counter], [torch.tensor(k, dtype=torch.int64) for k in key]
    assert [int(w) for w in reference.philox4x32(*tensors)] == words


@pytest.mark.skipif("cpu" not in READY, reason="the cpu backend is not under test")
@pytest.mark.parametrize("vector", VECTORS["philox4x32_7"], ids=lambda v: f"{v['key'][0]:x}")
def test_philox_words_of_the_extension(vector):
    assert native.extension().philox(vector["counter"], vector["key"]) == vector["words"]


@pytest.mark.parametrize("vector", VECTORS["masks"], ids=lambda v: f"{v['shape']}-{v['p']}-{v['seed']}")
def test_mask_vectors(backend, vector):
    place = {name: vector[name] for name in ("stream", "origin")}
    shape, p, seed = vector["shape"], vector["p"], vector["seed"]
    expected = torch.tensor([bit == "1" for bit in vector["keep"]]).reshape(shape)
    assert threshold(p) == vector["threshold"]
    assert torch.equal(torch_mask(shape, p, seed, **place), expected)
    assert torch.equal(ckpt_ops.dropout_mask(shape, p, seed, **place, device=backend.device).cpu(), expected)
    assert ckpt_ops.dropout_scale(p) == 65536 / (65536 - vector["threshold"])


# --- any shape, place and seed ----------------------------------------------------------------------------------------

SEEDS = st.integers(-(2**63), 2**63 - 1)
SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=4).flatmap(
    lambda lead: st.integers(0, 140).map(lambda columns: (*lead, columns))
)
ORIGINS = st.tuples(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 2**34))
PS = st.floats(0, 1)


@pytest.mark.parametrize("name", READY)
@given(shape=SHAPES, p=PS, seed=SEEDS, stream=st.integers(0, 2**32 - 1), origin=ORIGINS)
def test_masks_are_an_independent_philoxs(name, shape, p, seed, stream, origin):
    mine = ckpt_ops.dropout_mask(shape, p, seed, stream=stream, origin=origin, backend=name)
    assert torch.equal(mine, torch_mask(shape, p, seed, stream, origin))


def test_no_dimensions(backend):
    """A 0-d tensor is element (0, 0, 0)."""
    for seed in range(20):
        mask = ckpt_ops.dropout_mask((), 0.5, seed, device=backend.device)
        assert mask.shape == () and mask.item() == bool(torch_mask((1,), 0.5, seed))


@pytest.mark.parametrize("origin", [(0, 0, 1), (0, 0, 31), (1, 0, 0), (0, 2, 5), (1, 1, 33)])
def test_a_shard_is_a_slice_of_the_whole(backend, origin):
    whole = ckpt_ops.dropout_mask((3, 5, 100), 0.3, SEED, device=backend.device)
    plane, row, col = origin
    part = whole[plane:, row:, col:]
    assert torch.equal(ckpt_ops.dropout_mask(part.shape, 0.3, SEED, origin=origin, device=backend.device), part)


def test_the_last_places_of_the_contract(backend):
    ends = (2**32 - 2, 2**32 - 3, 2**35 - 70)
    mask = ckpt_ops.dropout_mask((2, 3, 70), 0.5, SEED, stream=2**32 - 1, origin=ends, device=backend.device)
    assert torch.equal(mask.cpu(), torch_mask((2, 3, 70), 0.5, SEED, 2**32 - 1, ends))


@pytest.mark.parametrize("p", [0, 1, 1e-9, 1 / 65536, 0.5 / 65536, 1.5 / 65536, 2.5 / 65536, 0.1, 0.999999])
def test_extreme_probabilities(backend, p):
    """Rounded half to even, never to none or all of 65536."""
    shape = (700, 512)
    mask = ckpt_ops.dropout_mask(shape, p, SEED, device=backend.device)
    assert torch.equal(mask.cpu(), torch_mask(shape, p, SEED))
    if 0 < p < 1:
        assert 0 < mask.sum() < mask.numel()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(backend, threads):
    torch.set_num_threads(threads)
    shape = (3, 257, 1027)
    assert torch.equal(ckpt_ops.dropout_mask(shape, 0.5, SEED, device=backend.device).cpu(), torch_mask(shape, 0.5, SEED))


def test_seeds_as_int_and_tensor(backend):
    expected = torch_mask((5, 70), 0.5, -3)
    for seed in (-3, torch.tensor(-3), torch.tensor([-3]), torch.tensor([[-3]])):
        seed = seed.to(backend.device) if isinstance(seed, torch.Tensor) else seed
        assert torch.equal(ckpt_ops.dropout_mask((5, 70), 0.5, seed, device=backend.device).cpu(), expected)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(p=-0.1), "between 0 and 1"),
        (dict(p=1.1), "between 0 and 1"),
        (dict(p=float("nan")), "between 0 and 1"),
        (dict(stream=-1), "stream must be"),
        (dict(stream=2**32), "stream must be"),
        (dict(origin=(0, 0)), "three ints"),
        (dict(origin=(0, -1, 0)), "none negative"),
        (dict(origin=(2**32 - 1, 0, 0)), "plane"),
        (dict(origin=(0, 2**32 - 2, 0)), "row"),
        (dict(origin=(0, 0, 2**35 - 3)), "col"),
        (dict(seed=2**63), "must fit in int64"),
        (dict(seed=torch.tensor([1, 2])), "one element"),
        (dict(seed=torch.tensor([1], dtype=torch.int32)), "int64"),
    ],
)
def test_what_the_contract_does_not_allow(backend, change, text):
    arguments = dict(shape=(2, 3, 4), p=0.5, seed=1) | change
    with pytest.raises(ValueError, match=text):
        ckpt_ops.dropout_mask(**arguments)


# --- statistics: 5 sigma of independent draws -------------------------------------------------------------------------


def assert_within_5_sigma(count, n, probability):
    sigma = (n * probability * (1 - probability)) ** 0.5
    assert abs(count - n * probability) < 5 * sigma, f"{count} of {n}, expected {n * probability:.0f} +- {sigma:.0f}"


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate_and_independence_of_neighbours(p):
    """Along every dimension, between streams and between seeds."""
    masks = np.stack([helpers_philox.mask((4, 64, 256), p, seed, stream) for seed in (1, 2) for stream in (0, 1)])
    keep = 1 - threshold(p) / 65536
    equal = keep**2 + (1 - keep) ** 2
    assert_within_5_sigma(masks.sum(), masks.size, keep)
    for axis in range(1, 4):
        for step in (1, 2, 4, 8, 32):
            if step < masks.shape[axis]:
                ahead, behind = np.split(masks, [step], axis)[1], np.split(masks, [masks.shape[axis] - step], axis)[0]
                assert_within_5_sigma((ahead == behind).sum(), ahead.size, equal)
    for one, other in [(0, 1), (0, 2), (1, 3), (0, 3)]:
        assert_within_5_sigma((masks[one] == masks[other]).sum(), masks[one].size, equal)


def test_the_scale_keeps_the_expectation_exactly():
    for p in (1e-9, 0.1, 1 / 3, 0.5, 0.9, 0.999999):
        assert ckpt_ops.dropout_scale(p) * (65536 - threshold(p)) / 65536 == 1
    assert ckpt_ops.dropout_scale(0) == 1 and ckpt_ops.dropout_scale(1) == 0


# --- the masks that ops apply: ones in, ones upstream; kept = not 0 ---------------------------------------------------

MASK_SHAPES = [(), (1,), (37,), (1, 1), (5, 33), (2, 3, 65), (2, 2, 3, 31), (0, 4), (1031, 7)]
ELEMENTWISE = [DROPOUT, *ACT_DROPOUTS, DROPOUT_ADD, DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM]


def recovered(op, x, **random):
    """Which elements the op kept in forward and in backward."""
    residual = torch.zeros_like(x)
    *_, y = op.ours({"x": x, "residual": residual}, **random)  # the stream r of those that return (y, r)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y != 0, dx != 0


@pytest.mark.parametrize("op", ELEMENTWISE, ids=str)
@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_forward_and_backward_masks(backend, op, shape):
    if len(shape) == 0 and op.stem == "dropout_add_norm":
        pytest.skip("a norm needs a dimension")
    x = torch.ones(shape, device=backend.device, requires_grad=True)
    for p in (1e-9, 0.5, 0.999999):
        for mask in recovered(op, x, p=p, seed=SEED, stream=3, origin=(1, 2, 3)):
            assert torch.equal(mask.cpu(), torch_mask(shape, p, SEED, 3, (1, 2, 3)))


@pytest.mark.parametrize("op", ELEMENTWISE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_place_decides_not_the_strides(backend, op, layout):
    x = relayout(torch.ones(2, 3, 5, 67, device=backend.device), layout).requires_grad_()
    for mask in recovered(op, x, p=0.5, seed=SEED):
        assert torch.equal(mask.cpu(), torch_mask(x.shape, 0.5, SEED))


@pytest.mark.parametrize("size", [1, 17, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_masks(backend, size, dtype):
    """Equal scores and the identity as v: o is the mask; with the identity upstream, dv is its transpose."""
    zeros = torch.zeros(2, 3, size, 4, dtype=dtype, device=backend.device)
    v = torch.eye(size, dtype=dtype, device=backend.device).expand(2, 3, size, size).clone().requires_grad_()
    o = ckpt_ops.scaled_dot_product_attention(zeros, zeros, v, dropout_p=0.5, seed=SEED, stream=2, origin=(1, 2, 3))
    expected = torch_mask((2, 3, size, size), 0.5, SEED, 2, (1, 2, 3))
    assert torch.equal((o != 0).cpu(), expected)
    (dv,) = torch.autograd.grad(o, v, v.detach())
    assert torch.equal((dv != 0).mT.cpu(), expected)
