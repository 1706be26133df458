"""The engine: what is replaced, and what never is."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ckpt_ops
from ckpt_ops.saved.engine import new_engine
from ckpt_ops.saved.scope import entered
from helpers_saved import Counted, assert_same, grads_of, leaf


def test_a_registered_output_is_replaced_and_made_again_once_for_all_consumers():
    f = Counted(torch.sin)
    engine = assert_same(lambda x, w: (f(x) * w + f(x).exp() * w).sum(), leaf(4, 3), leaf(4, 3))
    assert engine.replaced == {"counted": 1} and f.runs == 1

    def three(x, w):
        y = f(x)
        return ((y * w).sum() + (y @ w.T).sum() + (y * y).sum()) * 2

    f.runs = 0
    engine = assert_same(three, leaf(4, 3), leaf(4, 3))
    assert engine.replaced["counted"] == 4 and f.runs == 1


def test_a_reused_address_is_not_mistaken_for_what_was_there():
    """Registered storages die, new ones of the same size take their place: none of these is taken for an old one."""
    f = Counted(torch.sin)
    with entered(new_engine()) as engine:
        addresses, reused, rounds = set(), 0, 0
        while rounds < 600 or (reused < 20 and rounds < 20_000):  # more than the engine remembers before it sweeps
            rounds += 1
            addresses.add(f(torch.randn(100)).data_ptr())
            fresh = torch.randn(100)
            reused += fresh.data_ptr() in addresses
            assert engine.replace(fresh) is fresh
        assert reused >= 20
        assert engine.registered <= 257


def test_views_whose_base_died():
    """q, k, v are chunks of one output: the storage is what is registered."""
    f = Counted(lambda x, w: x @ w)

    def attention(x, w):
        q, k, v = f(x, w).chunk(3, dim=-1)
        return ((q * k).tanh() * v).sum()

    engine = assert_same(attention, leaf(5, 4), leaf(4, 12))
    assert engine.replaced["counted"] == 3 and f.runs == 1


def test_strides_and_offsets_survive():
    f = Counted(torch.cos)
    assert_same(lambda x, w: (f(x)[2:, 1::2].T * w).sum(), leaf(5, 6), leaf(3, 3))


def test_an_in_place_change_of_the_output_cancels_its_recipe():
    f = Counted(lambda x: x * 3)

    def forward(x, w):
        y = f(x)
        y.add_(1)
        return (y * w).sum()

    engine = assert_same(forward, leaf(4), leaf(4))
    assert not engine.replaced and f.runs == 0
    assert engine.refused == {"counted": "its output was modified in place afterwards"}


def test_an_in_place_change_of_the_output_after_it_was_saved():
    """Torch alone refuses this backward; here the saved value is made again, and it is the one that was saved."""
    f, x, w = Counted(lambda x: x * 3), leaf(4), leaf(4)
    with ckpt_ops.regenerating():
        y = f(x)
        loss = (y * w).sum()
        y.add_(1)
    assert torch.equal(torch.autograd.grad(loss, w)[0], x * 3)


@pytest.mark.parametrize("nested", [False, True])
def test_an_in_place_change_of_a_recipes_input_is_an_error(nested):
    f, g, x, w = Counted(torch.sin, "inner"), Counted(lambda x: x * 3, "outer"), leaf(4), leaf(4)
    with ckpt_ops.regenerating():
        base = x + 1
        y = f(g(base)) if nested else g(base)
        loss = (y * w).sum()
        base.mul_(2)
    with pytest.raises(RuntimeError, match=r"outer cannot be made again.*shape \(4,\).*modified in place"):
        loss.backward()


def test_an_in_place_change_of_a_kept_tensor_is_an_error():
    """Under any hooks torch itself no longer looks at versions: the engine does."""
    x = leaf(4)
    with ckpt_ops.regenerating():
        y = x + 1
        loss = (y * y).sum()
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("op", ["relu_", "exp_", "sigmoid_", "tanh_", "sqrt_"])
def test_in_place_operations_that_autograd_allows(op):
    assert_same(lambda x: getattr(x.abs() + 1, op)().sum(), leaf(6))


def test_a_changed_parameter_is_an_error():
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    ckpt_ops.regenerate(net, "mlp")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(3, 4)).sum().backward()
    loss = net(torch.randn(3, 4)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified in"):
        loss.backward()
    net(torch.randn(3, 4)).sum().backward()


def test_parameters_and_inputs_of_the_graph_are_never_replaced():
    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self):
            return self.weight

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.same = Weight(), nn.Identity()

        def forward(self, x):
            return (self.same(x) * x) @ self.weight()

    net = Net()
    handle = ckpt_ops.regenerate(net, "store", modules=["weight", "same"])
    x = leaf(3, 4)
    kept = ckpt_ops.memory.kept(net, x)
    assert any(row.shape == (3, 4) for row in kept.rows) and kept.parameter_bytes == 64
    (got,) = torch.autograd.grad(kept.output.sum(), x)
    assert torch.equal(got, grads_of(lambda x: (x * x @ net.weight.weight).sum(), x)[0])
    assert "its input's own memory" in str(handle.report())


@pytest.mark.parametrize("region", ["checkpoint", "save_on_cpu"])
def test_inert_where_other_hooks_are_on_top(region):
    net = nn.Sequential(ckpt_ops.nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))

    def forward(x):
        if region == "checkpoint":
            return checkpoint(net, x, use_reentrant=False).sum()
        with torch.autograd.graph.save_on_cpu():
            return net(x).sum()

    engine = assert_same(forward, leaf(3, 6))
    assert not engine.replaced and not engine.registered
    handle = ckpt_ops.regenerate(net, "qkv", modules=["1", "3"])
    engine = assert_same(forward, leaf(3, 6))
    assert not engine.replaced and not engine.registered
    handle.remove()


def test_an_engine_within_a_checkpoint_region():
    """A regenerated model inside of a region is left to the region, in both passes."""
    net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    x = leaf(3, 6)
    expected = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    ckpt_ops.regenerate(net, "mlp")
    got = torch.autograd.grad(checkpoint(net, x, use_reentrant=False).sum(), [x, *net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
