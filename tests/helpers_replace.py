"""Modules of the kind that other packages have, for the tests of replacement. At module level: they pickle."""

import torch
from torch import nn

import ckpt_ops

ours = ckpt_ops.nn
H = 16


class LlamaRMSNorm(nn.Module):
    """As in transformers: normalised in float32, rounded to the input's dtype, then times the weight."""

    def __init__(self, hidden, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.variance_epsilon = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class GemmaRMSNorm(nn.Module):
    """As in transformers: 1 is added to the weight in float32."""

    def __init__(self, hidden, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Mlp(nn.Module):
    """As in timm."""

    def __init__(self, act=nn.GELU):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(H, 2 * H), act(), nn.Dropout(0.1)
        self.fc2, self.drop2 = nn.Linear(2 * H, H), nn.Dropout(0.2)

    def forward(self, x):
        x = self.drop1(self.act(self.fc1(x)))
        return self.drop2(self.fc2(x))
