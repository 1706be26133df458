"""dropout: numerics, layouts, sizes, bytes."""

import os
import re
from pathlib import Path

import pytest
import torch

import ckpt_ops
from helpers_numerics import SEED, assert_close_for
from helpers_ops import DROPOUT, DTYPES, LAYOUTS, relayout
from helpers_philox import scale, torch_mask

SHAPES = [(), (1,), (7,), (0,), (0, 5), (5, 0), (1, 1), (11, 1), (31, 33), (2, 3, 65), (2, 2, 2, 37), (4099, 8), (3, 1009)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numerics(backend, shape, dtype):
    assert_close_for(DROPOUT, shape, dtype, backend.device, p=0.3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 67), (2, 3, 4, 33)])
def test_layouts(backend, shape, layout):
    assert_close_for(DROPOUT, shape, torch.float32, backend.device, p=0.3, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_stride_of_the_upstream_gradient(backend, layout):
    x = torch.ones(2, 3, 4, 33, device=backend.device, requires_grad=True)
    dy = relayout(torch.rand(x.shape, device=backend.device) + 1, layout)
    ckpt_ops.dropout(x, 0.5, seed=SEED).backward(dy)
    assert torch.equal(x.grad, dy * torch_mask(x.shape, 0.5, SEED, device=backend.device) * 2)


def test_p_0_and_eval_return_the_input(backend):
    x = torch.randn(4, 4, device=backend.device)
    state = torch.get_rng_state()
    assert ckpt_ops.dropout(x, 0.0) is x and ckpt_ops.dropout(x, 0.5, training=False) is x
    assert torch.equal(torch.get_rng_state(), state)


def test_p_1_is_zeros_and_draws_nothing(backend):
    x = torch.full((4, 5), torch.inf, device=backend.device, requires_grad=True)
    state = torch.get_rng_state()
    y = ckpt_ops.dropout(x, 1.0)
    y.backward(torch.full_like(y, torch.nan))
    assert torch.equal(torch.get_rng_state(), state)
    assert (y == 0).all() and (x.grad == 0).all()


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999999])
def test_the_scale_is_that_of_the_true_keep_probability(backend, p):
    x = torch.ones(64, 1024, dtype=torch.float64, device=backend.device)
    y = ckpt_ops.dropout(x, p, seed=3)
    kept = y[y != 0]
    assert len(kept) and torch.equal(kept, torch.full_like(kept, scale(p)))


def test_kept_bytes(fused):
    x = torch.randn(64, 256, device=fused.device, requires_grad=True)
    assert ckpt_ops.memory.kept(ckpt_ops.dropout, x, 0.1).bytes == 8
    assert ckpt_ops.memory.kept(ckpt_ops.dropout, x, 0.0).bytes == 0
    assert ckpt_ops.memory.kept(ckpt_ops.dropout, x, 1.0).bytes == 0
    assert ckpt_ops.memory.kept(ckpt_ops.dropout, x.detach(), 0.1).bytes == 0


def _gib():
    """Memory to be had: what is free, and the page cache where the system tells of it."""
    known = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    if found := re.search(r"MemAvailable:\s+(\d+) kB", known):
        return int(found[1]) / 2**20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**30


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_more_than_2_to_the_31_elements(fused, dtype):
    """Forward and backward of a 4 GiB tensor: both ends and the place where a 32-bit index wraps."""
    rows, columns = 2**21 + 3, 1024
    fused.skip_if_slow(rows * columns)
    if _gib() < 14:
        pytest.skip(f"needs 14 GiB of free memory, this machine has {_gib():.1f}")
    torch.utils.deterministic.fill_uninitialized_memory = False  # seconds for nothing at this size
    x = torch.ones((), dtype=dtype, device=fused.device).expand(rows, columns).requires_grad_()
    y = ckpt_ops.dropout(x, 0.5, seed=SEED)
    (dx,) = torch.autograd.grad(y, x, torch.ones((), dtype=dtype, device=fused.device).expand_as(x))
    for first in (0, 2**21 - 2, rows - 4):
        mask = torch_mask((4, columns), 0.5, SEED, origin=(0, first, 0))
        for result in (y, dx):
            assert torch.equal(result[first : first + 4].cpu() != 0, mask)
