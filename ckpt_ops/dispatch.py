"""Which backend serves a call, and why not.

A backend that the caller named (`backend=`, `use_backend`, CKPT_OPS_BACKEND, in that order) is obeyed or refused
with every reason. Otherwise the first one that can serve the call does; where only the reference is left, a warning
says once why.
"""

import contextlib
import os
import warnings

import torch

from . import native, native_cuda, triton_backend
from .library import constant_under_compile

BACKENDS = ("reference", "cpu", "cuda", "triton")
NAMESPACE = {"cpu": "ckpt_ops", "cuda": "ckpt_ops", "triton": "ckpt_ops_triton"}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_DEVICES = {"cpu": ("cpu", "meta"), "cuda": ("cuda",), "triton": triton_backend.DEVICES}

# What "no backend named" tries, by device type. Nothing listed: the reference alone.
_PREFERENCE = {"cpu": ("cpu",), "cuda": ("cuda", "triton"), "meta": ("cpu",)}

# Ops without a kernel in a backend, and why.
_LACKS = {"cuda": {"attention": "attention on a GPU is Triton's: backend='triton'"}}

_not_ready = {}  # why backends that were added are not, or None
_named = os.environ.get("CKPT_OPS_BACKEND") or None
_warned = set()


def not_ready(backend):
    """Why the backend can serve no call at all in this process, or None."""
    if backend == "cpu":
        return native.why_not()
    if backend == "cuda":
        return native_cuda.why_not()
    if backend == "triton":
        return triton_backend.why_not()
    return _not_ready.get(backend)


def add_backend(name, namespace, devices, *, reason=None, lacks=None):
    """A further backend in this process, of kernels in `namespace` for these device types; only calls that name it get it.

    reason: why it is not ready, or None.  lacks: the ops it has no kernel for, each with the reason.
    """
    global BACKENDS
    BACKENDS = (*BACKENDS, name)
    NAMESPACE[name], _DEVICES[name], _not_ready[name], _LACKS[name] = namespace, devices, reason, lacks or {}


def backends():
    """Each backend's name mapped to "ready" or to the reason it is not."""
    return {name: not_ready(name) or "ready" for name in BACKENDS}


def lacking(backend):
    """The ops that `backend` has no kernel for, each with the reason."""
    return _LACKS.get(backend, {})


def why_not(backend, op, x):
    """Every reason why `backend` cannot serve `op` for inputs like `x` (a tensor); [] if it can."""
    if backend == "reference":
        return []
    reasons = []
    if reason := not_ready(backend):
        reasons.append(reason)
    if reason := lacking(backend).get(op):
        reasons.append(reason)
    devices = _DEVICES[backend]
    if x.device.type not in devices:
        reasons.append(f"it runs on {' or '.join(devices)} tensors, and {op} got one on {x.device}")
    if x.dtype not in DTYPES:
        reasons.append(f"it takes {_names(DTYPES)}, and {op} got {x.dtype}")
    return reasons


def named(backend):
    """The backend that the caller named, or None: backend=, use_backend, CKPT_OPS_BACKEND."""
    return backend or _named


def choose(op, backend, x):
    """The backend that serves this call of `op` on inputs like `x`. RuntimeError if a named one cannot."""
    name = named(backend)
    if name is not None:
        _check_name(name)
        if reasons := why_not(name, op, x):
            raise RuntimeError(f"backend {name!r} cannot serve this call: " + "; ".join(reasons))
        return name
    refused = []
    for name in _PREFERENCE.get(x.device.type, ()):
        reasons = why_not(name, op, x)
        if not reasons:
            return name
        refused.append(f"{name}: {'; '.join(reasons)}")
    _warn_once(refused or [f"no kernels for {x.device.type} tensors"])
    return "reference"


@contextlib.contextmanager
def use_backend(name):
    """Within the context, every call that names no backend is served by `name`, or refused with the reasons."""
    global _named
    _check_name(name)
    before, _named = _named, name
    try:
        yield
    finally:
        _named = before


def _check_name(name):
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; choose one of {', '.join(BACKENDS)}")


def _names(dtypes):
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


@constant_under_compile
def _warn_once(refused):
    text = "ckpt_ops runs on its slower reference backend: " + " | ".join(refused)
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)
