"""A byte-level GPT: pre-LN blocks, learned positions, dropout on embedding, attention, MLP and every residual branch.

`layers` is what the blocks are built with: `ckpt_ops.nn` or `torch_layers`. The two models have the same parameters under
the same names, so either loads the other's state_dict.
"""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # bytes


class Block(nn.Module):
    def __init__(self, layers, hidden, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1 = layers.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.attention = layers.Attention(dropout, is_causal=True)
        self.projection = nn.Linear(hidden, hidden)
        self.norm2 = layers.DropoutAddLayerNorm(hidden, p=dropout)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.activation = layers.GELUDropout(dropout)
        self.down = nn.Linear(4 * hidden, hidden)
        self.add = layers.DropoutAdd(dropout)

    def forward(self, x):
        """x [B, N, C], the residual stream, to the same."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
        mixed = self.attention(q, k, v).transpose(1, 2).flatten(2)
        y, x = self.norm2(self.projection(mixed), x)  # x + dropout(projection), and its norm
        return self.add(self.down(self.activation(self.up(y))), x)


class GPT(nn.Module):
    """Calling it with ids and targets (int64 [B, N]) gives the mean loss a byte, in nats.

    run_block(block, x): how a block is called; checkpointed variants replace it.
    """

    def __init__(self, layers, *, depth, hidden, heads, context, dropout, run_block=lambda block, x: block(x)):
        super().__init__()
        self.run_block = run_block
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(context, hidden)
        self.dropout = layers.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(layers, hidden, heads, dropout) for _ in range(depth))
        self.norm = layers.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, ids, targets):
        x = self.dropout(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for block in self.blocks:
            x = self.run_block(block, x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def initialise(self, seed):
        """GPT-2's start: normal weights of 0.02, smaller where a branch joins the residual stream; zero biases."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                branch_end = name.endswith(("projection.weight", "down.weight"))
                std = 0.02 / (2 * len(self.blocks)) ** 0.5 if branch_end else 0.02
                nn.init.normal_(p, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        return self
