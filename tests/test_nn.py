"""Modules: torch's where a twin exists, one call each."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ckpt_ops
from helpers_ops import EPS

ours = ckpt_ops.nn

# ours, torch's twin (or None), the shapes of the arguments
MODULES = {
    "LayerNorm": (lambda: ours.LayerNorm(16), lambda: nn.LayerNorm(16), [(6, 16)]),
    "LayerNorm without bias": (
        lambda: ours.LayerNorm((4, 4), bias=False),
        lambda: nn.LayerNorm((4, 4), bias=False),
        [(6, 4, 4)],
    ),
    "LayerNorm without affine": (
        lambda: ours.LayerNorm(16, EPS, False),
        lambda: nn.LayerNorm(16, EPS, False),
        [(6, 16)],
    ),
    "RMSNorm": (lambda: ours.RMSNorm(16), lambda: nn.RMSNorm(16), [(6, 16)]),
    "RMSNorm without affine": (
        lambda: ours.RMSNorm(16, 1e-6, False),
        lambda: nn.RMSNorm(16, 1e-6, False),
        [(6, 16)],
    ),
    "Dropout": (lambda: ours.Dropout(0.3), lambda: nn.Dropout(0.3), [(6, 16)]),
    "GELUDropout": (lambda: ours.GELUDropout(0.3), None, [(6, 16)]),
    "ActDropout": (lambda: ours.ActDropout("silu", 0.3), None, [(6, 16)]),
    "DropoutAdd": (lambda: ours.DropoutAdd(0.3), None, [(6, 16), (6, 16)]),
    "DropoutAddLayerNorm": (lambda: ours.DropoutAddLayerNorm(16, p=0.3), None, [(6, 16), (6, 16)]),
    "DropoutAddRMSNorm": (lambda: ours.DropoutAddRMSNorm(16, p=0.3), None, [(6, 16), (6, 16)]),
    "Attention": (lambda: ours.Attention(0.3), None, [(2, 3, 5, 8)] * 3),
    "MLP": (lambda: ours.MLP(16, dropout=0.3), None, [(6, 16)]),
}
TWINS = [name for name, (_, twin, _) in MODULES.items() if twin]
RANDOM = [name for name in MODULES if "Norm" not in name or "Dropout" in name]
each = pytest.mark.parametrize("name", MODULES)


def inputs(name, device="cpu"):
    return [torch.randn(shape, device=device, requires_grad=True) for shape in MODULES[name][2]]


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", TWINS)
def test_twins_share_state_dict_class_and_result(backend, name):
    make, make_twin, _ = MODULES[name]
    module, twin = make().to(backend.device), make_twin().to(backend.device)
    assert isinstance(module, type(twin)) and list(module.state_dict()) == list(twin.state_dict())
    assert dict(module.named_parameters()).keys() == dict(twin.named_parameters()).keys()
    with torch.no_grad():
        for p in twin.parameters():
            p.normal_()
    module.load_state_dict(twin.state_dict(), strict=True)
    twin.load_state_dict(module.state_dict(), strict=True)
    (x,) = inputs(name, backend.device)
    torch.testing.assert_close(module.eval()(x), twin.eval()(x), rtol=1e-5, atol=1e-5)


def test_every_module_is_listed():
    elsewhere = {"MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer"}  # test_nn_transformer.py
    assert {name.split()[0] for name in MODULES} == set(ours.__all__) - elsewhere


def test_fused_norms_have_their_twins_state_dict():
    assert list(ours.DropoutAddLayerNorm(8).state_dict()) == list(nn.LayerNorm(8).state_dict())
    assert list(ours.DropoutAddRMSNorm(8).state_dict()) == list(nn.RMSNorm(8).state_dict())


def test_offset_weights_start_where_the_factor_is_1(backend):
    module = ours.RMSNorm(8, offset=1.0).to(backend.device)
    assert (module.weight == 0).all()
    x = torch.randn(3, 8, device=backend.device)
    torch.testing.assert_close(module(x), nn.RMSNorm(8)(x))


@each
def test_eval_is_deterministic_and_draws_nothing(backend, name):
    module = MODULES[name][0]().to(backend.device).eval()
    values = inputs(name, backend.device)
    state = torch.get_rng_state()
    assert torch.equal(first(module(*values)), first(module(*values)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", RANDOM)
def test_training_draws_and_manual_seed_reproduces(backend, name):
    module, values = MODULES[name][0]().to(backend.device), inputs(name, backend.device)
    torch.manual_seed(1)
    one, two = first(module(*values)), first(module(*values))
    torch.manual_seed(1)
    assert torch.equal(first(module(*values)), one) and not torch.equal(one, two)


@each
@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(backend, name, copy_of):
    module, values = MODULES[name][0]().to(backend.device).eval(), inputs(name, backend.device)
    first(module(*values)).sum()
    twin = copy_of(module)
    assert torch.equal(first(twin(*values)), first(module(*values))) and repr(twin) == repr(module)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not any((p == 0).all() for n, p in module.named_parameters() if n == "weight")


@each
def test_repr_names_what_was_set(name):
    text = repr(MODULES[name][0]())
    if name in RANDOM:
        assert "p=0.3" in text, text


@each
def test_half_precision_modules(backend, name):
    module = MODULES[name][0]().to(backend.device, torch.bfloat16)
    values = [x.detach().bfloat16().requires_grad_() for x in inputs(name, backend.device)]
    y = first(module(*values))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and all(x.grad.dtype == torch.bfloat16 for x in values)


def test_bad_p():
    for p in (-0.1, 1.5):
        for make in (ours.Dropout, ours.GELUDropout, ours.DropoutAdd, ours.Attention):
            with pytest.raises(ValueError, match="probability"):
                make(p)
        for make in (ours.DropoutAddLayerNorm, ours.DropoutAddRMSNorm):
            with pytest.raises(ValueError, match="probability"):
                make(4, p=p)


def test_bad_save(backend):
    for make in (ours.LayerNorm, ours.RMSNorm):
        with pytest.raises(ValueError, match="save must be 'input' or 'output'"):
            make(4, save="both")(torch.randn(2, 4, device=backend.device))


def test_attention_options(backend):
    q = torch.randn(2, 4, 5, 8, device=backend.device)
    k, v = (torch.randn(2, 2, 7, 8, device=backend.device) for _ in range(2))
    module = ours.Attention(0.0, True, 0.5, True, causal_align="lower_right")
    expected = ckpt_ops.scaled_dot_product_attention(q, k, v, None, 0.0, True, 0.5, True, causal_align="lower_right")
    assert torch.equal(module(q, k, v), expected)
    mask = torch.rand(5, 7, device=backend.device) < 0.5
    expected = ckpt_ops.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert torch.equal(ours.Attention(enable_gqa=True)(q, k, v, mask), expected)


def test_biases_are_passed_on(backend):
    x, r, b = (torch.randn(*s, device=backend.device) for s in ((6, 16), (6, 16), (16,)))
    assert torch.equal(ours.GELUDropout(0.0)(x, b), ckpt_ops.gelu_dropout(x, 0.0, bias=b))
    assert torch.equal(ours.DropoutAdd(0.0)(x, r, b), ckpt_ops.dropout_add(x, r, 0.0, b))
    for mine, expected in zip(
        ours.DropoutAddRMSNorm(16, 1e-6)(x, r, b), ckpt_ops.dropout_add_rms_norm(x, r, 16, torch.ones(16), 1e-6, input_bias=b)
    ):
        assert torch.equal(mine, expected)


@each
def test_compile_fullgraph_with_a_dynamic_batch(fused, name):
    """Training, seeds drawn in the graph at the default budget: what is kept in forward is kept in backward."""
    torch._dynamo.reset()
    module = MODULES[name][0]().to(fused.device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for batch in (9, 13, 9):
        values = [x.detach().repeat_interleave(batch, 0)[:batch].requires_grad_() for x in inputs(name, fused.device)]
        for x in values:
            torch._dynamo.mark_dynamic(x, 0)
        torch.manual_seed(4)
        y = first(compiled(*values))
        y.sum().backward()
        assert y.shape == values[0].shape and all(x.grad.isfinite().all() for x in values)
        module.eval()
        compiled.eval()
        torch.testing.assert_close(first(compiled(*values)), first(module(*values)), rtol=1e-6, atol=1e-6)
        module.train()
        compiled.train()
