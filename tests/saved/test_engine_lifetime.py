"""The engine: when a recipe runs, how long its value lives, and what is left behind."""

import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ckpt_ops
from ckpt_ops.saved import current
from ckpt_ops.saved.engine import Engine, new_engine
from ckpt_ops.saved.recipe import Handle
from helpers_saved import Counted, assert_same, leaf


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
        assert isinstance(engine.replace(y), Handle)
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


@pytest.mark.parametrize("context", [ckpt_ops.regenerating, lambda: ckpt_ops.offloading(min_bytes=0)])
@pytest.mark.parametrize("op", [torch.exp, lambda x: x.softmax(-1), lambda x: ckpt_ops.scaled_dot_product_attention(x, x, x)])
def test_a_graph_without_a_backward_is_freed(op, context):
    """An op that saves its own output makes a cycle that nobody sees, if what autograd is given holds the output's graph."""

    def forward():
        x = leaf(2, 3, 8)
        with context():
            y = op(x)
            loss = (y * y).sum()
        return [StorageWeakRef(t.untyped_storage()) for t in (x, y, loss)]

    assert all(ref.expired() for ref in forward())


def test_both_engines_have_the_same_parts(engine_kind):
    """What the package and its users ask of an engine."""
    engine, twin = new_engine(), Engine()
    assert (type(engine) is Engine) == (engine_kind == "python")
    public = [name for name in dir(twin) if not name.startswith("_")]
    assert public == [name for name in dir(engine) if not name.startswith("_")]
    for name in ("accepts", "caller", "verifier", "offloader", "watch", "replaced", "refused", "registered"):
        assert getattr(engine, name) == getattr(twin, name)
    assert type(engine.replaced) is Counter


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
