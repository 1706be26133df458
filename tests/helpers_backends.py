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

# Where each backend's inputs live. cuda-host: the CUDA kernels, compiled for the CPU.
DEVICES = {"reference": "cpu", "cpu": "cpu", "triton": "cuda" if GPU else "cpu", "cuda-host": "cpu"}
SLOW = ("cuda-host",) if GPU else ("triton", "cuda-host")  # backends that get the small shapes only


@dataclass(frozen=True)
class Backend:
    name: str
    device: str

    @property
    def fused(self):
        """Whether kernels serve it: those keep little and have no second derivative."""
        return self.name != "reference"

    def skip_if_slow(self, elements):
        if self.name in SLOW and elements > 20_000:
            pytest.skip(f"{self.name} is slow: {elements} elements are left to the other backends")


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


def unserved(item):
    """Whether a test is about an op that its backend has no kernel for, by the names of its file, itself and its parameters."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    name = next((parameters[key] for key in ("backend", "fused", "name") if parameters.get(key) in READY), None)
    return any(op in item.nodeid for op in ckpt_ops.dispatch.lacking(name))


READY = ready()
