"""`python -m bench ladder`: bytes in closed form, gradients to the bit, its JSON, promises and picture."""

import copy

import pytest
import torch

import ckpt_ops
from bench import __main__ as cli
from bench import engine_cost, ladder, ladder_layers, ladder_report, report
from bench.ladder import PROVIDERS, Size

SIZE = Size(tokens=24, hidden=32, heads=2, batch=2, blocks=2)
WIDTHS = {"store": 16, "norms": 14, "activations": 10, "mlp": 6, "qkv": 3, "block": 1}  # saved, in residual streams


@pytest.fixture(scope="module")
def document():
    """A run at a tiny size; without compiled kernels the bytes would be those of plain torch."""
    if ckpt_ops.backends()["cpu"] != "ready":
        pytest.skip(ckpt_ops.backends()["cpu"])
    sizes = [f"--{name}={getattr(SIZE, name)}" for name in ("tokens", "hidden", "heads", "batch", "blocks")]
    few = ["--rounds=2", "--engine-calls=3"]
    options = ladder.parser().parse_args([*sizes, *few, "--device=cpu", f"--threads={torch.get_num_threads()}"])
    return ladder.measure(options)


def rows_of(document, dropout):
    return {row["provider"]: row for row in document["rows"] if row["dropout"] == dropout}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_bytes_of_every_rung(document, dropout):
    rows = rows_of(document, dropout)
    tokens, seeds = SIZE.batch * SIZE.tokens, 4 if dropout else 0
    # Two norms with a mean and an rstd, attention with a log-sum-exp a head, and the seeds.
    statistics = SIZE.blocks * (tokens * (16 + 4 * SIZE.heads) + 8 * seeds)
    for rung, width in WIDTHS.items():
        row = rows[rung]
        own = statistics if rung != "block" else 0
        assert row["statistics_bytes"] == own, rung
        assert row["kept_bytes"] == 4 * width * SIZE.elements + own, rung
        assert row["kept_16bit"] == pytest.approx(2 * width + own / SIZE.elements), rung
    assert rows["torch + checkpoint"]["kept_bytes"] == rows["block"]["kept_bytes"]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_torchs_layers_replaced_and_regenerated(document, dropout):
    rows = {row["provider"]: row for row in document["layers"] if row["dropout"] == dropout}
    blocks = rows_of(document, dropout)
    for rung in WIDTHS:
        assert rows[rung]["kept_bytes"] == blocks[rung]["kept_bytes"], rung
        assert rows[rung]["same_gradients"] is True
        assert 0 < rows[rung]["share_of_allowed_error"] <= 1, rows[rung]["worst"]


def test_errors_of_torchs_layers_are_seen():
    model = ladder_layers.build(SIZE, 0.0, "cpu", torch.float32, "mlp")
    contender = ladder._Contender(model, SIZE, "cpu")
    expected = ladder_layers.Expected(SIZE, 0.0, contender.x, contender.dy)
    with torch.no_grad():
        model[1].linear2.bias[0] += 1e-4
    name, share = expected.worst(ladder_layers.results(model, contender.x, contender.dy))
    assert name == "y" and share > 1


def test_sixteen_bits_need_no_scaling():
    size = Size(**{**SIZE.__dict__, "dtype": "bfloat16"})
    contender = ladder._Contender(ladder.build("norms", size, 0.1, "cpu"), size, "cpu")
    kept = ladder._kept(contender, size)
    assert kept["kept_16bit"] == pytest.approx(kept["kept_bytes"] / size.elements)


def test_torch_keeps_the_scores_with_dropout(document):
    torch_row = rows_of(document, 0.1)["torch"]
    assert torch_row["kept_16bit"] > ladder_report.closed_form(torch_row, document["size"])  # masks as wide as values
    assert ladder_report.closed_form(torch_row, document["size"]) == 34 + 5 * SIZE.heads * SIZE.tokens / SIZE.hidden
    assert 32 < rows_of(document, 0.0)["torch"]["kept_16bit"] < 33


def test_rows_hold_what_a_reader_needs(document):
    assert [(r["dropout"], r["provider"]) for r in document["rows"]] == [(p, name) for p in (0.0, 0.1) for name in PROVIDERS]
    assert document["backend"] == "cpu" and document["machine"]["commit"]
    for row in document["rows"]:
        assert row["calls"] == 2
        assert 0 < row["p20"] <= row["p50"] <= row["p80"]
        store = rows_of(document, row["dropout"])["store"]
        assert row["ratio_to_store"] == pytest.approx(row["p50"] / store["p50"])
        assert row["gradients_of"] == ("store" if row["provider"] in ckpt_ops.RUNGS else "torch")
        assert row["same_gradients"] is True, row["provider"]


def test_the_engines_own_cost_is_measured(document):
    rows = {row["rung"]: row for row in document["engine"]}
    assert list(rows) == [engine_cost.HOOKS, "norms", "activations", "mlp", "qkv"]
    for row in rows.values():
        assert row["demo_step"] > 0
        whole = (row["forward"] + row["backward"]) * 4  # the demo's blocks
        assert row["share_of_demo_step"] == pytest.approx(whole / row["demo_step"])


@pytest.mark.parametrize(
    ("forward", "hooks", "share", "passed"),
    [
        (59e-6, 0, 0.019, (True, True, True)),
        (99e-6, 40e-6, 0.019, (True, False, True)),
        (101e-6, 40e-6, 0.021, (False, False, False)),
    ],
)
def test_the_engines_goals(forward, hooks, share, passed):
    rows = [
        {"rung": engine_cost.HOOKS, "forward": hooks},
        {"rung": "activations", "forward": forward, "share_of_demo_step": share},
    ]
    assert tuple(p["passed"] for p in engine_cost.promises(rows)) == passed


def test_gradients_that_differ_are_seen():
    contenders = {name: ladder._Contender(ladder.build(name, SIZE, 0.1, "cpu"), SIZE, "cpu") for name in PROVIDERS}
    with torch.no_grad():
        contenders["mlp"].model[1].down.weight[0, 0] += 1
    rows = {name: {} for name in PROVIDERS}
    ladder._compare_gradients(contenders, rows)
    assert [name for name, row in rows.items() if not row["same_gradients"]] == ["mlp"]


def test_promises_are_compared_with_what_was_measured(document):
    timed = {(p["provider"], p["what"], p["dropout"]) for p in document["must_show"] if p["what"] == "step time"}
    assert len([p for p in document["must_show"] if "hooks" in p["what"]]) == 3
    assert timed == {(rung, "step time", p) for rung in ("activations", "mlp") for p in (0.0, 0.1)}
    assert all(p["passed"] for p in document["must_show"] if p["what"] != "step time" and "hooks" not in p["what"])
    kept = rows_of(document, 0.1)["mlp"]["kept_16bit"]
    changes = {"kept_16bit": 0.98 * kept}, {"kept_16bit": 1.02 * kept}, {"same_gradients": False}, {"ratio_to_store": 1.121}
    for change in ({}, *changes):
        measured = copy.deepcopy(document)
        for row in measured["rows"]:
            row["ratio_to_store"] = {"activations": 1.03, "mlp": 1.12}.get(row["provider"], 1.0)
        for row in measured["engine"]:
            row |= {"forward": 1e-6, "share_of_demo_step": 0.001}
        rows_of(measured, 0.1)["mlp"].update(change)
        failed = [(p["provider"], p.get("dropout")) for p in ladder_report.must_show(measured, timed=True) if not p["passed"]]
        assert failed == ([("mlp", 0.1)] if change else [])


@pytest.mark.parametrize(
    "change", [{"kept_16bit": 20.0}, {"same_gradients": False}, {"share_of_allowed_error": 1.01}], ids=lambda c: next(iter(c))
)
def test_promises_of_torchs_layers_are_compared(document, change):
    measured = copy.deepcopy(document)
    next(row for row in measured["layers"] if row["provider"] == "mlp" and row["dropout"]).update(change)
    failed = [p["provider"] for p in ladder_report.must_show(measured, timed=False) if not p["passed"]]
    assert failed == ["encoder layer, mlp"]


def test_command_line_end_to_end(fused, tmp_path, capsys):
    arguments = ["ladder", "--small", "--dropout", "0.2", "--rounds", "2", "--engine-calls", "3", "--out", str(tmp_path)]
    fused.skip_if_slow(100_000)
    cli.main([*arguments, "--device", fused.device, "--threads", str(torch.get_num_threads())])
    document = report.read(tmp_path / "ladder.json")
    assert {row["dropout"] for row in document["rows"]} == {0.2}
    assert document["size"]["tokens"] == ladder.SMALL["tokens"]
    assert "step time" not in {p["what"] for p in document["must_show"]}  # microseconds say nothing about a rung
    printed = capsys.readouterr().out
    for name in (*PROVIDERS, "must show", "34 + 5as/h"):
        assert name in printed
    picture = tmp_path / "ladder.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    cli.main(["ladder", "--plot", str(tmp_path / "ladder.json")])
    assert picture.exists()
