"""How the norms' launchers cut a tensor: into rows, tiles of rows, and programs."""

import functools
import math

import torch
import triton
import triton.language as tl

from ._launch import INTERPRETED, TILE, CompileCase

LOOPED = dict(BLOCK_N=4096, num_warps=8)  # of kernels that read one row a program, block by block
LONGEST_FWD = 16384  # columns of a tile that stays in registers; half for float64


def longest_bwd(*held):
    """The same where a thread holds more beside the tile: for each of `held` a value a column."""
    return 8192 if sum(held) <= 2 else 4096


def compute_type(x):
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def fits(x, N, longest):
    limit = longest // 2 if x.dtype == torch.float64 else longest
    return limit >= N


@functools.cache
def fwd_tile(N):
    """16 elements a thread: several short rows a program."""
    BLOCK_N = max(32, triton.next_power_of_2(N))
    ROWS = max(1, TILE // BLOCK_N)
    return dict(ROWS=ROWS, BLOCK_N=BLOCK_N, num_warps=min(max(4, ROWS * BLOCK_N // 512), 16))


@functools.cache
def bwd_tile(N, elements):
    """So many elements a thread, 8 columns where rows are long enough: it then sums its columns over rows alone."""
    BLOCK_N = max(32, triton.next_power_of_2(N))
    warps = min(max(4, BLOCK_N // 256), 16)
    ROWS = max(1, warps * 32 * elements // BLOCK_N)
    if INTERPRETED:  # it takes as long for a tile of any size, but adds rows up one by one
        ROWS = min(ROWS * 32, 128)
    return dict(ROWS=ROWS, BLOCK_N=BLOCK_N, num_warps=warps)


class Walk:
    """The grid and tile of a kernel that walks the rows: of whole rows, or of blocks of columns.

    16 warps a multiprocessor share the rows: as many as have 128 registers a thread. Shape and device alone decide.
    """

    def __init__(self, like, M, N, whole_rows, tensors, elements=16):
        tile = bwd_tile(N if whole_rows else min(N, 1024), elements)
        blocks = triton.cdiv(N, tile["BLOCK_N"])
        at_once = multiprocessors(like.device) * 16 // (tile["num_warps"] * blocks)
        self.programs = min(triton.cdiv(M, tile["ROWS"]), max(2, at_once))
        self.grid = (self.programs, blocks)
        self.tile = dict(**tile, STAGES=stages(tile, tensors * like.element_size()))


def stages(tile, nbytes):
    """Tiles at work and on their way: some 64 KB a multiprocessor wait in shared memory.  nbytes: of all inputs' elements."""
    return 3 if nbytes * tile["ROWS"] * tile["BLOCK_N"] * 16 // tile["num_warps"] <= 32768 else 2


@functools.cache
def multiprocessors(device):
    """0 on a CPU: there a few programs walk all rows."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def row_view(x, inner, N):
    """(tensor, row stride): x as rows of its last `inner` dimensions, N elements; a copy where one stride cannot do it."""
    if x.is_contiguous():
        return x, N
    sizes, strides, step = x.shape, x.stride(), 1
    for d in range(x.dim() - 1, x.dim() - inner - 1, -1):
        if sizes[d] != 1 and strides[d] != step:
            return x.contiguous(), N
        step *= sizes[d]
    row, step = N, None
    for d in range(x.dim() - inner - 1, -1, -1):
        if sizes[d] == 1:
            continue
        if step is None:
            row = step = strides[d]
        elif strides[d] != step:
            return x.contiguous(), N
        step *= sizes[d]
    return x, row


def rows_and_columns(x, normalized_shape):
    lead = x.dim() - len(normalized_shape)
    return math.prod(x.shape[:lead]), math.prod(normalized_shape)


def dense(*tensors):
    """Parameters and statistics as kernels read them."""
    return [None if t is None else t.contiguous() for t in tensors]


def empty_like(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def compile_case(name, kernel, tile, wide=True, **arguments):
    """A CompileCase with a tile as launchers pass it."""
    constants = {k: v for k, v in tile.items() if k != "num_warps"}
    return CompileCase(name, kernel, arguments | constants, num_warps=tile["num_warps"], wide=wide)
