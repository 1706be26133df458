"""ckpt_ops.replace: what is swapped for what, what stays as it was, what is refused, and the way back."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import ckpt_ops
from helpers_numerics import error

ours = ckpt_ops.nn
H = 16
each = pytest.mark.parametrize


# --- models (at module level: they pickle) ------------------------------------------------------------------------


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


class Gemma2RMSNorm(LlamaRMSNorm):
    """Says that it adds 1, and does not."""

    def __init__(self, hidden, eps=1e-6):
        super().__init__(hidden)
        self.eps = eps
        del self.variance_epsilon

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class CenteredRMSNorm(LlamaRMSNorm):
    """Has the form of Llama's, and does something else."""

    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class StrangeNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x):
        return x * self.weight


class OwnForward(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class OwnName(nn.LayerNorm):
    pass


class Mlp(nn.Module):
    """As in timm."""

    def __init__(self, act=nn.GELU):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(H, 2 * H), act(), nn.Dropout(0.1)
        self.fc2, self.drop2 = nn.Linear(2 * H, H), nn.Dropout(0.2)

    def forward(self, x):
        x = self.drop1(self.act(self.fc1(x)))
        return self.drop2(self.fc2(x))


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


# --- what is swapped ----------------------------------------------------------------------------------------------


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


# --- what is refused ----------------------------------------------------------------------------------------------


@each("cls", [nn.LayerNorm, nn.RMSNorm])
def test_the_model_itself_has_no_parent(cls):
    with pytest.raises(ValueError, match=f"the model itself is a {cls.__name__}.*ckpt_ops.nn.{cls.__name__}"):
        ckpt_ops.replace(cls(H))


def patched():
    m = nn.LayerNorm(H)
    m.forward = lambda x: x
    return m


def compiled():
    m = nn.LayerNorm(H)
    m.compile()
    return m


REFUSED = {
    "own forward": (lambda: OwnForward(H), "a subclass of LayerNorm with a forward of its own"),
    "own name": (lambda: OwnName(H), "a subclass of LayerNorm: only torch's own"),
    "unknown norm": (StrangeNorm, "StrangeNorm is not a norm that this package knows"),
    "wrong offset": (lambda: Gemma2RMSNorm(H), "does not compute what its name says"),
    "wrong norm": (lambda: CenteredRMSNorm(H), "does not compute what its name says"),
    "on meta": (lambda: LlamaRMSNorm(H).to("meta"), "no values yet"),
    "patched": (patched, "its forward is replaced on the instance"),
    "compiled": (compiled, "compiled on its own"),
    "channels": (lambda: nn.Dropout2d(0.5), "another kind"),
    "alpha": (lambda: nn.AlphaDropout(0.5), "another kind"),
}


@each("name", REFUSED)
def test_unknown_modules_are_left_with_a_reason(name):
    make, reason = REFUSED[name]
    model = nn.Sequential(make())
    before = model[0]
    report = ckpt_ops.replace(model)
    assert model[0] is before and not report.replaced
    ((path, cls, why),) = report.skipped
    assert (path, cls) == ("0", type(before)) and reason in why and why in str(report)


# --- norms of other packages --------------------------------------------------------------------------------------


@each("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@each("cls, offset", [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
@each("eps", [1e-6, 1e-2])
def test_other_rms_norms(backend, dtypes, cls, offset, eps):
    x_dtype, w_dtype = dtypes
    model = nn.Sequential(cls(H, eps).to(w_dtype))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(H))
    plain = copy.deepcopy(model)
    ckpt_ops.replace(model)
    assert isinstance(model[0], ours.RMSNorm) and (model[0].offset, model[0].eps) == (offset, eps)
    x = torch.randn(4, H).to(x_dtype) * torch.tensor([[1.0], [1e-3], [30.0], [1.0]]).to(x_dtype)
    true = nn.functional.rms_norm(x.double(), (H,), model[0].weight.double() + offset, eps)
    got, theirs = model(x), plain(x)
    assert got.dtype == theirs.dtype
    assert error(got, true) <= 2 * error(theirs, true) + torch.finfo(x_dtype).eps


# --- activation and dropout ---------------------------------------------------------------------------------------


class Branching(Mlp):
    def forward(self, x):
        x = self.act(self.fc1(x))
        if self.training:
            x = self.drop1(x)
        return self.fc2(x)


class UsedTwice(Mlp):
    def forward(self, x):
        x = self.act(self.fc1(x))
        return self.fc2(self.drop1(x) + x)


class OtherMethod(Mlp):
    def features(self, x):
        return self.act(self.fc1(x))


class Untraceable(Mlp):
    def forward(self, x):
        return self.fc2(self.drop1(self.act(self.fc1(x)))) + x.sum().item() * len(x)


class Remembering(Mlp):
    def forward(self, x):
        self.last = x
        return super().forward(x)


@each("cls", [Branching, UsedTwice, OtherMethod, Untraceable])
def test_pairs_that_may_come_apart_stay_two(cls):
    model = nn.Sequential(cls())
    report = ckpt_ops.replace(model)
    assert type(model[0].act) is nn.GELU and type(model[0].drop1) is ours.Dropout
    if cls in (Branching, Untraceable):
        assert [(name, why.partition(":")[0]) for name, _, why in report.skipped] == [("0", "activation and dropout stay two")]


def test_tracing_leaves_nothing_behind():
    model = nn.Sequential(Remembering())
    ckpt_ops.replace(model)
    assert not hasattr(model[0], "last")


@each("act, name", [(nn.GELU, "gelu"), (lambda: nn.GELU("tanh"), "gelu_tanh"), (nn.SiLU, "silu"), (nn.ReLU, "relu")])
@each("traced", [True, False])
def test_pairs_become_one(fused, act, name, traced):
    p = 0.3
    plain = Mlp(act) if traced else nn.Sequential(nn.Linear(H, H), act(), nn.Dropout(p), nn.Linear(H, H))
    model = nn.Sequential(copy.deepcopy(plain))
    ckpt_ops.replace(model)
    pair = [m for m in model.modules() if isinstance(m, ours.ActDropout)]
    assert [m.act for m in pair] == [name] and isinstance(pair[0], nn.Dropout)
    x = torch.randn(5, H)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x), rtol=1e-5, atol=1e-6)
    saved, before = (ckpt_ops.memory.kept(m.train(), x).bytes for m in (model, plain))
    assert saved < before


def test_an_activation_in_place():
    """Fused where it overwrites a projection's result; left where that may be the caller's tensor."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(H, H), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5)),
    )
    report = ckpt_ops.replace(model)
    assert type(model[0][2]) is ours.ActDropout and type(model[1][1]) is ours.Dropout and type(model[1][0]) is nn.ReLU
    assert [(name, "in place" in why) for name, _, why in report.skipped] == [("1.0", True)]


def test_a_hook_keeps_the_pair_apart():
    model, seen = nn.Sequential(nn.GELU(), nn.Dropout(0.5)), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    report = ckpt_ops.replace(model)
    model(torch.randn(2, H))
    assert seen and type(model[1]) is ours.Dropout and "has hooks" in report.skipped[0][2]


def test_a_shared_activation_keeps_the_pair_apart():
    act = nn.GELU()
    model = nn.Sequential(nn.Sequential(act, nn.Dropout(0.5)), nn.Sequential(nn.Linear(H, H), act))
    report = ckpt_ops.replace(model)
    assert model[0][0] is model[1][1] is act and type(model[0][1]) is ours.Dropout
    assert "several places" in report.skipped[0][2]


def test_dropout_in_place_writes_its_input(backend):
    model = nn.Sequential(nn.Dropout(0.5, inplace=True))
    ckpt_ops.replace(model)
    x = torch.ones(64, H)
    y = model(x)
    assert y.data_ptr() == x.data_ptr() and set(x.unique().tolist()) == {0.0, 2.0}
    leaf = torch.ones(64, H, requires_grad=True)
    model(leaf * 1).sum().backward()
    assert set(leaf.grad.unique().tolist()) == {0.0, 2.0}


# --- and what it is for -------------------------------------------------------------------------------------------

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
