"""What holds for every op alike: the same bits wherever it runs, first and second derivatives, compile, vmap, threads."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ckpt_ops
from helpers_numerics import SEED, assert_close
from helpers_ops import ALL_OPS, EACH_OP, RANDOM_OPS, layer_norm_op, make, rms_norm_op, run, upstream

every = pytest.mark.parametrize("op", ALL_OPS, ids=str)
each = pytest.mark.parametrize("op", EACH_OP, ids=str)
each_random = pytest.mark.parametrize("op", [op for op in EACH_OP if op.random], ids=str)
RANDOM = dict(p=0.4, seed=SEED)


def without_values(op):
    """The op that runs under torch.compile and torch.func: weights have no values to read, so the input is kept."""
    return (
        layer_norm_op("input") if op.name == "layer_norm-output" else rms_norm_op("input", 1.0) if "output" in op.name else op
    )


def assert_equal(results, expected):
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(results[name], value), name


def through(wrapper, op):
    """op.ours with its tensors as positional arguments behind `wrapper`, which takes (fn, *tensors)."""

    def call(tensors, **random):
        def fn(*values):
            return op.ours(dict(zip(tensors, values)), **random)

        return wrapper(fn, *tensors.values())

    return call


# --- the same bits --------------------------------------------------------------------------------------------------


def _checkpoint(fn, *args):
    return checkpoint(fn, *args, use_reentrant=False)


def _checkpoint_without_rng_state(fn, *args):
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)


def _cloning_hooks(fn, *args):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        return fn(*args)


def _save_on_cpu(fn, *args):
    with torch.autograd.graph.save_on_cpu():
        return fn(*args)


@every
@pytest.mark.parametrize("wrapper", [_checkpoint, _checkpoint_without_rng_state, _cloning_hooks, _save_on_cpu])
def test_wrapped_is_plain_eager_to_the_bit(backend, op, wrapper):
    t = make(op, device=backend.device)
    assert_equal(run(op, t, RANDOM, call=through(wrapper, op)), run(op, t, RANDOM))


@each
def test_a_clone_of_the_seed_is_the_same_seed(backend, op):
    t = make(op, device=backend.device)
    seed = torch.tensor([SEED], device=backend.device)
    plain = run(op, t, RANDOM)
    assert_equal(run(op, t, dict(p=0.4, seed=seed)), plain)
    assert_equal(run(op, t, dict(p=0.4, seed=seed.clone().reshape(()))), plain)
    assert seed.item() == SEED


BIG = {"attention-lower_right-gqa": (2, 6, 3, 130, 150, 16, 16)}


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads_gives_the_same_bits(fused, op, dtype):
    t = make(op, BIG.get(op.name, (1031, 257)), dtype, fused.device)
    fused.skip_if_slow(sum(x.numel() for x in t.values()))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(op, t, RANDOM))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


@each
def test_ten_repeats_give_the_same_bits(backend, op):
    t = make(op, op.shape if backend.slow else BIG.get(op.name, (67, 257)), device=backend.device)
    first = run(op, t, RANDOM)
    for _ in range(1 if backend.slow else 9):
        assert_equal(run(op, t, RANDOM), first)


# --- what it may not touch ------------------------------------------------------------------------------------------


@every
def test_inputs_seed_and_upstream_gradient_stay_as_they_were(backend, op):
    t = make(op, device=backend.device)
    seed = torch.tensor([SEED], device=backend.device)
    outputs = op.ours(t, p=0.4, seed=seed)
    grads = upstream(op, outputs)
    watched = {**t, **{"grad of " + n: g for n, g in grads.items()}, "seed": seed}
    before = {n: (x.detach().clone(), x._version) for n, x in watched.items()}
    torch.autograd.grad(outputs, list(t.values()), list(grads.values()))
    for n, (value, version) in before.items():
        assert torch.equal(watched[n].detach(), value) and watched[n]._version == version, n


@each_random
def test_outputs_own_their_memory(backend, op):
    """Writing into the result changes no input (p = 0 of dropout returns the input by contract)."""
    t = make(op, device=backend.device)
    storages = {x.untyped_storage().data_ptr() for x in t.values()}
    for o in op.ours(t, **RANDOM):
        assert o.untyped_storage().data_ptr() not in storages


# --- which gradients ------------------------------------------------------------------------------------------------


def subsets(names):
    """Each input alone, and all but each."""
    return [{n} for n in names] + [set(names) - {n} for n in names]


@every
def test_any_subset_of_gradients_is_the_same_bits(backend, op):
    full = run(op, make(op, device=backend.device), RANDOM)
    for wanted in subsets(op.shapes(op.shape)):
        if wanted:
            t = make(op, device=backend.device, frozen=set(op.shapes(op.shape)) - wanted)
            some = run(op, t, RANDOM)
            assert_equal(some, {n: v for n, v in full.items() if n in op.outputs or n[1:] in wanted})


@every
def test_nothing_needs_a_gradient(backend, op):
    t = make(op, device=backend.device, frozen=op.shapes(op.shape))
    kept = ckpt_ops.memory.kept(lambda: op.ours(t, **RANDOM))
    assert kept.rows == [] and not any(o.requires_grad for o in kept.output)
    with torch.inference_mode():
        for o, expected in zip(op.ours(t, **RANDOM), kept.output):
            assert torch.equal(o, expected)


# --- derivatives ----------------------------------------------------------------------------------------------------

TINY = {op.name: (3, 5) for op in ALL_OPS} | {op.name: (1, 2, 2, 3, 4, 3, 2) for op in ALL_OPS if op.stem == "attention"}


def _tiny(op, device):
    t = make(op, TINY[op.name], torch.float64, device)
    return t, lambda *values: op.ours(dict(zip(t, values)), **RANDOM)


@every
def test_gradcheck(backend, op):
    t, fn = _tiny(op, backend.device)
    assert torch.autograd.gradcheck(fn, tuple(t.values()), fast_mode=backend.slow)  # fast: along random directions


@every
def test_gradgradcheck_of_the_reference(op):
    with ckpt_ops.use_backend("reference"):
        t, fn = _tiny(op, "cpu")
        assert torch.autograd.gradgradcheck(fn, tuple(t.values()))


@every
def test_a_second_derivative_is_a_clear_error(fused, op):
    t, fn = _tiny(op, fused.device)
    grads = torch.autograd.grad(sum(o.square().sum() for o in fn(*t.values())), list(t.values()), create_graph=True)
    name = op.name if op.stem == "dropout_add_norm" else op.stem
    with pytest.raises(RuntimeError, match=rf'{name} has no double backward.*backend="reference"'):
        sum(g.square().sum() for g in grads).backward()


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return None


@every
def test_outputs_that_get_no_gradient(backend, op):
    t = make(op, device=backend.device)
    unused = sum(_NoGradient.apply(o).sum() for o in op.ours(t, **RANDOM))
    for grad in torch.autograd.grad(unused, list(t.values()), allow_unused=True):
        assert grad is None or (grad == 0).all()


class _Seen(TorchDispatchMode):
    """The names of all dispatcher ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **kwargs or {})


@every
def test_backward_is_our_kernel_alone(fused, op):
    """No zeros are written in place of gradients that statistics do not have."""
    t = make(op, device=fused.device)
    outputs = op.ours(t, **RANDOM)
    with _Seen() as seen:
        torch.autograd.grad(outputs, list(t.values()), [torch.ones_like(o) for o in outputs])
    ours = [name for name in seen.names if name.startswith("ckpt_ops")]
    assert len(ours) == 1
    assert set(seen.names) - {"aten::ones_like", "aten::detach", "aten::view", *ours} == set()


# --- torch.func -----------------------------------------------------------------------------------------------------


@every
def test_func_grad(backend, op):
    t = make(op, device=backend.device)
    names = tuple(t)

    def loss(*values, op=op):
        return sum(o.square().sum() for o in op.ours(dict(zip(names, values)), **RANDOM))

    plain = torch.autograd.grad(loss(*t.values(), op=without_values(op)), list(t.values()))
    functional = torch.func.grad(loss, argnums=tuple(range(len(t))))(*(x.detach() for x in t.values()))
    for name, mine, expected in zip(names, functional, plain):
        if backend.fused:
            assert torch.equal(mine, expected), name
        else:  # torch.func takes some of torch's own backwards apart
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@every
def test_vmap_is_a_call_a_sample(backend, op):
    t = {n: x.detach() for n, x in make(op, device=backend.device).items()}
    batch = {n: torch.stack([x, 2 * x, -x]) for n, x in t.items()}

    def one(*values):
        return op.ours(dict(zip(t, values)), **RANDOM)

    together = torch.vmap(one)(*batch.values())
    for i in range(3):
        for mine, expected in zip(together, one(*(x[i] for x in batch.values()))):
            torch.testing.assert_close(mine[i], expected, rtol=1e-5, atol=1e-6)


# --- places ---------- -----------------------------------------------------------------------------------------------


@each_random
@pytest.mark.parametrize(
    "stream, origin", [(0, (0, 0, 0)), (7, (0, 0, 0)), (2**32 - 1, (3, 5, 9)), (1, (2**31, 2**32 - 100, 2**35 - 1000))]
)
def test_streams_and_origins(backend, op, stream, origin):
    assert_close(op, make(op, device=backend.device), p=0.4, stream=stream, origin=origin)


@each_random
def test_training_false_is_p_0_and_draws_nothing(backend, op):
    t = make(op, device=backend.device)
    state = torch.get_rng_state()
    for mine, expected in zip(op.ours(t, p=0.4, training=False), op.ours(t, p=0.0)):
        assert torch.equal(mine, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("op", RANDOM_OPS, ids=str)
def test_p_1_drops_everything_and_draws_nothing(backend, op):
    t = make(op, device=backend.device)
    state = torch.get_rng_state()
    results = run(op, t, dict(p=1.0))
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("dx", "dbias", "dinput_bias") if op.stem not in ("attention", "dropout_add_norm") else ("dinput_bias",):
        assert name not in results or (results[name] == 0).all()
    if op.stem == "attention":
        assert all((r == 0).all() for r in results.values())
