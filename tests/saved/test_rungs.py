"""regenerate(): bytes of every rung in closed form, gradients to the bit, and what it says of models it has never seen."""

import copy
import io
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ckpt_ops
from ckpt_ops import RUNGS, memory, regenerate
from ckpt_ops.demo import torch_layers
from ckpt_ops.demo.model import GPT, Block

BATCH, LENGTH, HIDDEN, HEADS = 2, 24, 32, 4
TOKENS = BATCH * LENGTH
DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = {"store": 16, "norms": 14, "activations": 10, "mlp": 6, "qkv": 3, "block": 1}  # saved, in units of [tokens, hidden]


class PlainBlock(nn.Module):
    """A pre-LN block of torch's own layers."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def ours(p=0.1):
    return Block(ckpt_ops.nn, HIDDEN, HEADS, p)


def hidden(dtype):
    return torch.randn(BATCH, LENGTH, HIDDEN, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rung", RUNGS)
def test_bytes_of_our_block(rung, dtype):
    """x, LayerNorm twice, qkv (3), attention, r, up (4), activation (4); 8 bytes a row a norm, 4 a head's row; 4 seeds."""
    block = ours().to(dtype)
    regenerate(block, rung)
    x = hidden(dtype)
    statistics = TOKENS * (8 + 8 + 4 * HEADS) + 4 * 8 if rung != "block" else 0
    assert memory.kept(block, x).bytes == WIDTHS[rung] * x.nbytes + statistics


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_torchs_layers(dtype):
    """The same ladder; torch's LayerNorm has statistics in x's dtype, and its attention keeps a few bytes more."""
    x, kept = hidden(dtype), {}
    for rung in RUNGS:
        block = PlainBlock().to(dtype)
        regenerate(block, rung)
        kept[rung] = memory.kept(block, x).bytes
    for rung in RUNGS[:-1]:
        assert kept["store"] - kept[rung] == (WIDTHS["store"] - WIDTHS[rung]) * x.nbytes
    assert kept["block"] == x.nbytes
    assert 0 <= kept["store"] - 16 * x.nbytes - TOKENS * (4 * x.itemsize + 4 * HEADS) <= 32


def gradients(model, *args, rung=None, autocast=False):
    if rung is not None:
        regenerate(model, rung)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(*args)
    loss = loss if loss.dim() == 0 else loss.float().sin().sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rung", RUNGS[1:])
@pytest.mark.parametrize("layers, p", [(ckpt_ops.nn, 0.1), (torch_layers, 0.0)], ids=["ours", "torch"])
def test_gradients_are_those_of_store(layers, p, rung, dtype):
    ids = torch.randint(0, 256, (BATCH, LENGTH))
    model = GPT(layers, depth=2, hidden=HIDDEN, heads=HEADS, context=LENGTH, dropout=p).initialise(0).to(dtype)
    expected = gradients(copy.deepcopy(model), ids, ids, rung="store")
    assert_equal(gradients(model, ids, ids, rung=rung), expected)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("make", [PlainBlock, ours])
def test_autocast_in_forward_and_backward_outside(make, rung):
    block, x = make(), hidden(torch.float32)
    expected = gradients(copy.deepcopy(block), x, autocast=True)
    assert_equal(gradients(block, x, rung=rung, autocast=True), expected)


@pytest.mark.parametrize("rung", ["mlp", "block"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_a_copy_of_a_regenerated_model_is_regenerated(how, rung):
    blocks = nn.Sequential(PlainBlock(), PlainBlock())
    x = hidden(torch.float32)
    expected = gradients(copy.deepcopy(blocks), x)
    regenerate(blocks, rung)
    memory.kept(blocks, x)
    if how == "deepcopy":
        again = copy.deepcopy(blocks)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(blocks))
    else:
        torch.save(blocks, buffer := io.BytesIO())
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
    for p in blocks.parameters():
        p.data.fill_(torch.nan)  # the copy computes with its own
    assert_equal(gradients(again, x), expected)
    plain = memory.kept(nn.Sequential(PlainBlock(), PlainBlock()), x).bytes
    assert memory.kept(again, x).bytes < plain / 2
    assert set(again.state_dict()) == set(nn.Sequential(PlainBlock(), PlainBlock()).state_dict())


def test_remove_restores():
    blocks, x = nn.Sequential(*(PlainBlock() for _ in range(3))), hidden(torch.float32)
    before = memory.kept(blocks, x).bytes
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in blocks.modules()]
    handle = regenerate(blocks, {"0": "mlp", "2": "block"})
    assert memory.kept(blocks, x).bytes < before
    handle.remove()
    assert memory.kept(blocks, x).bytes == before
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in blocks.modules()]
    regenerate(blocks, "norms")


def test_a_rung_for_each_block():
    blocks, x = nn.Sequential(*(PlainBlock() for _ in range(3))), hidden(torch.float32)
    before = memory.kept(blocks, x).bytes
    handle = regenerate(blocks, {"0": "norms", "2": "mlp"})
    assert before - memory.kept(blocks, x).bytes == (2 + 0 + 10) * x.nbytes
    report = handle.report(x)
    assert [(block.name, block.rung) for block in report.blocks] == [("0", "norms"), ("1", "store"), ("2", "mlp")]
    assert report.blocks[0].regenerated == ["0.norm1", "0.norm2"] and not report.blocks[1].regenerated
    assert report.kept.bytes == memory.kept(blocks, x).bytes and f"{report.kept.bytes:,} bytes" in str(report)


def test_modules_by_name():
    blocks, x = nn.Sequential(PlainBlock(), PlainBlock()), hidden(torch.float32)
    before = memory.kept(blocks, x).bytes
    handle = regenerate(blocks, "store", modules=["0.mlp.0", "1.norm2"])
    assert before - memory.kept(blocks, x).bytes == (4 + 1) * x.nbytes
    assert handle.report().blocks[-1].regenerated == ["0.mlp.0", "1.norm2"]


@pytest.mark.parametrize(
    "rung, modules, message",
    [
        ("mlps", (), "unknown rung 'mlps'; choose one of store, norms"),
        ({"0": "half"}, (), "unknown rung 'half'"),
        ({"5": "mlp"}, (), "no block named '5'; found '0', '1'"),
        ("store", ["0.mlp.7"], "no module named '0.mlp.7'"),
    ],
)
def test_unknown_names(rung, modules, message):
    blocks = nn.Sequential(PlainBlock(), PlainBlock())
    with pytest.raises(ValueError, match=message):
        regenerate(blocks, rung, modules=modules)
    regenerate(blocks)  # nothing of the failed call is left


def test_twice_is_refused():
    blocks = nn.Sequential(PlainBlock(), PlainBlock())
    handle = regenerate(blocks)
    with pytest.raises(ValueError, match="regenerated already; call remove"):
        regenerate(blocks)
    handle.remove()
    regenerate(blocks)


# --- modules that cannot be made again ---------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x * self.seen.clone()


class Hidden(nn.Module):
    """Randomness that cannot be seen without a call."""

    def forward(self, x):
        return F.dropout(x, 0.5)


class Listing(nn.Module):
    def forward(self, x):
        return [x.sin()]


CANNOT = {
    "dropout inside": (nn.Sequential(nn.Tanh(), nn.Dropout(0.5)), r"1 in it draws unseeded randomness \(Dropout\)"),
    "randomness in a call": (Hidden(), "draws from torch's cpu generator"),
    "an attribute": (Counting(), "a call changes an attribute of it: calls"),
    "a buffer": (Remembering(), "a call changes a buffer of it: seen"),
    "batch statistics": (nn.BatchNorm1d(8), "it updates its statistics"),
    "an in-place activation": (nn.ReLU(inplace=True), "it works in place"),
    "a view": (nn.Flatten(0, -1), "its input's own memory"),
    "not a tensor": (Listing(), "not a tensor or a tuple of tensors"),
}


class Around(nn.Module):
    """A module between two Linears: its output is saved."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(self.first(x))
        return self.last((y[0] if isinstance(y, list) else y).view(-1, 8)).sum()


@pytest.mark.parametrize("what", CANNOT)
def test_what_cannot_be_made_again_is_kept_with_a_reason(what):
    inner, reason = CANNOT[what]
    model, x = Around(copy.deepcopy(inner)), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    expected = [gradients(plain, x) for _ in range(2)][-1]
    handle = regenerate(model, "store", modules=["inner"])
    assert_equal([gradients(model, x) for _ in range(2)][-1], expected)
    (row,) = [block for block in handle.report().blocks if block.name == "(named modules)"]
    assert not row.regenerated and list(row.left) == ["inner"]
    assert re.search(reason, row.left["inner"])
    assert f"kept: inner: {row.left['inner']}" in str(handle.report())


def test_a_module_with_hooks_of_its_own_is_kept():
    model, x = Around(nn.Tanh()), torch.randn(4, 8)
    model.inner.register_forward_hook(lambda module, args, output: output * 2)
    expected = gradients(copy.deepcopy(model), x)
    handle = regenerate(model, "activations")
    assert_equal(gradients(model, x), expected)
    assert "forward hooks of its own" in str(handle.report())


def test_a_dropout_that_does_not_drop_is_no_reason():
    model, x = Around(nn.Sequential(nn.Tanh(), nn.Dropout(0.5))).eval(), torch.randn(4, 8)
    handle = regenerate(model, "store", modules=["inner"])
    gradients(model, x)
    assert handle.report().blocks[-1].left == {}
    model.train()
    gradients(model, x)
    assert "unseeded" in handle.report().blocks[-1].left["inner"]


# --- models it has never seen ------------------------------------------------------------------------------------


class RootMeanSquareNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


class LlamaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj, self.v_proj = nn.Linear(HIDDEN, HIDDEN // 2, bias=False), nn.Linear(HIDDEN, HIDDEN // 2, bias=False)

    def forward(self, hidden_states):
        q, k, v = (p(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 88, bias=False), nn.Linear(HIDDEN, 88, bias=False)
        self.down_proj, self.act_fn = nn.Linear(88, HIDDEN, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(), LlamaMLP()
        self.input_layernorm, self.post_attention_layernorm = RootMeanSquareNorm(HIDDEN), RootMeanSquareNorm(HIDDEN)

    def forward(self, hidden_states):
        x = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(50, HIDDEN), RootMeanSquareNorm(HIDDEN)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(2))

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def test_a_llama_of_its_own_classes():
    model, ids = Llama(), torch.randint(0, 50, (BATCH, LENGTH))
    plain = memory.kept(model, ids).bytes
    expected = gradients(copy.deepcopy(model), ids)
    handle = regenerate(model, "qkv")
    first = handle.report().blocks[0]
    assert [block.name for block in handle.report().blocks] == ["layers.0", "layers.1"]
    assert first.regenerated == [
        "layers.0." + name
        for name in (
            "input_layernorm", "post_attention_layernorm", "mlp.act_fn", "mlp.gate_proj", "mlp.up_proj",
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        )
    ]  # fmt: skip
    assert not first.left and not first.notes
    assert_equal(gradients(model, ids), expected)
    # a layer's q, k, v (32 + 16 + 16), gate, up and silu (88 each), two norms (32 each)
    assert plain - memory.kept(model, ids).bytes == 2 * TOKENS * 4 * (64 + 3 * 88 + 2 * 32)


def test_torchs_transformer_encoder_layers():
    layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, norm_first=True, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), hidden(torch.float32)
    expected = gradients(copy.deepcopy(model), x)
    plain = memory.kept(model, x).bytes
    handle = regenerate(model, "mlp")
    assert_equal(gradients(model, x), expected)
    report = handle.report().blocks[0]
    assert report.name == "layers.0"
    assert report.regenerated == ["layers.0.norm1", "layers.0.norm2", "layers.0.linear1"]
    assert any(note.startswith("activations: none found as a module") for note in report.notes)
    assert any(note.startswith("qkv: none found as a Linear") for note in report.notes)
    # norm2 of each layer: attention saves a transposed copy of norm1's output, and relu its own output
    assert plain - memory.kept(model, x).bytes == 2 * x.nbytes


def test_a_cnn_without_blocks():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Flatten()
    )
    x = torch.randn(2, 3, 8, 8)
    expected = gradients(copy.deepcopy(model), x)
    handle = regenerate(model)
    assert_equal(gradients(model, x), expected)
    (report,) = handle.report().blocks
    assert report.name == "(the model)" and report.regenerated == ["4"] and report.left == {"2": "it works in place"}
    assert [note.partition(":")[0] for note in report.notes] == ["norms", "mlp", "qkv"]
