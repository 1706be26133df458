"""Attention on projected heads."""

from torch import nn

from .. import functional as F
from ._random import RandomModule
from .dropout import _check_p


class Attention(RandomModule, nn.Module):
    """Scaled dot-product attention with dropout on the probabilities; off in eval.

    Args: as in `ckpt_ops.functional.scaled_dot_product_attention`. No parameters: q, k, v come projected.
    Kept for backward: query, key, value, the result, 4 bytes a query row, 8 bytes.
    """

    def __init__(self, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *, causal_align=None):
        super().__init__()
        _check_p(dropout_p)
        self.dropout_p, self.is_causal, self.scale = dropout_p, is_causal, scale
        self.enable_gqa, self.causal_align = enable_gqa, causal_align

    def forward(self, query, key, value, attn_mask=None):
        """query [..., Hq, Nq, D], key [..., Hkv, Nk, D], value [..., Hkv, Nk, Dv] -> [..., Hq, Nq, Dv]."""
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, self.dropout_p, self.is_causal, self.scale, self.enable_gqa,
            causal_align=self.causal_align, training=self.training, **self.random(),
        )  # fmt: skip

    def extra_repr(self):
        return f"dropout_p={self.dropout_p}, is_causal={self.is_causal}, enable_gqa={self.enable_gqa}"
