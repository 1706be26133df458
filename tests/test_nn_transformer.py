"""The transformer layers: torch's results and gradients, and the same drop-in rules."""

import copy
import functools

import pytest
import torch
from torch import nn

import ckpt_ops
from helpers_layers import (
    ACTIVATIONS,
    DECODERS,
    ENCODERS,
    HEADS,
    E,
    assert_equals_torchs,
    causal,
    hidden_keys,
    layers,
)

each = pytest.mark.parametrize


def encode(masks, module, x):
    return module(x, **masks)


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
