"""Rows 57 and 59 of the collected bug reports: copies beside the computation, and what hooks alone do not see."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ckpt_ops
from ckpt_ops import offloading
from ckpt_ops.saved import copies

everything = functools.partial(offloading, min_bytes=0)


# --- 57: streams -------------------------------------------------------------------------------------------------


class Stream:
    def __init__(self, log, name):
        self._log, self.name = log, name

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self._log.append(f"{self.name} waits for {event.name}")

    def record_event(self):
        event = SimpleNamespace(name=f"event {sum(entry.endswith('recorded') for entry in self._log)}")
        event.synchronize = lambda: self._log.append(f"host waits for {event.name}")
        self._log.append(f"{event.name} recorded")
        return event


class Streams:
    """In the place of torch.cuda: notes what is asked for, in order."""

    def __init__(self):
        self.log = []
        self.running = Stream(self.log, "compute")

    def Stream(self, device):
        return Stream(self.log, "side")

    def current_stream(self, device):
        self.log.append(f"{self.running.name} is current")
        return self.running

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.running = self.running, stream
        self.log.append(f"into {stream.name}")
        yield
        self.log.append(f"out of {stream.name}")
        self.running = before


@pytest.fixture
def streams(monkeypatch):
    fake = Streams()
    monkeypatch.setattr(copies, "stream_module", lambda device: fake)
    begin = copies.Copy._begin

    def noted(self, t, non_blocking=False):
        fake.log.append(f"copy on {fake.running.name}" + (", not waited for" if non_blocking else ""))
        begin(self, t, non_blocking)

    monkeypatch.setattr(copies.Copy, "_begin", noted)
    return fake


def out(n):
    return [
        "compute is current", "side waits for compute", "into side", "copy on side, not waited for", f"event {n} recorded",
        "out of side",
    ]  # fmt: skip


def settled(n):
    return ["compute is current", f"compute waits for event {n}"]


def test_case_57_order_of_a_copy(streams):
    x = torch.randn(4, requires_grad=True)
    with everything():
        y = x.exp()
    assert streams.log == out(0) + settled(0)
    streams.log.clear()
    y.sum().backward()
    assert streams.log == settled(0)  # on the stream that is current in backward
    assert torch.equal(x.grad, x.exp())


def test_case_57_an_original_is_held_until_the_computation_waits_for_its_copy(streams):
    x = torch.randn(4, requires_grad=True)
    with everything() as offloader:
        y = x.sin()  # x
        for _ in range(3):
            y = y.exp()  # its result
        assert streams.log == out(0) + out(1) + out(2) + settled(0) + out(3) + settled(1)
        assert [copy._original is not None for copy in offloader._pending] == [True, True]
    assert streams.log[-4:] == settled(2) + settled(3) and not offloader._pending
    y.sum().backward()


def test_case_57_another_stream_became_current(streams):
    """What is allocated in the original's place would be used by a stream that does not wait: the host waits instead."""
    x = torch.randn(4, requires_grad=True)
    with everything():
        y = x.exp()
        streams.running = Stream(streams.log, "another")
    assert streams.log == [*out(0), "another is current", "host waits for event 0"]
    streams.log.clear()
    y.sum().backward()
    assert streams.log == ["another is current", "another waits for event 0"]


def test_case_57_a_change_while_the_copy_runs_is_an_error(streams):
    x = torch.randn(4, requires_grad=True)
    with everything():
        y = x * 1
        loss = (y * y).sum()
        y.zero_()
    with pytest.raises(RuntimeError, match="modified in place while it was being copied.*streams=False"):
        loss.backward()


def test_case_57_a_change_after_the_copy(streams):
    x = torch.randn(4, requires_grad=True)
    with everything():
        y = x * 1
        loss = (y * y).sum()
    y.detach().zero_()
    loss.backward()
    assert torch.equal(x.grad, 2 * x)


def test_case_57_without_streams_the_results_are_the_same(streams):
    net, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(4, 8)

    def grads(**options):
        with everything(**options):
            y = net(x)
        return torch.autograd.grad(y.sin().sum(), list(net.parameters()))

    beside = grads()
    assert streams.log
    streams.log.clear()
    for options in ({"streams": False}, {"pin_memory": False}):
        assert all(map(torch.equal, grads(**options), beside))
        assert set(streams.log) == {"copy on compute"}
    plain = torch.autograd.grad(net(x).sin().sum(), list(net.parameters()))
    assert all(map(torch.equal, plain, beside))


# --- 59: what a checkpoint keeps ---------------------------------------------------------------------------------

MM = torch.ops.aten.mm.default


def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is MM else CheckpointPolicy.PREFER_RECOMPUTE


def region(x, w):
    return (x.sin() @ w).exp()


class Module(nn.Module):
    def forward(self, x, w):
        return region(x, w)


def positional(x, w, **options):
    return ckpt_ops.checkpoint(region, x, w, **options)


def keyword(x, w, **options):
    return ckpt_ops.checkpoint(region, x=x, w=w, **options)


def in_a_dict(x, w, **options):
    return ckpt_ops.checkpoint(lambda batch, w: region(batch["x"][0], w), {"x": [x], "other": 1}, w, **options)


def in_a_closure(x, w, **options):
    return ckpt_ops.checkpoint(lambda: region(x, w), **options)


def in_a_closure_of_a_closure(x, w, **options):
    def inner():
        return x.sin()

    return ckpt_ops.checkpoint(lambda: (inner() @ w).exp(), **options)


def in_a_partial(x, w, **options):
    return ckpt_ops.checkpoint(functools.partial(region, w=w), x, **options)


def in_a_default(x, w, **options):
    return ckpt_ops.checkpoint(lambda x=x, *, w=w: region(x, w), **options)


def of_a_module(x, w, **options):
    return ckpt_ops.checkpoint(Module(), x, w=w, **options)


WAYS = [
    positional, keyword, in_a_dict, in_a_closure, in_a_closure_of_a_closure, in_a_partial, in_a_default, of_a_module,
]  # fmt: skip
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@each_way
@pytest.mark.parametrize("selective", [True, False])
@pytest.mark.parametrize("engine", [True, False])
def test_case_59_inputs_and_policy_saved_outputs_are_moved(way, selective, engine):
    x, w = torch.randn(7, 8, requires_grad=True), nn.Parameter(torch.randn(8, 5))
    options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)} if selective else {}
    expected = torch.autograd.grad(region(x, w).sin().sum(), (x, w))

    def forward():
        return way(x * 1, w, **options)  # the region's input is held by nobody else

    with everything() as offloader, ckpt_ops.regenerating() if engine else contextlib.nullcontext():
        y = forward()
    moved = [(row.shape, row.why, row.op) for row in offloader.rows]
    assert moved[0] == ((7, 8), "input of a checkpoint region", "Mul")
    assert moved[1:] == ([((7, 5), "saved by a checkpoint's policy", "")] if selective else [])
    assert all(map(torch.equal, torch.autograd.grad(y.sin().sum(), (x, w)), expected))


@each_way
def test_case_59_nothing_else_holds_the_input(way):
    x, w = torch.randn(7, 8, requires_grad=True), nn.Parameter(torch.randn(8, 5))
    with everything():
        middle = x * 1
        address = torch.multiprocessing.reductions.StorageWeakRef(middle.untyped_storage())
        y = way(middle, w)
        del middle
    assert address.expired()
    y.sum().backward()


def test_case_59_a_function_that_binds_a_name_anew_does_so():
    """Its cells are its own business; containers and cells of the first call are the caller's."""
    x, seen = torch.randn(7, 8, requires_grad=True), {}
    last = torch.zeros(1)

    def step(notes):
        nonlocal last
        last = x.sin()
        notes.setdefault("seen", last.detach())
        return last.exp()

    with everything() as offloader:
        ckpt_ops.checkpoint(step, notes := {"seen": None}).sum().backward()
    assert torch.equal(last.detach(), x.detach().sin()) and notes == {"seen": None} and not seen
    assert [row.shape for row in offloader.rows] == [(7, 8)]


def test_case_59_a_function_that_calls_itself():
    x = torch.randn(7, 8, requires_grad=True)

    def power(n):
        return x if n == 0 else power(n - 1) * x.sin()

    with everything() as offloader:
        y = ckpt_ops.checkpoint(power, 3)
    assert [row.shape for row in offloader.rows] == [(7, 8)]
    expected = torch.autograd.grad(power(3).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_case_59_a_saved_output_that_changes_is_still_an_error():
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    x, w = torch.randn(7, 8, requires_grad=True), nn.Parameter(torch.randn(8, 5))

    def changes(x, w):
        y = x @ w
        return y.mul_(2).exp()

    with everything() as offloader:
        y = ckpt_ops.checkpoint(changes, x, w, context_fn=contexts)
    assert [row.shape for row in offloader.rows] == [(7, 8)]
    with pytest.raises(RuntimeError, match="has been mutated"):
        y.sum().backward()


def test_case_59_caches_are_still_looked_into():
    def grows(x, cache):
        cache.append(x)
        return torch.cat(cache).sum()

    with pytest.raises(RuntimeError, match="cache.*use_cache=False"), everything():
        ckpt_ops.checkpoint(grows, torch.randn(2, 4, requires_grad=True), [])


@pytest.mark.parametrize("nested", [True, False])
def test_case_59_regions_in_regions(nested):
    x = torch.randn(7, 8, requires_grad=True)

    def inner(x):
        return ckpt_ops.checkpoint(lambda: x.sin().exp()) if nested else x.sin().exp()

    with everything() as offloader:
        y = ckpt_ops.checkpoint(lambda: inner(x * 2) * x)
    assert [row.shape for row in offloader.rows] == [(7, 8)]
    expected = torch.autograd.grad(((x * 2).sin().exp() * x).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected, rtol=0, atol=0)
