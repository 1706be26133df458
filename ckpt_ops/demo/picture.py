"""demo.png: kept memory against step time, and the loss curves on top of each other."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .report import MIB

# A hue for whose layers, a lighter tone for the checkpointed one. Wide lines first: narrow ones stay visible on top.
_LOOK = {
    "torch": {"color": "#7f8c8d", "marker": "o", "linewidth": 7},
    "torch-checkpoint": {"color": "#bdc3c7", "marker": "s", "linewidth": 4.5},
    "ours": {"color": "#c0392b", "marker": "o", "linewidth": 2.5},
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
    slowest, most = max(r.median_ms for r in results), max(r.kept_bytes for r in results) / MIB
    labels = []
    for r in sorted(results, key=lambda r: (r.kept_bytes, r.median_ms)):
        look, x, y = _LOOK[r.name], r.median_ms, r.kept_bytes / MIB
        axes.scatter(x, y, s=110, color=look["color"], marker=look["marker"], zorder=3, clip_on=False)
        label_x, label_y, align = _label_place(x / slowest, y / most, labels)
        axes.annotate(
            f"{r.title}\n{x:,.0f} ms, {y:,.1f} MiB",
            (x, y),
            xytext=(label_x * slowest, label_y * most),
            ha=align,
            va="center",
            arrowprops={"arrowstyle": "-", "color": look["color"], "shrinkA": 0},
        )
    axes.set_xlim(0, 1.08 * slowest)
    axes.set_ylim(0, max(1.12, *(y + 0.1 for _, y in labels)) * most)
    axes.set_xlabel("median step time, ms")
    axes.set_ylabel("kept between forward and backward, MiB")
    axes.set_title("Less to remember, less to wait for" if _better(results) else "Memory against time", loc="left")


def _label_place(x, y, labels):
    """(x, y, alignment) of a point's label, in shares of the largest x and y; `labels` holds (left, y) of those before.

    Beside the point where there is room, above the labels it would touch. Points come from the lowest up.
    """
    width, height = 0.36, 0.12  # of two lines of text
    right = x < 0.6
    label_x = x + 0.03 if right else x - 0.03
    left = label_x if right else label_x - width
    touched = [other_y for other_left, other_y in labels if abs(other_left - left) < width]
    label_y = max(y, 0.06, *(other_y + height for other_y in touched))
    labels.append((left, label_y))
    return label_x, label_y, "left" if right else "right"


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
