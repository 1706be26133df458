"""Seeds: drawn, folded, scoped, replayed, attached."""

import functools

import pytest
import torch
import torch._functorch.config
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
