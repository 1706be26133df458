"""offloading(): what is moved, that the original is freed, and gradients to the bit."""

import functools

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ckpt_ops
from ckpt_ops import memory, offloading
from ckpt_ops.demo import torch_layers
from ckpt_ops.demo.model import Block
from ckpt_ops.saved import current

BATCH, LENGTH, HIDDEN, HEADS = 2, 24, 32, 4
TOKENS = BATCH * LENGTH
WIDTHS = {"store": 16, "norms": 14, "activations": 10, "mlp": 6, "qkv": 3, "block": 1}  # saved, in residual streams
everything = functools.partial(offloading, min_bytes=0)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
each_rung = pytest.mark.parametrize("rung", ckpt_ops.RUNGS)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def blocks(dtype=torch.float32, layers=ckpt_ops.nn, p=0.1):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(layers, HIDDEN, HEADS, p) for _ in range(2))).to(dtype)


def hidden(dtype=torch.float32):
    return torch.randn(BATCH, LENGTH, HIDDEN, dtype=dtype)


def gradients(model, x, context=torch.enable_grad):
    torch.manual_seed(1)
    with context():
        y = model(x)
    return torch.autograd.grad(y.float().sin().sum(), list(model.parameters()))


@each_dtype
@each_rung
@pytest.mark.parametrize("inside", [True, False])
def test_a_block_at_every_rung(rung, dtype, inside):
    """Moved is what the rung keeps, no more; what is made again is not moved. Statistics and seeds are small, and stay."""
    model, x = blocks(dtype), hidden(dtype)
    ckpt_ops.regenerate(model, rung)
    expected = gradients(model, x)
    statistics = 2 * (TOKENS * (8 + 8 + 4 * HEADS) + 4 * 8) if rung != "block" else 0

    def forward():
        with offloading(min_bytes=x.nbytes) as offloader:
            return memory.kept(model, x) if inside else model(x), offloader

    torch.manual_seed(1)
    kept, offloader = forward() if inside else memory.kept(forward).output
    assert offloader.report().bytes == 2 * WIDTHS[rung] * x.nbytes
    if inside:
        assert kept.bytes == statistics
        kept = kept.output
    got = torch.autograd.grad(kept.float().sin().sum(), list(model.parameters()))
    assert all(map(torch.equal, got, expected))
    assert current() is None and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_gradients_of_torchs_layers(streams, pin_memory, autocast):
    model, x = blocks(layers=torch_layers, p=0.2), hidden()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = gradients(model, x)
        got = gradients(model, x, functools.partial(everything, streams=streams, pin_memory=pin_memory))
    assert all(map(torch.equal, got, expected))


@each_rung
def test_originals_are_freed(rung):
    """After the forward, nothing on the side of the computation holds what was moved."""
    seen = []

    class Seen(nn.Module):
        def forward(self, x):
            y = x.sin()
            seen.append(StorageWeakRef(y.untyped_storage()))
            return y.exp() * y

    model = nn.Sequential(nn.Linear(8, 8), Seen(), nn.LayerNorm(8), nn.Linear(8, 8), Seen(), nn.Linear(8, 8))
    ckpt_ops.regenerate(model, rung)
    with everything():
        y = model(torch.randn(4, 8))
    assert [ref.expired() for ref in seen] == [True] * len(seen)
    y.sum().backward()


def test_a_storage_is_moved_once_and_comes_back_once():
    x, w = leaf(6, 4), leaf(4, 12)
    with everything() as offloader:
        q, k, v = (x @ w).chunk(3, dim=-1)
        loss = ((q * k).tanh() * v).sum()
    shapes = [row.shape for row in offloader.rows]
    assert shapes.count((6, 4)) == 3  # x, q with k and v, tanh
    (qkv,) = [row for row in offloader.rows if row.bytes == 6 * 12 * 4]
    assert qkv.op == "Split"
    q, k, v = (x @ w).chunk(3, dim=-1)
    expected = torch.autograd.grad(((q * k).tanh() * v).sum(), (x, w))
    assert all(map(torch.equal, torch.autograd.grad(loss, (x, w)), expected))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:, ::2],
        lambda x: x.T,
        lambda x: x[:1].expand(5, 6),
        lambda x: x.view(torch.int32).view(torch.float32),
        lambda x: x[:0],
    ],
)
def test_views_come_back_as_they_were(view):
    """Place, strides and type."""
    x = torch.randn(5, 6)
    w = torch.randn_like(view(x), requires_grad=True)
    with everything():
        y = x * 1
        loss = (view(y) * w).sum() + (y.sum() * w.exp()).sum()
        del y
    assert torch.equal(torch.autograd.grad(loss, w)[0], view(x) + x.sum() * w.exp())


def test_what_stays():
    model = nn.Linear(8, 8)
    with offloading(min_bytes=100) as offloader:
        y = model(torch.randn(16, 8)) @ model.weight.T + torch.randn(2).requires_grad_().exp().sum()
    report = offloader.report()
    assert [row.shape for row in report.rows] == [(16, 8), (16, 8)]
    assert report.stayed == {"a parameter": 1, "smaller than 100 bytes": 1}
    y.sum().backward()


def test_weights_in_autocasts_dtype_stay():
    model = nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16), everything() as offloader:
        y = model(torch.randn(16, 8, requires_grad=True))
    assert {row.shape for row in offloader.rows} == {(16, 8)} and offloader.stayed["a parameter"] == 1
    y.sum().backward()


def test_what_a_tensor_subclass_saves_stays():
    class Own(torch.Tensor):
        pass

    x = torch.randn(4).as_subclass(Own).requires_grad_()
    with everything() as offloader:
        y = (x * x).sum()
    assert not offloader.rows and offloader.stayed == {"not a plain strided tensor": 2}
    y.backward()
    assert torch.equal(x.grad.as_subclass(torch.Tensor), 2 * x.detach().as_subclass(torch.Tensor))


def test_the_report_says_what_where_and_why():
    model = blocks()
    ckpt_ops.regenerate(model, {"0": "mlp", "1": "block"})
    with everything() as offloader:
        model(hidden())
    report = offloader.report(model)
    text = str(report)
    assert text.startswith(f"{report.bytes:,} bytes moved to cpu, in {len(report.rows)} storages")
    assert "6,144  float32 [2, 24, 32]  1, DropoutAdd: input of a checkpoint region" in text
    assert "6,144  float32 [2, 24, 32]  0.norm1: saved for backward" in text
    assert "stayed: a parameter:" in text


def test_retain_graph_and_two_backwards():
    x, w = leaf(5), leaf(5)
    with everything():
        y = x.sin()
        loss = (y * w * y.exp()).sum()
    del y
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    second = torch.autograd.grad(loss, (x, w))
    assert all(map(torch.equal, first, second))
    y = x.sin()
    assert all(map(torch.equal, first, torch.autograd.grad((y * w * y.exp()).sum(), (x, w))))


def test_a_change_after_the_copy_does_not_reach_it():
    """Torch alone refuses this backward; here the value is the one that was saved."""
    x = leaf(5)
    with everything():
        y = x * 1
        loss = (y * y).sum()
        y.zero_()
        other = (y * y).sum()
    assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], 2 * x)
    assert torch.equal(torch.autograd.grad(other, x)[0], torch.zeros(5))


def test_a_kept_tensor_that_changes_is_still_an_error():
    x = leaf(5)
    with offloading():
        y = x * 1
        loss = (y * y).sum()
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_engine_around():
    x, net = leaf(4, 8), nn.Sequential(ckpt_ops.nn.LayerNorm(8), nn.Linear(8, 8))
    expected = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    with ckpt_ops.regenerating() as engine, everything() as offloader:
        loss = net(x).sum()
    assert engine.replaced == {"layer_norm": 1}
    assert [row.shape for row in offloader.rows if row.bytes > 16] == [(4, 8)]  # x; the norm's output is made again
    assert all(map(torch.equal, torch.autograd.grad(loss, [x, *net.parameters()]), expected))


def test_torchs_own_checkpoint_inside():
    """Its positional inputs are seen; what the region saves is its own business."""
    model, x = blocks(p=0.0), hidden().requires_grad_()
    expected = gradients(model, x)
    with everything() as offloader:
        y = checkpoint(model, x, use_reentrant=False)
    assert [row.shape for row in offloader.rows] == [x.shape]
    assert all(map(torch.equal, torch.autograd.grad(y.sin().sum(), list(model.parameters())), expected))


def test_contexts_nest_and_end_with_any_exception():
    x = leaf(5)
    with everything() as outer:
        with everything() as inner:
            first = x.exp()
        second = first.exp()
    assert len(inner.rows) == len(outer.rows) == 1
    second.sum().backward()
    for kind in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(kind), everything():
            x.exp()
            raise kind
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with torch.no_grad(), everything() as offloader:
        x.exp()
    assert not offloader.rows


def test_nothing_is_held_by_the_offloader():
    """A training loop inside of one context: a graph's copies go with it."""
    x, refs = leaf(1000), []
    with everything() as offloader:
        for _ in range(3):
            loss = x.exp().sum()
            refs += [StorageWeakRef(m.fn.__self__._target.untyped_storage()) for m in offloader._moved.values()]
            loss.backward()
            del loss
    assert len(refs) == 3 and all(ref.expired() for ref in refs)


def test_verify_compares_as_without():
    model, x = blocks(), hidden()
    ckpt_ops.regenerate(model, "mlp")
    with ckpt_ops.verify(model) as v:
        gradients(model, x, everything)
    assert v.ok and v.compared
