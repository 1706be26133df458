"""The ops, under torch.nn.functional's names and argument order where it has a twin."""

from .ops.act_dropout import act_dropout, gelu_dropout
from .ops.attention import scaled_dot_product_attention
from .ops.dropout import dropout
from .ops.dropout_add import dropout_add
from .ops.dropout_add_norm import dropout_add_layer_norm, dropout_add_rms_norm
from .ops.layer_norm import layer_norm
from .ops.rms_norm import rms_norm

__all__ = [
    "act_dropout",
    "dropout",
    "dropout_add",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "gelu_dropout",
    "layer_norm",
    "rms_norm",
    "scaled_dot_product_attention",
]
