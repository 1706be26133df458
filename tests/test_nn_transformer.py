"""MLP, MultiheadAttention and the transformer layers: torch's results and gradients, fewer bytes, the same drop-in rules."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ckpt_ops
from helpers_numerics import error

ours = ckpt_ops.nn
E, HEADS, WIDE = 32, 4, 64
each = pytest.mark.parametrize


def assert_equals_torchs(mine, twin, call, inputs, dtype=torch.float32):
    """The numerics rule for outputs and all gradients. call(module, *inputs) -> tensor."""
    mine.load_state_dict(twin.state_dict(), strict=True)
    mine, twin, true = mine.to(dtype), twin.to(dtype), copy.deepcopy(twin).double()
    results, upstream = [], None
    for module, kind in ((true, torch.float64), (twin, dtype), (mine, dtype)):
        values = [x.detach().to(dtype).to(kind).requires_grad_() for x in inputs]
        y = call(module, *values)
        upstream = torch.randn(y.shape) if upstream is None else upstream
        names = ["y", *(f"dx{i}" for i in range(len(values))), *(f"d{n}" for n, _ in module.named_parameters())]
        grads = torch.autograd.grad(y, [*values, *module.parameters()], upstream.to(dtype).to(kind), allow_unused=True)
        results.append(dict(zip(names, (y, *grads))))
    truth, plain, fused = results
    assert truth.keys() == plain.keys() == fused.keys()
    for name, expected in truth.items():
        if expected is None:
            assert fused[name] is None, name
            continue
        if name.endswith("in_proj_bias"):  # a key's bias shifts all scores of a query alike: its gradient is 0 but for rounding
            expected, plain[name], fused[name] = (torch.cat([t[:E], t[2 * E :]]) for t in (expected, plain[name], fused[name]))
        assert (fused[name].shape, fused[name].dtype) == (plain[name].shape, dtype), name
        allowed = 2 * error(plain[name], expected) + torch.finfo(dtype).eps
        assert error(fused[name], expected) <= allowed, f"{name}: {error(fused[name], expected):.3g}, allowed {allowed:.3g}"


def hidden_keys(batch, length):
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[0, -2:] = True
    return mask


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


# --- MultiheadAttention -------------------------------------------------------------------------------------------

MASKS = {
    "none": lambda b, n, m: {},
    "bool": lambda b, n, m: dict(attn_mask=torch.ones(n, m, dtype=torch.bool).triu(1)),
    "floating": lambda b, n, m: dict(attn_mask=torch.randn(n, m)),
    "a head each": lambda b, n, m: dict(attn_mask=(torch.rand(b * HEADS, n, m) < 0.3).index_fill(2, torch.tensor(0), False)),
    "padding": lambda b, n, m: dict(key_padding_mask=hidden_keys(b, m)),
    "both": lambda b, n, m: dict(attn_mask=torch.ones(n, m, dtype=torch.bool).triu(1), key_padding_mask=hidden_keys(b, m)),
    "both, floating": lambda b, n, m: dict(
        attn_mask=torch.randn(n, m), key_padding_mask=torch.zeros(b, m).masked_fill(hidden_keys(b, m), -torch.inf)
    ),
    "causal hint": lambda b, n, m: dict(attn_mask=torch.ones(n, m, dtype=torch.bool).triu(1), is_causal=True),
    "causal hint and padding": lambda b, n, m: dict(
        attn_mask=torch.ones(n, m, dtype=torch.bool).triu(1), is_causal=True, key_padding_mask=hidden_keys(b, m)
    ),
}
OPTIONS = {
    "plain": {},
    "no bias": dict(bias=False),
    "other key and value sizes": dict(kdim=24, vdim=40),
    "add_bias_kv": dict(add_bias_kv=True),
    "add_zero_attn": dict(add_zero_attn=True),
}


def as_masks_of(x, masks):
    return {k: m.to(x.dtype) if isinstance(m, torch.Tensor) and m.is_floating_point() else m for k, m in masks.items()}


def attend(masks, module, *inputs):
    query, key, value = inputs if len(inputs) == 3 else (inputs[0], inputs[-1], inputs[-1])
    y, weights = module(query, key, value, need_weights=False, **as_masks_of(query, masks))
    assert weights is None
    return y


@each("batch_first", [True, False])
@each("masks", MASKS)
@each("same", [1, 2, 3], ids=["self", "memory", "three"])
def test_attention(backend, batch_first, masks, same):
    b, n, m = 2, 6, 6 if same == 1 else 9
    shapes = [(b, n, E), (b, m, E), (b, m, E)][:same]
    inputs = [torch.randn(s if batch_first else (s[1], s[0], s[2])) for s in shapes]
    mine, twin = (cls(E, HEADS, batch_first=batch_first) for cls in (ours.MultiheadAttention, nn.MultiheadAttention))
    assert_equals_torchs(mine, twin, functools.partial(attend, MASKS[masks](b, n, m)), inputs)


@each("options", OPTIONS)
@each("masks", ["none", "both"])
def test_attention_options(backend, options, masks):
    mine, twin = (
        cls(E, HEADS, batch_first=True, **OPTIONS[options]) for cls in (ours.MultiheadAttention, nn.MultiheadAttention)
    )
    inputs = [torch.randn(2, n, size) for n, size in ((6, E), (9, twin.kdim), (9, twin.vdim))]
    assert_equals_torchs(mine, twin, functools.partial(attend, MASKS[masks](2, 6, 9)), inputs)


@each("masks", MASKS)
def test_attention_without_a_batch(backend, masks):
    made = {k: m[0] if k == "key_padding_mask" else m for k, m in MASKS[masks](1, 6, 6).items()}
    mine, twin = (cls(E, HEADS) for cls in (ours.MultiheadAttention, nn.MultiheadAttention))
    assert_equals_torchs(mine, twin, functools.partial(attend, made), [torch.randn(6, E)])


def test_attention_weights_come_from_torch(backend):
    mine, twin = (cls(E, HEADS, dropout=0.5, batch_first=True) for cls in (ours.MultiheadAttention, nn.MultiheadAttention))
    mine.load_state_dict(twin.state_dict())
    x = torch.randn(2, 6, E)
    for options in ({}, dict(average_attn_weights=False), dict(attn_mask=causal(6))):
        torch.manual_seed(1)
        expected = twin(x, x, x, **options)
        torch.manual_seed(1)
        for one, two in zip(mine(x, x, x, **options), expected):
            assert torch.equal(one, two)


def test_attention_learns_a_mask_that_requires_a_gradient(backend):
    mine, twin = (cls(E, HEADS, batch_first=True) for cls in (ours.MultiheadAttention, nn.MultiheadAttention))

    def call(module, x, bias):
        return module(x, x, x, attn_mask=bias, need_weights=False)[0]

    assert_equals_torchs(mine, twin, call, [torch.randn(2, 6, E), torch.randn(6, 6)])


def test_a_query_that_sees_nothing_is_0(backend):
    module = ours.MultiheadAttention(E, HEADS, batch_first=True)
    x = torch.randn(2, 6, E, requires_grad=True)
    hidden = torch.zeros(6, 6, dtype=torch.bool)
    hidden[1] = True
    y, _ = module(x, x, x, attn_mask=hidden, need_weights=False)
    y[:, [0, 2, 3, 4, 5]].sum().backward()
    assert torch.equal(y[:, 1], module.out_proj.bias.expand(2, E)) and x.grad.isfinite().all()


def test_the_causal_hint_needs_its_mask():
    x = torch.randn(2, 6, E)
    for cls in (ours.MultiheadAttention, nn.MultiheadAttention):
        with pytest.raises(RuntimeError, match="is_causal"):
            cls(E, HEADS)(x, x, x, need_weights=False, is_causal=True)


# --- layers -------------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": F.silu,
    "GELU tanh": nn.GELU("tanh"),
    "partial": functools.partial(F.gelu, approximate="tanh"),
    "ReLU in place": nn.ReLU(inplace=True),
    "SiLU": nn.SiLU(),
    "another": torch.tanh,
}
ENCODERS = (ours.TransformerEncoderLayer, nn.TransformerEncoderLayer)
DECODERS = (ours.TransformerDecoderLayer, nn.TransformerDecoderLayer)


def layers(classes, **options):
    return [cls(E, HEADS, WIDE, **{"dropout": 0.0, **options}) for cls in classes]


def encode(masks, module, x):
    return module(x, **as_masks_of(x, masks))


ENCODER_MASKS = {
    "none": lambda b, n: {},
    "causal": lambda b, n: dict(src_mask=causal(n), is_causal=True),
    "both": lambda b, n: dict(src_mask=causal(n), src_key_padding_mask=hidden_keys(b, n)),
}


@each("norm_first", [True, False])
@each("batch_first", [True, False])
@each("masks", ENCODER_MASKS)
@each("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_encoder_layer(backend, norm_first, batch_first, masks, dtype):
    mine, twin = layers(ENCODERS, norm_first=norm_first, batch_first=batch_first, activation="gelu")
    x = torch.randn(3, 6, E) if batch_first else torch.randn(6, 3, E)
    assert_equals_torchs(mine, twin, functools.partial(encode, ENCODER_MASKS[masks](3, 6)), [x], dtype)


@each("activation", ACTIVATIONS)
def test_encoder_layer_activations(backend, activation):
    mine, twin = layers(ENCODERS, activation=ACTIVATIONS[activation])
    assert_equals_torchs(mine, twin, lambda m, x: m(x), [torch.randn(6, 3, E)])


@each("options", [dict(bias=False), dict(layer_norm_eps=0.1)], ids=str)
@each("classes", [ENCODERS, DECODERS], ids=["encoder", "decoder"])
def test_layer_options(backend, classes, options):
    mine, twin = layers(classes, norm_first=True, **options)
    inputs = [torch.randn(6, 3, E) for _ in range(2 if classes is DECODERS else 1)]
    assert_equals_torchs(mine, twin, lambda m, *x: m(*x), inputs)


@each("norm_first", [True, False])
@each("batch_first", [True, False])
@each("masked", [True, False])
def test_decoder_layer(backend, norm_first, batch_first, masked):
    mine, twin = layers(DECODERS, norm_first=norm_first, batch_first=batch_first)
    inputs = [torch.randn(3, n, E) if batch_first else torch.randn(n, 3, E) for n in (6, 9)]
    masks = {}
    if masked:
        masks = dict(tgt_mask=causal(6), tgt_is_causal=True, memory_key_padding_mask=hidden_keys(3, 9))
    assert_equals_torchs(mine, twin, lambda m, x, memory: m(x, memory, **masks), inputs)


@each("classes", [ENCODERS, DECODERS], ids=["encoder", "decoder"])
def test_layers_are_torchs_with_our_children(classes):
    mine, twin = layers(classes, activation=nn.GELU())
    assert isinstance(mine, type(twin)) and list(mine.state_dict()) == list(twin.state_dict())
    twin.load_state_dict(mine.state_dict(), strict=True)
    for (name, one), (other, two) in zip(mine.named_modules(), twin.named_modules(), strict=True):
        assert name == other and isinstance(one, type(two)), name
    kinds = {type(m) for m in mine.modules()}
    assert not kinds & {nn.LayerNorm, nn.Dropout, nn.MultiheadAttention}


def test_torchs_transformer_takes_them(backend):
    """nn.Transformer of stacks of our layers against its own, with masks; gradients too."""

    def whole(classes):
        encoder, decoder = (layers(kind, batch_first=True)[classes] for kind in (ENCODERS, DECODERS))
        return nn.Transformer(
            E, HEADS, batch_first=True,
            custom_encoder=nn.TransformerEncoder(encoder, 2, nn.LayerNorm(E)),
            custom_decoder=nn.TransformerDecoder(decoder, 2, nn.LayerNorm(E)),
        )  # fmt: skip

    def call(model, source, target):
        return model(source, target, tgt_mask=causal(5), src_key_padding_mask=hidden_keys(3, 6))

    assert_equals_torchs(whole(0), whole(1), call, [torch.randn(3, 6, E), torch.randn(3, 5, E)])


@each("rung", ckpt_ops.RUNGS)
def test_padded_batches_in_eval(backend, rung):
    """torch's encoder hands its layers nested tensors then, and the result is 0 where it was padded."""
    mine, twin = (nn.TransformerEncoder(layer, 2).eval() for layer in layers(ENCODERS, batch_first=True, dropout=0.1))
    mine.load_state_dict(twin.state_dict())
    x, padding = torch.randn(3, 6, E), hidden_keys(3, 6)
    padding[:, -1] = True
    ckpt_ops.regenerate(mine, rung)
    with torch.no_grad():
        expected, got = (m(x, src_key_padding_mask=padding) for m in (twin, mine))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert (got[padding] == 0).all()


# --- randomness and hooks -----------------------------------------------------------------------------------------


def test_eval_draws_nothing(backend):
    x, state = torch.randn(6, 3, E), torch.get_rng_state()
    for classes, inputs in ((ENCODERS, (x,)), (DECODERS, (x, x))):
        module = layers(classes, dropout=0.5)[0].eval()
        torch.set_rng_state(state)
        assert torch.equal(module(*inputs), module(*inputs)) and torch.equal(torch.get_rng_state(), state)


def test_each_dropout_follows_its_module(backend):
    """p set after construction counts, module by module, as with torch's."""
    x = torch.randn(6, 3, E)
    module = layers(ENCODERS, dropout=0.5)[0]
    plain = copy.deepcopy(module).eval()(x)
    dropouts = [module.dropout, module.dropout1, module.dropout2]
    for m in dropouts:
        m.p = 0.0
    module.self_attn.dropout = 0.0
    assert torch.equal(module(x), plain)
    for m in dropouts:
        m.p = 0.5
        assert not torch.equal(module(x), plain)
        m.p = 0.0
    module.self_attn.dropout = 0.5
    assert not torch.equal(module(x), plain)


@each("norm_first", [True, False])
def test_hooks_of_children_run(backend, norm_first):
    """A child with a hook is called, and the result is the same up to rounding; with the same seeds, the same masks."""
    module = layers(ENCODERS, dropout=0.5, norm_first=norm_first, activation=nn.GELU())[0]
    x = torch.randn(6, 3, E)
    torch.manual_seed(5)
    expected = module(x)
    seen = []
    names = ["norm1", "norm2", "dropout", "dropout1", "dropout2", "activation", "linear1", "linear2", "self_attn"]
    for name in names:
        module.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    torch.manual_seed(5)
    got = module(x)
    assert sorted(seen) == sorted(names)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_attached_seeds(backend):
    """One seed a forward; every random child has a mask of its own."""
    model = nn.TransformerEncoder(layers(ENCODERS, dropout=0.5)[0], 2)
    ckpt_ops.seeds.attach(model)
    streams = [m.stream for m in model.modules() if hasattr(m, "seed_source")]
    assert len(streams) == len(set(streams)) == 8
    x = torch.randn(6, 3, E)
    state = torch.get_rng_state()
    one, two = model(x), model(x)
    torch.set_rng_state(state)
    assert torch.equal(model(x), one) and not torch.equal(one, two)


@each("classes", [ENCODERS, DECODERS], ids=["encoder", "decoder"])
def test_compile_fullgraph(fused, classes):
    torch._dynamo.reset()
    module = layers(classes, batch_first=True, norm_first=True, dropout=0.1)[0]
    inputs = [torch.randn(2, 6, E, requires_grad=True) for _ in range(2 if classes is DECODERS else 1)]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    compiled(*inputs).sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)
    torch.testing.assert_close(compiled.eval()(*inputs), module.eval()(*inputs), rtol=1e-5, atol=1e-5)


# --- bytes --------------------------------------------------------------------------------------------------------

# In units of 2 bytes an element, per token and hidden size: what a pre-norm layer keeps.
LADDER = {"store": 32, "norms": 28, "activations": 20, "mlp": 12, "qkv": 6, "block": 2}
B, N, H, A = 2, 128, 128, 4


def stack(layer, depth=2):
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def step(model, rung, *inputs):
    handle = ckpt_ops.regenerate(model, rung)
    torch.manual_seed(3)
    kept = ckpt_ops.memory.kept(model, *inputs)
    grads = torch.autograd.grad(kept.output, [*inputs, *model.parameters()], torch.ones_like(kept.output))
    handle.remove()
    return kept, grads


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


def test_no_copies_of_what_attention_needs(fused):
    """Self-attention alone: the input, one storage for q, k, v, the result, statistics."""
    module = ours.MultiheadAttention(H, A, dropout=0.1)
    x = torch.randn(N, B, H, requires_grad=True)
    kept = ckpt_ops.memory.kept(lambda x: module(x, x, x, need_weights=False)[0], x)
    assert kept.bytes == 5 * x.nbytes + 4 * B * N * A + 8


# --- MLP ----------------------------------------------------------------------------------------------------------


@each("activation", ["gelu", "gelu_tanh", "relu", "silu", "relu2"])
def test_mlp(backend, activation):
    functions = {"gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "relu2": lambda x: F.relu(x) ** 2}
    function = functions.get(activation) or getattr(F, activation)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(E, 4 * E), nn.Linear(4 * E, E)

        def forward(self, x):
            return self.down(function(self.up(x)))

    assert_equals_torchs(ours.MLP(E, activation=activation), Plain(), lambda m, x: m(x), [torch.randn(2, 6, E)])


@each("size", [1, 128, 256, 257, 768])
@each("p", [0.0, 0.1])
@each("bias", [True, (True, False), (False, True), False], ids=["both", "first", "second", "none"])
def test_case_39_biases_are_added_once(backend, size, p, bias):
    up, down = bias if isinstance(bias, tuple) else (bias, bias)
    module = ours.MLP(4, size, dropout=p, bias=bias)
    assert (module.up.bias is not None, module.down.bias is not None) == (up, down)
    with torch.no_grad():
        module.up.weight.zero_()
        module.down.weight.fill_(1 / size)
        for b in (module.up.bias, module.down.bias):
            if b is not None:
                b.fill_(1.0)
    y = module.eval()(torch.randn(3, 4))
    expected = (0.841345 if up else 0.0) + (1.0 if down else 0.0)  # gelu(1), not gelu(2) = 1.954500
    torch.testing.assert_close(y, torch.full((3, 4), expected), rtol=0, atol=2e-6)
    module.train()(torch.randn(3, 4)).sum().backward()


def test_case_22_a_frozen_projection_keeps_no_input(fused):
    x = torch.randn(64, E, requires_grad=True)
    module = ours.MLP(E)
    trained = ckpt_ops.memory.kept(module, x).bytes
    module.up.weight.requires_grad_(False)
    assert trained - ckpt_ops.memory.kept(module, x).bytes == x.nbytes


def test_mlp_on_the_ladder(fused):
    """x, up(x) and the activation; the last two go at their rungs."""
    model = nn.Sequential(*(ours.MLP(E, dropout=0.1) for _ in range(2)))
    x = torch.randn(64, E, requires_grad=True)
    sizes = {rung: step(model, rung, x)[0].bytes for rung in ("store", "activations", "mlp")}
    assert sizes == {"store": 2 * (9 * x.nbytes + 8), "activations": 2 * (5 * x.nbytes + 8), "mlp": 2 * (x.nbytes + 8)}


def test_case_18_an_empty_batch(backend):
    for module, x in ((ours.MLP(E), torch.empty(0, E)), (layers(ENCODERS)[0], torch.empty(6, 0, E))):
        y = module(x.requires_grad_())
        y.sum().backward()
        assert y.shape == x.shape and all((p.grad == 0).all() for p in module.parameters())
