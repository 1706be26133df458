"""ladder.png: kept memory against step time, a connected line of rungs, with torch's layers as points beside it."""

from matplotlib.figure import Figure

from .labels import name_points
from .report import MIB

RUNGS_COLOUR = "#c0392b"
GREY = "#7f8c8d"
_LOOK = {
    "torch": {"color": GREY, "marker": "o"},
    "torch + checkpoint": {"color": "#95a5a6", "marker": "s"},
}


def save(path, rungs, others, caption):
    """rungs, others: a `Result` each."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    everything, close = figure.subplots(1, 2)
    points = _points(rungs)
    draw_beside(everything, points, _points(others))
    draw_rungs(close, points)
    for axes in (everything, close):
        axes.set_xlabel("median step time, ms")
        axes.set_ylabel("kept between forward and backward, MiB")
    everything.set_title("The rungs beside torch's layers" if others else "The rungs", loc="left")
    close.set_title("ckpt_ops.regenerate(model, rung), time as a share of store's", loc="left")
    figure.supxlabel(caption, fontsize=8, color=GREY)
    figure.savefig(path, dpi=150)


def _points(results):
    return [(r.title, r.median_ms, r.kept_bytes / MIB) for r in results]


def draw_beside(axes, rungs, others):
    """Both as points (label, time, kept) on axes that start at zero; of the rungs, only the ends are named."""
    _line(axes, rungs)
    for label, x, y in others:
        axes.scatter(x, y, s=110, zorder=3, **_LOOK[label])
    axes.set_xlim(0, 1.1 * max(x for _, x, _ in (*rungs, *others)))
    axes.set_ylim(0, 1.15 * max(y for _, _, y in (*rungs, *others)))
    named = [(f"{label}\n{x:,.0f} ms, {y:,.1f}", x, y) for label, x, y in others]
    named += [(f"ckpt_ops, {label}\n{x:,.0f} ms, {y:,.1f}", x, y) for label, x, y in (rungs[-1], rungs[0])]
    colours = [_LOOK[label]["color"] for label, _, _ in others] + 2 * [RUNGS_COLOUR]
    name_points(axes, named, colours, line=[(x, y) for _, x, y in rungs])
    _tidy(axes)


def draw_rungs(axes, rungs):
    """The rungs alone, from near: (label, time, kept) each, named with their figures."""
    _line(axes, rungs)
    times = [x for _, x, _ in rungs]
    before = None
    for label, x, y in rungs:
        # The line comes from the rung above: the name stands on the other side.
        side = "right" if before is None or x >= before else "left"
        sign = 1 if side == "right" else -1
        name = axes.annotate(
            f"{label}: {y:,.1f}, {x / rungs[0][1]:.0%}", (x, y), (9 * sign, 3), textcoords="offset points",
            ha="left" if side == "right" else "right", va="bottom",
        )  # fmt: skip
        name.set_in_layout(False)
        before = x
    # Names need a third of the width on either side; without a spread, a tenth of the time is the width.
    spread = max(max(times) - min(times), 0.1 * max(times))
    axes.set_xlim(min(times) - spread, max(times) + spread)
    axes.set_ylim(0, 1.15 * max(y for _, _, y in rungs))
    _tidy(axes)


def _line(axes, rungs):
    axes.plot([x for _, x, _ in rungs], [y for _, _, y in rungs], "o-", color=RUNGS_COLOUR, markersize=7, clip_on=False)


def _tidy(axes):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
