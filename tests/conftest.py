"""Fixtures over the backends under test (helpers_backends.py), and NaN in all fresh memory.

CKPT_OPS_TEST_EXAMPLES=500 searches longer where shapes are random.
"""

import os

import hypothesis
import pytest
import torch

from helpers_backends import DEVICES, READY, SLOW, Backend, alike, unserved  # isort: skip  (before ckpt_ops: it sets what Triton reads)

import ckpt_ops

hypothesis.settings.register_profile(
    "ckpt_ops",
    deadline=None,
    max_examples=int(os.environ.get("CKPT_OPS_TEST_EXAMPLES", 25)),
    derandomize=bool(os.environ.get("CI")),
)
hypothesis.settings.load_profile("ckpt_ops")

SHARE = [
    "test_bench",
    "test_bench_ladder",
    "test_cuda_host",
    "test_e_sharded",
    "test_triton_attention_compile",
    "test_triton_compile",
]


def pytest_report_header():
    lines = [f"ckpt_ops backend {name}: {state}" for name, state in ckpt_ops.backends().items()]
    if left := [name for name in READY if name in SLOW]:
        lines.append(f"deselected for {' and '.join(left)}, which are slow: whole models, and one of several alike tests")
    return lines


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: needs many GiB or tens of seconds; runs by default where they are there")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    left = [item for item in items if unserved(item) or alike(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]
    if config.pluginmanager.hasplugin("xdist"):  # with -n 2 --dist loadgroup, as `make test` has it
        for item in items:
            if name := one_process(item):
                item.add_marker(pytest.mark.xdist_group(name))


def one_process(item):
    """The group of tests that run in one process: those that share what takes long to make, and those of many GiB."""
    if item.get_closest_marker("slow"):
        return "memory"
    if item.path.parent.name == "install":
        return "install"
    return item.path.stem if item.path.stem in SHARE else None


@pytest.fixture(params=READY)
def backend(request):
    """Each ready backend in turn, serving every call of the test that names no other."""
    with ckpt_ops.use_backend(request.param):
        yield Backend(request.param, DEVICES[request.param])


@pytest.fixture(
    params=[name for name in READY if name != "reference"] or [pytest.param(None, marks=pytest.mark.skip("no kernel backend"))]
)
def fused(request):
    """Each ready backend that has kernels."""
    with ckpt_ops.use_backend(request.param):
        yield Backend(request.param, DEVICES[request.param])


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """An element that a kernel forgets to write shows as NaN."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(autouse=True)
def fixed_generator():
    torch.manual_seed(20240229)


@pytest.fixture(autouse=True)
def threads_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
