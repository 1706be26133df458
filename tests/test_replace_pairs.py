"""ckpt_ops.replace: an activation and the dropout behind it become one, where they cannot come apart."""

import copy

import pytest
import torch
from torch import nn

import ckpt_ops
from helpers_replace import H, Mlp, ours

each = pytest.mark.parametrize


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
