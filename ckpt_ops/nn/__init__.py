"""Modules: parameters and one call each. Those with a twin in torch.nn subclass it and share its state_dict."""

from .attention import Attention
from .dropout import Dropout, DropoutAdd, GELUDropout
from .norm import DropoutAddLayerNorm, DropoutAddRMSNorm, LayerNorm, RMSNorm

__all__ = [
    "Attention",
    "Dropout",
    "DropoutAdd",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "GELUDropout",
    "LayerNorm",
    "RMSNorm",
]
