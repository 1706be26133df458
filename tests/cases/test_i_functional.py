"""Rows 64, 65 and 67 of the collected bug reports: torch.func, tracing, imports. The number in a name is the row's."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers_numerics import SEED
from helpers_ops import ALL_OPS, LAYOUTS, RANDOM_OPS, make

every = pytest.mark.parametrize("op", ALL_OPS, ids=str)
every_random = pytest.mark.parametrize("op", RANDOM_OPS, ids=str)


@every
def test_case_64_func_grad(backend, op):
    t = {n: x.detach() for n, x in make(op, device=backend.device).items()}
    grads = torch.func.grad(lambda t: sum(o.sum() for o in op.ours(t, p=0.0)))(t)
    assert grads.keys() == t.keys() and all(g.isfinite().all() for g in grads.values())


@every_random
def test_case_64_vmap_randomness(backend, op):
    """Under vmap a call draws: 'different' masks, the 'same' one, or an error in our words."""
    t = {n: x.detach() for n, x in make(op, device=backend.device).items()}
    batch = {n: x.expand(2, *x.shape) for n, x in t.items()}

    def call(t):
        return op.ours(t, p=0.4)[-1]

    first, second = torch.vmap(call, randomness="different")(batch)
    assert not torch.equal(first, second)
    first, second = torch.vmap(call, randomness="same")(batch)
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match="ckpt_ops draws a seed here.*pass seed="):
        torch.vmap(call)(batch)


@every_random
def test_case_64_vmap_over_seeds(backend, op):
    """A batch of seeds: each sample is the call with its seed."""
    t = {n: x.detach() for n, x in make(op, device=backend.device).items()}
    seeds = torch.tensor([[3], [SEED]], device=backend.device)
    together = torch.vmap(lambda s: op.ours(t, p=0.4, seed=s)[-1])(seeds)
    for mine, seed in zip(together, seeds):
        torch.testing.assert_close(mine, op.ours(t, p=0.4, seed=seed)[-1], rtol=1e-5, atol=1e-6)


def form(x):
    """Shape, dtype and the strides that mean something."""
    return x.shape, x.dtype, [stride for stride, size in zip(x.stride(), x.shape) if size > 1]


@every
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_65_fake_strides_are_the_real_ones(fused, op, layout):
    """Results and gradients, of inputs in any layout."""
    t = make(op, device=fused.device, layout=layout)
    seed = torch.tensor([SEED], device=fused.device)

    def results(t, seed):
        outputs = op.ours(t, p=0.3, seed=seed)
        return *outputs, *torch.autograd.grad(outputs, list(t.values()), [torch.ones_like(o) for o in outputs])

    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(x) for n, x in t.items()}
        fake = [form(x) for x in results(fakes, mode.from_tensor(seed))]
    assert fake == [form(x) for x in results(t, seed)]


def _python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


def test_case_67_without_triton():
    """No triton on the platform: the import works, results come, and backends() says why triton is not there."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, ckpt_ops\n"
        "x = torch.randn(4, 64)\n"
        "assert torch.equal(ckpt_ops.dropout(x, .5, seed=3), ckpt_ops.dropout(x, .5, seed=3, backend='reference'))\n"
        "assert ckpt_ops.backends()['triton'] != 'ready'\n"
        "try: ckpt_ops.dropout(x, .5, backend='triton')\n"
        "except RuntimeError as error: assert ckpt_ops.backends()['triton'] in str(error)\n"
        "else: raise AssertionError\n"
    )
    result = _python(code)
    assert result.returncode == 0, result.stderr
