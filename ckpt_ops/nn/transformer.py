"""torch.nn's transformer layers, built from this package's kernels.

Arguments, children, state_dict and results are torch's, and torch.nn.TransformerEncoder, TransformerDecoder and Transformer
take them as layers. Nested tensors, which torch's encoder makes of padded batches in eval, go to torch's own fast path.

Kept for backward by an encoder layer, norm first or last, in elements a token: 1 (input) + 1 (norm) + 3 (q, k, v)
+ 1 (attention) + 1 (residual) + 1 (norm) hidden sizes, 2 feed-forward sizes; and statistics and seeds. At hidden size h
and 4 h in the feed-forward that is 16 h; no mask, no probabilities, no activation beside its dropout.
"""

import torch
from torch import nn

from ..saved.accepts import registers
from ._fused import act_dropout, dropout_add, dropout_add_norm
from .dropout import Dropout
from .multihead_attention import MultiheadAttention
from .norm import LayerNorm


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer; activation gelu, relu or silu (module or function) is one kernel with its dropout."""

    regenerable = {
        "norms": ("norm1", "norm2"),
        "activations": ("dropout",),
        "mlp": ("linear1",),
        "qkv": ("self_attn",),
    }

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _own_children(self)

    @registers
    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        """src [B, N, C] (batch_first), [N, B, C] or [N, C] -> the same shape. Masks as in torch: True hides."""
        if src.is_nested:
            return _padded(self, src) if _hooked(self) else super().forward(src, src_mask, src_key_padding_mask, is_causal)
        masks = dict(attn_mask=src_mask, key_padding_mask=src_key_padding_mask, is_causal=is_causal)
        if self.norm_first:
            attended = _attend(self.self_attn, self.norm1(src), **masks)
            y, x = dropout_add_norm(self.dropout1, self.norm2, attended, src)
            return dropout_add(self.dropout2, _feed_forward(self, y), x)
        x, _ = dropout_add_norm(self.dropout1, self.norm1, _attend(self.self_attn, src, **masks), src)
        x, _ = dropout_add_norm(self.dropout2, self.norm2, _feed_forward(self, x), x)
        return x


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer; activation gelu, relu or silu (module or function) is one kernel with its dropout."""

    regenerable = {
        "norms": ("norm1", "norm2", "norm3"),
        "activations": ("dropout",),
        "mlp": ("linear1",),
        "qkv": ("self_attn", "multihead_attn"),
    }

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _own_children(self)

    @registers
    def forward(
        self, tgt, memory, tgt_mask=None, memory_mask=None, tgt_key_padding_mask=None, memory_key_padding_mask=None,
        tgt_is_causal=False, memory_is_causal=False,
    ):  # fmt: skip
        """tgt [B, N, C] (batch_first), [N, B, C] or [N, C], memory [B, M, C], ... -> tgt's shape. Masks: True hides."""
        own = dict(attn_mask=tgt_mask, key_padding_mask=tgt_key_padding_mask, is_causal=tgt_is_causal)
        cross = dict(attn_mask=memory_mask, key_padding_mask=memory_key_padding_mask, is_causal=memory_is_causal)
        if self.norm_first:
            attended = _attend(self.self_attn, self.norm1(tgt), **own)
            y, x = dropout_add_norm(self.dropout1, self.norm2, attended, tgt)
            y, x = dropout_add_norm(self.dropout2, self.norm3, _attend(self.multihead_attn, y, memory, **cross), x)
            return dropout_add(self.dropout3, _feed_forward(self, y), x)
        x, _ = dropout_add_norm(self.dropout1, self.norm1, _attend(self.self_attn, tgt, **own), tgt)
        x, _ = dropout_add_norm(self.dropout2, self.norm2, _attend(self.multihead_attn, x, memory, **cross), x)
        x, _ = dropout_add_norm(self.dropout3, self.norm3, _feed_forward(self, x), x)
        return x


_TWINS = {nn.LayerNorm: LayerNorm, nn.Dropout: Dropout, nn.MultiheadAttention: MultiheadAttention}


def _own_children(layer):
    """Gives the children that torch's constructor made this package's classes. Parameters and attributes are theirs already."""
    for child in layer.children():
        child.__class__ = _TWINS.get(type(child), type(child))


def _hooked(layer):
    """Whether torch's fast path, which calls no child, refuses the layer."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())


def _padded(layer, nested):
    """The layer on a nested tensor [B, (N), C], by way of a padded one."""
    lengths = [t.shape[0] for t in nested.unbind()]
    x = nested.to_padded_tensor(0.0)
    padding = torch.arange(x.shape[1], device=x.device) >= torch.tensor(lengths, device=x.device)[:, None]
    y = layer.forward(x, src_key_padding_mask=padding)
    return torch.nested.as_nested_tensor([row[:n] for row, n in zip(y, lengths)])


def _attend(attention, x, memory=None, **masks):
    memory = x if memory is None else memory
    return attention(x, memory, memory, need_weights=False, **masks)[0]


def _feed_forward(layer, x):
    return layer.linear2(act_dropout(layer.activation, layer.dropout, layer.linear1(x)))
