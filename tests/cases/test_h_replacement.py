"""Rows 20, 22, 23 and 60 to 62 of the collected bug reports: replacing layers of a model, and leaving all else alone."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import ckpt_ops

ours = ckpt_ops.nn
H = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.mlp = nn.Sequential(nn.Linear(H, 2 * H), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * H, H))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Tiny(nn.Module):
    """Two nested norms of each kind, a final one, a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, H)
        self.blocks = nn.ModuleList([nn.ModuleDict({"block": Block(), "rms": nn.RMSNorm(H)}) for _ in range(2)])
        self.final = nn.LayerNorm(H, elementwise_affine=False)
        self.head = nn.Linear(H, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        for level in self.blocks:
            x = level["rms"](level["block"](x))
        return self.head(self.final(x))


IDS = torch.arange(14).reshape(2, 7) % 7


def types(model):
    return [type(m) for m in model.modules()]


def test_case_20_replaced_norms_write_nothing_they_are_given(fused):
    """A diamond r + norm(norm(r)): the gradient of r is needed twice, and g is the caller's."""
    model = nn.Sequential(nn.LayerNorm(H), nn.RMSNorm(H))
    plain = copy.deepcopy(model)
    ckpt_ops.replace(model)
    r = torch.randn(5, H, requires_grad=True)
    g = torch.randn(5, H)
    before, version = g.clone(), g._version
    (mine,) = torch.autograd.grad(r + model(r), r, g)
    (expected,) = torch.autograd.grad(r + plain(r), r, g)
    assert torch.equal(g, before) and g._version == version
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [("up",), ("down",), ("up", "down")], ids="+".join)
def test_case_22_frozen_parameters_get_no_gradient_and_keep_nothing(fused, frozen):
    """An MLP block with frozen projections: what only their gradients need is not kept."""
    model = nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * H, H))
    ckpt_ops.replace(model)
    x = torch.randn(32, H, requires_grad=True)
    before = ckpt_ops.memory.kept(model, x).bytes
    for name, index, kept in (("up", 0, x.nbytes), ("down", 3, 4 * x.nbytes)):
        if name in frozen:
            model[index].weight.requires_grad_(False)
            before -= kept
    result = ckpt_ops.memory.kept(model, x)
    assert result.bytes == before
    result.output.sum().backward()
    assert [model[i].weight.grad is None for i in (0, 3)] == [name in frozen for name in ("up", "down")]


def test_case_23_eps_is_the_sources():
    """torch's default eps on 1e-5 gives .02895, eps=1e-6 gives .0100."""
    model = nn.ModuleList([nn.RMSNorm(H), nn.RMSNorm(H, eps=1e-6)])
    plain = copy.deepcopy(model)
    ckpt_ops.replace(model)
    x = torch.full((1, H), 1e-5)
    for mine, theirs, value in zip(model, plain, (0.02895, 0.0100)):
        torch.testing.assert_close(mine(x), theirs(x), rtol=1e-5, atol=0)
        assert mine(x)[0, 0].item() == pytest.approx(value, rel=1e-3)


class GemmaRMSNorm(nn.Module):
    def __init__(self, hidden, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(hidden))

    def forward(self, x):
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


def test_case_23_the_offset_is_added_in_float32():
    """bf16 weight 0.00390625 and offset 1: the factor is 1.00390625, which bf16 cannot hold."""
    model = nn.Sequential(GemmaRMSNorm(H).bfloat16())
    with torch.no_grad():
        model[0].weight.fill_(0.00390625)
    plain = copy.deepcopy(model)
    ckpt_ops.replace(model)
    assert type(model[0]) is ours.RMSNorm and model[0].weight.dtype == torch.bfloat16
    x = torch.full((1, H), 3.0)
    assert torch.equal(model(x), plain(x)) and model(x)[0, 0].item() == pytest.approx(1.00390625, abs=1e-6)


def test_case_60_one_instance_all_of_its_norms_and_back():
    a, b = Tiny().eval(), Tiny().eval()
    types_a, types_b, out_a, out_b = types(a), types(b), a(IDS), b(IDS)
    norms = sum(isinstance(m, (nn.LayerNorm, nn.RMSNorm)) for m in a.modules())
    forwards = [cls.forward for cls in (nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.GELU)]
    report = ckpt_ops.replace(a)
    assert sum("Norm" in old.__name__ for _, old, _ in report.replaced) == norms == 5
    assert types(b) == types_b and torch.equal(b(IDS), out_b) and type(Tiny().final) is nn.LayerNorm
    assert [cls.forward for cls in (nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.GELU)] == forwards
    assert not any(type(m) in (nn.LayerNorm, nn.RMSNorm, nn.Dropout) for m in a.modules())
    report.restore()
    assert types(a) == types_a and torch.equal(a(IDS), out_a)


def test_case_61_the_same_parameters(fused):
    model, seen = Tiny(), []
    ids = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    decayed = [n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.final.register_forward_hook(lambda *_: seen.append("final"))
    model.final.eval()
    ckpt_ops.replace(model)
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == ids
    assert [n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)] == decayed
    assert model.head.weight is model.tokens.weight and model.final.weight is None and not model.final.training
    before = model.blocks[0]["block"].norm.weight.detach().clone()
    model(IDS).sum().backward()
    optimizer.step()
    assert seen == ["final"] and not torch.equal(model.blocks[0]["block"].norm.weight, before)


def test_case_62_copies_and_keys():
    plain, model = Tiny().eval(), Tiny().eval()
    ckpt_ops.replace(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(model.state_dict(), strict=True)
    expected = model(IDS)
    average = copy.deepcopy(model)  # after a forward, as for an exponential moving average
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (average, pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(twin(IDS), expected)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert (twin(IDS) == 0).all() and torch.equal(model(IDS), expected)
