"""Tile sizes of attention's passes: a short fixed list for each, and which of it a call takes.

The first of a list spills no registers and is what a call takes unmeasured: under the interpreter, while a CUDA graph is
captured, and with torch.use_deterministic_algorithms(True), as another tile sums in another order. Otherwise the first
call of a shape and dtype measures the list. No choice changes a bit of the mask.
"""

from typing import NamedTuple

import torch
import triton

from ._launch import INTERPRETED, CompileCase, launch


class Tile(NamedTuple):
    BLOCK_M: int  # queries
    BLOCK_N: int  # keys
    num_warps: int
    num_stages: int


# By architecture and pass; in each the lists for head dimensions up to 64, 128 and 256.
TILES = {
    "sm_90": {
        "fwd": (
            (Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
            (Tile(128, 64, 8, 3), Tile(128, 128, 8, 2)),
            (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
        ),
        "dkdv": ((Tile(64, 128, 8, 2), Tile(32, 128, 8, 2)), (Tile(32, 128, 8, 2), Tile(16, 128, 8, 2)), (Tile(32, 32, 8, 1),)),
        "dq": ((Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)), (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)), (Tile(64, 32, 8, 1),)),
    },
    "sm_100": {
        "fwd": (
            (Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
            (Tile(128, 64, 8, 3), Tile(128, 128, 8, 2)),
            (Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
        ),
        "dkdv": (
            (Tile(64, 128, 8, 1), Tile(32, 128, 8, 2)),
            (Tile(32, 128, 8, 1), Tile(64, 64, 8, 1)),
            (Tile(32, 32, 8, 1),),
        ),
        "dq": ((Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)), (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)), (Tile(64, 32, 8, 1),)),
    },
    "sm_80": {
        "fwd": ((Tile(128, 64, 4, 3), Tile(128, 64, 8, 2)), (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)), (Tile(64, 32, 8, 2),)),
        "dkdv": ((Tile(32, 128, 8, 2), Tile(32, 64, 8, 2)), (Tile(32, 64, 8, 2),), (Tile(32, 32, 8, 1),)),
        "dq": ((Tile(128, 32, 8, 2), Tile(128, 64, 8, 2)), (Tile(64, 32, 4, 2), Tile(128, 32, 8, 2)), (Tile(64, 32, 8, 1),)),
    },
    "gfx942": {
        "fwd": ((Tile(128, 64, 4, 1), Tile(64, 64, 4, 1)), (Tile(128, 32, 4, 1), Tile(64, 32, 4, 1)), (Tile(64, 32, 4, 1),)),
        "dkdv": ((Tile(32, 64, 4, 1),), (Tile(32, 64, 4, 1),), (Tile(16, 32, 4, 1),)),
        "dq": ((Tile(64, 64, 4, 1),), (Tile(64, 32, 4, 1),), (Tile(32, 32, 4, 1),)),
    },
}
# float32 and float64: no tensor core takes them unrounded, or only in small pieces.
WIDE = Tile(16, 32, 8, 1)
SMALL = Tile(64, 64, 4, 1)  # the interpreter takes as long for a tile of any size; several still make a test's shape

_measured = {}


def tiles(architecture, name, size):
    """The list for a pass, of head dimensions (the larger of the two) up to `size`."""
    return TILES[architecture][name][0 if size <= 64 else 1 if size <= 128 else 2]


def tiled(kernel, name, programs, shape, on, arguments, constants):
    """Launches the pass `name` of a call. programs: of a tile's two sizes; shape: what a measurement holds for."""

    def run(tile):
        launch(kernel, (programs(tile.BLOCK_M, tile.BLOCK_N),), on, *arguments, **constants, **tile._asdict())

    run(_choose(run, name, shape, on, constants))


def _choose(run, name, shape, on, constants):
    if INTERPRETED:
        return SMALL
    if on.dtype.itemsize > 2:
        return WIDE
    listed = tiles(_architecture(on.device), name, max(constants["D"], constants["DV"]))
    key = (name, on.device, on.dtype, *constants.values(), *(n.bit_length() for n in shape))
    if len(listed) == 1 or torch.are_deterministic_algorithms_enabled():
        return listed[0]
    if key not in _measured:
        if torch.cuda.is_current_stream_capturing():
            return listed[0]
        _measured[key] = min(listed, key=lambda tile: _milliseconds(run, tile))
    return _measured[key]


def _architecture(device):
    if torch.version.hip:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "sm_90", 10: "sm_100", 11: "sm_100"}.get(major, "sm_80")  # 12 has no more shared memory than 8.6


def _milliseconds(run, tile):
    try:
        return triton.testing.do_bench(lambda: run(tile), warmup=5, rep=20, return_mode="median")
    except triton.runtime.errors.OutOfResources:
        return float("inf")


def compile_cases(kernel, name):
    """A pass at its main configurations, causal with dropout: bfloat16 with the first tile of each target, and float64."""
    inputs = ("do_ptr", "q_ptr", "k_ptr", "v_ptr", "o_ptr", "dq_ptr", "dk_ptr", "dv_ptr")
    statistics = ("lse_ptr", "lse2_ptr", "delta_ptr")
    cases = []
    for dtype, size in (("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp64", 64)):
        given = dict(seed_ptr="*i64", mask_ptr=None, scale="fp32", CAUSAL=1, MASK=0, DROPOUT=True)
        given |= dict.fromkeys(inputs, f"*{dtype}") | dict.fromkeys(statistics, "*fp64" if dtype == "fp64" else "*fp32")
        given |= dict.fromkeys(("D", "DV", "BLOCK_D", "BLOCK_DV"), size)
        first = {target: (WIDE if dtype == "fp64" else tiles(target, name, size)[0])._asdict() for target in TILES}
        given |= {n: first["sm_90"][n] for n in ("BLOCK_M", "BLOCK_N")}
        arguments = {n: given.get(n, "i32:16" if n.startswith("stride") else "i32") for n in kernel.arg_names}
        cases.append(CompileCase(f"{dtype} causal dropout {size}", kernel, arguments, wide=dtype == "bf16", differs=first))
    return tuple(cases)
