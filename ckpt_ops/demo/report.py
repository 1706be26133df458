"""The demo's table, its sentences, and the JSON."""

import json
from dataclasses import asdict
from datetime import datetime, timezone

from rich import box
from rich.markup import escape
from rich.table import Table

from ..machine import machine
from .ladder import same_losses
from .training import END_STEPS, EXACT_LIMIT, WARMUP_STEPS, serving_backend

MIB = 2**20
COUNTED = (
    "Kept: what autograd holds between the forward and the backward of a step, each storage once, parameters apart. "
    "A checkpointed block counts with its input, and not with what its recomputation holds for a while."
)


def caption(settings):
    """What was trained on what, in a line."""
    here = machine()
    return (
        f"byte-level GPT, {settings.layers} layers, {settings.hidden} wide, {settings.heads} heads; "
        f"dropout {settings.dropout}; {settings.batch} x {settings.context} bytes a step; {settings.dtype}, {settings.device}; "
        f"{here['processor']}, torch threads: {here['threads']}"
    )


def print_heading(console, settings, text):
    source = escape(str(settings.text or "the sources of Python's standard library"))
    console.print(f"[bold]ckpt_ops demo[/]: {caption(settings)}", highlight=False)
    console.print(
        f"Text: {source}, {len(text) / 1e6:.1f} MB. Backend of ckpt_ops: {serving_backend(settings)}.", highlight=False
    )


def print_results(console, settings, results, exactness, rungs, written):
    console.print(_table(settings, results))
    console.print(f"[dim]{COUNTED}[/]", highlight=False)
    console.print(_exactness_line(settings, exactness), highlight=False)
    if summary := _summary(results):
        console.print(f"[bold]{summary}[/]", highlight=False)
    if rungs:
        console.print(_ladder_table(rungs))
        console.print(_ladder_line(rungs), highlight=False)
    *pictures, figures = written
    line = f"Pictures: {', '.join(map(str, pictures))}   Figures: {figures}"
    console.print(escape(line), highlight=False, soft_wrap=True)


def content(settings, results, exactness, rungs):
    """Everything measured, as JSON takes it."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": asdict(settings),
        "backend": serving_backend(settings),
        "counted": COUNTED,
        "warmup_steps": WARMUP_STEPS,
        "variants": [_variant(settings, r) for r in results],
        "exactness": exactness and asdict(exactness) | {"largest_difference": exactness.largest_difference},
        "ladder": {
            "rungs": [_variant(settings, r) for r in rungs],
            "warmup_steps": rungs[0].warmup,
            "same_losses": same_losses(rungs),
        }
        if rungs
        else None,
    }


def save(path, content):
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")


def _variant(settings, result):
    return {
        "name": result.name,
        "title": result.title,
        "ms_median": result.median_ms,
        "ms_p20": result.quantile_ms(0.2),
        "ms_p80": result.quantile_ms(0.8),
        "tokens_per_second": _tokens_per_second(settings, result),
        "kept_bytes": result.kept_bytes,
        "end_loss": result.end_loss,
        "losses": result.losses,
        "step_ms": result.step_ms,
    }


def _table(settings, results):
    """The first row is what the others are compared with."""
    table = Table(box=box.ROUNDED)
    table.add_column("")
    base = results[0]
    last = min(END_STEPS, len(base.losses))
    for heading in ("ms a step", "tokens/s", "kept, MiB", "loss,\nfirst", f"loss, mean\nof last {last}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        share_of_time, share_of_bytes = r.median_ms / base.median_ms, r.kept_bytes / base.kept_bytes
        table.add_row(
            r.title,
            f"{r.median_ms:,.0f} {_share(share_of_time, r is base)}",
            f"{_tokens_per_second(settings, r):,.0f}",
            f"{r.kept_bytes / MIB:,.1f} {_share(share_of_bytes, r is base)}",
            f"{r.losses[0]:.3f}",
            f"{r.end_loss:.3f}",
            style="bold" if r.name == "ours" else None,
        )
    return table


def _ladder_table(rungs):
    """The rungs of ckpt_ops.regenerate; shares are of the first, where everything is stored."""
    table = Table(box=box.ROUNDED)
    for heading in ("ckpt_ops.regenerate", "ms a step", "kept, MiB"):
        table.add_column(heading, justify="right" if table.columns else "left", no_wrap=True)
    store = rungs[0]
    for r in rungs:
        time, kept = r.median_ms / store.median_ms, r.kept_bytes / store.kept_bytes
        table.add_row(
            r.title,
            f"{r.median_ms:,.0f} {_share(time, r is store)}",
            f"{r.kept_bytes / MIB:,.1f} {_share(kept, r is store)}",
        )
    return table


def _ladder_line(rungs):
    verdict = "[green]the same to the bit[/]" if same_losses(rungs) else "[red]NOT the same[/]"
    return f"Rungs: over {len(rungs[0].losses)} training steps with the same seeds, the losses at all rungs are {verdict}."


def _share(share, is_base):
    if is_base:
        return "[dim]100%[/]"
    colour = "green" if share < 0.995 else "red" if share > 1.005 else "dim"
    return f"[{colour}]{share:4.0%}[/]"


def _exactness_line(settings, exactness):
    if exactness is None:
        return "Exactness: not compared, because ckpt_ops was not trained or has no kernels here."
    difference = exactness.largest_difference
    line = (
        f"Exactness: over {len(exactness.ours)} training steps on 1 x {exactness.context} bytes, the loss on the "
        f"{exactness.backend} kernels and in plain torch with the same masks differs by at most {difference:.1e}"
    )
    if settings.dtype != "float32":
        return f"{line} (in {settings.dtype}; loss near {exactness.ours[-1]:.1f})."
    verdict = "[green]within[/]" if difference <= EXACT_LIMIT else "[red]NOT within[/]"
    return f"{line}, {verdict} {EXACT_LIMIT:g}."


def _summary(results):
    """One sentence on ours against torch's layers, whichever way it went; "" where one of the two was not trained."""
    by_name = {r.name: r for r in results}
    if not {"torch", "ours"} <= by_name.keys():
        return ""
    torch, ours = by_name["torch"], by_name["ours"]
    speed = torch.median_ms / ours.median_ms
    saved = (torch.kept_bytes - ours.kept_bytes) / MIB
    pace = f"{speed:.1f} times as fast" if speed >= 1 else f"{1 / speed:.1f} times as slow"
    change = f"{saved:,.0f} MiB less than" if saved >= 0 else f"{-saved:,.0f} MiB more than"
    return (
        f"With ckpt_ops a step is {pace} and keeps {change} with torch's layers "
        f"({ours.kept_bytes / torch.kept_bytes:.0%} of the bytes); the model, its parameters and its dropout stay the same."
    )


def _tokens_per_second(settings, result):
    return 1000 * settings.batch * settings.context / result.median_ms
