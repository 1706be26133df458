"""ckpt_ops.replace: what is swapped for what, what stays as it was, the way back, and what it is for."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import ckpt_ops
from helpers_numerics import error
from helpers_replace import H, LlamaRMSNorm, Mlp, ours

each = pytest.mark.parametrize


class Net(nn.Module):
    """All that is replaced, nested, with a norm used twice, tied weights and a buffer."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, H)
        self.embed = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.mixed = nn.Sequential(nn.Linear(H, H), nn.SiLU(), nn.Dropout(0.1), nn.Linear(H, H), nn.ReLU(), nn.Linear(H, H))
        self.layer = nn.TransformerEncoderLayer(H, 2, 2 * H, 0.1, batch_first=True, norm_first=True)
        self.attention = nn.MultiheadAttention(H, 2, 0.1, batch_first=True)
        self.norms = nn.ModuleDict({"layer": nn.LayerNorm(H, 1e-3), "rms": nn.RMSNorm(H, 1e-3), "llama": LlamaRMSNorm(H)})
        self.again = self.norms["layer"]
        self.head = nn.Linear(H, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids):
        x = self.embed(self.tokens(ids))
        for block in self.blocks:
            x = x + block(self.norms["rms"](x))
        x = self.layer(x + self.mixed(self.norms["layer"](x)))
        x = x + self.scale * self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.again(self.norms["llama"](x)))


IDS = torch.arange(33).reshape(3, 11) % 11


def gradients(model, x=IDS):
    y = model(x)
    generator = torch.Generator().manual_seed(2)
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(
        y, list(parameters.values()), torch.randn(y.shape, generator=generator).to(y), allow_unused=True
    )
    return {"y": y, **dict(zip(parameters, grads))}


def assert_alike(results, plain, truth):
    assert results.keys() == plain.keys()
    for name, value in results.items():
        if name.endswith("in_proj_bias"):  # of a key: 0 but for rounding
            value, plain[name], truth[name] = (torch.cat([t[:H], t[2 * H :]]) for t in (value, plain[name], truth[name]))
        allowed = 2 * error(plain[name], truth[name]) + torch.finfo(value.dtype).eps
        assert error(value, truth[name]) <= allowed, name


REPLACED = {
    "embed": ours.Dropout,
    **{f"blocks.{i}.{name}": cls for i in range(2) for name, cls in
       {"act": nn.Identity, "drop1": ours.ActDropout, "drop2": ours.Dropout}.items()},
    "mixed.1": nn.Identity,
    "mixed.2": ours.ActDropout,
    "layer": ours.TransformerEncoderLayer,
    "layer.self_attn": ours.MultiheadAttention,
    **{f"layer.{name}": ours.Dropout for name in ("dropout", "dropout1", "dropout2")},
    **{f"layer.{name}": ours.LayerNorm for name in ("norm1", "norm2")},
    "attention": ours.MultiheadAttention,
    "norms.layer": ours.LayerNorm,
    "norms.rms": ours.RMSNorm,
    "norms.llama": ours.RMSNorm,
}  # fmt: skip


def test_the_report_lists_all_in_the_models_order():
    model = Net()
    before = {name: type(m) for name, m in model.named_modules()}
    report = ckpt_ops.replace(model)
    assert [name for name, _, _ in report.replaced] == [name for name in before if name in REPLACED] and not report.skipped
    after = dict(model.named_modules())
    assert list(after) == list(before)
    for name, old, new in report.replaced:
        assert old is before[name] and new is type(after[name]) and issubclass(new, REPLACED[name]), name
    text = str(report)
    assert "norms.layer: torch.LayerNorm -> ckpt_ops.LayerNorm" in text and text.startswith(f"{len(REPLACED)} modules replaced")


@each("training", [True, False])
def test_results_and_gradients_are_the_models(backend, training):
    plain = Net().train(training)
    for m in plain.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        if isinstance(m, nn.MultiheadAttention):
            m.dropout = 0.0
    model, true = copy.deepcopy(plain), copy.deepcopy(plain).double()
    ckpt_ops.replace(model)
    assert_alike(gradients(model), gradients(plain), gradients(true))


def test_modules_keep_what_they_had():
    model = Net().to(torch.bfloat16)
    model.norms["layer"].weight.requires_grad_(False)
    model.norms["rms"].eval()
    model.norms["rms"].note = "kept"
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    keys, state = list(model.state_dict()), copy.deepcopy(model.state_dict())
    isinstances = {name: type(m) for name, m in model.named_modules() if type(m) in (nn.LayerNorm, nn.RMSNorm, nn.Dropout)}
    ckpt_ops.replace(model)
    for name, p in model.named_parameters(remove_duplicate=False):
        assert p is parameters.pop(name), name
    assert not parameters and model.scale is buffers["scale"] and model.head.weight is model.tokens.weight
    assert list(model.state_dict()) == keys
    for name, cls in isinstances.items():
        assert isinstance(model.get_submodule(name), cls), name
    assert model.again is model.norms["layer"] and model.norms["layer"].eps == 1e-3
    assert not model.norms["layer"].weight.requires_grad and model.norms["rms"].note == "kept"
    assert not model.norms["rms"].training and model.norms["layer"].training
    assert model.blocks[0].drop1.p == 0.1 and model.blocks[0].drop2.p == 0.2
    fresh = Net()
    fresh.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(state, strict=True)


def test_hooks_and_their_handles():
    model, seen = nn.Sequential(nn.LayerNorm(H), nn.GELU(), nn.Dropout(0.5)), []
    norm = model[0]
    handles = [
        norm.register_forward_hook(lambda *_: seen.append("forward")),
        norm.register_forward_pre_hook(lambda *_: seen.append("pre")),
        norm.register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    report = ckpt_ops.replace(model)
    x = torch.randn(3, H, requires_grad=True)
    model(x).sum().backward()
    assert seen == ["pre", "forward", "backward"] and type(model[0]) is ours.LayerNorm
    for handle in handles:
        handle.remove()
    model[0].register_forward_hook(lambda *_: seen.append("late"))
    model(x)
    assert seen[3:] == ["late"]
    report.restore()
    model(x)
    assert model[0] is norm and seen[4:] == ["late"]


def test_an_optimizer_built_before_updates(backend):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ckpt_ops.replace(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(IDS).square().sum().backward()
    optimizer.step()
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []


@each("copy_of", ["deepcopy", "pickle", "torch.save"])
def test_copies(backend, copy_of):
    model = Net().eval()
    ckpt_ops.replace(model)
    expected = model(IDS)
    if copy_of == "deepcopy":
        twin = copy.deepcopy(model)
    elif copy_of == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(IDS), expected) and [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert (twin(IDS) == 0).all() and torch.equal(model(IDS), expected)


def test_restore_brings_back_the_objects_in_their_present_state():
    model = Net()
    olds, state = dict(model.named_modules()), model.eval()(IDS)
    report = ckpt_ops.replace(model.train())
    model.eval()
    model.embed.p = 0.7
    model.blocks[0].drop1.p = 0.6
    report.restore()
    for name, m in model.named_modules():
        assert m is olds.pop(name) and not m.training, name
    assert not olds and model.embed.p == 0.7 and model.blocks[0].drop1.p == 0.6
    assert torch.equal(model(IDS), state) and not hasattr(model.blocks[0].drop1, "act")
    report.restore()
    assert len(ckpt_ops.replace(model).replaced) == len(REPLACED)


def test_twice_is_once():
    model = Net()
    ckpt_ops.replace(model)
    classes = [type(m) for m in model.modules()]
    again = ckpt_ops.replace(model)
    assert not again.replaced and {reason for _, _, reason in again.skipped} == {"already this package's"}
    assert [type(m) for m in model.modules()] == classes


def test_skip():
    model = Net()
    report = ckpt_ops.replace(model, skip=("layer", "embed", "blocks.0.drop1"))
    assert type(model.layer) is nn.TransformerEncoderLayer and type(model.layer.norm1) is nn.LayerNorm
    assert type(model.embed) is nn.Dropout and type(model.blocks[0].act) is nn.GELU
    assert type(model.blocks[1].drop1) is ours.ActDropout
    assert [(name, reason) for name, _, reason in report.skipped] == [
        (n, "asked for") for n in ("layer", "embed", "blocks.0.drop1")
    ]
    with pytest.raises(ValueError, match="no module named 'norm'"):
        ckpt_ops.replace(model, skip=("norm",))


LADDER = {"store": 32, "norms": 28, "activations": 20, "mlp": 12, "qkv": 6, "block": 2}
B, N, WIDTH, HEADS = 1, 128, 128, 4


@each("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_encoder_on_the_ladder(fused, dtype):
    """nn.TransformerEncoderLayer(norm_first=True), dropout .1: bytes per token and hidden size, in 2-byte units."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True, dtype=dtype)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(B, N, WIDTH, dtype=dtype, requires_grad=True)
    units = 2 * x.nbytes / 2  # two layers; one unit is half a 16-bit element
    eager = ckpt_ops.memory.kept(model, x).bytes / units
    ckpt_ops.replace(model)
    stored = None
    for rung, expected in LADDER.items():
        handle = ckpt_ops.regenerate(model, rung)
        torch.manual_seed(3)
        kept = ckpt_ops.memory.kept(model, x)
        grads = torch.autograd.grad(kept.output, [x, *model.parameters()], torch.ones_like(kept.output))
        handle.remove()
        stored = stored or grads
        assert all(map(torch.equal, grads, stored)), rung
        statistics = 2 * B * N * (2 * 8 + 4 * HEADS) if rung != "block" else 0
        assert expected <= (kept.bytes - statistics) / units < 1.01 * expected, f"{rung}\n{kept}"
    assert eager > 2 * LADDER["store"]


def test_padded_batches_train(backend):
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(H, 2, 2 * H, 0.0, batch_first=True), 2)
    model, true = copy.deepcopy(plain), copy.deepcopy(plain).double()
    ckpt_ops.replace(model)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    x = torch.randn(3, 5, H)

    def masked(m, x):
        return gradients_of(m, m(x, src_key_padding_mask=padding))

    assert_alike(masked(model, x), masked(plain, x), masked(true, x.double()))


def gradients_of(model, y):
    grads = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    return {"y": y, **dict(zip(dict(model.named_parameters()), grads))}
