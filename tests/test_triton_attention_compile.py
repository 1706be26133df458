"""What dropout costs attention's kernels on sm_90, read from compiled code: no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("triton")

# Prints, for each pass, head dimension and p = 0 or more: the tile, and what is counted in ttgir and PTX.
SCRIPT = r"""
import json, re, triton
from triton.backends.compiler import GPUTarget
from bench.triton_resources import cases, source

PHILOX = r"(?:3528531795|-766435501|3449720151|-845247145)"  # its two constants
found = []
for case in (case.on("sm_90") for case in cases()):
    name, size = case.kernel.__name__, case.arguments.get("D")
    if not name.startswith("_attention") or not case.name.startswith("bf16") or size not in (64, 128):
        continue
    for dropout in (False, True):
        arguments = {**case.arguments, "DROPOUT": dropout, "seed_ptr": "*i64" if dropout else None}
        options = dict(num_warps=case.num_warps, num_stages=case.num_stages)
        compiled = triton.compile(source(case._replace(arguments=arguments)), target=GPUTarget("cuda", 90, 32), options=options)
        ttgir, ptx = compiled.asm["ttgir"], compiled.asm["ptx"]
        found.append(dict(
            kernel=name, size=size, dropout=dropout, shared=compiled.metadata.shared,
            elements=arguments["BLOCK_M"] * arguments["BLOCK_N"] // (32 * case.num_warps),
            conversions=len(re.findall(r"= ttg\.convert_layout", ttgir)), shuffles=len(re.findall(r"\bshfl\.", ptx)),
            products=len(re.findall(r"\bmul\.(?:wide\.[us]32|hi\.u32|lo\.s64)\s[^;]*, " + PHILOX + ";", ptx)),
        ))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def counts():
    """{(kernel, head dimension): (without dropout, with)}"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    found = {(row["kernel"], row["size"], row["dropout"]): row for row in json.loads(done.stdout)}
    return {(kernel, size): (found[kernel, size, False], found[kernel, size, True]) for kernel, size, _ in found}


FORWARD, DQ, DKDV = "_attention_fwd_kernel", "_attention_bwd_dq_kernel", "_attention_bwd_dkdv_kernel"


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kernel", [FORWARD, DQ])
def test_the_mask_stays_in_registers(counts, kernel, size):
    plain, dropped = counts[kernel, size]
    for what in ("conversions", "shuffles", "shared"):
        assert dropped[what] == plain[what], f"{what}: {dropped[what]} with dropout, {plain[what]} without"


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kernel", [FORWARD, DQ, DKDV])
def test_one_philox_call_for_eight_elements(counts, kernel, size):
    """Seven rounds of two products, by Philox's constants. Of the counter's uniform words up to four stand before the loop."""
    plain, dropped = counts[kernel, size]
    assert plain["products"] == 0
    assert 12 * dropped["elements"] / 8 - 14 <= dropped["products"] <= 14 * dropped["elements"] / 8 + 4


@pytest.mark.parametrize("size", [64, 128])
def test_the_transposed_mask_moves_a_bit_an_element(counts, size):
    """Scores of the dk/dv pass are [keys, queries]: 32 columns of the mask travel as one word."""
    plain, dropped = counts[DKDV, size]
    assert dropped["conversions"] == plain["conversions"] + 1
    assert dropped["shared"] - plain["shared"] <= 1024
