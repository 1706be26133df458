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

DEVICES = {"reference": "cpu", "cpu": "cpu", "triton": "cuda" if GPU else "cpu"}  # where each backend's inputs live
SLOW = () if GPU else ("triton",)  # backends that get the small shapes only


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
    states = ckpt_ops.backends()
    if os.environ.get("CI") and (missing := [f"{name}: {states[name]}" for name in names if states[name] != "ready"]):
        raise RuntimeError("in CI every backend under test must be ready; " + "; ".join(missing))
    return [name for name in names if states[name] == "ready"]


READY = ready()
