"""The cases: what is measured, at which shapes. A new op adds a row here and its expressions to ops.py."""

from dataclasses import dataclass, replace

import torch

from . import ops
from .ops import Op, Param

# Shapes that fill a GPU: of the row ops, and of causal attention.
_GPU_ROWS = ((8192, 4096), (16384, 8192))
_GPU_ATTENTION = ((2, 16, 4096, 64), (2, 16, 4096, 128), (1, 16, 16384, 64), (1, 16, 16384, 128))

#       op                                     p         small            large
ROWS = (
    (ops.DROPOUT,                             (.1,),    (64, 96),        (8192, 1024)),
    (ops.act_dropout("gelu"),                 (.1, 0),  (64, 96),        (8192, 1024)),
    (ops.act_dropout("gelu", bias=True),      (.1,),    (64, 96),        (8192, 1024)),
    (ops.act_dropout("gelu_tanh"),            (.1,),    (64, 96),        (8192, 1024)),
    (ops.act_dropout("relu"),                 (.1,),    (64, 96),        (8192, 1024)),
    (ops.act_dropout("silu"),                 (.1,),    (64, 96),        (8192, 1024)),
    (ops.act_dropout("relu2"),                (.1,),    (64, 96),        (8192, 1024)),
    (ops.DROPOUT_ADD,                         (.1,),    (64, 96),        (8192, 1024)),
    (ops.LAYER_NORM,                          (0,),     (64, 96),        (8192, 1024)),
    (ops.RMS_NORM,                            (0,),     (64, 96),        (8192, 1024)),
    (ops.DROPOUT_ADD_LAYER_NORM,              (.1,),    (64, 96),        (8192, 1024)),
    (ops.DROPOUT_ADD_RMS_NORM,                (.1,),    (64, 96),        (8192, 1024)),
    (ops.attention(causal=False),             (0, .1),  (1, 4, 48, 32),  (1, 8, 1024, 64)),
    (ops.attention(causal=True),              (0, .1),  (1, 4, 48, 32),  (1, 8, 2048, 64)),
    (ops.attention(causal=True, group=4),     (0,),     (1, 4, 48, 32),  (1, 8, 1024, 64)),
)  # fmt: skip


SIZES = ("small", "large", "gpu")


@dataclass(frozen=True)
class Case:
    """One op at one shape; `shape` is that of the (first) input and of every output."""

    op: Op
    size: str  # one of SIZES
    shape: tuple
    p: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def stem(self):
        return self.op.stem

    @property
    def name(self):
        return self.op.name + (f" p={self.p:g}" if self.p or self.stem not in ("layer_norm", "rms_norm") else "")

    def tensors(self, device="cpu"):
        """The op's inputs, all of which get gradients; the same values every time."""
        generator = torch.Generator().manual_seed(1)
        made = []
        for shape in self.op.inputs(self.shape):
            values = torch.randn(shape, generator=generator).to(device, self.dtype)
            parameter = torch.nn.Parameter(1 + 0.1 * values) if isinstance(shape, Param) else None
            made.append(values.requires_grad_() if parameter is None else parameter)
        return made

    def grad_outputs(self, device="cpu"):
        """A gradient for every output."""
        generator = torch.Generator().manual_seed(2)
        return [torch.randn(self.shape, generator=generator).to(device, self.dtype) for _ in range(self.op.outputs)]


def _of_size(size, dtype):
    column = {"small": 2, "large": 3}[size]
    return [Case(row[0], size, row[column], p, dtype) for row in ROWS for p in row[1]]


def gpu(dtype=torch.bfloat16):
    """Every op at shapes that fill a GPU."""
    cases = []
    for op, ps, *_ in ROWS:
        shapes = _GPU_ROWS if op.stem != "attention" else _GPU_ATTENTION if op.name == "attention causal" else ()
        cases += [Case(op, "gpu", shape, p, dtype) for shape in shapes for p in ps]
    return cases


def small(dtype=torch.float32):
    """Every op at shapes that run in microseconds: what tests import, and where overhead shows."""
    return _of_size("small", dtype)


def large(dtype=torch.float32):
    """Every op at shapes of training."""
    return _of_size("large", dtype)


def with_p(case, p):
    return replace(case, p=p)
