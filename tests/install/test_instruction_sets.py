"""Every instruction set that was built gives the same masks, and meets the one rule of how close is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt_ops
from ckpt_ops import native

pytestmark = pytest.mark.install
ROOT = Path(__file__).parents[2]

# Runs in a process of its own, since a process loads one library: closeness of each op, then the masks.
CHECK = """
import sys, torch, ckpt_ops
from helpers_numerics import assert_close_for
from helpers_ops import EACH_OP
with ckpt_ops.use_backend("cpu"):
    for op in EACH_OP:
        for dtype in (torch.float32, torch.bfloat16):
            assert_close_for(op, op.shape, dtype, "cpu", p=0.3 if op.random else 0.0)
    x = torch.ones(2, 37, 101)
    masks = {
        "mask": ckpt_ops.dropout_mask(x.shape, 0.3, 11, stream=3, origin=(1, 2, 5)),
        "dropout": ckpt_ops.dropout(x, 0.3, seed=11) != 0,
        "gelu_dropout": ckpt_ops.gelu_dropout(x, 0.3, seed=11) != 0,
    }
torch.save(masks | {"isa": ckpt_ops.native.extension().instruction_set()}, sys.argv[1])
"""


def built():
    """The instruction sets that lie beside the package under test and that this machine can run."""
    info = Path(ckpt_ops.__file__).parent / "_build_info.json"
    variants = json.loads(info.read_text())["variants"] if info.exists() else {}
    return [isa for isa in native.instruction_sets() if isa in variants]


def test_same_masks_and_close_results(tmp_path):
    sets = built()
    if len(sets) < 2:
        pytest.skip(f"needs two instruction sets built ahead of time; there is {sets}")
    results = []
    for isa in sets:
        env = os.environ | {"CKPT_OPS_ISA": isa, "CKPT_OPS_JIT": "0", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        command = [sys.executable, "-c", CHECK, str(tmp_path / isa)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        results.append(torch.load(tmp_path / isa))
    assert [r.pop("isa") for r in results] == sets
    for name, mask in results[0].items():
        assert not mask.all()
        assert torch.equal(mask, results[1][name]), name


def test_philox_of_the_extension():
    extension = native.extension()
    if extension is None:
        pytest.skip(native.status())
    known = json.loads((ROOT / "tests" / "mask_vectors.json").read_text())["philox4x32_7"]
    assert known
    for case in known:
        assert extension.philox(case["counter"], case["key"]) == case["words"]
