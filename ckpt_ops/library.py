"""Defines every schema in every kernel namespace, and gives one fake kernel to all of them.

`ckpt_ops` holds the native kernels (CPU, CUDA), `ckpt_ops_triton` the Triton ones. The definitions need no
compiled extension: FakeTensor, torch.compile and checkpoint policies see the ops even where no kernel serves them.
"""

import torch

from .schemas import SCHEMAS

NAMESPACES = ("ckpt_ops", "ckpt_ops_triton")
_libraries = {}
_fakes = {}


def add_namespace(name):
    """Defines every op in a further namespace."""
    library = _libraries[name] = torch.library.Library(name, "DEF")
    for schema in SCHEMAS:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for op, fn in _fakes.items():
        torch.library.register_fake(f"{name}::{op}", fn, lib=library)


for _name in NAMESPACES:
    add_namespace(_name)


def fake(op):
    """Registers the decorated function as the shape-and-dtype kernel of `op` in every namespace."""

    def register(fn):
        _fakes[op] = fn
        for name, library in _libraries.items():
            torch.library.register_fake(f"{name}::{op}", fn, lib=library)
        return fn

    return register


def implement(namespace, op, device_type, fn):
    """Registers a Python launcher as `op`'s kernel for a device type ("CPU", "CUDA")."""
    _libraries[namespace].impl(op, fn, device_type)


def constant_under_compile(fn):
    """torch.compiler.assume_constant_result, which imports torch._dynamo, and with it Triton: as long as torch itself takes."""
    fn._dynamo_marked_constant = True
    return fn


def kernels(namespace):
    """The dispatcher ops of a namespace: kernels("ckpt_ops").layer_norm_fwd(...)."""
    return getattr(torch.ops, namespace)
