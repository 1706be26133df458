"""Modules: parameters and one call each. Those with a twin in torch.nn subclass it and share its state_dict."""

from .attention import Attention
from .dropout import ActDropout, Dropout, DropoutAdd, GELUDropout
from .mlp import MLP
from .multihead_attention import MultiheadAttention
from .norm import DropoutAddLayerNorm, DropoutAddRMSNorm, LayerNorm, RMSNorm
from .transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "MLP",
    "ActDropout",
    "Attention",
    "Dropout",
    "DropoutAdd",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "GELUDropout",
    "LayerNorm",
    "MultiheadAttention",
    "RMSNorm",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
]
