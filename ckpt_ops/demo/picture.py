"""demo.png: kept memory against step time, and the loss curves on top of each other."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .labels import name_points
from .report import MIB

# A hue for whose layers, a lighter tone for the checkpointed one. Wide lines first: narrow ones stay visible on top.
_LOOK = {
    "torch": {"color": "#7f8c8d", "marker": "o", "linewidth": 7},
    "torch-checkpoint": {"color": "#bdc3c7", "marker": "s", "linewidth": 4.5},
    "ours": {"color": "#c0392b", "marker": "o", "linewidth": 2.5},
    "ours-activations": {"color": "#8e44ad", "marker": "D", "linewidth": 1.8},
    "ours-checkpoint": {"color": "#f39c12", "marker": "s", "linewidth": 1.2},
}


def save(path, results, caption):
    figure = Figure(figsize=(12, 5), layout="constrained")
    memory, loss = figure.subplots(1, 2)
    _memory_against_time(memory, results)
    _losses(loss, results)
    for axes in (memory, loss):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    figure.supxlabel(caption, fontsize=8, color="#7f8c8d")
    figure.savefig(path, dpi=150)


def _memory_against_time(axes, results):
    for r in results:
        look = _LOOK[r.name]
        axes.scatter(
            r.median_ms, r.kept_bytes / MIB, s=110, color=look["color"], marker=look["marker"], zorder=3, clip_on=False
        )
    axes.set_xlim(0, 1.08 * max(r.median_ms for r in results))
    axes.set_ylim(0, 1.12 * max(r.kept_bytes for r in results) / MIB)
    upwards = sorted(results, key=lambda r: (r.kept_bytes, r.median_ms))
    points = [
        (f"{r.title}\n{r.median_ms:,.0f} ms, {r.kept_bytes / MIB:,.1f} MiB", r.median_ms, r.kept_bytes / MIB) for r in upwards
    ]
    name_points(axes, points, [_LOOK[r.name]["color"] for r in upwards])
    axes.set_xlabel("median step time, ms")
    axes.set_ylabel("kept between forward and backward, MiB")
    axes.set_title("Less to remember, less to wait for" if _better(results) else "Memory against time", loc="left")


def _better(results):
    by_name = {r.name: r for r in results}
    if not {"torch", "ours"} <= by_name.keys():
        return False
    torch, ours = by_name["torch"], by_name["ours"]
    return ours.kept_bytes < torch.kept_bytes and ours.median_ms < torch.median_ms


def _losses(axes, results):
    for r in results:
        look = _LOOK[r.name]
        axes.plot(range(1, len(r.losses) + 1), r.losses, color=look["color"], linewidth=look["linewidth"], label=r.title)
    axes.set_xlabel("training step")
    axes.set_ylabel("loss, nats a byte")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Loss, from the same weights on the same batches", loc="left")
    axes.legend(frameon=False)
