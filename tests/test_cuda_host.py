"""The CUDA kernels on the CPU: sizes at which they change their way, the other builds and orders, and planted bugs.

The op tests run them in one order as backend cuda-host; here a part of those runs in every other build and order.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt_ops
import helpers_cuda_host as cuda_host
from helpers_backends import READY
from helpers_numerics import assert_close_for
from helpers_ops import ACT_DROPOUTS, DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM, layer_norm_op, rms_norm_op

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(cuda_host.NAME not in READY, reason=f"no {cuda_host.NAME}: {cuda_host.why_not()}")

NORMS = [layer_norm_op("input"), rms_norm_op("output"), DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM]


@pytest.fixture(autouse=True)
def kernels_under_test():
    with ckpt_ops.use_backend(cuda_host.NAME):
        yield


@pytest.mark.parametrize("op", NORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 255), (5, 257), (3, 4100), (3, 8200), (2, 16400), (2, 65537)], ids=str)
def test_rows_in_registers_and_looped_over(op, shape, dtype):
    """Rows of one warp, of a block, too long for the backward's registers, too long for the forward's."""
    assert_close_for(op, shape, dtype, "cpu", p=0.3 if op.random else 0.0)


@pytest.mark.parametrize("op", [ACT_DROPOUTS[0], NORMS[0]], ids=str)
def test_more_rows_than_a_grid_has_blocks_in_y(op):
    assert_close_for(op, (65_539, 2), torch.float32, "cpu", p=0.3 if op.random else 0.0)


# --- builds and orders ----------------------------------------------------------------------------------------------

# Every kernel in every dtype and with every kind of tail: seconds in the slowest build.
PART = [
    *("tests/test_mask.py::test_mask_vectors", "tests/ops/test_act_dropout.py::test_float32_bias_with_16_bit_input"),
    *("tests/ops/test_dropout_add.py::test_layouts", "tests/ops/test_dropout_add_norm.py::test_layouts"),
    *("tests/ops/test_layer_norm.py::test_layouts", "tests/ops/test_rms_norm.py::test_numerics_of_offsets"),
    "tests/test_cuda_host.py::test_rows_in_registers_and_looped_over",
]
SMALL = "not 16400 and not 65537 and not triton"


def _pytest(build, order="random", library=None, tests=PART):
    """Runs tests on another build in a process of their own."""
    environment = os.environ | {
        "CKPT_OPS_TEST_BACKENDS": cuda_host.NAME,
        "CKPT_CUDA_HOST_BUILD": build,
        "CKPT_CUDA_HOST_ORDER": order,
        "CKPT_CUDA_HOST_LIBRARY": str(library or cuda_host.build(build)),
        "OMP_NUM_THREADS": "1",
    }
    if build == "asan":
        environment |= cuda_host.asan_environment()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-s", "-p", "no:cacheprovider", "-k", SMALL, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif("CKPT_CUDA_HOST_BUILD" in os.environ, reason="this is such a build")
@pytest.mark.parametrize(
    "build, order", [("values", "reverse"), ("values", "random"), ("asan", "forward"), ("race", "forward")]
)
def test_other_builds_and_orders(build, order):
    result = _pytest(build, order)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


# --- planted bugs ---------------------------------------------------------------------------------------------------

# What is wrong: (header, its text, the bug in its place), (kernels compiled anew, build that must catch it, words of its
# complaint, a test).
WIDE = "tests/test_cuda_host.py::test_rows_in_registers_and_looped_over"
ADD = "tests/ops/test_dropout_add.py::test_layouts"
PLANTED = {
    "a dropped barrier": (
        ("reduce.h", "  __syncthreads();  // parts are written again by the next call\n", ""),
        ("layer_norm", "race", "race on shared memory", WIDE),
    ),
    "the wrong lane": (
        ("reduce.h", "(kWholeWarp, w[i], lanes)", "(kWholeWarp, w[i], lanes == 4 ? 2 : lanes)"),
        ("rms_norm", "values", "AssertionError: rms_norm", "tests/ops/test_rms_norm.py::test_layouts"),
    ),
    "a tail off by one": (
        ("element.h", "if (k < n) p[k] = pack.v[k];", "if (k < n - 1) p[k] = pack.v[k];"),
        ("dropout_add", "values", "AssertionError: dropout_add y", ADD),
    ),
    "a read past the end whose value is not used": (
        ("element.h", "pack.v[k] = k < n ? p[k] : T(0.f);", "{ const T v = p[k]; pack.v[k] = k < n ? v : T(0.f); }"),
        ("dropout_add", "asan", "AddressSanitizer: heap-buffer-overflow", ADD),
    ),
    "blocks that share one partial sum": (
        ("strips.h", "partials.of[s][int64_t(blockIdx.y) * C + c] = sum;", "partials.of[s][c] = sum;"),
        ("act_dropout", "race", "race on global memory", "tests/test_cuda_host.py::test_more_rows_than_a_grid_has_blocks_in_y"),
    ),
}


@pytest.mark.skipif("CKPT_CUDA_HOST_BUILD" in os.environ, reason="this is such a build")
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug, tmp_path):
    (name, right, wrong), (stem, build, complaint, test) = PLANTED[bug]
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    text = (csrc / "cuda" / name).read_text()
    assert text.count(right) == 1, f"{name} has changed: plant {bug} anew"
    (csrc / "cuda" / name).write_text(text.replace(right, wrong))
    result = _pytest(build, "random", cuda_host.build(build, csrc, stem), [test])
    assert result.returncode != 0, f"{bug} passes the {build} build"
    assert complaint in result.stdout + result.stderr, result.stdout[-3000:] + result.stderr[-2000:]
