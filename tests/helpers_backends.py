"""The backends under test.

A new backend needs one entry in DEVICES (and, if it is slow, in SLOW): the suite runs over it.
CKPT_OPS_TEST_BACKENDS=cpu,reference narrows the run.
"""

import os
from dataclasses import dataclass

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    # Before Triton is imported anywhere: its kernels run on CPU tensors, slowly. TRITON_INTERPRET=0 leaves them out.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import ckpt_ops  # noqa: E402
import helpers_cuda_host  # noqa: E402
import helpers_triton_interpreter  # noqa: E402
from helpers_ops import ALL_OPS, EACH_OP  # noqa: E402

# Where each backend's inputs live. cuda-host: the CUDA kernels, compiled for the CPU.
DEVICES = {"reference": "cpu", "cpu": "cpu", "triton": "cuda" if GPU else "cpu", "cuda-host": "cpu"}
OF_ALL_OPS = [f"test_{name}.py" for name in ("a_masks", "b_norms", "e_saved", "i_functional", "every_op", "mask")]
OF_OPS = ("test_mask", "test_cuda_host", "test_triton", "test_gpu")  # tests of ops beside the folders ops and cases
SLOW = ("cuda-host",) if GPU else ("triton", "cuda-host")  # backends that get the small shapes only


@dataclass(frozen=True)
class Backend:
    name: str
    device: str

    @property
    def fused(self):
        """Whether kernels serve it: those keep little and have no second derivative."""
        return self.name != "reference"

    @property
    def slow(self):
        return self.name in SLOW

    def skip_if_slow(self, elements):
        if self.slow and elements > 20_000:
            pytest.skip(f"{self.name} is slow: {elements} elements are left to the other backends")

    def skip_alike(self, alike):
        """Leaves a slow backend one of several tests that run the same code of it."""
        if self.slow and alike:
            pytest.skip(f"{self.name} is slow: another test runs the same code")


def ready():
    """The backends this run tests."""
    wanted = os.environ.get("CKPT_OPS_TEST_BACKENDS")
    names = wanted.split(",") if wanted else list(DEVICES)
    if "cuda-host" in names:
        helpers_cuda_host.add_backend()
        if helpers_cuda_host.why_not() and not wanted:  # said in the report's header
            names.remove("cuda-host")
    states = ckpt_ops.backends()
    if os.environ.get("CI") and (missing := [f"{name}: {states[name]}" for name in names if states[name] != "ready"]):
        raise RuntimeError("in CI every backend under test must be ready; " + "; ".join(missing))
    names = [name for name in names if states[name] == "ready"]
    if "triton" in names and DEVICES["triton"] == "cpu":
        helpers_triton_interpreter.prepare()
    return names


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def _name(item):
    return next((_parameters(item)[key] for key in ("backend", "fused", "name") if _parameters(item).get(key) in READY), None)


def unserved(item):
    """Whether a test is about an op that its backend has no kernel for, by the names of its file, itself and its parameters.

    Whole models are too much for a slow backend, and have attention in them: those serve the tests of ops.
    """
    name = _name(item)
    lacking = ckpt_ops.dispatch.lacking(name)
    of_ops = item.path.parent.name in ("ops", "cases") or item.path.stem.startswith(OF_OPS)
    if (lacking or name in SLOW) and not of_ops:
        return True
    return any(op in item.nodeid for op in lacking)


def alike(item):
    """Whether a test of all ops on a slow backend has one that is another's kernel with another formula: EACH_OP suffices."""
    op = _parameters(item).get("op")
    return item.path.name in OF_ALL_OPS and _name(item) in SLOW and op in ALL_OPS and op not in EACH_OP


READY = ready()
