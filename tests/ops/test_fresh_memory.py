"""Large outputs of the CPU kernels: a freed one is reused, a live one never, and little waits."""

import pathlib

import pytest
import torch

import ckpt_ops

MIB = 1 << 20
ROWS = 4 * MIB // (1024 * 4)  # [ROWS, 1024] float32 is the smallest size that is reused

MAPS = pathlib.Path("/proc/self/maps")
SANITIZED = MAPS.exists() and "libasan" in MAPS.read_text()  # there all memory is malloc's
pytestmark = pytest.mark.skipif(
    ckpt_ops.backends()["cpu"] != "ready" or not MAPS.exists() or SANITIZED,
    reason="needs the CPU kernels on Linux, not under the sanitizer",
)


@pytest.fixture(autouse=True)
def on_cpu(fresh_memory_is_nan):
    with ckpt_ops.use_backend("cpu"):
        yield


def output(mib, value=1):
    """A fresh output of a kernel: `mib` MiB, all of them 2 * value or 0."""
    return ckpt_ops.dropout(torch.full((mib * MIB // 4096, 1024), float(value)), 0.5, seed=1)


def address_space():
    """MiB that the process has mapped."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    return pages * 4096 / MIB


def test_a_freed_output_serves_the_next_of_its_size():
    first = output(8)
    place = first.data_ptr()
    del first
    other = output(12)
    assert other.data_ptr() != place
    assert output(8).data_ptr() == place


def test_live_outputs_share_nothing():
    outputs = [output(4, value) for value in range(1, 9)]
    for value, y in enumerate(outputs, 1):
        assert set(y.unique().tolist()) == {0, 2 * value}
    view = outputs[0][1:3]
    del outputs
    kept = view.clone()
    output(4, 99.0)
    assert torch.equal(view, kept)


def test_little_waits():
    output(32)
    before = address_space()
    many = [output(32) for _ in range(12)]
    assert address_space() - before > 300
    del many
    assert address_space() - before < 300
    huge = output(300)
    del huge
    assert address_space() - before < 300


def test_an_output_can_be_resized_like_any_tensor():
    y = output(4)
    y.resize_(2 * ROWS, 1024)
    assert set(y[:ROWS].unique().tolist()) == {0, 2}
    y.fill_(3)
    assert y.sum() == 3 * 2 * ROWS * 1024


def test_threads_allocate_and_free_at_once():
    from concurrent.futures import ThreadPoolExecutor

    def work(value):
        return all(set(output(4, value).unique().tolist()) == {0, 2 * value} for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 9)))
