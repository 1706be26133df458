"""Part A of the collected bug reports: dropout masks and seed replay. The number in a name is the row's."""

import functools
import socket

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ckpt_ops
from helpers_numerics import SEED
from helpers_ops import ALL_OPS, RANDOM_OPS, make, run
from helpers_philox import torch_mask

# Ops of one input whose mask shows in the output and in x.grad: ones in, ones upstream.
VISIBLE = [op for op in RANDOM_OPS if op.stem in ("dropout", "act_dropout", "dropout_add")]
visible = pytest.mark.parametrize("op", VISIBLE, ids=str)
every_random = pytest.mark.parametrize("op", RANDOM_OPS, ids=str)


def kept(op, x, wrap=lambda fn: fn, **random):
    """Agreement of the forward's and the backward's mask, and the forward's mask."""
    y = wrap(lambda x: op.ours({"x": x, "residual": torch.zeros_like(x)}, **random)[-1])(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return ((y != 0) == (dx != 0)).double().mean().item(), y != 0


def flat(device, *shape):
    return torch.full(shape or (4096,), 0.7, device=device, requires_grad=True)


@visible
@pytest.mark.parametrize("budget", [1, 0.5, 0])
def test_case_1_every_memory_budget(fused, op, budget):
    fused.skip_alike(budget == 0.5)
    torch._dynamo.reset()
    seed = torch.tensor([SEED], device=fused.device)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        compiled = lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True)  # noqa: E731
        agreement, mask = kept(op, flat(fused.device), compiled, p=0.5, seed=seed)
    assert agreement == 1.0 and torch.equal(mask.cpu(), torch_mask((4096,), 0.5, SEED))


def test_case_1_control_torchs_own_dropout_fails_at_budget_0():
    """Shows that the check above can fail: if this one does, torch was repaired."""
    torch._dynamo.reset()
    x = flat("cpu")
    with torch._functorch.config.patch(activation_memory_budget=0):
        y = torch.compile(lambda x: F.dropout(x, 0.5), backend="aot_eager")(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert ((y != 0) == (dx != 0)).double().mean() < 0.9


def _graphs(fn, *args):
    """Every node target of the forward and backward graphs of compiling fn."""
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    targets = []

    def record(gm, _inputs):
        targets.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        return gm

    y = torch.compile(fn, backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True)(*args)
    torch.autograd.grad(y.sum(), args[0])
    return targets


@visible
def test_case_2_no_random_op_in_the_graph(fused, op):
    """At p = 0 and with a seed given: nothing that a compiler has to treat as random."""
    x, seed = flat(fused.device), torch.tensor([SEED], device=fused.device)
    for random in (dict(p=0.0), dict(p=0.5, seed=seed)):
        targets = _graphs(lambda x, random=random: op.ours({"x": x, "residual": x * 2}, **random)[-1].sin(), x)
        random_ones = [t for t in targets if torch.Tag.nondeterministic_seeded in getattr(t, "tags", ())]
        assert targets and not random_ones


@visible
def test_case_2_compiled_checkpoint_with_an_inner_draw(fused, op):
    torch._dynamo.reset()
    wrap = lambda fn: torch.compile(lambda x: checkpoint(fn, x, use_reentrant=False), backend="aot_eager", fullgraph=True)  # noqa: E731
    agreement, _ = kept(op, flat(fused.device), wrap, p=0.5)
    assert agreement == 1.0


def test_case_2_compiled_checkpoint_without_a_gradient(fused):
    """Grad mode is on and nothing needs a gradient: p = 0 and a seed that is given trace as any other op."""
    x, seed = flat(fused.device).detach(), torch.tensor([SEED], device=fused.device)
    for random in (dict(p=0.0), dict(p=0.5, seed=seed)):
        torch._dynamo.reset()
        region = lambda x, random=random: ckpt_ops.gelu_dropout(x, **random)  # noqa: E731
        fn = torch.compile(
            lambda x, region=region: checkpoint(region, x, use_reentrant=False), backend="aot_eager", fullgraph=True
        )
        assert torch.equal(fn(x), region(x))


@visible
def test_case_3_checkpoint_without_rng_state(backend, op):
    wrap = lambda fn: functools.partial(  # noqa: E731
        checkpoint, fn, use_reentrant=False, preserve_rng_state=False, context_fn=ckpt_ops.seeds.replay()
    )
    assert kept(op, flat(backend.device, 64, 64), wrap, p=0.5)[0] == 1.0
    given = lambda fn: functools.partial(checkpoint, fn, use_reentrant=False, preserve_rng_state=False)  # noqa: E731
    assert kept(op, flat(backend.device, 64, 64), given, p=0.5, seed=SEED)[0] == 1.0


@visible
def test_case_4_the_logical_place_decides(backend, op):
    expected = torch_mask((2, 64, 512), 0.5, SEED)
    base = torch.full((2, 64, 512), 0.7, device=backend.device)
    views = {
        "contiguous": base,
        "transposed twice": base.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": torch.full((2, 64, 1024), 0.7, device=backend.device)[..., ::2],
    }
    for name, x in views.items():
        agreement, mask = kept(op, x.detach().requires_grad_(), p=0.5, seed=SEED)
        assert agreement == 1.0 and torch.equal(mask.cpu(), expected), name
    equal = (expected[..., 1:] == expected[..., :-1]).sum().item()
    n = expected[..., 1:].numel()
    assert abs(equal - n / 2) < 5 * (n / 4) ** 0.5


@every_random
def test_case_6_the_seeds_value_decides(backend, op):
    t, seed = make(op, device=backend.device), torch.tensor([SEED], device=backend.device)
    results = [run(op, t, dict(p=0.3, seed=seed.clone())) for _ in range(3)]
    for other in results[1:]:
        assert all(torch.equal(other[name], value) for name, value in results[0].items())


def _rank(rank, port, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(1)
    x = torch.ones(64, 64)
    entered = []
    with torch.autocast("cpu", torch.bfloat16):
        with ckpt_ops.seeds.scope(9, rank):
            entered.append((torch.is_autocast_enabled("cpu"), ckpt_ops.seeds._threads.top() is not None))
            apart = ckpt_ops.dropout(x, 0.5) != 0
        with ckpt_ops.seeds.scope(9):
            together = ckpt_ops.dropout(x, 0.5) != 0
    plain = ckpt_ops.dropout(x, 0.5) != 0
    folded = ckpt_ops.dropout_mask(x.shape, 0.5, ckpt_ops.seeds.fold_in(9, rank))
    masks = torch.stack([apart, together, plain, folded]).to(torch.uint8)
    gathered = [torch.empty_like(masks) for _ in range(2)]
    dist.all_gather(gathered, masks)
    results.put((rank, [(a == b).double().mean().item() for a, b in zip(*gathered)], entered))
    dist.destroy_process_group()


def test_case_8_ranks_fold_their_number_in():
    """Different masks where the rank is folded in, equal ones where it is not (replicated activations)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    torch.multiprocessing.spawn(_rank, (port, results), nprocs=2)
    for _ in range(2):
        _, (apart, together, plain, folded), entered = results.get()
        assert together == plain == 1.0
        assert abs(apart - 0.5) < 0.04 and abs(folded - 0.5) < 0.04
        assert entered == [(True, True)]


@pytest.mark.parametrize("n", [63, 64, 65, 129, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_case_10_attention_gradients_with_dropout(backend, n, causal):
    backend.skip_alike(n in (63, 64, 200))
    q, k, v = (torch.randn(1, 2, n, 16, device=backend.device, requires_grad=True) for _ in range(3))
    do = torch.randn(1, 2, n, 16, device=backend.device)
    o = ckpt_ops.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=causal, seed=SEED)
    ours = torch.autograd.grad(o, (q, k, v), do)
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scores = doubles[0] @ doubles[1].mT / 4
    if causal:
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    m = ckpt_ops.dropout_mask((1, 2, n, n), 0.3, SEED, device=q.device) * ckpt_ops.dropout_scale(0.3)
    expected = torch.autograd.grad((scores.softmax(-1) * m) @ doubles[2], doubles, do.double())
    for name, mine, true in zip("qkv", ours, expected):
        assert (mine - true).abs().max() < 1e-5, name


@pytest.mark.parametrize("op", ALL_OPS, ids=str)
def test_case_11_only_final_tensors_are_saved(backend, op):
    """Hooks that clone, save_on_cpu, and both within a checkpoint: the gradients of plain eager, to the bit."""
    t = make(op, device=backend.device)
    random = dict(p=0.4, seed=SEED)
    expected = run(op, t, random)
    contexts = [
        lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t),
        torch.autograd.graph.save_on_cpu,
    ]
    for context in contexts:
        with context():
            results = run(op, t, random)
        assert all(torch.equal(results[name], value) for name, value in expected.items())


@every_random
def test_case_12_a_generator_of_ones_own(backend, op):
    t, g = make(op, device=backend.device), torch.Generator(backend.device).manual_seed(5)
    default, state = torch.get_rng_state(), g.get_state()
    first = op.ours(t, p=0.3, generator=g)
    assert torch.equal(torch.get_rng_state(), default) and not torch.equal(g.get_state(), state)
    g.set_state(state)
    assert all(torch.equal(a, b) for a, b in zip(op.ours(t, p=0.3, generator=g), first))
    g.set_state(state)
    seed = ckpt_ops.seeds.draw(backend.device, g)
    assert all(torch.equal(a, b) for a, b in zip(op.ours(t, p=0.3, seed=seed), first))


def test_case_12_the_public_mask_rebuilds_the_op(backend):
    x = torch.randn(64, 100, device=backend.device)
    mask = ckpt_ops.dropout_mask(x.shape, 0.3, 17, device=x.device)
    assert torch.equal(ckpt_ops.dropout(x, 0.3, seed=17), x * mask * ckpt_ops.dropout_scale(0.3))
