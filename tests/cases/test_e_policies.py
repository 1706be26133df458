"""Rows 40 to 43, 45, 46, 48, 52 and 53 of the collected bug reports: what checkpoints and regenerated models get wrong."""

import copy
import functools
import gc
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import ckpt_ops
from ckpt_ops import regenerate

RUNGS = ("store", "activations", "mlp", "block")


class Calls(nn.Module):
    """Counts its calls, in a place that a recipe does not take for state."""

    def __init__(self):
        super().__init__()
        self._calls = 0

    def forward(self, x):
        self._calls += 1
        return x


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)
        self.calls = Calls()

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(self.calls(x)))))


def layers(n=3):
    return nn.Sequential(*(Layer() for _ in range(n)))


def has_grads(net):
    return [all(p.grad is not None for p in layer.parameters()) for layer in net]


# --- 40: frozen blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", RUNGS)
def test_case_40_a_frozen_prefix(rung):
    net, x = layers(), torch.randn(2, 8)
    plain = copy.deepcopy(net)
    regenerate(net, rung)
    for model in (net, plain):
        model[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x).sum().backward()
        plain(x).sum().backward()
        assert has_grads(net) == [False, True, True]
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)
        net[0].requires_grad_(True)
        net(x).sum().backward()
        assert has_grads(net) == [True, True, True]
        assert not net.requires_grad_(False)(x).requires_grad


def test_case_40_a_frozen_prefix_under_checkpoint():
    blocks, x = [nn.Linear(4, 4) for _ in range(3)], torch.randn(2, 4)
    blocks[0].requires_grad_(False)

    def forward():
        return functools.reduce(lambda x, block: ckpt_ops.checkpoint(block, x), blocks, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward().sum().backward()
        assert [block.weight.grad is not None for block in blocks] == [False, True, True]
        blocks[0].requires_grad_(True)
        forward().sum().backward()
        assert blocks[0].weight.grad is not None
        for block in blocks:
            block.requires_grad_(False)
        assert not forward().requires_grad


# --- 41: caches --------------------------------------------------------------------------------------------------


def test_case_41_a_cache_in_a_region_is_refused():
    def region(x, cache):
        cache.append(x)
        return torch.cat(cache).sum()

    with pytest.raises(RuntimeError, match="cache.*use_cache=False"):
        ckpt_ops.checkpoint(region, torch.randn(2, 4, requires_grad=True), [])
    with torch.no_grad():
        ckpt_ops.checkpoint(region, torch.randn(2, 4), cache := [])
    assert len(cache) == 1


class CacheLayer:
    keys = None


class DynamicCache:
    def __init__(self):
        self.layers = [CacheLayer(), CacheLayer()]

    def update(self, index, x):
        layer = self.layers[index]
        layer.keys = torch.cat([layer.keys, x], 1) if layer.keys is not None else x
        return layer.keys


class CachingLayer(Layer):
    def __init__(self, index):
        super().__init__()
        self._index = index

    def forward(self, x, past_key_values=None):
        keys = past_key_values.update(self._index, x) if past_key_values is not None else x
        return super().forward(x) + keys.mean(1, keepdim=True)


class Caching(nn.Module):
    """As transformers' models go: config.use_cache decides, generate() reads the cache."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.layers = nn.ModuleList(CachingLayer(i) for i in range(2))

    def forward(self, x, past_key_values=None):
        if self.config.use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        for layer in self.layers:
            x = layer(x, past_key_values=past_key_values)
        return x, past_key_values

    @torch.no_grad()
    def generate(self, x, steps):
        cache = None
        for _ in range(steps):
            x, cache = self(x[:, -1:], cache)
        return x, cache


def test_case_41_a_model_with_a_cache_trains_and_still_generates():
    model, x = Caching(), torch.randn(2, 5, 8)
    plain = copy.deepcopy(model)
    plain.config.use_cache = False
    regenerate(model, "block")
    y, cache = model(x)
    y.sum().backward()
    plain(x)[0].sum().backward()
    assert cache is None and model.config.use_cache is True
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    _, cache = model.generate(x, 3)
    assert cache.layers[0].keys.shape[1] == 3
    with pytest.raises(RuntimeError, match="cache"):
        model(x, DynamicCache())
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 9))
    assert model.config.use_cache is True


# --- 42, 43: autocast --------------------------------------------------------------------------------------------


def test_case_42_a_shared_weight_under_autocast_and_a_policy():
    shared, x = nn.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    saves = (torch.ops.aten.addmm.default, torch.ops.aten._to_copy.default)

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saves else CheckpointPolicy.PREFER_RECOMPUTE

    def grads(region):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = region(torch.nn.functional.gelu(region(x))).float().sum()
        return torch.autograd.grad(loss, [x, *shared.parameters()])

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    expected = grads(lambda x: shared(x).sin())
    for options in ({}, {"context_fn": contexts}):
        got = grads(lambda x: ckpt_ops.checkpoint(lambda x: shared(x).sin(), x, **options))  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("case", ["off", "bf16", "off inside of bf16", "off, backward inside of bf16"])
def test_case_43_recomputation_has_the_forwards_autocast(case):
    seen = []
    weight = torch.randn(4, 4)

    def region(x):
        y = x.sin() @ weight
        seen.append((y.dtype, torch.is_autocast_enabled("cpu")))
        return y.exp()

    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in case and "backward" not in case):
        if case == "off inside of bf16":
            with torch.autocast("cpu", enabled=False):
                loss = ckpt_ops.checkpoint(region, x).float().sum()
        else:
            loss = ckpt_ops.checkpoint(region, x).float().sum()
    with torch.autocast("cpu", torch.bfloat16, enabled="backward" in case), set_checkpoint_early_stop(False):
        loss.backward()
    expected = (torch.bfloat16, True) if case == "bf16" else (torch.float32, False)
    assert seen == [expected] * 2


# --- 45: buffers -------------------------------------------------------------------------------------------------


class Counter(nn.Module):
    """Buffers that a call changes: one in place, one by another tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x.sin()


@pytest.mark.parametrize("how", ["checkpoint", "block"])
def test_case_45_buffers_are_updated_once(how):
    def net():
        torch.manual_seed(0)
        norm = nn.InstanceNorm1d(4, track_running_stats=True)
        return nn.Sequential(nn.BatchNorm1d(4), Counter(), nn.Linear(4, 12), nn.Unflatten(1, (4, 3)), norm)

    plain, model = net(), net()
    if how == "block":
        regenerate(model, "block")
    run = (lambda x: ckpt_ops.checkpoint(model, x)) if how == "checkpoint" else model
    for _ in range(3):
        x = torch.randn(8, 4)
        plain(x).sin().sum().backward()
        run(x).sin().sum().backward()
    assert model[0].num_batches_tracked == 3 and model[1].calls == 3
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_case_45_buffers_that_do_not_change_are_not_touched():
    """A table used inside and outside of a region: its version stays, or the outside's backward would be refused."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(4))

        def forward(self, x):
            return x * self.table

    table, x = Table(), torch.randn(2, 4, requires_grad=True)
    version = table.table._version
    ckpt_ops.checkpoint(lambda x: table(x).sin(), table(x)).sum().backward()
    ckpt_ops.checkpoint(table, table(x)).sum().backward()
    assert table.table._version == version


# --- 46: nothing is left behind ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("used", [True, False])
def test_case_46_as_many_tensors_after_20_steps(rung, used):
    net, x = layers(2), torch.randn(2, 8)
    regenerate(net, rung)

    def step():
        loss = net(x).sum()
        if used:
            loss.backward()

    step()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        step()
        before = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        for _ in range(20):
            step()
        assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) == before
    finally:
        gc.unfreeze()
        gc.enable()


# --- 48: how often ----------------------------------------------------------------------------------------------


def test_case_48_a_block_runs_exactly_twice():
    net = layers(2)
    regenerate(net, "block")
    net(torch.randn(2, 8)).sum().backward()
    assert [layer.calls._calls for layer in net] == [2, 2]


def test_case_48_other_rungs_run_a_block_once():
    net = layers(2)
    regenerate(net, "mlp")
    net(torch.randn(2, 8)).sum().backward()
    assert [layer.calls._calls for layer in net] == [1, 1]


def test_case_48_checkpointing_twice_is_refused():
    net = layers(2)
    net.gradient_checkpointing = True  # as transformers notes it
    with pytest.raises(ValueError, match=r"gradient_checkpointing_disable\(\)"):
        regenerate(net, "block")
    net.gradient_checkpointing = False
    net[1].forward = functools.partial(ckpt_ops.checkpoint, net[1].forward)
    with pytest.raises(ValueError, match="forward of a Layer is wrapped already"):
        regenerate(net, "block")
    assert not net._forward_pre_hooks and "forward" not in vars(net[0])
    del net[1].forward
    regenerate(net, "block")
    with pytest.raises(ValueError, match="regenerated already"):
        regenerate(net, "block")


def test_case_48_a_checkpoint_wrapper_is_refused():
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    net = nn.Sequential(*(wrapper.checkpoint_wrapper(Layer()) for _ in range(2)))
    with pytest.raises(ValueError, match="wrapped already"):
        regenerate(net, "block")


# --- 52: the same is saved in both passes -------------------------------------------------------------------------


@pytest.mark.parametrize("rung", ["norms", "mlp", "qkv"])
def test_case_52_a_regenerated_model_in_a_region(rung):
    """torch compares count, shapes and dtypes of both passes: the model is not regenerated in one of them alone."""
    net, x = layers(2), torch.randn(2, 8, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    regenerate(net, rung)
    with set_checkpoint_early_stop(False):
        for inside in (False, True):
            with ckpt_ops.regenerating() if inside else torch.enable_grad():
                loss = ckpt_ops.checkpoint(net, x).sum()
            got = torch.autograd.grad(loss, [x, *net.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert ckpt_ops.memory.kept(ckpt_ops.checkpoint, net, x).bytes == x.nbytes


# --- 53: when ---------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.adapter = Layer().requires_grad_(False), nn.Linear(8, 8)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


@pytest.mark.parametrize("train", [True, False])
def test_case_53_eval_mode_with_a_trainable_adapter(train):
    net = nn.Sequential(Adapted(), Adapted()).train(train)
    regenerate(net, "block")
    net(torch.randn(2, 8)).sum().backward()
    assert [m.base.calls._calls for m in net] == [2, 2]
    assert all(m.adapter.weight.grad is not None for m in net)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_case_53_nothing_happens_without_a_graph(mode):
    net, x = layers(2), torch.randn(2, 8)
    regenerate(net, "block")
    expected = net(x)
    with mode():
        kept = ckpt_ops.memory.kept(net, x)
    assert torch.equal(kept.output, expected) and not kept.rows
    assert [layer.calls._calls for layer in net] == [2, 2]
