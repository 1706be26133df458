"""Tables and JSON of a run. The JSON holds everything; the tables and the plots are drawn from it."""

import json
import pathlib

from rich.table import Table

from . import machine, must_show
from .cases import SIZES
from .runner import BOTH, FORWARD

COLUMNS = (
    "case", "provider", "forward ms (p20-p80)", "forward+backward ms (p20-p80)", "kept", "peak", "moved", "GB/s", "of copy",
    "x eager", "x best torch",
)  # fmt: skip
CAPTION = (
    "Medians. kept: bytes alive between forward and backward, parameters apart. moved: bytes of the tensors that the ops "
    "read and write, forward and backward (>= where they cannot be seen inside a compiled graph); GB/s and the share of "
    "copy bandwidth follow from it, above 100 % from caches. Ratios: times faster than torch eager, and than the fastest "
    "of torch's rows, forward / forward+backward; ▼ marks a loss."
)


def document(machine_facts, copy_bandwidth, rows, absent):
    """The JSON document of a run."""
    return {
        "machine": machine_facts,
        "copy_gb_per_s": copy_bandwidth / 1e9,
        "absent": absent,
        "must_show": must_show.results(rows),
        "rows": rows,
    }


def lines(rows):
    """[(case key, cells)]: a line a case and provider, its modes side by side."""
    pairs = {}
    for row in rows:
        pairs.setdefault((row["case"], tuple(row["shape"]), row["provider"]), {})[row["mode"]] = row
    return [((case, shape), _cells(by_mode)) for (case, shape, _), by_mode in pairs.items()]


def _cells(by_mode):
    forward, both = by_mode.get(FORWARD), by_mode.get(BOTH)
    row = both or forward
    provider = row["provider"] + (f" ({row['backend']})" if row["backend"] and row["provider"] != row["backend"] else "")
    if row["error"]:
        return [_title(row), provider, _clipped(row["error"]), *[""] * (len(COLUMNS) - 3)]
    return [
        _title(row), provider, _time(forward), _time(both),
        readable_bytes(row["kept_bytes"]), readable_bytes(row["peak_bytes"]),
        (">= " if row["traffic_is_lower_bound"] else "") + readable_bytes(row["traffic_bytes"]),
        f"{row['gb_per_s']:.1f}", f"{row['share_of_copy']:.0%}",
        _ratios(forward, both, "ratio_to_eager"), _ratios(forward, both, "ratio_to_best_torch"),
    ]  # fmt: skip


def _clipped(error, length=60):
    return error if len(error) <= length else error[: length - 3] + "..."


def _title(row):
    return f"{row['case']}, {'x'.join(map(str, row['shape']))}"


def _time(row):
    if row is None or row["p50"] is None:
        return "-"
    return f"{milliseconds(row['p50'])} ({milliseconds(row['p20'])}-{milliseconds(row['p80'])})"


def milliseconds(seconds):
    """Three digits, and no exponent."""
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def readable_bytes(n):
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n} B"


def _ratios(forward, both, key):
    values = [row[key] for row in (forward, both) if row is not None and row[key] is not None]
    return " / ".join(f"{v:.2f}" + (" ▼" if v < 0.995 else "") for v in values) or "-"


def tables(doc):
    """Rich tables: one a size, with the machine below."""
    for size in SIZES:
        if rows := [row for row in doc["rows"] if row["size"] == size]:
            table = Table(title=_heading(size, rows), caption=f"{CAPTION}\n{_where(doc)}", caption_justify="left")
            for column in COLUMNS:
                table.add_column(column, justify="left" if column in ("case", "provider") else "right")
            _fill(table, lines(rows))
            yield table


def _heading(size, rows):
    return f"{size} shapes, {rows[0]['dtype']}"


def _fill(table, keyed_lines):
    before = None
    for key, cells in keyed_lines:
        if before not in (None, key):
            table.add_section()
        style = "bold" if cells[1].startswith("ours") else None
        marked = [cell.replace("▼", "[red]▼[/red]") for cell in cells[1:]]
        table.add_row(cells[0] if key != before else "", *marked, style=style)
        before = key


def must_show_table(doc):
    """The promises with the required and the measured figure, or None if none was measured."""
    promises = [p for p in doc["must_show"] if p["passed"] is not None]
    if not promises:
        return None
    table = Table(title="must show (forward+backward)", caption=_where(doc), caption_justify="left")
    for column in ("", "case", "against / keeps", "required", "measured"):
        table.add_column(column)
    for p in promises:
        mark = "[green]pass[/green]" if p["passed"] else "[bold red]FAIL[/bold red]"
        table.add_row(mark, p["case"], p["against"], p["required"], p["measured"])
    return table


def markdown(doc):
    """The same tables, for a README."""
    parts = []
    for size in SIZES:
        if rows := [row for row in doc["rows"] if row["size"] == size]:
            parts += [f"### {_heading(size, rows)}", _markdown_table(COLUMNS, [cells for _, cells in lines(rows)])]
    promises = [p for p in doc["must_show"] if p["passed"] is not None]
    if promises:
        body = [["pass" if p["passed"] else "**FAIL**", *(p[k] for k in _PROMISE)] for p in promises]
        parts += ["### must show (forward+backward)", _markdown_table(("", "case", "against", *_PROMISE[2:]), body)]
    return "\n\n".join([*parts, CAPTION, _where(doc)]) + "\n"


_PROMISE = ("case", "against", "required", "measured")


def _markdown_table(header, body):
    rows = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _where(doc):
    return f"{machine.line(doc['machine'])} | copy {doc['copy_gb_per_s']:.1f} GB/s"


def write(doc, folder, stem):
    """Writes stem.json and stem.md; returns the path of the JSON."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.md").write_text(markdown(doc))
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(doc, indent=1) + "\n")
    return path


def read(path):
    return json.loads(pathlib.Path(path).read_text())
