"""verify(): what replays is silent, what does not is named, with the likely cause."""

import sys
import textwrap

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

import ckpt_ops
from ckpt_ops.cli import main
from ckpt_ops.demo.model import GPT
from ckpt_ops.saved import current
from ckpt_ops.saved.compare import difference


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


class Plain(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), middle, nn.Linear(16, 8)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class OwnGenerator(nn.Module):
    """Randomness that a first call does not show."""

    def __init__(self, what):
        super().__init__()
        self._generator, self.what = torch.Generator(), what

    def forward(self, x):
        return self.what(x, torch.rand(x.shape, generator=self._generator))


class LaterDropout(nn.Module):
    """Draws from torch's generator, but not in its first call."""

    _calls = 0

    def forward(self, x):
        self._calls += 1
        return x + torch.rand_like(x) if self._calls > 1 else x * 1


class Drifting(nn.Module):
    """A factor that every call changes where no rule looks."""

    def __init__(self, by):
        super().__init__()
        self._factor, self._by = 1.0, by

    def forward(self, x):
        self._factor *= self._by
        return x * self._factor


def verified(model, x, warm=False, given=True):
    handle = ckpt_ops.regenerate(model, "store", modules=["middle"])
    if warm:
        model(x)
    with ckpt_ops.verify(model if given else None) as v:
        model(x).sum().backward()
    handle.remove()
    return v


@pytest.mark.parametrize("rung", ckpt_ops.RUNGS)
def test_every_rung_of_the_demo_replays(rung):
    model = GPT(ckpt_ops.nn, depth=2, hidden=32, heads=2, context=16, dropout=0.1).initialise(0)
    ckpt_ops.regenerate(model, rung)
    ids = torch.randint(0, 256, (2, 16))
    with ckpt_ops.verify(model) as v:
        model(ids, ids).backward()
    assert v.ok and not v.findings and (v.compared == 0) == (rung == "store")
    v.raise_if_different()
    expected = "nothing was compared" if rung == "store" else f"{v.compared} tensors compared, 0 differ"
    assert expected in str(v)


@pytest.mark.parametrize(
    "middle, cause",
    [
        (lambda: OwnGenerator(lambda x, r: x * (r > 0.5)), "unseeded randomness"),
        (LaterDropout, "unseeded randomness"),
        (lambda: OwnGenerator(lambda x, r: x + r), "mutated state"),
        (lambda: Drifting(1.5), "mutated state"),
        (lambda: Drifting(1 + 3e-7), "nondeterministic kernel"),
    ],
)
def test_a_module_that_does_not_replay_is_named(middle, cause):
    v = verified(Plain(middle()), torch.randn(4, 8), warm=True)
    (finding,) = v.findings
    assert not v.ok and v.compared == 1
    assert (finding.module, finding.recipe, finding.shape, finding.dtype) == ("middle", "middle", (4, 16), torch.float32)
    assert finding.cause.startswith(cause) and 0.3 < finding.share <= 1 and finding.largest > 0
    with pytest.raises(RuntimeError, match=rf"1 tensors compared, 1 differ\n.*middle: float32 \[4, 16\].*{cause}"):
        v.raise_if_different()


def test_without_the_model_the_class_is_named():
    v = verified(Plain(Drifting(2)), torch.randn(4, 8), given=False)
    assert v.findings[0].module == "Drifting" and "Drifting, middle" in str(v)


def test_the_figures_of_a_finding():
    def half(x):
        y = x.clone()
        y[:, :2] += calls.pop()
        return y

    calls, x, w = [0.25, 0.0], torch.zeros(3, 4), leaf(3, 4)
    with ckpt_ops.verify() as v, ckpt_ops.regenerating():
        y = half(x)
        current().register("half", half, (x,), (y,))
        loss = (y * w).sum()
    loss.backward()
    assert [(f.module, f.share, f.largest) for f in v.findings] == [("(outside of any module)", 0.5, 0.25)]


def test_the_origin_of_nested_recipes_comes_first():
    model = Plain(nn.Sequential(Drifting(1.5), nn.Tanh()))
    ckpt_ops.regenerate(model, "store", modules=["middle.0", "middle.1"])
    with ckpt_ops.verify(model) as v:
        model(torch.randn(4, 8)).sum().backward()
    assert v.findings[0].module == "middle.0" and {f.module for f in v.findings} == {"middle.0", "middle.1"}


def test_a_changed_output_is_no_difference():
    """In-place changes after the value was saved: the recipe gives the value that was saved."""
    x, w = torch.randn(4), leaf(4)
    with ckpt_ops.verify() as v:
        with ckpt_ops.regenerating():
            y = x.sin()
            current().register("sin", torch.sin, (x,), (y,))
            loss = (y * w).sum()
            y.zero_()
        loss.backward()
    assert v.ok and v.compared == 1


# --- checkpoint regions -----------------------------------------------------------------------------------------


def through(middle, **options):
    model, x = Plain(middle), leaf(4, 8)
    with ckpt_ops.verify(model) as v:
        checkpoint(model, x, use_reentrant=False, **options).sum().backward()
    return v


def test_regions_that_replay():
    for middle in (nn.GELU(), nn.Dropout(0.5), ckpt_ops.nn.Dropout(0.5), nn.LayerNorm(16)):
        v = through(middle)
        assert v.ok and v.compared > 2
    v = through(ckpt_ops.nn.GELUDropout(0.5), preserve_rng_state=False, context_fn=ckpt_ops.seeds.replay())
    assert v.ok and v.compared > 2


@pytest.mark.parametrize(
    "middle, options, cause",
    [
        (nn.Dropout(0.5), {"preserve_rng_state": False}, "unseeded randomness"),
        (nn.RReLU(), {"preserve_rng_state": False}, "unseeded randomness"),
        (Drifting(1.5), {}, "mutated state"),
        (Drifting(1 + 3e-7), {}, "nondeterministic kernel"),
    ],
)
def test_a_region_that_does_not_replay(middle, options, cause):
    """The first finding is what the forward saved first: in the module itself, or, made from its output, in the next one."""
    v = through(middle, **options)
    first = v.findings[0]
    assert first.recipe == "checkpoint" and first.cause.startswith(cause)
    assert first.module == ("last" if isinstance(middle, Drifting) else "middle")
    assert not any(f.module == "first" for f in v.findings)


class Casting(nn.Module):
    def __init__(self, *dtypes):
        super().__init__()
        self._dtypes = iter(dtypes)

    def forward(self, x):
        return x.to(next(self._dtypes)).sin().float()


class Cutting(nn.Module):
    def __init__(self):
        super().__init__()
        self._rows = iter((4, 3))

    def forward(self, x):
        return x[: next(self._rows)].sin()


@pytest.mark.parametrize(
    "middle, cause",
    [
        (lambda: Casting(torch.float32, torch.bfloat16), "autocast: torch.bfloat16"),
        (Cutting, r"mutated state: shape (3, 16)"),
    ],
)
def test_another_dtype_or_shape_is_named_before_torch_refuses(middle, cause):
    model, x = Plain(middle()), leaf(4, 8)
    with ckpt_ops.verify(model) as v, pytest.raises(torch_checkpoint.CheckpointError):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert v.findings[0].module == "middle" and v.findings[0].cause.startswith(cause) and v.findings[0].share == 1


def test_nan_is_the_same_as_nan():
    v = through(Drifting(float("nan")))
    assert v.ok and v.compared > 1


def test_retained_graphs_and_nested_regions_are_compared():
    model, x = Plain(nn.Sequential(nn.Tanh(), nn.Dropout(0.5))), leaf(4, 8)

    def nested(x):
        return checkpoint(model, x, use_reentrant=False)

    with ckpt_ops.verify(model) as v:
        loss = checkpoint(nested, x, use_reentrant=False).sum()
        loss.backward(retain_graph=True)
        once = v.compared
        loss.backward()
    assert v.ok and v.compared == 2 * once > 4


def test_everything_is_restored():
    hooks = torch_checkpoint._checkpoint_hook
    modules = torch.nn.modules.module
    before = (len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks))
    with pytest.raises(ZeroDivisionError), ckpt_ops.verify():
        with ckpt_ops.verify() as inner:
            assert torch_checkpoint._checkpoint_hook is not hooks
        assert torch_checkpoint._checkpoint_hook is not hooks
        checkpoint(nn.Linear(2, 2), leaf(2, 2), use_reentrant=False).sum().backward()
        assert inner.compared == 0
        _ = 1 / 0
    assert torch_checkpoint._checkpoint_hook is hooks
    assert (len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)) == before


def test_an_exception_in_forward_does_not_confuse_the_names():
    model = Plain(Drifting(1.5))
    ckpt_ops.regenerate(model, "store", modules=["middle"])
    with ckpt_ops.verify(model) as v:
        with pytest.raises(RuntimeError):
            model(torch.randn(4, 9))
        assert v.running() is None
        model(torch.randn(4, 8)).sum().backward()
    assert [f.module for f in v.findings] == ["middle"]


# --- comparing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64])
def test_difference(dtype):
    a = torch.arange(6).reshape(2, 3).to(dtype)
    b = a.clone()
    assert difference(a, b) is None and difference(a.T, b.T) is None
    b[1, 2] = 7
    assert difference(a, b) == (1 / 6, 2.0)
    assert difference(a, a.real.to(torch.int8)) == difference(a, a[:1]) == (1.0, float("inf"))
    if dtype.is_floating_point:
        assert difference(torch.full_like(a, torch.nan), -torch.full_like(a, torch.nan)) is None
        assert difference(torch.zeros_like(a), -torch.zeros_like(a)) == (1.0, 0.0)  # bits, not values


def test_difference_of_masks():
    a = torch.tensor([True, False])
    assert difference(a, a.clone()) is None and difference(a, ~a) == (1.0, 1.0)
    assert difference(torch.empty(0), torch.empty(0)) is None


# --- the command line -------------------------------------------------------------------------------------------

FACTORIES = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    def good():
        net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        return net, torch.randn(4, 8)

    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

        def forward(self, x, scale=1.0):
            return {"loss": scale * checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False), "n": 3}

    def random():
        return Region(), (torch.randn(4, 8),), {"scale": 2.0}

    class Growing(Region):
        calls = 0

        def forward(self, x):
            return checkpoint(self.grow, x, use_reentrant=False)

        def grow(self, x):
            self.calls += 1
            return self.inner(x.repeat(self.calls, 1))

    def growing():
        return Growing(), torch.randn(4, 8)

    def frozen():
        return good()[0].requires_grad_(False), torch.randn(4, 8)

    number = 3
    wrong = lambda: 3
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "verify_factories.py").write_text(textwrap.dedent(FACTORIES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "verify_factories", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return "verify_factories:"


def test_command_on_a_model_that_replays(factories, capsys):
    assert main(["verify", factories + "good"]) == 0
    out = capsys.readouterr().out
    assert "regenerated: 0, 2" in out and "verify: 2 tensors compared, 0 differ" in out
    assert main(["verify", factories + "good", "--rung", "block"]) == 0
    assert main(["verify", factories + "good", "--rung", "store"]) == 0
    assert "nothing was compared" in capsys.readouterr().out


def test_command_on_a_model_that_does_not(factories, capsys):
    assert main(["verify", factories + "random", "--seed", "3"]) == 1
    out = capsys.readouterr().out
    assert "inner.1" in out and "unseeded randomness" in out and "float32 [4, 8]" in out
    assert main(["verify", factories + "growing"]) == 1
    out = capsys.readouterr().out
    assert "mutated state" in out and "Recomputed values for the following tensors have different metadata" in out


def test_command_with_an_input_shape(factories, capsys):
    assert main(["verify", factories + "Region", "--input-shape", "4,8"]) == 1
    assert "inner.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["verify_factories"], "expected MODULE:FACTORY"),
        ([":good"], "expected MODULE:FACTORY"),
        (["no_such_package.models:f"], "there is no module named no_such_package"),
        (["verify_factories:nothing"], "verify_factories has no nothing"),
        (["verify_factories:number"], "cannot be called: it is of type int"),
        (["verify_factories:wrong"], "must return (model, args), (model, args, kwargs) or a model, got int"),
        (["verify_factories:Region"], "pass --input-shape"),
        (["verify_factories:Region", "--input-shape", "4,x"], "sizes joined by commas"),
        (["verify_factories:frozen"], "nothing that the model returns needs a gradient"),
        (["verify_factories:good", "--rung", "half"], "invalid choice"),
    ],
)
def test_command_refuses(factories, capsys, argv, message):
    with pytest.raises(SystemExit) as exit_:
        main(["verify", *argv])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
