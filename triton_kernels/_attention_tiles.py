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
WIDE = Tile(32, 32, 4, 1)  # float32 and float64: no tensor core takes them unrounded, or only in small pieces
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
    return "sm_90" if torch.cuda.get_device_capability(device) >= (9, 0) else "sm_80"


def _milliseconds(run, tile):
    try:
        return triton.testing.do_bench(lambda: run(tile), warmup=5, rep=20, return_mode="median")
    except triton.runtime.errors.OutOfResources:
        return float("inf")


def compile_cases(kernel, name):
    """A pass at its main configurations: bfloat16, causal, with dropout; each target with the first tile of its list."""
    types = {
        "seed_ptr": "*i64",
        "mask_ptr": None,
        "scale": "fp32",
        **dict.fromkeys(("lse_ptr", "lse2_ptr", "delta_ptr"), "*fp32"),
    }
    types |= dict.fromkeys(("do_ptr", "q_ptr", "k_ptr", "v_ptr", "o_ptr", "dq_ptr", "dk_ptr", "dv_ptr"), "*bf16")
    cases = []
    for size in (64, 128, 256):
        constants = dict(D=size, DV=size, CAUSAL=1, MASK=0, DROPOUT=True, BLOCK_D=size, BLOCK_DV=size)
        arguments = {n: "i32:16" if n.startswith("stride") else "i32" for n in kernel.arg_names}
        arguments |= {n: value for n, value in {**types, **constants}.items() if n in arguments}
        first = {architecture: tiles(architecture, name, size)[0]._asdict() for architecture in TILES}
        differs = first | {"sm_100": first["sm_90"]}
        arguments |= {n: first["sm_90"][n] for n in ("BLOCK_M", "BLOCK_N")}
        cases.append(CompileCase(f"bf16 causal dropout {size}", kernel, arguments, differs=differs))
    return tuple(cases)
