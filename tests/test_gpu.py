"""What only a GPU can show: the CPU's masks, streams, CUDA graphs, a second device. `bench/gpu_check.sh` runs it there.

Tests named sanitized_... are small: compute-sanitizer runs them.
"""

import pytest
import torch

import ckpt_ops
from helpers_backends import READY
from helpers_numerics import SEED, assert_close_for
from helpers_ops import ALL_OPS, EACH_OP, RANDOM_OPS, make, run, upstream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

on_each_backend = pytest.mark.parametrize("name", [name for name in READY if name in ("cuda", "triton")] or ["triton"])
each = pytest.mark.parametrize("op", EACH_OP, ids=str)
RANDOM = dict(p=0.4, seed=SEED)
SHAPES = {"attention": ((2, 4, 2, 65, 129, 40, 72), (1, 2, 1, 300, 300, 64, 64))}
ODD = ((3, 7, 129), (5, 1), (1, 65537), (70001, 16), (0, 8), (257, 1000))


@pytest.fixture(autouse=True)
def served(request):
    with ckpt_ops.use_backend(request.node.callspec.params["name"]):
        yield


@on_each_backend
@pytest.mark.parametrize("shape", [(2, 3, 70, 130), (1, 1), (5, 33)])
@pytest.mark.parametrize("origin", [(0, 0, 0), (3, 5, 32), (1, 2, 7)])
def test_sanitized_masks_are_the_cpus(name, shape, origin):
    arguments = dict(stream=3, origin=origin)
    ours = ckpt_ops.dropout_mask(shape, 0.3, SEED, device="cuda", **arguments)
    assert torch.equal(ours.cpu(), ckpt_ops.dropout_mask(shape, 0.3, SEED, **arguments))


@on_each_backend
@pytest.mark.parametrize("op", RANDOM_OPS, ids=str)
def test_forward_and_backward_drop_what_the_cpu_drops(name, op):
    tensors = make(op, device="cuda")
    on_gpu = run(op, tensors, RANDOM, grads := upstream(op, op.ours(tensors, **RANDOM)))
    with ckpt_ops.use_backend("cpu"):
        cpu = {key: t.detach().cpu().requires_grad_(t.requires_grad) for key, t in tensors.items()}
        on_cpu = run(op, cpu, RANDOM, {key: g.cpu() for key, g in grads.items()})
    for key, value in on_cpu.items():
        torch.testing.assert_close(on_gpu[key].cpu(), value, rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


@on_each_backend
@pytest.mark.parametrize("op", ALL_OPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sanitized_small(name, op, dtype):
    assert_close_for(op, op.shape, dtype, "cuda", p=0.4 if op.random else 0.0)


@on_each_backend
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_odd_shapes(name, op, dtype):
    for shape in SHAPES.get(op.stem, ODD):
        assert_close_for(op, shape, dtype, "cuda", p=0.4 if op.random else 0.0)


@on_each_backend
@each
def test_a_side_stream_sees_its_own_seed(name, op):
    """The seed is written on the stream of the call, just before it, while the default stream is busy."""
    tensors = make(op, device="cuda")
    grads = upstream(op, op.ours(tensors, **RANDOM))
    expected = run(op, tensors, RANDOM, grads)
    busy, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for _ in range(20):
        busy @ busy
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            seed = torch.zeros(1, dtype=torch.int64, device="cuda")
            torch.cuda._sleep(100_000)
            seed.fill_(SEED)
            results = run(op, tensors, dict(p=0.4, seed=seed), grads)
        side.synchronize()
        for key, value in expected.items():
            assert torch.equal(results[key], value), key


@on_each_backend
@each
def test_graph_replays_draw_fresh_masks_and_equal_eager(name, op):
    tensors = make(op, device="cuda")
    grads = upstream(op, op.ours(tensors, **RANDOM))
    seed = torch.tensor([SEED], device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and autotunes outside the capture
        for _ in range(2):
            run(op, tensors, dict(p=0.4, seed=seed), grads)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(op, tensors, dict(p=0.4, seed=seed), grads)
    seen = []
    for value in (SEED, 1, 2):
        seed.fill_(value)
        graph.replay()
        eager = run(op, tensors, dict(p=0.4, seed=value), grads)
        for key in eager:
            assert torch.equal(captured[key], eager[key]), f"{key}, seed {value}"
        seen.append(captured[op.outputs[-1]].clone())
    if op.random:
        assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@on_each_backend
@each
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_tensor_on_another_device_than_the_current_one(name, op):
    first, second = (make(op, device=f"cuda:{i}") for i in range(2))
    grads = upstream(op, op.ours(first, **RANDOM))
    expected = run(op, first, RANDOM, grads)
    results = run(op, second, RANDOM, {key: g.to("cuda:1") for key, g in grads.items()})
    for key, value in expected.items():
        assert torch.equal(results[key].cpu(), value.cpu()), key


@on_each_backend
@pytest.mark.parametrize("op", [op for op in EACH_OP if op.stem != "attention"], ids=str)
def test_more_than_two_to_the_31_elements(name, op):
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:
        pytest.skip("needs 100 GiB of GPU memory")
    rows, columns = 2**21 + 1, 1024
    x = torch.ones(1, dtype=torch.bfloat16, device="cuda").expand(rows, columns)
    tensors = {key: t.detach() for key, t in make(op, (1, columns), torch.bfloat16, "cuda").items()}
    tensors |= {key: x for key, t in tensors.items() if t.dim() == 2}
    last = {key: t[-1:] if t.dim() == 2 else t for key, t in tensors.items()}
    whole = op.ours(tensors, **RANDOM)[0][-1:].clone()
    torch.cuda.empty_cache()
    assert torch.equal(whole, op.ours(last, **RANDOM, origin=(0, rows - 1, 0))[0])
