"""What takes a module's place: an object of this package's class with the same parameters, buffers and hooks."""

import torch
from torch import nn

from .. import nn as ours

EXACT = {
    nn.LayerNorm: ours.LayerNorm,
    nn.RMSNorm: ours.RMSNorm,
    nn.Dropout: ours.Dropout,
    nn.MultiheadAttention: ours.MultiheadAttention,
    nn.TransformerEncoderLayer: ours.TransformerEncoderLayer,
    nn.TransformerDecoderLayer: ours.TransformerDecoderLayer,
}
_OURS = tuple(getattr(ours, name) for name in ours.__all__)

# Norm classes known by name that do not have Llama's `variance_epsilon`: what they add to the weight.
_OFFSETS = {
    "RMSNorm": 0.0,
    "GemmaRMSNorm": 1.0,
    "Gemma2RMSNorm": 1.0,
    "Gemma3RMSNorm": 1.0,
    "RecurrentGemmaRMSNorm": 1.0,
    "Qwen3NextRMSNorm": 1.0,
}


class Skip(Exception):
    """Why a module is left as it is."""


class Twin:
    """`new` in the place of `old`.

    They share the dicts of parameters, buffers, children and hooks, so that whatever is registered with one, or removed
    by a handle taken from the other, is there for both. Plain attributes are copied, and copied back by `restore`.
    """

    def __init__(self, old, cls, **attributes):
        self.old, self._own = old, attributes
        self.new = cls.__new__(cls)
        vars(self.new).update(vars(old), **attributes)

    def restore(self):
        """Brings the old module's attributes (training, p, ...) up to date."""
        now = vars(self.new)
        vars(self.old).update({key: now[key] for key in vars(self.old) if key in now and key not in self._own})


def twin_of(m):
    """The Twin of a module that this package has one for, None for modules that are none of its business, or Skip."""
    if isinstance(m, _OURS):
        raise Skip("already this package's")
    cls = EXACT.get(type(m))
    if cls is None:
        _refuse_relatives(m)
        return _rms_norm(m) if _calls_itself_a_norm(m) else None
    check_untouched(m)
    return Twin(m, cls)


def check_untouched(m):
    """Skip where the instance does not run its class's forward."""
    if "forward" in vars(m):
        raise Skip("its forward is replaced on the instance")
    if m._compiled_call_impl is not None:
        raise Skip("it is compiled on its own")


def _refuse_relatives(m):
    for base in EXACT:
        if isinstance(m, base):
            if type(m).forward is not base.forward:
                raise Skip(f"a subclass of {base.__name__} with a forward of its own")
            raise Skip(f"a subclass of {base.__name__}: only torch's own class is replaced")
    if isinstance(m, nn.modules.dropout._DropoutNd):
        raise Skip("a dropout of another kind: it drops channels, or does not set to zero")


def _calls_itself_a_norm(m):
    name = type(m).__name__
    if type(m).__module__.startswith("torch.") or not name.lower().endswith("norm"):
        return False
    return not list(m.children())


# --- RMSNorm of other packages ------------------------------------------------------------------------------------


class _PromotingRMSNorm(ours.RMSNorm):
    """As Llama's: the result has the common dtype of input and weight."""

    def forward(self, input):
        return super().forward(input).to(torch.promote_types(input.dtype, self.weight.dtype))


def _rms_norm(m):
    """The Twin of an RMSNorm that is known by structure or name, and that computes what its twin does."""
    own, name = dict(m.named_parameters()), type(m).__name__
    llamas = isinstance(getattr(m, "variance_epsilon", None), float)
    if set(own) != {"weight"} or list(m.buffers()) or not (llamas or name in _OFFSETS):
        raise Skip(f"{name} is not a norm that this package knows")
    check_untouched(m)
    eps = m.variance_epsilon if llamas else getattr(m, "eps", None)
    if not isinstance(eps, float) or m.weight.dim() != 1 or m.weight.is_meta:
        raise Skip(f"{name} has no eps or weight of the form known, or no values yet")
    attributes = dict(
        normalized_shape=tuple(m.weight.shape), eps=eps, elementwise_affine=True, offset=0.0 if llamas else _OFFSETS[name]
    )  # fmt: skip
    twin = Twin(m, _PromotingRMSNorm if _promotes(m) else ours.RMSNorm, **attributes)
    if not _agree(m, twin.new):
        raise Skip(f"{name} does not compute what its name says: its results differ from RMSNorm's")
    return twin


def _bare(m, weight):
    """The module without its hooks, and with this weight."""
    bare = type(m).__new__(type(m))
    hookless = {key: {} for key in vars(m) if key.endswith("_hooks")}
    vars(bare).update(vars(m), **hookless, _parameters={"weight": nn.Parameter(weight, requires_grad=False)})
    return bare


def _promotes(m):
    x = torch.ones(1, m.weight.shape[0], dtype=torch.bfloat16, device=m.weight.device)
    return _bare(m, torch.ones_like(x[0], dtype=torch.float32)).forward(x).dtype == torch.float32


def _agree(old, new):
    """Whether both give the same for a random weight, and numbers of usual size and small ones, where eps tells."""
    generator = torch.Generator().manual_seed(0)
    *x, weight = torch.randn(5, old.weight.shape[0], generator=generator).to(old.weight.device)
    x = torch.stack([*x, *(1e-3 * row for row in x)])
    one, two = _bare(old, weight).forward(x), _bare(new, weight).forward(x)
    return one.shape == two.shape and torch.allclose(one, two, rtol=1e-4, atol=1e-5)
