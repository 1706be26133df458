"""ckpt_ops: kernels that make training remember less.

Forward keeps seeds and statistics, fused backward kernels regenerate the rest.
"""

import os

# Installed, triton_kernels/ lies inside the package; in a clone, beside it.
if not os.path.isdir(os.path.join(__path__[0], "triton_kernels")):
    __path__.append(os.path.dirname(__path__[0]))

from . import functional, memory, nn, seeds
from .dispatch import backends, use_backend
from .functional import *  # noqa: F403
from .mask import dropout_mask, dropout_scale
from .policies.checkpoint import checkpoint
from .policies.rungs import RUNGS, regenerate
from .replacement import replace
from .saved import regenerating
from .saved.offload import offloading
from .saved.verify import verify

__version__ = "0.1.0"

__all__ = [
    *functional.__all__,
    "RUNGS",
    "backends",
    "checkpoint",
    "dropout_mask",
    "dropout_scale",
    "functional",
    "memory",
    "nn",
    "offloading",
    "regenerate",
    "regenerating",
    "replace",
    "seeds",
    "use_backend",
    "verify",
]
