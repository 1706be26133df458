"""The ladder's tables, JSON, promises and picture."""

import json
import pathlib
import textwrap

from matplotlib.figure import Figure
from rich.table import Table

from ckpt_ops import RUNGS
from ckpt_ops.demo import ladder_picture

from . import engine_cost, machine
from .report import milliseconds, readable_bytes

# Bytes per token and hidden column in 16 bits, statistics apart: what each rung keeps of a block.
CLOSED_FORM = {
    "store": 32,
    "norms": 28,
    "activations": 20,
    "mlp": 12,
    "qkv": 6,
    "block": 2,
    "torch": 32,
    "torch + checkpoint": 2,
}
TIMES = {"activations": 1.03, "mlp": 1.12}  # at most, as a share of store's
CAPTION = (
    "kept: bytes alive between forward and backward, parameters apart, each storage once. 16-bit: the same per token, hidden "
    "column and block, as if values had 16 bits; of it statistics: the norms' and attention's, in float32. closed form: the "
    "rung's figure without statistics; for torch with dropout 34 + 5as/h (Korthikanti et al. 2022; torch on a CPU keeps masks "
    "as wide as the values and scaled copies of q and k, and these blocks drop after the activation too). Medians of forward "
    "+ backward, all in turn. gradients: equal to the bit, with the same seeds, to store's, or for torch's checkpoint to "
    "torch's."
)

LAYERS_CAPTION = (
    "error: relative root mean square, against float64, of the result and of all gradients; allowed: twice that of plain "
    "torch, and an ulp. Plain torch is the layer itself; with dropout the reference with equal masks, as torch's are others."
)


def closed_form(row, size):
    """The row's figure, statistics apart. Without dropout torch's attention is a fused one that keeps no scores."""
    if row["provider"] == "torch" and row["dropout"]:
        return 34 + 5 * size["heads"] * size["tokens"] / size["hidden"]
    return CLOSED_FORM[row["provider"]]


def must_show(doc, timed):
    """The promises as plain dictionaries; those on time only where `timed`."""
    size, promises = doc["size"], []
    for dropout in dict.fromkeys(row["dropout"] for row in doc["rows"]):
        rows = {row["provider"]: row for row in doc["rows"] if row["dropout"] == dropout}
        for rung in RUNGS:
            promises += [_keeps(rows[rung], size), _gradients(rows[rung])]
        promises += [_takes(rows[rung], most) for rung, most in TIMES.items() if timed]
    if timed:
        promises += engine_cost.promises(doc["engine"])
    for row in doc["layers"]:
        of_layers = [_keeps(row, size), _gradients(row), _errs(row)]
        promises += [{**promise, "provider": f"encoder layer, {row['provider']}"} for promise in of_layers]
    return promises


def _keeps(row, size):
    figure = CLOSED_FORM[row["provider"]] + (4 * size["heads"] + 16) / size["hidden"]  # log-sum-exps; means and rstds
    below = row["provider"] == "block"  # it may keep no statistics
    passed = row["kept_16bit"] <= 1.01 * figure and (below or row["kept_16bit"] >= 0.99 * figure)
    required = f"<= {figure:.1f}" if below else f"{figure:.1f} within 1%"
    return _promise(row, "kept, 16-bit", required, f"{row['kept_16bit']:.2f}", passed)


def _gradients(row):
    measured = "equal" if row["same_gradients"] else "different"
    return _promise(row, "gradients", "equal to store's", measured, row["same_gradients"])


def _errs(row):
    share = row["share_of_allowed_error"]
    return _promise(row, f"error, {row['worst']}", "<= 1 of allowed", f"{share:.2f}", share <= 1)


def _takes(row, most):
    ratio = row["ratio_to_store"]
    return _promise(row, "step time", f"<= {most:g}x store's", f"{ratio:.3f}x", ratio <= most)


def _promise(row, what, required, measured, passed):
    return {
        "dropout": row["dropout"], "provider": row["provider"], "what": what,
        "required": required, "measured": measured, "passed": passed,
    }  # fmt: skip


def tables(doc):
    """Rich tables: one a drop probability, and what was promised."""
    for dropout in dict.fromkeys(row["dropout"] for row in doc["rows"]):
        yield _table(doc, dropout)
        yield _layers_table(doc, dropout)
    yield engine_cost.table(doc["engine"])
    table = Table(title="must show", caption=machine.line(doc["machine"]), caption_justify="left")
    for column in ("", "dropout", "rung", "", "required", "measured"):
        table.add_column(column)
    for p in doc["must_show"]:
        mark = "[green]pass[/green]" if p["passed"] else "[bold red]FAIL[/bold red]"
        table.add_row(
            mark, f"{p['dropout']:g}" if "dropout" in p else "", p["provider"], p["what"], p["required"], p["measured"]
        )
    yield table


def _table(doc, dropout):
    table = Table(title=f"{heading(doc)}, dropout {dropout:g}", caption=CAPTION, caption_justify="left")
    columns = ("kept", "16-bit", "of it statistics", "closed form", "ms (p20-p80)", "x store", "gradients")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for row in (r for r in doc["rows"] if r["dropout"] == dropout):
        if row["provider"] == "torch":
            table.add_section()
        figure = closed_form(row, doc["size"])
        p20, p50, p80 = (milliseconds(row[key]) for key in ("p20", "p50", "p80"))
        table.add_row(
            row["provider"], readable_bytes(row["kept_bytes"]), f"{row['kept_16bit']:.2f}",
            f"{row['statistics_16bit']:.3f}", f"{figure:g}", f"{p50} ({p20}-{p80})",
            f"{row['ratio_to_store']:.3f}", _same(row),
        )  # fmt: skip
    return table


def _layers_table(doc, dropout):
    title = f"nn.TransformerEncoderLayer(norm_first=True) after replace and regenerate, dropout {dropout:g}"
    table = Table(title=title, caption=LAYERS_CAPTION, caption_justify="left")
    table.add_column("")
    for column in ("kept", "16-bit", "of it statistics", "closed form", "error / allowed", "the worst", "gradients"):
        table.add_column(column, justify="right")
    for row in (r for r in doc["layers"] if r["dropout"] == dropout):
        table.add_row(
            row["provider"], readable_bytes(row["kept_bytes"]), f"{row['kept_16bit']:.2f}", f"{row['statistics_16bit']:.3f}",
            f"{CLOSED_FORM[row['provider']]:g}", f"{row['share_of_allowed_error']:.2f}", row["worst"], _same(row),
        )  # fmt: skip
    return table


def _same(row):
    return f"[green]{row['gradients_of']}'s[/green]" if row["same_gradients"] else f"[red]not {row['gradients_of']}'s[/red]"


def heading(doc):
    s = doc["size"]
    return (
        f"{s['blocks']} pre-LN GPT blocks, s={s['tokens']}, h={s['hidden']}, a={s['heads']}, batch {s['batch']}, "
        f"{s['dtype']}, {doc['backend']} kernels"
    )


def write(doc, folder):
    """Writes ladder.json; returns its path."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ladder.json"
    path.write_text(json.dumps(doc, indent=1) + "\n")
    return path


def draw(doc, path):
    """A line of panels a drop probability: the rungs beside torch's layers, and from near."""
    drops = list(dict.fromkeys(row["dropout"] for row in doc["rows"]))
    figure = Figure(figsize=(12, 0.8 + 4.6 * len(drops)), layout="constrained")
    for dropout, (everything, close) in zip(drops, figure.subplots(len(drops), 2, squeeze=False), strict=True):
        points = [(r["provider"], 1e3 * r["p50"], r["kept_16bit"]) for r in doc["rows"] if r["dropout"] == dropout]
        rungs = [p for p in points if p[0] in RUNGS]
        ladder_picture.draw_beside(everything, rungs, [p for p in points if p[0] not in RUNGS])
        ladder_picture.draw_rungs(close, rungs)
        everything.set_title(f"dropout {dropout:g}: the rungs beside torch's layers", loc="left")
        close.set_title(f"dropout {dropout:g}: the rungs, time as a share of store's", loc="left")
        for axes in (everything, close):
            axes.set_xlabel("forward + backward, ms")
            axes.set_ylabel("kept bytes per token and hidden column, 16-bit")
    figure.suptitle(heading(doc), x=0.01, ha="left")
    caption = "\n".join(textwrap.wrap(machine.line(doc["machine"]), 200))
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=7, color=ladder_picture.GREY)
    figure.savefig(path, dpi=120)
