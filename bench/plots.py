"""A picture a size, drawn from the JSON: time and kept memory of every provider, torch eager = 1."""

import pathlib
import textwrap

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

from . import machine  # noqa: E402
from .cases import SIZES  # noqa: E402
from .report import milliseconds, readable_bytes  # noqa: E402
from .runner import BOTH  # noqa: E402

_COLOURS = {"eager": "#9aa0a6", "compile": "#c58af9", "fused": "#669df6", "reference": "#fdd663"}
_OURS, _OTHER = ("#137333", "#34a853", "#81c995"), ("#f28b82", "#fa903e", "#5bb5c9")


def draw(doc, json_path):
    """Writes <json stem>_<size>.png beside the JSON; returns the paths."""
    json_path = pathlib.Path(json_path)
    paths = []
    for size in SIZES:
        rows = [r for r in doc["rows"] if r["size"] == size and r["mode"] == BOTH and not r["error"]]
        if any(r["provider"] == "eager" for r in rows):
            paths.append(json_path.with_name(f"{json_path.stem}_{size}.png"))
            _figure(rows, doc, size).savefig(paths[-1], dpi=110)
            plt.close()
    return paths


def _figure(rows, doc, size):
    cases = list(dict.fromkeys((r["case"], tuple(r["shape"])) for r in rows))
    names = list(dict.fromkeys(r["provider"] for r in rows))
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 1.6 + 0.16 * len(names) * len(cases)), sharey=True)
    left.set_xscale("log")
    _bars(left, rows, cases, names, "p50", milliseconds, origin=1)
    _bars(right, rows, cases, names, "kept_bytes", readable_bytes, origin=0)
    left.set_xlabel("forward+backward, time / torch eager's (left of 1: faster; labels: ms)")
    right.set_xlabel("bytes kept for backward / torch eager's")
    left.set_yticks(range(len(cases)), [f"{case}\n{'x'.join(map(str, shape))}" for case, shape in cases])
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.xaxis.set_major_formatter("{x:g}")
    left.xaxis.set_minor_formatter(NullFormatter())
    left.set_ylim(len(cases) - 0.4, -0.6)
    handles = [Patch(color=_colour(name, names), label=name) for name in names]
    figure.legend(handles=handles, loc="upper right", ncol=len(names), frameon=False)
    figure.suptitle(f"{size} shapes, {rows[0]['dtype']}", x=0.01, ha="left")
    figure.supxlabel(
        "\n".join(textwrap.wrap(machine.line(doc["machine"]), 250)), x=0.01, ha="left", fontsize=7, color="#5f6368"
    )
    figure.tight_layout()
    return figure


def _bars(axes, rows, cases, names, key, label, origin):
    values = {(r["case"], tuple(r["shape"]), r["provider"]): r[key] for r in rows}
    height = 0.8 / len(names)
    for n, name in enumerate(names):
        for y, case in enumerate(cases):
            value, eager = values.get((*case, name)), values.get((*case, "eager"))
            if value is None or not eager:
                continue
            share, place = value / eager, y + (n - (len(names) - 1) / 2) * height
            axes.barh(place, share - origin, height, left=origin, color=_colour(name, names))
            axes.annotate(
                label(value), (max(share, origin), place), (3, 0), textcoords="offset points", va="center", fontsize=7
            )
    axes.axvline(1, color="#5f6368", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1)


def _colour(name, names):
    if name in _COLOURS:
        return _COLOURS[name]
    alike = [n for n in names if n.startswith("ours") == name.startswith("ours") and n not in _COLOURS]
    palette = _OURS if name.startswith("ours") else _OTHER
    return palette[alike.index(name) % len(palette)]
