"""The backends under test.

A new backend needs one entry in DEVICES (and, if it is slow, in SLOW): the suite runs over it.
CKPT_OPS_TEST_BACKENDS=cpu,reference narrows the run.
"""

import os
from dataclasses import dataclass

import pytest

import ckpt_ops

DEVICES = {"reference": "cpu", "cpu": "cpu"}  # where each backend's inputs live
SLOW = ()  # backends that get the small shapes only


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
