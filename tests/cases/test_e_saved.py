"""Rows 45, 46 and 52 of the collected bug reports: what a checkpoint region repeats, what steps and ops keep."""

import functools
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import ckpt_ops
from helpers_numerics import SEED
from helpers_ops import ALL_OPS, EACH_OP, make, run

every = pytest.mark.parametrize("op", ALL_OPS, ids=str)


def test_case_45_our_modules_have_no_buffers_to_update_twice():
    """Norms and dropouts keep no running state: a recomputed forward changes nothing but time."""
    for name in ckpt_ops.nn.__all__:
        module = getattr(ckpt_ops.nn, name)
        arguments = {"ActDropout": ("silu",), "MLP": (4,)}.get(name, (4, 2) if name.startswith(("Multi", "Trans")) else (0.5,))
        instance = module(4) if "Norm" in name else module(*arguments)
        assert not list(instance.buffers()), name


def test_case_45_a_replayed_region_updates_batch_norm_like_torchs_checkpoint(backend):
    """The documented behaviour of recomputation: torch's own, the statistics see the batch in both passes."""

    def counted(**options):
        torch.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm1d(4), ckpt_ops.nn.Dropout(0.5)).to(backend.device)
        x = torch.randn(8, 4, device=backend.device, requires_grad=True)
        checkpoint(net, x, use_reentrant=False, **options).sum().backward()
        return net[0].num_batches_tracked.item(), net[0].running_mean

    plain = counted()
    replayed = counted(preserve_rng_state=False, context_fn=ckpt_ops.seeds.replay())
    assert plain[0] == replayed[0] and torch.equal(plain[1], replayed[1])


def _alive():
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("op", EACH_OP, ids=str)
@pytest.mark.parametrize("used", [True, False])
def test_case_46_nothing_is_left_behind(backend, op, used):
    """20 steps without garbage collection: as many tensors as after the second; also where the result is not used."""
    t = make(op, device=backend.device)

    def step():
        outputs = op.ours(t, p=0.3, seed=SEED)
        if used:
            torch.autograd.grad(outputs, list(t.values()), [torch.ones_like(o) for o in outputs])

    step()
    gc.collect()
    gc.disable()
    gc.freeze()  # leaves only what is new to be counted
    try:
        step()
        before = _alive()
        for _ in range(20):
            step()
        assert _alive() == before
    finally:
        gc.unfreeze()
        gc.enable()


def test_case_46_bytes_against_torchs_own(fused):
    x, r = (torch.randn(64, 256, device=fused.device, requires_grad=True) for _ in range(2))
    b, w = (nn.Parameter(torch.randn(256, device=fused.device)) for _ in range(2))
    kept = ckpt_ops.memory.kept
    assert kept(ckpt_ops.gelu_dropout, x, 0.1, "none", b).bytes <= x.nbytes + 16 < 131_072
    assert kept(ckpt_ops.dropout_add_layer_norm, x, r, (256,), w, b, p=0.1).bytes == x.nbytes + 64 * 8 + 8 < 133_632
    assert kept(ckpt_ops.dropout_add_rms_norm, x, r, (256,), w, p=0.1).bytes == x.nbytes + 64 * 4 + 8


def _saved(fn):
    saved = []

    def pack(t):
        saved.append((tuple(t.shape), t.dtype, t.stride()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fn()
    return saved


def subsets(op):
    names = list(op.shapes(op.shape))
    return [names, *([n] for n in names)]


@every
def test_case_52_the_same_is_saved_in_both_passes(backend, op):
    """Grad mode, the pass and repetition change nothing; which inputs need gradients may."""
    for wanted in subsets(op):
        t = make(op, device=backend.device, frozen=set(op.shapes(op.shape)) - set(wanted))
        copies = {n: x.detach().requires_grad_(x.requires_grad) for n, x in t.items()}
        once = _saved(functools.partial(op.ours, t, p=0.3, seed=SEED))
        with torch.no_grad():
            op.ours(t, p=0.3, seed=SEED)
            with torch.enable_grad():
                again = _saved(functools.partial(op.ours, copies, p=0.3, seed=SEED))
        assert once == again, wanted


@every
def test_case_52_checkpoints_own_check_without_early_stop(backend, op):
    """torch compares count, shapes and dtypes of the two passes, and raises where they differ."""
    for wanted in subsets(op):
        t = make(op, device=backend.device, frozen=set(op.shapes(op.shape)) - set(wanted))
        expected = run(op, t, dict(p=0.3, seed=SEED))
        with set_checkpoint_early_stop(False):
            results = run(
                op, t, dict(p=0.3, seed=SEED), call=lambda t, **k: checkpoint(lambda t: op.ours(t, **k), t, use_reentrant=False)
            )
        assert all(torch.equal(results[name], value) for name, value in expected.items())
