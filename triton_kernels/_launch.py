"""What launchers share: tensors as planes of rows, tiles, the mask's arguments, the launch itself."""

import contextlib
import os
from typing import NamedTuple

import torch

from ..ops._common import statistics_dtype  # noqa: F401  for launchers
from ..reference import scale, threshold

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as triton.jit read it
# Elements of a tile: two 128-bit loads of 16-bit elements in flight for each of 128 threads. The interpreter takes as
# long for a tile of any size.
TILE = 2**16 if INTERPRETED else 2048


def device_guard(x):
    """Within the context x's device is the current one: Triton launches there."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def launch(kernel, grid, on, *args, **options):
    """kernel[grid](*args, **options) on the device of the tensor `on`; nothing where the grid is empty."""
    if 0 in grid:
        return
    with device_guard(on):
        kernel[grid](*args, **options)


class Rows(NamedTuple):
    """A tensor as [planes, rows, columns]: its row m is row m % rows of plane m // rows, as the mask counts them."""

    x: torch.Tensor
    planes: int
    rows: int
    columns: int
    strides: tuple  # of a plane, a row, a column

    @property
    def count(self):
        return self.planes * self.rows

    @property
    def sizes(self):
        """As kernels take them: M, rows, C."""
        return self.count, self.rows, self.columns


def rows_of(x):
    """x as Rows, in place where the dimensions before the last two step evenly, else a contiguous copy."""
    if x.dim() < 2:
        x2 = x.reshape(1, -1)  # a view
        return Rows(x2, 1, 1, x2.shape[1], (0, 0, x2.stride(1)))
    planes, stride = 1, 0
    for size, step in zip(reversed(x.shape[:-2]), reversed(x.stride()[:-2])):
        if size == 1:
            continue
        if planes == 1:
            stride = step
        elif step != stride * planes and x.numel():  # an empty tensor's strides mean nothing
            return rows_of(x.contiguous())
        planes *= size
    return Rows(x, planes, *x.shape[-2:], (stride, *x.stride()[-2:]))


class CompileCase(NamedTuple):
    """A kernel in one of its main configurations. `python -m bench triton` compiles each module's COMPILE_CASES.

    arguments: for every parameter its type ("*bf16", "fp32", "i32"; "i32:16" is a multiple of 16; pointers are aligned to
    16 bytes), or its value: constexprs, and integers that Triton specialises, as a stride of 1.
    """

    name: str
    kernel: object
    arguments: dict
    num_warps: int = 4
    num_stages: int = 3
    wide: bool = True  # its accesses must be 128 bits wide
    differs: dict = {}  # by target: the arguments, num_warps, num_stages that differ there

    def on(self, target):
        """The case as a target has it."""
        arguments = {**self.arguments, **self.differs.get(target, {})}
        options = {n: arguments.pop(n, getattr(self, n)) for n in ("num_warps", "num_stages")}
        return self._replace(arguments=arguments, **options)


class MaskArguments(NamedTuple):
    """A mask as a kernel's arguments. DRAW: whether there is one; without, seed is None and the rest is ignored.

    col0 is the multiple of 32 at or before the origin's column, shift what lies between: tiles begin at col0.
    """

    seed: torch.Tensor | None
    threshold: int
    scale: float
    stream: int
    plane0: int
    row0: int
    col0: int
    shift: int

    @property
    def draws(self):
        return self.seed is not None


NO_MASK = MaskArguments(None, 0, 1.0, 0, 0, 0, 0, 0)


def mask_arguments(op, seed, p, stream, origin, device):
    """The checked arguments of a mask; NO_MASK at p = 0. The launcher itself answers p = 1."""
    if not 0 <= p <= 1:
        raise ValueError(f"{op}: the drop probability must be between 0 and 1, got {p}")
    if p == 0 or p == 1:
        return NO_MASK
    if seed is None:
        raise ValueError(f"{op}: a seed is needed at p = {p}")
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
        raise ValueError(f"{op}: the seed must be an int64 tensor of one element on {device}")
    plane0, row0, col0 = origin
    return MaskArguments(seed, threshold(p), scale(p), stream, plane0, row0, col0 // 32 * 32, col0 % 32)
