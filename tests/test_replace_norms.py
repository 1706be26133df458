"""ckpt_ops.replace: what is refused, and norms of other packages."""

import copy

import pytest
import torch
from torch import nn

import ckpt_ops
from helpers_numerics import error
from helpers_replace import GemmaRMSNorm, H, LlamaRMSNorm, ours

each = pytest.mark.parametrize


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
