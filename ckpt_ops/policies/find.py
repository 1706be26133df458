"""Finds a model's repeated blocks, and in a block its norms, activations, MLP and qkv projections, by structure."""

import re
from dataclasses import dataclass, field

from torch import nn

_ACTIVATIONS = (
    nn.GELU, nn.SiLU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.Mish, nn.Softplus, nn.Hardswish,
    nn.Sigmoid, nn.Tanh, nn.LogSigmoid, nn.Softsign, nn.PReLU,
)  # fmt: skip
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_QKV = re.compile(
    r"qkv|kqv|(^|[._])[qkv]{1,3}(_?proj|_?lin|_proj)?$|c_attn|query|key|value|in_proj|to_[qkv]{1,3}$|^w_?[qkv]$", re.I
)
_OUTPUT = re.compile(r"^(o|out|output|dense|c_proj|proj|projection|to_out|wo)(_?proj|_?lin)?$", re.I)
_ATTENTION = re.compile(r"att(e)?n", re.I)


@dataclass
class Block:
    """What was found in one repeated block. Every list holds (name in the model, module)."""

    name: str
    module: nn.Module
    norms: list = field(default_factory=list)
    activations: list = field(default_factory=list)
    mlp: list = field(default_factory=list)  # Linears whose result goes into an activation
    qkv: list = field(default_factory=list)  # Linears whose result is attended to
    notes: list = field(default_factory=list)  # what was looked for in vain


def find_blocks(model):
    """The model's repeated blocks, outermost ones; the model itself as one block if nothing repeats."""
    blocks = list(_repeated(model, ""))
    return [_describe(name, module) for name, module in blocks or [("", model)]]


def _repeated(module, prefix):
    children = list(module.named_children())
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and children and _alike([m for _, m in children]):
        for name, child in children:
            yield _join(prefix, name), child
        return
    for name, child in children:
        yield from _repeated(child, _join(prefix, name))


def _alike(modules):
    """One class, each with at least two matrix products: blocks, not a row of Linears."""
    if len({type(m) for m in modules}) != 1:
        return False
    return all(sum(is_linear(m) for m in module.modules()) >= 2 for module in modules)


def _describe(name, module):
    block = Block(name, module)
    declared = _declared(block)
    for path, m in module.named_modules():
        where = (_join(name, path), m)
        if m in declared:
            continue
        if is_norm(m):
            block.norms.append(where)
        elif is_activation(m):
            block.activations.append(where)
    around_activations = {a for n, _ in block.activations for a in _ancestors(n)}
    for path, m in module.named_modules():
        if m in declared or not is_linear(m):
            continue
        full, own = _join(name, path), path.rpartition(".")[2]
        in_attention = _ATTENTION.search(_parent(path)) or _ATTENTION.search(type(_at(module, _parent(path))).__name__)
        if _QKV.search(own) or (in_attention and not _OUTPUT.match(own)):
            block.qkv.append((full, m))
        elif not in_attention and _widens(m) and (_parent(full) in around_activations or not around_activations):
            block.mlp.append((full, m))
    for kind in ("norms", "activations", "mlp", "qkv"):
        if not getattr(block, kind):
            block.notes.append(f"{kind}: none found" + (_HINTS.get(kind, "")))
    return block


def _declared(block):
    """Fills in what layers of this package say of themselves; returns them and all that is in them.

    Such a layer has `regenerable`: {kind: names of children, "" for itself}. It may do several children's work in one kernel.
    """
    declared = set()
    for path, m in block.module.named_modules():
        if m in declared or not hasattr(m, "regenerable"):
            continue
        declared.update(m.modules())
        for kind, names in m.regenerable.items():
            getattr(block, kind).extend((_join(_join(block.name, path), n), m.get_submodule(n)) for n in names)
    return declared


_HINTS = {
    "activations": " as a module (an activation called as a function is regenerated only where ckpt_ops.replace swaps it)",
    "qkv": " as a Linear",
}


def is_norm(m):
    """A module of torch's norms, or one that calls itself a norm and has nothing but a weight and perhaps a bias."""
    if isinstance(m, _NORMS):
        return True
    own = dict(m.named_parameters(recurse=False))
    return (
        bool(re.search(r"norm$", type(m).__name__, re.I))
        and not list(m.children())
        and set(own) <= {"weight", "bias"}
        and not list(m.buffers())
    )


def is_activation(m):
    if isinstance(m, _ACTIVATIONS):
        return True
    named = re.search(r"gelu|silu|swish|relu|activation|act_?dropout", type(m).__name__, re.I)
    return bool(named) and not list(m.children()) and not list(m.parameters())


def is_linear(m):
    return isinstance(m, nn.Linear) or (type(m).__name__ == "Conv1D" and hasattr(m, "nf"))


def _widens(m):
    return m.weight.shape[0] > m.weight.shape[1] if isinstance(m, nn.Linear) else m.weight.shape[1] > m.weight.shape[0]


def _join(prefix, name):
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _parent(path):
    return path.rpartition(".")[0]


def _ancestors(path):
    while path:
        path = _parent(path)
        yield path


def _at(module, path):
    return module.get_submodule(path)
