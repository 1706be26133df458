"""Registers the Triton kernels without importing Triton, and says why they cannot run.

The table names the module of every launcher. A module is imported when one of its ops is first called; Triton itself
when somebody first asks whether the backend is ready.
"""

import importlib
import os
import subprocess

import torch

from .library import constant_under_compile, implement

# The launchers, named as their schemas, by the module of ckpt_ops.triton_kernels that has them.
LAUNCHERS = {
    "dropout": ("dropout_fwd", "dropout_mask"),
    "act_dropout": ("act_dropout_fwd", "act_dropout_bwd"),
    "dropout_add": ("dropout_add_fwd", "dropout_add_bwd"),
    "layer_norm": ("layer_norm_fwd", "layer_norm_bwd"),
    "rms_norm": ("rms_norm_fwd", "rms_norm_bwd"),
    "dropout_add_norm": (
        "dropout_add_layer_norm_fwd",
        "dropout_add_layer_norm_bwd",
        "dropout_add_rms_norm_fwd",
        "dropout_add_rms_norm_bwd",
    ),
    "attention": ("attention_fwd", "attention_bwd"),
}

# Triton reads it when it is imported, which may be later, but then finds the same.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ("cuda", "cpu", "meta") if INTERPRETED else ("cuda",)

_settled = False
_reason = None


@constant_under_compile
def why_not():
    """Why no Triton kernel can run in this process, or None. The first call imports Triton."""
    global _settled, _reason
    if not _settled:
        _reason = _problem()
        _settled = True
    return _reason


def _problem():
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "torch sees no GPU, and TRITON_INTERPRET=1, which interprets the kernels on the CPU, is not set"
    try:
        triton.runtime.driver.active.get_current_target()  # compiles Triton's launcher: needs a C compiler and Python.h
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        return f"triton finds no driver for this GPU ({str(error).strip() or type(error).__name__})"
    return None


def _lazily(module, name):
    """The launcher, imported at its first call."""
    launcher = None

    def kernel(*args):
        nonlocal launcher
        if launcher is None:
            launcher = getattr(importlib.import_module(f"{__package__}.triton_kernels.{module}"), name)
        return launcher(*args)

    kernel.__name__ = name
    return kernel


for _module, _names in LAUNCHERS.items():
    for _name in _names:
        for _device in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
            implement("ckpt_ops_triton", _name, _device, _lazily(_module, _name))
