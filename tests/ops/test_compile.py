"""Every op under torch.compile: one graph, the bits of eager."""

import pytest
import torch
import torch._dynamo.testing
from test_every_op import RANDOM, _checkpoint, assert_equal, without_values

import ckpt_ops
from helpers_numerics import SEED
from helpers_ops import ACT_DROPOUTS, EACH_OP, PARAMETERS, make, run

each = pytest.mark.parametrize("op", EACH_OP, ids=str)


@each
def test_compile_fullgraph_with_a_dynamic_batch(fused, op):
    """One graph for every batch size (none of them another dimension's size), with the bits of eager."""
    torch._dynamo.reset()
    seed = torch.tensor([SEED], device=fused.device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda t, seed: op.ours(t, p=0.4, seed=seed), backend=counter, fullgraph=True)
    for batch in (3, 5, 3):
        t = make(op, (batch, *op.shape[1:]), device=fused.device)
        for name, x in t.items():
            if name not in PARAMETERS:
                torch._dynamo.mark_dynamic(x, 0)
        assert_equal(run(op, t, dict(seed=seed), call=compiled), run(without_values(op), t, RANDOM))
    assert counter.frame_count == 1


@each
def test_compile_with_one_tensor_in_several_places(fused, op):
    """dropout_add(x, x) and the like."""
    torch._dynamo.reset()
    shape = (2, 2, 2, 9, 9, 8, 8) if op.stem == "attention" else op.shape
    t = make(op, shape, device=fused.device)
    shared = {n: next(x for x in t.values() if x.shape == value.shape) for n, value in t.items()}
    seed = torch.tensor([SEED], device=fused.device)

    def loss(shared, seed, op=op):
        return sum(o.square().sum() for o in op.ours(shared, p=0.4, seed=seed))

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    wrt = list({id(x): x for x in shared.values()}.values())
    ours = torch.autograd.grad(compiled(shared, seed), wrt)
    expected = torch.autograd.grad(loss(shared, seed, without_values(op)), wrt)
    for mine, eager in zip(ours, expected):
        torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-6)


def test_the_reference_compiles(backend):
    torch._dynamo.reset()
    seed = torch.tensor([SEED], device=backend.device)
    compiled = torch.compile(lambda x, seed: ckpt_ops.dropout(x, 0.4, seed=seed), backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 40, device=backend.device)
    assert torch.equal(compiled(x, seed), ckpt_ops.dropout(x, 0.4, seed=SEED))


@each
def test_compile_of_checkpoint_and_checkpoint_of_compile(fused, op):
    torch._dynamo.reset()
    seed = torch.tensor([SEED], device=fused.device)
    t = make(op, device=fused.device)
    names = tuple(t)

    def fn(seed, *values):
        return op.ours(dict(zip(names, values)), p=0.4, seed=seed)

    inside = torch.compile(lambda *a: _checkpoint(fn, *a), backend="aot_eager", fullgraph=True)
    outside = torch.compile(fn, backend="aot_eager", fullgraph=True)
    expected = run(without_values(op), t, RANDOM)
    assert_equal(run(op, t, call=lambda t: inside(seed, *t.values())), expected)
    assert_equal(run(op, t, call=lambda t: _checkpoint(outside, seed, *t.values())), expected)


def test_compile_by_inductor(fused):
    """The default compiler may fuse what surrounds the op, never change its mask."""
    torch._dynamo.reset()
    op = ACT_DROPOUTS[0]
    t = make(op, device=fused.device)
    seed = torch.tensor([SEED], device=fused.device)
    compiled = torch.compile(lambda t, seed: op.ours({n: x * 1 for n, x in t.items()}, p=0.4, seed=seed), fullgraph=True)
    eager = run(op, t, RANDOM)
    for name, value in run(op, t, dict(seed=seed), call=compiled).items():
        torch.testing.assert_close(value, eager[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(value != 0, eager[name] != 0), name
