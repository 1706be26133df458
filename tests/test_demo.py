"""The demo: one model from two sets of layers, what it measures, and what it writes."""

import json
import math
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

import ckpt_ops
from ckpt_ops.cli import main
from ckpt_ops.demo import data, labels, ladder, report, training
from ckpt_ops.demo.options import VARIANTS, Settings
from ckpt_ops.demo.variants import build

TINY = Settings(layers=2, hidden=32, heads=2, context=24, batch=2, steps=3, out=Path("unused"))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(32, 127)) * 20)
    return file


@pytest.fixture
def batches(text):
    return data.batches(data.load(text), TINY.batch, TINY.context, TINY.steps, TINY.seed)


def _changed(**changes):
    return Settings(**{**TINY.__dict__, **changes})


def _losses(name, settings, batches):
    return training.train(name, settings, batches).losses


# --- the model -------------------------------------------------------------------------------------------------


def test_all_variants_have_the_same_parameters():
    torch_state = build("torch", TINY).state_dict()
    for name in VARIANTS:
        model = build(name, TINY)
        model.load_state_dict(torch_state, strict=True)
        fresh = build(name, TINY).state_dict()
        assert list(fresh) == list(torch_state)
        for key, value in fresh.items():
            assert torch.equal(value, torch_state[key]), key


def test_without_dropout_ours_has_torchs_losses_and_gradients(backend, batches):
    settings = _changed(dropout=0.0, dtype="float32")
    models = [build(name, settings).double() for name in ("torch", "ours")]
    losses = [model(*batches[0]) for model in models]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def test_without_dropout_ours_trains_as_torch_does(batches):
    settings = _changed(dropout=0.0)
    for a, b in zip(_losses("torch", settings, batches), _losses("ours", settings, batches), strict=True):
        assert math.isclose(a, b, rel_tol=1e-5)  # float32: a few roundings of a loss near 5


@pytest.mark.parametrize("layers", ["torch", "ours"])
def test_checkpointing_changes_no_bit(layers, backend, batches):
    plain, checkpointed = build(layers, TINY), build(f"{layers}-checkpoint", TINY)
    for model in (plain, checkpointed):
        torch.manual_seed(3)
        model(*batches[0]).backward()
    for (name, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert _losses(layers, TINY, batches) == _losses(f"{layers}-checkpoint", TINY, batches)


def test_dropout_acts_and_a_seed_repeats_it(batches):
    assert _losses("ours", TINY, batches) == _losses("ours", TINY, batches)
    assert _losses("ours", TINY, batches) != _losses("ours", _changed(dropout=0.0), batches)


def test_eval_has_no_dropout(batches):
    losses = [build(name, TINY).eval()(*batches[0]).item() for name in ("torch", "ours", "ours")]
    assert losses[1] == losses[2]
    assert math.isclose(losses[0], losses[1], rel_tol=1e-5)


# --- what is measured ------------------------------------------------------------------------------------------


def test_a_checkpointed_block_keeps_its_input_alone(batches):
    deeper = _changed(layers=TINY.layers + 1)
    stream = TINY.batch * TINY.context * TINY.hidden * 4  # bytes of the residual stream in float32
    for name in ("torch-checkpoint", "ours-checkpoint"):
        grown = training.kept_bytes(build(name, deeper), *batches[0]) - training.kept_bytes(build(name, TINY), *batches[0])
        assert grown == stream, name


def test_ours_keeps_no_mask_and_no_scores(fused, batches):
    deeper = _changed(layers=TINY.layers + 1)
    rows = TINY.batch * TINY.context
    # In rows x hidden: x, y1, qkv 3, o, r, y2, up 4, activation 4. Then two norms' statistics,
    # attention's log-sum-exp, and four seeds.
    expected = 16 * rows * TINY.hidden * 4 + 2 * 8 * rows + 4 * rows * TINY.heads + 4 * 8
    grown = training.kept_bytes(build("ours", deeper), *batches[0]) - training.kept_bytes(build("ours", TINY), *batches[0])
    assert grown == expected


def test_exactness_compares_the_kernels_with_the_reference(fused, text):
    result = training.exactness(TINY, data.load(text))
    assert len(result.ours) == len(result.reference) == TINY.steps
    assert result.backend == fused.name
    assert result.largest_difference <= 1e-5


def test_exactness_sees_another_mask(fused, text, monkeypatch):
    honest = ckpt_ops.reference.dropout_mask
    monkeypatch.setattr("ckpt_ops.reference.dropout_mask", lambda *args, **options: ~honest(*args, **options))
    assert training.exactness(TINY, data.load(text)).largest_difference > training.EXACT_LIMIT


def test_warm_up_steps_are_not_timed():
    result = training.Result("ours", "ours", 0, step_ms=[900.0, 900.0, 900.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert (result.median_ms, result.quantile_ms(0.2), result.quantile_ms(0.8)) == (3.0, 2.0, 4.0)
    assert training.Result("ours", "ours", 0, step_ms=[7.0]).median_ms == 7.0


# --- the text --------------------------------------------------------------------------------------------------


def test_the_standard_library_is_the_default_text():
    text = data.load()
    assert text.dtype == torch.uint8
    assert len(text) > 1_000_000
    assert b"def " in bytes(text[:100_000].tolist())


def test_a_folder_is_read_in_order_without_its_binary_files(tmp_path):
    for name, content in (("b.txt", b"second"), ("a.txt", b"first "), ("c.bin", b"\0\1")):
        (tmp_path / name).write_bytes(content)
    assert bytes(data.load(tmp_path).tolist()) == b"first second"


def test_targets_are_the_next_bytes(batches):
    assert len(batches) == TINY.steps
    for ids, targets in batches:
        assert ids.shape == targets.shape == (TINY.batch, TINY.context)
        assert torch.equal(ids[:, 1:], targets[:, :-1])


# --- all of it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_writes_a_picture_and_json(dtype, text, tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    threads = torch.get_num_threads()
    sizes = ["--layers=1", "--hidden=32", "--heads=2", "--context=16", "--batch=2", "--steps=3", f"--threads={threads + 1}"]
    assert main(["demo", *sizes, "--no-ladder", "--dtype", dtype, "--text", str(text), "--out", str(out)]) == 0

    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((out / "demo.json").read_text())
    assert [v["name"] for v in figures["variants"]] == list(VARIANTS)
    for variant in figures["variants"]:
        assert len(variant["losses"]) == len(variant["step_ms"]) == 3
        assert all(math.isfinite(x) for x in variant["losses"])
        assert variant["ms_median"] > 0
        assert variant["kept_bytes"] > 0
    assert figures["settings"]["dtype"] == dtype
    assert figures["machine"]["threads"] == threads + 1
    assert figures["machine"]["torch"] == torch.__version__
    assert figures["date"]

    printed = capsys.readouterr().out
    assert "ckpt_ops + checkpoint" in printed
    assert "Exactness" in printed
    assert str(out / "demo.png") in printed
    assert torch.get_num_threads() == threads


def test_demo_with_some_variants(text, tmp_path):
    sizes = ["--layers=1", "--hidden=16", "--heads=1", "--context=8", "--batch=1", "--steps=1"]
    main(
        ["demo", *sizes, "--variants", "torch-checkpoint", "torch", "--no-ladder", "--text", str(text), "--out", str(tmp_path)]
    )
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert [v["name"] for v in figures["variants"]] == ["torch", "torch-checkpoint"]
    assert figures["exactness"] is None and figures["ladder"] is None
    assert not (tmp_path / "ladder.png").exists()


def test_the_demo_sweeps_over_the_rungs(fused, text, tmp_path, capsys):
    sizes = ["--layers=2", "--hidden=32", "--heads=2", "--context=16", "--batch=2", "--steps=2"]
    main(["demo", *sizes, "--variants", "torch", "ours", "ours-activations", "--text", str(text), "--out", str(tmp_path)])
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "demo.json").read_text())
    ours, activations = figures["variants"][1:]
    assert ours["losses"] == activations["losses"]  # regenerating changes no bit
    rungs = {r["name"]: r for r in figures["ladder"]["rungs"]}
    assert list(rungs) == list(ckpt_ops.RUNGS)
    kept = [r["kept_bytes"] for r in rungs.values()]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)
    assert rungs["store"]["kept_bytes"] == ours["kept_bytes"]
    assert rungs["activations"]["kept_bytes"] == activations["kept_bytes"]
    assert all(len(r["losses"]) == ladder.ROUNDS and r["ms_median"] > 0 for r in rungs.values())
    assert len({tuple(r["losses"]) for r in rungs.values()}) == 1 and figures["ladder"]["same_losses"]
    printed = capsys.readouterr().out
    assert "ckpt_ops.regenerate" in printed
    assert "the same to the bit" in printed


def test_a_rung_that_does_not_repeat_the_losses_is_named(text):
    one, two = (training.Result(name, name, 8, [1.0, 1.0], [5.0, loss]) for name, loss in (("store", 4.0), ("norms", 4.1)))
    assert not ladder.same_losses([one, two])
    assert "NOT the same" in report._ladder_line([one, two])


def test_the_loss_at_the_end_is_a_mean():
    result = training.Result("ours", "ckpt_ops", 8, [1.0] * 7, [9.0, 8.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert result.end_loss == 3.0


# --- the pictures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_names_of_points_touch_nothing(seed):
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(1, 2)[0]
    axes.set_xlim(0, 1.1)
    axes.set_ylim(0, 1.1)
    drawn = torch.rand(5, 2, generator=torch.Generator().manual_seed(seed)).tolist()
    points = [("ckpt_ops, activations\n1,234 ms, 123.4 MiB", x, y) for x, y in sorted(drawn, key=lambda p: p[1])]
    labels.name_points(axes, points, ["black"] * 5)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    texts = [labels.Box(b.x0, b.y0, b.x1, b.y1) for b in boxes]
    assert not any(a.touches(b) for i, a in enumerate(texts) for b in texts[:i])
