"""A forward or backward that ends by an exception of any kind, Ctrl-C among them, leaves nothing behind."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ckpt_ops
from ckpt_ops.saved import current

KINDS = [KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_rung = pytest.mark.parametrize("rung", ckpt_ops.RUNGS)


class Interrupt(nn.Module):
    """Raises what it is told to, once, in forward or backward."""

    _raise = None

    def forward(self, x):
        y = x * 1
        if self._raise is not None and self._raise[0] == "backward" and y.requires_grad:
            y.register_hook(lambda grad: self.now(grad))
        elif self._raise is not None and self._raise[0] == "forward":
            self.now(x)
        return y

    def now(self, grad):
        _, kind, self._raise = *self._raise, None
        raise kind


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = ckpt_ops.nn.LayerNorm(8), ckpt_ops.nn.MLP(8, dropout=0.2)
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)
        self.interrupt = Interrupt()

    def forward(self, x):
        return x + self.mlp(self.norm(x)) + self.down(self.act(self.interrupt(self.up(x))))


def model_at(rung):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    model.config = SimpleNamespace(use_cache=True)
    return model, ckpt_ops.regenerate(model, rung)


def step(model):
    torch.manual_seed(1)
    kept = ckpt_ops.memory.kept(model, torch.randn(3, 8))
    model.zero_grad()
    kept.output.sin().sum().backward()
    return kept.bytes, [p.grad for p in model.parameters()]


def assert_nothing_left(model):
    assert current() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert model.config.use_cache is True


@each_kind
@each_rung
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_next_step_is_right(rung, kind, where):
    model, handle = model_at(rung)
    expected, gradients = step(model)
    for block in model:
        block.interrupt._raise = (where, kind)
        with pytest.raises(kind):
            step(model)
        assert_nothing_left(model)
    x = nn.Parameter(torch.randn(3))
    assert not hasattr((x * x).grad_fn._raw_saved_self.data, "held")  # another model's forward is nobody's business
    kept, again = step(model)
    assert kept == expected and all(map(torch.equal, again, gradients))
    handle.remove()
    for m in model.modules():
        assert not ({"forward", "_accepts"} & set(vars(m)) or m._forward_hooks or m._forward_pre_hooks)


@each_kind
@pytest.mark.parametrize("context", [ckpt_ops.regenerating, ckpt_ops.verify])
def test_contexts(kind, context):
    with pytest.raises(kind), context():
        ckpt_ops.layer_norm(torch.randn(2, 4, requires_grad=True), 4)
        raise kind
    assert current() is None and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@each_rung
def test_tools_that_read_the_signature_see_the_models(rung):
    class Model(nn.Sequential):
        def forward(self, x, labels=None, *, scale: float = 1.0):
            return super().forward(x) * scale

    model = Model(Block(), Block())
    expected = inspect.signature(model.forward)
    ckpt_ops.regenerate(model, rung)
    assert inspect.signature(model.forward) == expected


def test_a_forward_put_on_the_instance_stays():
    """As accelerate does: before and after."""
    model, calls = nn.Sequential(Block(), Block()), []
    own = model.forward

    def counted(x):
        calls.append(x)
        return own(x)

    model.forward = counted
    plain = step_bytes(model)
    handle = ckpt_ops.regenerate(model, "mlp")
    assert step_bytes(model) < plain
    handle.remove()
    assert model.forward is counted and step_bytes(model) == plain and len(calls) == 3
    handle = ckpt_ops.regenerate(model, "mlp")
    ours = model.forward
    model.forward = lambda x: ours(x)
    handle.remove()  # not the outermost: it only passes calls on
    assert step_bytes(model) == plain and len(calls) == 4


def step_bytes(model):
    return ckpt_ops.memory.kept(model, torch.randn(3, 8)).bytes


@each_rung
def test_a_replica_of_data_parallel_computes_with_its_own_parameters(rung):
    model, x = nn.Sequential(Block(), Block()).eval(), torch.randn(3, 8)
    ckpt_ops.regenerate(model, rung)
    expected = model(x)
    replica = replicate(model)
    for p in model.parameters():
        p.data.fill_(torch.nan)
    assert torch.equal(replica(x), expected)
    grads = torch.autograd.grad(replica(x).sum(), list(replica.parameters_))
    assert all(grad.isfinite().all() for grad in grads)


def replicate(module):
    """torch.nn.parallel.replicate without devices: copies of parameters that are attributes, not Parameters."""
    replica = module._replicate_for_data_parallel()
    replica.parameters_ = []
    for name, p in module._parameters.items():
        copy = p.detach().clone().requires_grad_() if p is not None else None
        setattr(replica, name, copy)
        replica.parameters_ += [copy] if p is not None else []
    for name, child in module._modules.items():
        replica._modules[name] = replicate(child)
        replica.parameters_ += replica._modules[name].parameters_
    return replica
