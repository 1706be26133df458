"""Part D of the collected bug reports: bias + GELU + dropout. The number in a name is the row's."""

import pytest
import torch
import torch.nn.functional as F

import ckpt_ops
from helpers_numerics import assert_close, assert_close_for
from helpers_ops import ACT_DROPOUTS, make, run

GELU = {"none": -0.00404969, "tanh": -0.00363743}


@pytest.mark.parametrize("approximate", GELU)
def test_case_38_the_form_asked_for(backend, approximate):
    def gelu(x):
        return ckpt_ops.gelu_dropout(x, 0.0, approximate)

    x = torch.tensor([-3.0], device=backend.device)
    assert abs(gelu(x).item() - GELU[approximate]) < 1e-7
    x = torch.linspace(-6, 6, 10_001, device=backend.device, requires_grad=True)
    plain = x.detach().double().requires_grad_()
    assert (gelu(x) - F.gelu(plain, approximate=approximate)).abs().max() < 1e-6
    assert_close(ACT_DROPOUTS[0 if approximate == "none" else 1], {"x": x})


def test_case_38_the_two_forms_differ_as_they_should(backend):
    x = torch.linspace(-6, 6, 100_001, device=backend.device)
    gap = (ckpt_ops.gelu_dropout(x, 0.0) - ckpt_ops.gelu_dropout(x, 0.0, "tanh")).abs().max().item()
    assert abs(gap - 4.735e-4) < 2e-6


@pytest.mark.parametrize("approximate", GELU)
@pytest.mark.parametrize("value", [-40.0, 40.0, torch.inf, -torch.inf, torch.nan])
def test_case_38_ends_like_torch(backend, approximate, value):
    x = torch.tensor([value] * 9, device=backend.device)
    y, expected = ckpt_ops.gelu_dropout(x, 0.0, approximate), F.gelu(x, approximate=approximate)
    if value == -torch.inf and (y == 0).all():
        return  # the limit, where torch's kernels give 0 or -inf * 0 by the vector width
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=0, atol=1e-30)


def test_case_39_the_bias_is_added_once(backend):
    y = ckpt_ops.gelu_dropout(torch.zeros(3, 8, device=backend.device), 0.0, bias=torch.ones(8, device=backend.device))
    torch.testing.assert_close(y, torch.full_like(y, 0.841345), rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", ACT_DROPOUTS, ids=str)
@pytest.mark.parametrize("width", [1, 128, 256, 257, 768])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("without", [(), ("bias",)])
def test_case_39_widths(backend, op, width, p, without):
    frozen = ("bias",) if width == 1 else ()
    assert_close_for(op, (67, width), torch.float32, backend.device, p=p, without=without, frozen=frozen)


@pytest.mark.parametrize("op", ACT_DROPOUTS, ids=str)
def test_case_39_the_bias_gradient_of_one_column(backend, op):
    """A single sum, so its error is bounded by that of its terms, not by a mean over columns."""
    results = run(op, make(op, (67, 1), device=backend.device), dict(p=0.1, seed=5))
    terms = results["dx"].double()
    assert abs(results["dbias"].item() - terms.sum().item()) <= 4 * torch.finfo(torch.float32).eps * terms.abs().sum().item()
