"""The Triton kernels compile for real GPUs: no spills, wide accesses, shared memory that fits. No GPU is needed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.triton_resources import TARGETS, Row, problems

ROOT = Path(__file__).resolve().parent.parent

pytest.importorskip("triton")


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """What `python -m bench triton` found, in a process that compiles instead of interpreting."""
    path = tmp_path_factory.mktemp("triton") / "resources.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench", "triton", "--jobs", "2", "--out", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert path.exists(), done.stderr
    return [Row(**row) for row in json.loads(path.read_text())]


def test_this_file_stays_in_one_process(request):
    """Or else all is compiled twice, and nothing says so."""
    if request.config.getoption("loadgroup", False):  # pytest-xdist's, in a process of --dist loadgroup
        assert request.node.nodeid.endswith("@test_triton_compile")


def test_every_kernel_has_a_case(rows):
    jitted = re.compile(r"^@triton\.jit[^\n]*\n(?:[^\n]*\n)??def (\w+_kernel)\(", re.MULTILINE)
    kernels = {name for path in (ROOT / "triton_kernels").glob("*.py") for name in jitted.findall(path.read_text())}
    assert len(kernels) > 5
    missing = kernels - {row.kernel for row in rows}
    assert not missing, f"no COMPILE_CASES for {', '.join(sorted(missing))}"


def test_every_case_is_compiled_for_every_target(rows):
    found = {(row.kernel, row.configuration, row.target) for row in rows}
    assert len(found) == len(rows), "two cases of a kernel have one name"
    assert found == {(row.kernel, row.configuration, target) for row in rows for target in TARGETS}


def test_they_compile_fit_and_do_not_spill(rows):
    wrong = [f"{row.kernel}, {row.configuration}, {row.target}: {problem}" for row in rows for problem in problems(row)]
    assert not wrong, "\n".join(wrong)


def test_row_and_elementwise_kernels_have_128_bit_accesses(rows):
    promised = {row.kernel for row in rows if row.wide}
    for stem in ("dropout_fwd", "act_dropout_bwd", "dropout_add_fwd", "norm"):
        assert any(stem in kernel for kernel in promised), f"no case of {stem} promises 128-bit accesses"


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(error="no such operation"), "no such operation"),
        (dict(spilled=8), "8 bytes spilled"),
        (dict(shared=2**20), "1048576 bytes of shared memory"),
        (dict(load_bits=32), "loads of 32 bits"),
    ],
)
def test_what_counts_as_a_problem(change, text):
    row = Row("k", "c", "sm_90", 4, True, shared_limit=227 * 1024, load_bits=128, store_bits=128)
    assert not list(problems(row))
    assert text in " ".join(problems(Row(**(vars(row) | change))))
