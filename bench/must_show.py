"""The figures that this project promises: float32, forward + backward, measured beside torch in the same run."""

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


def results(rows):
    """[(promise, what was measured, True / False / None where nothing was)]; rows: of a run."""
    return [(promise, *promise.check(rows)) for promise in PROMISES]


def _find(rows, case_name, provider):
    wanted = _case(case_name)
    for row in rows:
        same_case = row["case"] == case_name and tuple(row["shape"]) == wanted.shape and row["dtype"] == "float32"
        if same_case and row["mode"] == BOTH and row["provider"] == provider:
            return row
    return None


def _case(name):
    return next(case for case in cases.large() if case.name == name)
