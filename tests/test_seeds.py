"""Seeds: drawn, folded, scoped, replayed, attached."""

import copy
import functools
import pickle

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ckpt_ops
from ckpt_ops import seeds


def agreement(y, grad):
    """Where the backward kept what the forward kept (ones in, ones upstream)."""
    return ((y != 0) == (grad != 0)).double().mean().item()


def ones(device="cpu"):
    return torch.full((64, 64), 0.7, device=device, requires_grad=True)


# --- drawing --------------------------------------------------------------------------------------------------------


def test_draw_is_one_int64_that_manual_seed_reproduces():
    torch.manual_seed(7)
    first = [seeds.draw() for _ in range(3)]
    torch.manual_seed(7)
    again = [seeds.draw() for _ in range(3)]
    assert all(s.dtype == torch.int64 and s.shape == (1,) for s in first)
    assert [s.item() for s in first] == [s.item() for s in again] and len({s.item() for s in first}) == 3


def test_draws_use_all_64_bits():
    drawn = torch.cat([seeds.draw() for _ in range(200)])
    for bit in range(64):
        assert 50 < ((drawn >> bit) & 1).sum() < 150, f"bit {bit}"


def test_a_generator_alone_advances():
    g = torch.Generator().manual_seed(5)
    default, own = torch.get_rng_state(), g.get_state()
    seeds.draw(generator=g)
    assert torch.equal(torch.get_rng_state(), default) and not torch.equal(g.get_state(), own)


@pytest.mark.parametrize(
    "seed, kind, text",
    [
        (1.5, TypeError, "must be an int or an int64 tensor"),
        (True, TypeError, "got bool"),
        ("7", TypeError, "got str"),
        (2**63, ValueError, "fit in int64"),
        (-(2**63) - 1, ValueError, "fit in int64"),
        (torch.tensor(1.0), ValueError, "int64 and one element"),
        (torch.tensor(1, dtype=torch.int32), ValueError, "int64 and one element"),
        (torch.tensor([1, 2]), ValueError, "one element"),
        (torch.empty(1, dtype=torch.int64, device="meta"), ValueError, "must share a device"),
    ],
)
def test_what_is_no_seed(backend, seed, kind, text):
    state = torch.get_rng_state()
    for p in (0.0, 0.5):  # also where no mask is needed
        with pytest.raises(kind, match=text):
            ckpt_ops.dropout(torch.ones(3, device=backend.device), p, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)


# --- folding --------------------------------------------------------------------------------------------------------


def test_fold_in_is_pure_and_tells_ints_apart():
    values = {seeds.fold_in(s, *ints) for s in (0, 1, -1) for ints in [(0,), (1,), (-1,), (0, 0), (0, 1), (1, 0), (2**62,)]}
    assert len(values) == 21 and all(-(2**63) <= v < 2**63 for v in values)
    assert seeds.fold_in(3, 1, 2) == seeds.fold_in(seeds.fold_in(3, 1), 2) == seeds.fold_in(3, 1, 2)
    assert seeds.fold_in(3) == 3


def test_fold_in_of_a_tensor_is_that_of_the_int():
    for seed in (0, -5, 2**63 - 1):
        folded = seeds.fold_in(torch.tensor([seed]), 9, -4)
        assert isinstance(folded, torch.Tensor) and folded.dtype == torch.int64 and folded.item() == seeds.fold_in(seed, 9, -4)


def test_fold_in_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="every int must fit in int64"):
        seeds.fold_in(1, 2**63)
    with pytest.raises(TypeError, match="got float"):
        seeds.fold_in(1.0, 2)


def test_folded_seeds_give_independent_masks():
    masks = [ckpt_ops.dropout_mask((256, 256), 0.5, seeds.fold_in(1, rank)) for rank in range(4)]
    for i in range(4):
        for j in range(i):
            assert abs((masks[i] == masks[j]).double().mean() - 0.5) < 5 * 0.5 / 256


# --- scope ----------------------------------------------------------------------------------------------------------


def test_scope_numbers_its_draws_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    with seeds.scope(11, 3):
        drawn = [seeds.draw().item() for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn == [seeds.fold_in(11, 3, n) for n in (1, 2, 3)]


def test_scopes_nest_and_end():
    with seeds.scope(1):
        outer = seeds.draw().item()
        with seeds.scope(2):
            assert seeds.draw().item() == seeds.fold_in(2, 1)
        assert seeds.draw().item() == seeds.fold_in(1, 2) and outer == seeds.fold_in(1, 1)
    torch.manual_seed(0)
    a = seeds.draw().item()
    torch.manual_seed(0)
    assert seeds.draw().item() == a


# --- replay ---------------------------------------------------------------------------------------------------------


def region(x):
    """Two draws, so that their order matters."""
    return ckpt_ops.dropout(ckpt_ops.dropout(x, 0.3), 0.5)


def replayed(fn, x, **k):
    return checkpoint(fn, x, use_reentrant=False, preserve_rng_state=False, context_fn=seeds.replay(**k))


def test_replay_gives_the_forwards_masks(backend):
    x = ones(backend.device)
    y = replayed(region, x)
    y.sum().backward()
    assert agreement(y, x.grad) == 1.0


def test_control_without_replay_the_masks_differ(backend):
    x = ones(backend.device)
    y = checkpoint(region, x, use_reentrant=False, preserve_rng_state=False)
    y.sum().backward()
    assert 0.3 < agreement(y, x.grad) < 0.7


def test_replay_draws_no_more_than_the_forward(backend):
    x = ones(backend.device)
    y = replayed(region, x)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_two_backwards_of_one_region(backend):
    x = ones(backend.device)
    y = replayed(region, x)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second) and agreement(y, first) == 1.0


def test_nested_regions(backend):
    x = ones(backend.device)
    y = replayed(lambda x: replayed(region, ckpt_ops.dropout(x, 0.2)) * 2, x)
    y.sum().backward()
    assert agreement(y, x.grad) == 1.0


def test_with_a_selective_policy(fused):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    selective = functools.partial(create_selective_checkpoint_contexts, policy)
    x, w = ones(fused.device), torch.eye(64, device=fused.device, requires_grad=True)
    y = replayed(lambda x: region(x @ w), x, context_fn=selective)
    y.sum().backward()
    assert agreement(y, x.grad) == 1.0


def test_within_a_scope(backend):
    x = ones(backend.device)
    with seeds.scope(4):
        y = replayed(region, x)
    y.sum().backward()
    assert agreement(y, x.grad) == 1.0
    with seeds.scope(4):
        assert torch.equal(region(x), y)


def test_more_draws_than_the_forward_is_an_error():
    calls = []

    def grows(x):
        calls.append(1)
        for _ in calls:
            x = ckpt_ops.dropout(x, 0.5)
        return x.sin()

    with pytest.raises(RuntimeError, match="asks for more seeds than its forward drew"):
        replayed(grows, ones()).sum().backward()


def test_regions_of_one_context_fn_do_not_mix(backend):
    """One replay() for all blocks, backwards in another order than the forwards."""
    context_fn = seeds.replay()
    xs = [ones(backend.device) for _ in range(3)]
    ys = [checkpoint(region, x, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn) for x in xs]
    for i in (1, 0, 2):
        ys[i].sum().backward()
        assert agreement(ys[i], xs[i].grad) == 1.0


# --- attach ---------------------------------------------------------------------------------------------------------


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
