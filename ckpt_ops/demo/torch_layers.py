"""torch's layers under the names and constructors of ckpt_ops.nn: what the model is built with for comparison."""

import torch.nn.functional as F
from torch import nn

Dropout = nn.Dropout
LayerNorm = nn.LayerNorm


class Attention(nn.Module):
    def __init__(self, dropout_p, is_causal):
        super().__init__()
        self.dropout_p, self.is_causal = dropout_p, is_causal

    def forward(self, query, key, value):
        dropout_p = self.dropout_p if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=self.is_causal)


class GELUDropout(nn.Sequential):
    def __init__(self, p):
        super().__init__(nn.GELU(), nn.Dropout(p))


class DropoutAdd(nn.Dropout):
    def forward(self, input, residual):
        return residual + super().forward(input)


class DropoutAddLayerNorm(nn.LayerNorm):
    def __init__(self, normalized_shape, *, p):
        super().__init__(normalized_shape)
        self.dropout = nn.Dropout(p)

    def forward(self, input, residual):
        r = residual + self.dropout(input)
        return super().forward(r), r
