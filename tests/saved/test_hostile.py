"""What could make a recipe give another value than the forward had, or break a model that has nothing to do with recipes."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ckpt_ops
from ckpt_ops import memory, regenerate
from ckpt_ops.saved import current


class Around(nn.Module):
    """A module between two Linears: its output is saved."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 8)

    def forward(self, x, *args):
        return self.last(self.inner(self.first(x), *args)).sum()


def around(inner, x, *args):
    model = Around(inner)
    model(x, *args)
    return model, regenerate(model, "store", modules=["inner"])


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_equal(got, expected):
    assert all(map(torch.equal, got, expected))


X = torch.randn(4, 8)


# --- the module is in another state in backward -------------------------------------------------------------------


def test_functional_call_in_forward_and_backward_outside():
    """By then the module has its own parameters and buffers again."""
    model, handle = around(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), X)
    model.eval()
    parameters = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    others = {**parameters, "inner.1.running_mean": torch.randn(8), "inner.1.running_var": torch.rand(8) + 1}
    leaves = list(parameters.values())
    got = torch.autograd.grad(torch.func.functional_call(model, others, (X,)), leaves)
    assert not handle.report().blocks[-1].left
    handle.remove()
    assert_equal(got, torch.autograd.grad(torch.func.functional_call(model, others, (X,)), leaves))


def test_eval_between_forward_and_backward():
    class Halves(nn.Module):
        def forward(self, x):
            return x.sin() * (0.5 if self.training else 1)

    model, _ = around(Halves(), X)
    expected = gradients(model(X), model)
    loss = model(X)
    model.eval()
    assert_equal(gradients(loss, model), expected)
    assert not model.inner.training


def test_a_buffer_that_changes_in_place_is_an_error():
    model, _ = around(nn.BatchNorm1d(8).eval(), X)
    loss = model(X)
    model.inner.running_mean += 1
    with pytest.raises(RuntimeError, match="inner cannot be made again.*modified in place"):
        loss.backward()


def test_randomness_that_begins_with_training():
    """The first call was one in eval: it told nothing about training."""

    class Drops(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, self.training)

    model = Around(Drops()).eval()
    handle = regenerate(model, "store", modules=["inner"])
    model(X)
    model.train()
    torch.manual_seed(0)
    kept = memory.kept(model, X)
    (dropped,) = [row for row in handle.report().blocks if row.name == "(named modules)"]
    assert "unseeded randomness" in dropped.left["inner"]
    torch.manual_seed(0)
    handle.remove()
    assert_equal(gradients(kept.output, model), gradients(model(X), model))


def test_containers_among_the_arguments_may_change():
    class Scaled(nn.Module):
        def forward(self, x, options):
            return x.sin() * options["scale"]

    model, handle = around(Scaled(), X, options := {"scale": torch.tensor(2.0)})
    expected = gradients(model(X, options), model)
    loss = model(X, options)
    options["scale"] = torch.tensor(3.0)
    assert_equal(gradients(loss, model), expected)
    assert "an argument is a dict" in str(handle.report())


# --- models with tensors of another kind --------------------------------------------------------------------------


def test_sparse_tensors_are_kept():
    a, w = torch.eye(4).to_sparse(), torch.randn(4, 3, requires_grad=True)
    for context in (ckpt_ops.regenerating, lambda: ckpt_ops.offloading(min_bytes=0)):
        with context():
            loss = torch.sparse.mm(a, w.sin()).sum()
        assert torch.equal(torch.autograd.grad(loss, w)[0], w.cos())


@pytest.mark.parametrize("layers", [ckpt_ops.nn, nn])
def test_inference_tensors_do_not_tell_of_changes(layers):
    model = nn.Sequential(layers.LayerNorm(8).requires_grad_(False), nn.Linear(8, 8))
    with torch.inference_mode():
        x = torch.randn(3, 8)
    weight = model[1].weight
    (expected,) = torch.autograd.grad(model(x).sum(), weight)
    handle = regenerate(model, "store", modules=["0"])
    (got,) = torch.autograd.grad(model(x).sum(), weight)
    assert torch.equal(got, expected) and "an input is an inference tensor" in str(handle.report())


@pytest.mark.parametrize("layers", [ckpt_ops.nn, nn])
def test_the_report_names_the_module_whose_output_changed(layers):
    class Adds(nn.Module):
        def forward(self, x):
            return x.add_(1)

    model = nn.Sequential(layers.LayerNorm(8), Adds(), nn.Linear(8, 8))
    expected = gradients(model(X).sin().sum(), model)
    handle = regenerate(model, "store", modules=["0"])
    assert_equal(gradients(model(X).sin().sum(), model), expected)
    assert "kept: 0: its output was modified in place afterwards" in str(handle.report())


def test_modules_inside_of_a_chosen_one_keep_their_names():
    model = nn.Sequential(ckpt_ops.nn.MLP(8, dropout=0.1), nn.Linear(8, 8))
    regenerate(model, "store", modules=["0", "0.up"])
    kept = memory.kept(model, X)
    through = {row.op.partition("(through ")[2].partition(")")[0] for row in kept.rows if "through" in row.op}
    assert through == {"0", "0.up"}


def test_a_module_that_returns_nothing():
    class Nothing(nn.Module):
        def forward(self, x):
            return ()

    class Model(nn.Sequential):
        def forward(self, x):
            self[0](x)
            return self[1](x)

    model = Model(Nothing(), nn.Linear(8, 8))
    handle = regenerate(model, "store", modules=["0"])
    model(torch.randn(3, 8)).sum().backward()
    assert "it returns nothing" in str(handle.report())


@pytest.mark.parametrize("how", ["regenerating", "offloading"])
@pytest.mark.parametrize("view", [torch.conj, lambda y: y.conj().imag, lambda y: y.conj().T, lambda y: y.real])
def test_conjugated_views(how, view):
    x, w = torch.randn(3, 3, dtype=torch.complex64), torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)

    def loss():
        y = x * (2 + 1j)
        if how == "regenerating" and ckpt_ops.saved.current() is not None:
            current().register("y", lambda x: x * (2 + 1j), (x,), (y,))
        return (view(y) * w).abs().sum()

    (expected,) = torch.autograd.grad(loss(), w)
    with ckpt_ops.regenerating() if how == "regenerating" else ckpt_ops.offloading(min_bytes=0):
        got = loss()
    assert torch.equal(torch.autograd.grad(got, w)[0], expected)


# --- what is shared, and what is left behind ----------------------------------------------------------------------


class Shares(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.act, self.down = norm, nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def test_a_norm_that_blocks_share():
    norm = nn.LayerNorm(8)
    model = nn.Sequential(Shares(norm), Shares(norm))
    plain, expected = memory.kept(model, X).bytes, gradients(model(X).sin().sum(), model)
    handle = regenerate(model, "norms")
    assert plain - memory.kept(model, X).bytes == 2 * X.nbytes
    assert_equal(gradients(model(X).sin().sum(), model), expected)
    assert [block.regenerated for block in handle.report().blocks] == [["0.norm"], ["1.norm"]]
    handle.remove()
    assert not norm._forward_hooks and not norm._forward_pre_hooks


@pytest.mark.parametrize("rung", ["mlp", "block"])
def test_a_block_that_repeats(rung):
    block = Shares(nn.LayerNorm(8))
    model = nn.Sequential(block, block, Shares(nn.LayerNorm(8)))
    expected = gradients(model(X).sin().sum(), model)
    regenerate(model, rung)
    assert_equal(gradients(model(X).sin().sum(), model), expected)


@pytest.mark.parametrize("used", [True, False])
def test_a_loop_inside_of_one_context(used):
    """200 steps: what the graphs of earlier ones held is gone."""
    norm, w = ckpt_ops.nn.LayerNorm(64), torch.randn(64, 64, requires_grad=True)
    gc.collect()
    with ckpt_ops.regenerating() as engine:
        for _ in range(200):
            for _ in range(3):
                loss = (norm(torch.randn(8, 64)) @ w).sum()
            if used:
                loss.backward()
        assert engine.registered <= 257


@pytest.mark.parametrize("rung", ckpt_ops.RUNGS)
def test_under_torch_compile(rung):
    torch._dynamo.reset()
    model = nn.Sequential(Shares(nn.LayerNorm(8)), Shares(nn.LayerNorm(8)))
    expected = gradients(model(X).sin().sum(), model)
    regenerate(model, rung)
    compiled = torch.compile(model, backend="eager")
    for got in (gradients(compiled(X).sin().sum(), model), gradients(model(X).sin().sum(), model)):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
