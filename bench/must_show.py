"""The figures that this project promises: forward + backward, measured beside torch in the same run.

PROMISES: on a CPU, in float32. On a GPU, at the shapes that fill one: a share of copy bandwidth, and the peers' speed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from . import cases
from .runner import BOTH

GELU, NORM = "gelu_dropout p=0.1", "dropout_add_layer_norm p=0.1"
ATTENTION, ATTENTION_DROPOUT = "attention causal p=0", "attention causal p=0.1"


@dataclass(frozen=True)
class Faster:
    """At least `factor` times as fast as a peer; a factor below 1 allows for being slower."""

    case: str
    peer: str
    label: str
    factor: float
    at_most: float | None = None  # the same bound as a share of the peer's time, where it is stated so

    def check(self, rows):
        ours, peer = (_find(rows, self.case, name) for name in ("ours", self.peer))
        if not (ours and peer and ours["p50"] and peer["p50"]):
            return "not measured", None
        times = peer["p50"] / ours["p50"]
        measured = f"{times:.2f}x faster" if self.at_most is None else f"{1 / times:.2f}x its time"
        return measured, times >= self.factor

    @property
    def required(self):
        return f">= {self.factor:g}x faster" if self.at_most is None else f"<= {self.at_most:g}x its time"


@dataclass(frozen=True)
class Keeps:
    """Exactly these bytes alive between forward and backward."""

    case: str
    label: str
    bytes: Callable  # case -> bytes

    def check(self, rows):
        ours = _find(rows, self.case, "ours")
        if not ours or ours["kept_bytes"] is None:
            return "not measured", None
        return f"{ours['kept_bytes']:,} bytes", ours["kept_bytes"] == self.bytes(_case(self.case))

    @property
    def required(self):
        return f"{self.bytes(_case(self.case)):,} bytes"


def _elements(shape):
    n = 1
    for size in shape:
        n *= size
    return n


def _tensor(case):
    return _elements(case.shape) * case.dtype.itemsize


def _rows(case):
    return _elements(case.shape[:-1])


def within(case, peer, label, share):
    return Faster(case, peer, label, 1 / share, share)


PROMISES = (
    Faster(GELU, "eager", "F.dropout(F.gelu(x))", 5),
    Faster(GELU, "compile", "torch.compile of it", 5),
    Faster(NORM, "eager", "eager", 4),
    Faster(NORM, "compile", "torch.compile", 4),
    Faster("layer_norm", "fused", "F.layer_norm", 1.3),
    Faster("rms_norm", "fused", "F.rms_norm", 3),
    within(ATTENTION, "fused", "F.scaled_dot_product_attention", 1.15),
    Faster(ATTENTION_DROPOUT, "fused", "F.scaled_dot_product_attention", 6),
    Keeps("dropout p=0.1", "seed", lambda c: 8),
    Keeps("dropout_add p=0.1", "seed", lambda c: 8),
    Keeps(GELU, "x, seed", lambda c: _tensor(c) + 8),
    Keeps(NORM, "r, 8 a row, seed", lambda c: _tensor(c) + 8 * _rows(c) + 8),
    Keeps(ATTENTION, "q, k, v, o, 4 a row", lambda c: 4 * _tensor(c) + 4 * _rows(c)),
    Keeps(ATTENTION_DROPOUT, "q, k, v, o, 4 a row, seed", lambda c: 4 * _tensor(c) + 4 * _rows(c) + 8),
)


def needed_cases():
    names = {promise.case for promise in PROMISES}
    return [case for case in cases.large() if case.name in names]


def needed_providers(case):
    """The names of the providers that the promises about a case compare."""
    return {"ours", *(promise.peer for promise in PROMISES if promise.case == case.name and isinstance(promise, Faster))}


SHARE = 0.85  # of copy bandwidth, of a row kernel on a GPU
GPU_ATTENTION = {True: 1.0, False: 0.8}  # of the speed of torch's, with dropout or without


def results(rows):
    """Each promise beside what was measured, as it stands in the JSON; passed is None where nothing was measured."""
    found = []
    for promise in PROMISES:
        measured, passed = promise.check(rows)
        found.append(_result(promise.case, promise.label, promise.required, measured, passed))
    for row in rows:
        if row["size"] == "gpu" and row["mode"] == BOTH and row["provider"].startswith("ours") and row["p50"]:
            found += _on_gpu(row, rows)
    return found


def _on_gpu(row, rows):
    """What is promised of a row of ours at a shape that fills a GPU."""
    case = f"{row['case']}, {'x'.join(map(str, row['shape']))} ({row['backend']})"
    rivals = {r["provider"]: r["p50"] for r in rows if all(r[key] == row[key] for key in ("case", "shape", "mode"))}
    if row["stem"] != "attention":
        share = row["share_of_copy"]
        yield _result(case, "copy bandwidth", f">= {SHARE:.0%}", f"{share:.0%}", share >= SHARE)
    peer = "fused" if row["stem"] == "attention" else "compile"
    least = GPU_ATTENTION[row["p"] > 0] if row["stem"] == "attention" else 1.0
    if rivals.get(peer):
        times = rivals[peer] / row["p50"]
        yield _result(case, peer, f">= {least:g}x its speed", f"{times:.2f}x", times >= least)


def _result(case, against, required, measured, passed):
    return {"case": case, "against": against, "required": required, "measured": measured, "passed": passed}


def _find(rows, case_name, provider):
    wanted = _case(case_name)
    for row in rows:
        same_case = row["case"] == case_name and tuple(row["shape"]) == wanted.shape and row["dtype"] == "float32"
        if same_case and row["mode"] == BOTH and row["provider"] == provider:
            return row
    return None


def _case(name):
    return next(case for case in cases.large() if case.name == name)
