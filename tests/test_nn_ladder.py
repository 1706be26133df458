"""The transformer layers and MLP at every rung: bytes kept, and gradients to the bit."""

import pytest
import torch
from torch import nn

import ckpt_ops
from helpers_layers import ACTIVATIONS, DECODERS, ENCODERS, E, layers, ours, stack, step

each = pytest.mark.parametrize

# In units of 2 bytes an element, per token and hidden size: what a pre-norm layer keeps.
LADDER = {"store": 32, "norms": 28, "activations": 20, "mlp": 12, "qkv": 6, "block": 2}
B, N, H, A = 2, 128, 128, 4


@each("dtype", [torch.float32, torch.bfloat16], ids=str)
@each("batch_first", [True, False])
def test_the_ladder(fused, dtype, batch_first):
    layer = ours.TransformerEncoderLayer(H, A, 4 * H, 0.1, "gelu", batch_first=batch_first, norm_first=True, dtype=dtype)
    model, x = stack(layer), torch.randn(B, N, H, dtype=dtype, requires_grad=True)
    stored = step(model, "store", x)[1]
    for rung, units in LADDER.items():
        kept, grads = step(model, rung, x)
        rows = B * N
        statistics = 2 * (2 * 8 * rows + 4 * rows * A)  # two norms and one log-sum-exp a head, in two layers
        wide = kept.bytes - (statistics if rung != "block" else 0)
        measured = wide / 2 / (rows * H) * 2 / x.element_size()
        assert units <= measured < 1.01 * units, f"{rung}: {measured:.3f}\n{kept}"
        for name, one, two in zip(["x", *dict(model.named_parameters())], grads, stored):
            assert torch.equal(one, two), f"{rung} {name}"


@each("classes", [ENCODERS, DECODERS], ids=["encoder", "decoder"])
@each("norm_first", [True, False])
@each("activation", ["relu", "another"])
def test_gradients_at_every_rung(fused, classes, norm_first, activation):
    layer = layers(classes, dropout=0.2, norm_first=norm_first, activation=ACTIVATIONS[activation])[0]
    model = layer if classes is DECODERS else stack(layer)
    inputs = [torch.randn(6, 3, E, requires_grad=True) for _ in range(2 if classes is DECODERS else 1)]
    stored, before = step(model, "store", *inputs)
    sizes = []
    for rung in ckpt_ops.RUNGS:
        kept, grads = step(model, rung, *inputs)
        sizes.append(kept.bytes)
        assert all(map(torch.equal, grads, before)), rung
    assert sizes == sorted(sizes, reverse=True) and sizes[-2] < sizes[0] == stored.bytes


def test_the_report_names_children_and_what_stays(fused):
    model = stack(layers(ENCODERS, activation="gelu")[0])
    x = torch.randn(6, 3, E, requires_grad=True)
    handle = ckpt_ops.regenerate(model, "qkv")
    model(x)
    for i, block in enumerate(handle.report().blocks):
        names = ["norm1", "norm2", "dropout", "linear1", "self_attn"]
        assert block.regenerated == [f"layers.{i}.{name}" for name in names] and not block.left and not block.notes
    handle.remove()
    model = stack(layers(ENCODERS, activation=torch.tanh)[0])
    handle = ckpt_ops.regenerate(model, "activations")
    model(x)
    assert "activation" in handle.report().blocks[0].left["layers.0.dropout"]


def test_mlp_on_the_ladder(fused):
    """x, up(x) and the activation; the last two go at their rungs."""
    model = nn.Sequential(*(ours.MLP(E, dropout=0.1) for _ in range(2)))
    x = torch.randn(64, E, requires_grad=True)
    sizes = {rung: step(model, rung, x)[0].bytes for rung in ("store", "activations", "mlp")}
    assert sizes == {"store": 2 * (9 * x.nbytes + 8), "activations": 2 * (5 * x.nbytes + 8), "mlp": 2 * (x.nbytes + 8)}
