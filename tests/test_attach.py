"""seeds.attach: one seed a forward of a whole model, right under checkpoint, compile and copying."""

import copy
import pickle

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import checkpoint

import ckpt_ops
from ckpt_ops import seeds
from test_seeds import agreement, ones


class Net(nn.Module):
    """Three random modules; an output that is 0 exactly where one of the masks is."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.add = ckpt_ops.nn.Dropout(0.3), ckpt_ops.nn.GELUDropout(0.3), ckpt_ops.nn.DropoutAdd(0.3)

    def forward(self, x):
        return self.add(self.act(self.first(x)), torch.zeros_like(x))


def test_attach_gives_fixed_streams_and_one_seed_a_forward(backend):
    net, x = Net(), ones(backend.device)
    seeds.attach(net)
    assert [m.stream for m in (net.first, net.act, net.add)] == [1, 2, 3]
    torch.manual_seed(3)
    y = net(x)
    torch.manual_seed(3)
    seed = seeds.draw(backend.device)
    keep = torch.stack([ckpt_ops.dropout_mask(x.shape, 0.3, seed, stream=s) for s in (1, 2, 3)]).all(0)
    assert torch.equal(y != 0, keep)
    assert not torch.equal(net(x) != 0, keep), "a new forward, a new seed"
    y.sum().backward()
    assert agreement(y, x.grad) == 1.0


def test_attach_folds(backend):
    net, x = Net(), ones(backend.device)
    seeds.attach(net, 5)
    torch.manual_seed(3)
    y = net(x)
    torch.manual_seed(3)
    seed = seeds.fold_in(seeds.draw(backend.device), 5)
    assert torch.equal(y != 0, torch.stack([ckpt_ops.dropout_mask(x.shape, 0.3, seed, stream=s) for s in (1, 2, 3)]).all(0))


def test_eval_draws_nothing():
    net, x = Net().eval(), ones()
    seeds.attach(net)
    state = torch.get_rng_state()
    net(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_remove_undoes_attach():
    net = Net()
    handle = seeds.attach(net)
    handle.remove()
    assert all(m.seed_source is None and m.stream == 0 for m in (net.first, net.act, net.add))
    assert not net._forward_pre_hooks
    net(ones())


def test_attach_needs_a_random_module():
    with pytest.raises(ValueError, match="no random module of ckpt_ops.nn"):
        seeds.attach(nn.Linear(2, 2))


@pytest.mark.parametrize("budget", [1, 0.5, 0])
def test_attached_after_compile_is_right_at_every_memory_budget(fused, budget):
    torch._dynamo.reset()
    x = ones(fused.device)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        compiled = torch.compile(Net(), backend="aot_eager", fullgraph=True)
        seeds.attach(compiled)
        masks = []
        for _ in range(2):
            y = compiled(x)
            x.grad = None
            y.sum().backward()
            assert agreement(y, x.grad) == 1.0
            masks.append(y != 0)
    assert not torch.equal(*masks)


def test_compiled_after_attach(fused):
    """As one graph it is refused; with graph breaks allowed the draw stays outside, and the masks are right."""
    torch._dynamo.reset()
    net = Net()
    seeds.attach(net)
    with pytest.raises(RuntimeError, match="call torch.compile first, then seeds.attach"):
        torch.compile(net, backend="aot_eager", fullgraph=True)(ones(fused.device))
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=0):
        x = ones(fused.device)
        y = torch.compile(net, backend="aot_eager")(x)
        y.sum().backward()
    assert agreement(y, x.grad) == 1.0


def test_a_seed_drawn_in_a_graph_below_budget_1_is_refused(fused):
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=0.5), pytest.raises(RuntimeError, match="pass seed=, or call"):
        torch.compile(lambda x: ckpt_ops.dropout(x, 0.5), backend="aot_eager", fullgraph=True)(ones(fused.device))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False, preserve_rng_state=False)


def test_attached_checkpoints_need_no_rng_state(backend):
    net, x = Checkpointed(), ones(backend.device)
    seeds.attach(net)
    for _ in range(3):
        x.grad = None
        y = net(x)
        y.sum().backward()
        assert agreement(y, x.grad) == 1.0


def test_recomputing_with_two_forwards_outstanding_is_refused(backend):
    net, x = Checkpointed(), ones(backend.device)
    seeds.attach(net)
    first, _second = net(x), net(x)
    with pytest.raises(RuntimeError, match="cannot know whose seed to use.*replay"):
        first.sum().backward()


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_of_an_attached_model_is_attached_to_itself(backend, copy_of):
    net, x = Net(), ones(backend.device)
    seeds.attach(net)
    net(x)
    twin = copy_of(net)
    assert twin.first.seed_source is not net.first.seed_source and twin.first.seed_source is twin.add.seed_source
    before = net.first.seed_source.seed
    torch.manual_seed(8)
    y = twin(x)
    assert net.first.seed_source.seed is before
    torch.manual_seed(8)
    assert torch.equal(net(x), y)
