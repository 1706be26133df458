"""The bench measures what it says: which calls count, percentiles, bytes moved, the same work for every provider."""

import json

import pytest
import torch
import torch.nn.functional as F

from bench import __main__ as cli
from bench import cases, must_show, plots, providers, report, runner, timing, traffic
from ckpt_ops import dispatch

SMALL = [pytest.param(case, id=case.name) for case in cases.small()]


class Clock:
    """A clock that only moves when told to."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time


def taking(clock, seconds):
    """A callable whose n-th call takes seconds[n]; the last one repeats."""
    calls = []

    def run():
        clock.time += seconds[min(len(calls), len(seconds) - 1)]
        calls.append(clock.time)

    run.calls = calls
    return run


def test_first_calls_are_not_counted():
    clock = Clock()
    compiles_first = taking(clock, [100.0, 50.0, 1.0])  # two slow calls, then a second each
    times = timing.interleaved({"a": compiles_first}, timing.Stopwatch(clock.now), warmup=2, min_time=0, min_calls=5)
    assert times["a"] == timing.Timing(1.0, 1.0, 1.0, calls=5)
    assert len(compiles_first.calls) == 7


def test_percentiles():
    clock = Clock()
    steps = taking(clock, [float(s) for s in range(11)])  # 0, 1, .. 10
    times = timing.interleaved({"a": steps}, timing.Stopwatch(clock.now), warmup=0, min_time=0, min_calls=11)
    assert times["a"] == timing.Timing(p20=2.0, p50=5.0, p80=8.0, calls=11)


def test_rounds_call_everyone_equally_until_the_time_is_spent():
    clock = Clock()
    runs = {"fast": taking(clock, [1.0]), "slow": taking(clock, [9.0])}
    times = timing.interleaved(runs, timing.Stopwatch(clock.now), warmup=1, min_time=50, min_calls=2)
    assert times["fast"].calls == times["slow"].calls == 10  # 10 seconds a round, 50 seconds a callable
    assert (times["fast"].p50, times["slow"].p50) == (1.0, 9.0)
    runs = {"a": taking(clock, [1e-6])}
    assert timing.interleaved(runs, timing.Stopwatch(clock.now), min_time=1, max_calls=20)["a"].calls == 20


def test_traffic_of_known_ops():
    x = torch.randn(32, 16)
    nbytes = x.nbytes
    assert traffic.measure(lambda: x + 1.0) == 2 * nbytes  # read, written
    assert traffic.measure(lambda: x * x) == 2 * nbytes  # one tensor, however often it is named
    assert traffic.measure(lambda: torch.add(x, x.clone())) == 5 * nbytes
    assert traffic.measure(lambda: x.t().reshape(8, 64)) == 2 * nbytes  # a reshape that has to copy
    assert traffic.measure(lambda: x.to(torch.float64)) == 3 * nbytes
    assert traffic.measure(lambda: x.view(-1)[::2].unsqueeze(0)) == 0  # views
    assert traffic.measure(lambda: torch.empty_like(x)) == 0  # allocation alone
    assert traffic.measure(lambda: x.new_empty(x.shape).zero_()) == nbytes  # overwritten, not read
    assert traffic.measure(lambda: x.new_empty(x.shape).mul_(2.0)) == 2 * nbytes  # read and overwritten
    assert traffic.measure(lambda: x[:1].expand(32, 16) + x) == 16 * 4 + 2 * nbytes  # a row, though 32 times


def test_traffic_counts_the_backward():
    x = torch.randn(32, 16, requires_grad=True)
    dy = torch.randn(32, 16)
    moved = traffic.measure(lambda: torch.autograd.grad(F.gelu(x), x, dy))
    assert moved == 2 * x.nbytes + 3 * x.nbytes  # x -> y;  dy, x -> dx


def test_lower_bound_of_a_graph():
    x, w = torch.randn(32, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    dy = torch.randn(32, 16)
    forward = lambda x, w: x * w  # noqa: E731  saves x and w
    assert traffic.lower_bound(forward, [x, w], [dy], backward=False) == 2 * x.nbytes + w.nbytes
    both = traffic.lower_bound(forward, [x, w], [dy], backward=True)
    assert both == 2 * x.nbytes + w.nbytes + (x.nbytes + w.nbytes) + dy.nbytes + (x.nbytes + w.nbytes)


def run(case, provider):
    """(outputs, gradients) of a provider."""
    tensors = case.tensors()
    outputs = provider.bind(case)(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs, torch.autograd.grad(outputs, tensors, case.grad_outputs())


def pairs():
    """Every small case with every provider that has it."""
    found, _ = providers.providers(["ours:all", "reference", "fused"])
    return [pytest.param(c, p, id=f"{c.name}-{p.name}") for c in cases.small() for p in found if p.bind(c)]


@pytest.mark.parametrize(("case", "provider"), pairs())
def test_every_provider_does_the_same_work(case, provider):
    (eager,), _ = providers.providers(["eager"])
    for ours, theirs in zip(run(case, provider), run(case, eager), strict=True):
        assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in theirs]
    without_dropout = cases.with_p(case, 0.0)
    for ours, theirs in zip(run(without_dropout, provider), run(without_dropout, eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", SMALL)
def test_eager_compiles_to_one_graph(case):
    compile_ = providers.Provider(
        "compile", lambda c: providers.compiled(c, "aot_eager"), lambda c, d: "aot_eager", opaque=True
    )
    (eager,), _ = providers.providers(["eager"])
    for ours, theirs in zip(run(case, compile_), run(case, eager), strict=True):
        assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in theirs]


@pytest.fixture(scope="module")
def document():
    """A run of two cases, with a clock that says a second each call."""
    found, absent = providers.providers(["ours", "eager", "fused", "flash_attn"])
    rows = []
    for case in [c for c in cases.small() if c.name in ("dropout p=0.1", "layer_norm")]:
        rows += runner.run_case(case, found, "cpu", copy_bandwidth=1e9, watch=FakeWatch(), min_time=0, min_calls=3)
    return report.document({"machine": "test", "commit": "abc"}, 1e9, rows, absent)


class FakeWatch:
    """Runs the call and reports 1, 2, 3, .. seconds, so that nothing depends on the machine."""

    def __init__(self):
        self._next = 0

    def seconds(self, run):
        run()
        self._next += 1
        return float(self._next)


def test_rows_hold_what_a_reader_needs(document):
    rows = json.loads(json.dumps(document))["rows"]
    found = {(r["case"], r["mode"], r["provider"]) for r in rows}
    modes = ("forward", "forward+backward")
    assert found == {("dropout p=0.1", m, p) for m in modes for p in ("ours", "eager")} | {
        ("layer_norm", m, p) for m in modes for p in ("ours", "eager", "fused")
    }
    for row in rows:
        assert row["error"] is None
        assert row["shape"] == [64, 96]
        assert row["dtype"] == "float32"
        assert row["backend"]
        assert 0 < row["p20"] <= row["p50"] <= row["p80"]
        assert row["calls"] == 3
        assert row["gb_per_s"] == pytest.approx(row["traffic_bytes"] / row["p50"] / 1e9)
        assert row["share_of_copy"] == pytest.approx(row["traffic_bytes"] / row["p50"] / 1e9)  # copy_bandwidth is 1e9
        eager = next(r for r in rows if (r["case"], r["mode"], r["provider"]) == (row["case"], row["mode"], "eager"))
        assert row["ratio_to_eager"] == pytest.approx(eager["p50"] / row["p50"])
        assert 0 < row["ratio_to_best_torch"] <= row["ratio_to_eager"]
    fused = next(r for r in rows if r["provider"] == "fused")
    assert fused["kept_bytes"] == 64 * 96 * 4 + 8 * 64  # F.layer_norm keeps x, a mean and an rstd a row


def test_tables_show_every_row_and_mark_losses(document):
    text = report.markdown(document)
    for row in document["rows"]:
        assert row["case"] in text
        assert row["provider"] in text
    lost = [r for r in document["rows"] if r["ratio_to_best_torch"] < 0.995]
    marked = sum(line.split("|")[-2].count("▼") for line in text.splitlines() if line.startswith("|"))
    assert len(lost) == marked > 0
    assert "commit abc" in text
    assert len(list(report.tables(document))) == 1


def test_json_and_plots_are_written(document, tmp_path):
    path = report.write(document, tmp_path / "new", "bench")
    assert report.read(path) == document
    assert (tmp_path / "new" / "bench.md").read_text() == report.markdown(document)
    (picture,) = plots.draw(report.read(path), path)
    assert picture.name == "bench_small.png"
    assert picture.stat().st_size > 1000


def test_a_failing_provider_is_a_row_with_its_error():
    def refuse(*tensors):
        raise NotImplementedError("no kernel here\nsecond line")

    broken = providers.Provider("broken", lambda case: refuse, lambda case, device: "none")
    found, _ = providers.providers(["eager"])
    rows = runner.run_case(cases.small()[0], [broken, *found], "cpu", copy_bandwidth=1e9, watch=FakeWatch(), min_time=0)
    errors = {row["provider"]: row["error"] for row in rows}
    assert errors == {"broken": "NotImplementedError: no kernel here", "eager": None}
    assert "no kernel here" in report.markdown(report.document({"machine": "m"}, 1e9, rows, {}))


def promised_rows(times, kept):
    """Rows of every promised case; times: provider -> seconds."""
    return [
        {"case": c.name, "size": c.size, "shape": list(c.shape), "dtype": "float32", "mode": runner.BOTH}
        | {"provider": name, "p50": seconds, "kept_bytes": kept(c)}
        for c in must_show.needed_cases()
        for name, seconds in times.items()
    ]


def test_promises_are_compared_with_what_was_measured():
    fast = promised_rows({"ours": 1.0, "eager": 6.5, "compile": 6.5, "fused": 6.5}, kept=lambda c: 8)
    outcomes = {(p["case"], p["against"]): p["passed"] for p in must_show.results(fast)}
    failed = {key for key, passed in outcomes.items() if not passed}
    assert failed == {(p.case, p.label) for p in must_show.PROMISES if isinstance(p, must_show.Keeps) and p.label != "seed"}
    slow = promised_rows({"ours": 1.0, "eager": 1.2, "compile": 1.2, "fused": 0.8}, kept=lambda c: 8)
    faster = {(p.case, p.label) for p in must_show.PROMISES if isinstance(p, must_show.Faster)}
    assert not any(p["passed"] for p in must_show.results(slow) if (p["case"], p["against"]) in faster)
    assert all(p["passed"] is None for p in must_show.results([]))


def test_attention_may_take_a_little_longer_than_torch():
    promise = next(p for p in must_show.PROMISES if p.case == must_show.ATTENTION and isinstance(p, must_show.Faster))
    for seconds, passed in ((1.14, True), (1.16, False)):
        assert promise.check(promised_rows({"ours": seconds, "fused": 1.0}, kept=lambda c: 0)) == (
            f"{seconds}x its time",
            passed,
        )


@pytest.mark.parametrize(
    ("stem", "p", "share", "times", "passed"),
    [
        ("layer_norm", 0, 0.85, 1.0, [True, True]),
        ("layer_norm", 0, 0.84, 0.99, [False, False]),
        ("attention", 0, 0.01, 0.8, [True]),
        ("attention", 0.1, 0.01, 0.99, [False]),
    ],
)
def test_promises_on_a_gpu(stem, p, share, times, passed):
    same = {"case": stem, "stem": stem, "size": "gpu", "shape": [8, 8], "p": p, "mode": "forward+backward", "dtype": "bfloat16"}
    ours = {"provider": "ours:triton", "backend": "triton", "p50": 1.0, "share_of_copy": share}
    peer = {"provider": "fused" if stem == "attention" else "compile", "backend": "torch", "p50": times, "share_of_copy": 1}
    found = [r for r in must_show.results([{**same, **ours}, {**same, **peer}]) if r["passed"] is not None]
    assert [r["passed"] for r in found] == passed
    assert all("triton" in r["case"] for r in found)


def test_every_op_has_cases_of_every_size():
    assert {c.stem for c in cases.gpu()} == {c.stem for c in cases.small()}
    assert {c.size for c in cases.gpu()} == {"gpu"} and {c.dtype for c in cases.gpu()} == {torch.bfloat16}
    assert {c.stem for c in cases.small()} == {c.stem for c in cases.large()}
    assert len({c.name for c in cases.small()}) == len(cases.small())
    assert {promise.case for promise in must_show.PROMISES} <= {c.name for c in cases.large()}


def test_command_line_filters():
    def names(*arguments):
        return [(c.name, c.size, c.dtype) for c in cli.selected(cli.parser().parse_args(arguments))]

    assert names("--case", "rms", "--small", "--dtype", "bfloat16") == [
        ("rms_norm", "small", torch.bfloat16),
        ("dropout_add_rms_norm p=0.1", "small", torch.bfloat16),
    ]
    assert names("--case", "rms_norm") == names("--case", "rms_norm", "--small") + names("--case", "rms_norm", "--large")
    assert {size for _, size, _ in names("--must-show", "--dtype", "bfloat16")} == {"large"}
    assert {dtype for _, _, dtype in names("--must-show", "--dtype", "bfloat16")} == {torch.float32}
    assert {name for name, *_ in names("--case", "norm", "--without", "dropout")} == {"layer_norm", "rms_norm"}
    assert {size for _, size, _ in names("--gpu")} == {"gpu"}
    with pytest.raises(SystemExit, match="no case's name contains 'nonsense'"):
        cli.main(["--case", "nonsense"])


def test_providers_are_named_or_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "not_ready", lambda backend: "it is broken" if backend == "cuda" else None)
    found, absent = providers.providers(["ours:reference", "ours:cuda", "eager", "ours:all"])
    ready = [f"ours:{name}" for name in dispatch.BACKENDS if name not in ("reference", "cuda")]
    assert [p.name for p in found] == ["ours:reference", "eager", *ready] and "ours:triton" in ready
    assert absent == {"ours:cuda": "it is broken"}
    with pytest.raises(ValueError, match="unknown provider 'torch'"):
        providers.providers(["torch"])


def test_command_line_end_to_end(tmp_path, capsys):
    cli.main(["--small", "--case", "silu", "--providers", "ours,eager", "--min-time", "0.001", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "silu_dropout p=0.1" in printed
    assert "torch " + torch.__version__ in printed
    rows = report.read(tmp_path / "bench.json")["rows"]
    assert [r["provider"] for r in rows] == ["ours", "eager"] * 2
    assert (tmp_path / "bench_small.png").exists()
