"""The engine: what is replaced, what never is, when a recipe runs and how long its value lives."""

import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ckpt_ops
from ckpt_ops.saved import current, register
from ckpt_ops.saved.engine import Engine, entered
from ckpt_ops.saved.recipe import Handle


class Counted:
    """A function that is registered where an engine is active, and that counts its recomputations."""

    def __init__(self, fn, name="counted"):
        self.fn, self.name, self.runs, self.made = fn, name, 0, []

    def __call__(self, *inputs):
        y = self.fn(*inputs)
        if current() is not None:
            register(self.name, self.again, inputs, (y,))
        return y

    def again(self, *inputs):
        self.runs += 1
        y = self.fn(*inputs)
        self.made.append(StorageWeakRef(y.untyped_storage()))
        return y

    def alive(self):
        return [ref for ref in self.made if not ref.expired()]


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def grads_of(forward, *leaves):
    return torch.autograd.grad(forward(*leaves), leaves)


def assert_same(forward, *leaves):
    """Gradients with an engine are those without, to the bit. Returns the engine."""
    expected = grads_of(forward, *leaves)
    with ckpt_ops.regenerating() as engine:
        loss = forward(*leaves)
    for got, want in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert torch.equal(got, want)
    return engine


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
    with entered(Engine()) as engine:
        addresses, reused = set(), 0
        for _ in range(600):  # more than the engine remembers before it sweeps
            addresses.add(f(torch.randn(100)).data_ptr())
            fresh = torch.randn(100)
            reused += fresh.data_ptr() in addresses
            assert engine.replace(fresh) is fresh
        assert reused > 100
        assert len(engine._entries) <= 257


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
    assert not engine.replaced and not engine._entries
    handle = ckpt_ops.regenerate(net, "qkv", modules=["1", "3"])
    engine = assert_same(forward, leaf(3, 6))
    assert not engine.replaced and not engine._entries
    handle.remove()


def test_an_engine_within_a_checkpoint_region():
    """A regenerated model inside of a region is left to the region, in both passes."""
    net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    x = leaf(3, 6)
    expected = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    ckpt_ops.regenerate(net, "mlp")
    got = torch.autograd.grad(checkpoint(net, x, use_reentrant=False).sum(), [x, *net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_retain_graph_and_two_backwards():
    f, x, w = Counted(torch.sin), leaf(4), leaf(4)
    with ckpt_ops.regenerating():
        loss = (f(x) * w).sum()
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    second = torch.autograd.grad(loss, (x, w))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and f.runs == 2
    assert torch.equal(first[1], x.sin()) and not f.alive()


def test_parts_of_the_graph():
    """A part's backward leaves the value to nobody: it is gone afterwards, and made again for the next part."""
    f, x, a, b = Counted(torch.sin), leaf(4), leaf(4), leaf(4)
    with ckpt_ops.regenerating():
        y = f(x)
        left, right = (y * a).sum(), (y * b).sum()
    del y
    assert torch.equal(torch.autograd.grad(left, a)[0], x.sin())
    assert f.runs == 1 and not f.alive()
    assert torch.equal(torch.autograd.grad(right, b)[0], x.sin())
    assert f.runs == 2 and not f.alive()


def test_an_unused_output_costs_nothing():
    f, x, w = Counted(torch.sin), leaf(4), leaf(4)
    with ckpt_ops.regenerating():
        _ = f(x) * w
        loss = (w * w).sum()
    loss.backward()
    assert f.runs == 0


def test_a_shared_value_is_freed_after_its_last_consumer():
    f, x, w = Counted(torch.sin), leaf(4), leaf(4)
    alive = []
    with ckpt_ops.regenerating():
        y = f(x)
        early = y * w  # its backward is the last one
        early.register_hook(lambda _: alive.append(len(f.alive())))
        loss = ((early + y.exp() * y) * y).sum()
        x.register_hook(lambda _: alive.append(len(f.alive())))
    del y
    loss.backward()
    assert alive == [1, 0] and f.runs == 1


def test_recipes_nest():
    f, g, h = Counted(torch.sin, "f"), Counted(torch.exp, "g"), Counted(lambda x, y: x + y, "h")

    def forward(x, w):
        inner = f(x)
        middle = g(inner)
        return (h(inner, middle) * w + middle * inner).sum()

    x, w = leaf(4), leaf(4)
    engine = assert_same(forward, x, w)
    assert {f.runs, g.runs, h.runs} == {1} and set(engine.replaced) >= {"f", "g", "h"}
    assert not f.alive() and not g.alive() and not h.alive()


def test_only_the_beginning_of_nested_recipes_is_held():
    f, g, x, w = Counted(torch.sin), Counted(torch.exp), torch.randn(100), leaf(100)
    kept = ckpt_ops.memory.kept(_regenerated(lambda: (g(f(x)) * w).sum()))
    assert kept.bytes == x.nbytes


def _regenerated(forward):
    def run():
        with ckpt_ops.regenerating():
            return forward()

    return run


def test_a_handle_holds_no_value():
    f, x, w = Counted(torch.sin), torch.randn(4), leaf(4)
    with ckpt_ops.regenerating() as engine:
        y = f(x)
        assert type(engine.replace(y)) is Handle
        storage = StorageWeakRef(y.untyped_storage())
        loss = (y * w).sum()
        del y
        assert storage.expired()
    loss.backward()
    assert torch.equal(w.grad, x.sin())


def test_two_threads():
    """Each thread has its own forward and backward, of one model."""
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    ckpt_ops.regenerate(net, "mlp")
    inputs = [torch.randn(5, 8) for _ in range(2)]
    alone = [torch.autograd.grad(net(x).sin().sum(), list(net.parameters())) for x in inputs]
    same, both = [], threading.Barrier(2)

    def work(x, expected):
        for _ in range(20):
            both.wait(timeout=20)
            got = torch.autograd.grad(net(x).sin().sum(), list(net.parameters()))
            same.append(all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) and current() is None)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, alone, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 40


def test_a_recipe_that_gives_another_shape_is_an_error():
    sizes = iter((4, 6))
    w = leaf(4)
    with ckpt_ops.regenerating():
        f = Counted(lambda: torch.ones(next(sizes)))
        loss = (f() * w).sum()
    with pytest.raises(RuntimeError, match="counted did not give the same output again: a storage of 24 bytes, 16 in forward"):
        loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_there_is_no_engine(mode):
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    engines = []
    net[1].register_forward_hook(lambda *_: engines.append(current()))
    ckpt_ops.regenerate(net)
    with mode():
        net(torch.randn(2, 4))
        with ckpt_ops.regenerating() as engine:
            engines.append(engine)
    assert engines == [None, None]
    net(torch.randn(2, 4))
    assert engines[2] is not None and current() is None


def test_an_exception_in_forward_leaves_no_engine_behind():
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    ckpt_ops.regenerate(net)
    for broken in (lambda: net(torch.randn(2, 5)), lambda: net(torch.randn(2, 4), 1)):
        with pytest.raises((RuntimeError, TypeError)):
            broken()
        assert current() is None
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        net(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ZeroDivisionError), ckpt_ops.regenerating():
        _ = 1 / 0
    assert current() is None


def test_steps_leave_nothing_behind():
    """Row 46 of the collected bug reports: storages are as many after 20 steps as after one, garbage collection off."""
    import gc

    f = Counted(torch.sin)
    x, w = leaf(4), leaf(4)

    def step(used):
        with ckpt_ops.regenerating():
            y = f(x)
            loss = (y * w).sum()
        if used:
            torch.autograd.grad(loss, (x, w))

    step(True)
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        for used in (True, False):
            step(used)
            before = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
            for _ in range(20):
                step(used)
            assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) == before
    finally:
        gc.unfreeze()
        gc.enable()
    assert not f.alive()


def test_inert_under_torch_func():
    """torch.func forbids saved-tensor hooks: a regenerated model works there as a plain one."""
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    x = torch.randn(3, 4)

    def loss(parameters):
        return torch.func.functional_call(net, parameters, x).sum()

    expected = torch.func.grad(loss)(parameters)
    ckpt_ops.regenerate(net, "mlp")
    assert all(torch.equal(value, expected[name]) for name, value in torch.func.grad(loss)(parameters).items())
