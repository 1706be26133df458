"""Runs a case on every provider and returns its rows: plain dictionaries, as they stand in the JSON."""

import torch

from ckpt_ops import memory

from . import timing, traffic

FORWARD, BOTH = "forward", "forward+backward"
MODES = (FORWARD, BOTH)

# What a provider may answer instead of running; anything else is a bug of the bench and stops it.
_REFUSALS = (RuntimeError, TypeError, ValueError, ImportError, AssertionError)


def run_case(case, providers, device, *, copy_bandwidth, modes=MODES, watch=None, progress=None, **timing_options):
    """The rows of one case, a provider and mode each; a provider that has no such op gives none.

    copy_bandwidth: bytes a second, for the shares.  progress: called with the name of what runs.
    """
    say = progress or (lambda text: None)
    tensors, grad_outputs = case.tensors(device), case.grad_outputs(device)
    contenders, rows = {}, []
    for provider in providers:
        say(f"{case.name}: {provider.name}")
        try:
            forward = provider.bind(case)
            if forward is not None:
                contenders[provider.name] = _Contender(provider, case, forward, tensors, grad_outputs, device, modes)
        except _REFUSALS as error:
            rows += [_row(case, mode, provider.name, None, error=_first_line(error)) for mode in modes]
    for mode in modes:
        say(f"{case.name}: {mode}")
        runs = {name: contender.runs[mode] for name, contender in contenders.items()}
        times = timing.interleaved(runs, watch or timing.stopwatch(device), **timing_options)
        for name, contender in contenders.items():
            rows.append(_timed_row(case, mode, name, contender, times[name], copy_bandwidth))
    _add_ratios(rows)
    return rows


class _Contender:
    """A provider bound to a case, and what it keeps and moves; all just-in-time compilation happens here."""

    def __init__(self, provider, case, forward, tensors, grad_outputs, device, modes):
        def run_forward():
            forward(*tensors)

        def run_both():
            torch.autograd.grad(_as_tuple(forward(*tensors)), tensors, grad_outputs)

        self.runs = {FORWARD: run_forward, BOTH: run_both}
        run_both()
        self.backend = provider.backend(case, device)
        self.kept = memory.kept(forward, *tensors).bytes
        self.peak = memory.peak(lambda *_: run_both(), *tensors)
        self.opaque = provider.opaque
        if provider.opaque:
            self.traffic = {m: traffic.lower_bound(forward, tensors, grad_outputs, m == BOTH) for m in modes}
        else:
            self.traffic = {m: traffic.measure(self.runs[m]) for m in modes}


def _timed_row(case, mode, name, contender, time, copy_bandwidth):
    moved = contender.traffic[mode]
    return _row(
        case, mode, name, contender.backend,
        p20=time.p20, p50=time.p50, p80=time.p80, calls=time.calls,
        kept_bytes=contender.kept, peak_bytes=contender.peak,
        traffic_bytes=moved, traffic_is_lower_bound=contender.opaque,
        gb_per_s=moved / time.p50 / 1e9, share_of_copy=moved / time.p50 / copy_bandwidth,
    )  # fmt: skip


def _row(case, mode, provider, backend, **measured):
    row = {
        "case": case.name, "stem": case.stem, "size": case.size, "shape": list(case.shape),
        "dtype": str(case.dtype).removeprefix("torch."), "p": case.p, "mode": mode, "provider": provider, "backend": backend,
    }  # fmt: skip
    return {**row, **dict.fromkeys(_MEASURED), **measured}


_MEASURED = (
    "p20", "p50", "p80", "calls", "kept_bytes", "peak_bytes", "traffic_bytes", "traffic_is_lower_bound", "gb_per_s",
    "share_of_copy", "ratio_to_eager", "ratio_to_best_torch", "error",
)  # fmt: skip


def is_torch(row):
    return row["provider"] in ("eager", "compile", "fused")


def _add_ratios(rows):
    """How many times faster than torch eager, and than the fastest way that torch offers, each in the same mode."""
    for row in rows:
        rivals = {r["provider"]: r["p50"] for r in rows if r["mode"] == row["mode"] and is_torch(r) and r["p50"]}
        if row["p50"] and rivals:
            row["ratio_to_best_torch"] = min(rivals.values()) / row["p50"]
            if "eager" in rivals:
                row["ratio_to_eager"] = rivals["eager"] / row["p50"]


def _as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _first_line(error):
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
