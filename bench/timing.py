"""Times several callables side by side: in turn, so that the machine's noise hits all alike."""

import gc
import random
import statistics
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds a call."""

    p20: float
    p50: float
    p80: float
    calls: int


class Stopwatch:
    """Seconds that one call takes by the host's clock."""

    def __init__(self, now=time.perf_counter):
        self._now = now

    def seconds(self, run):
        start = self._now()
        run()
        return self._now() - start


class CudaStopwatch:
    """Seconds that one call takes on the device, by its own events."""

    def seconds(self, run):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def stopwatch(device):
    return CudaStopwatch() if torch.device(device).type == "cuda" else Stopwatch()


def interleaved(runs, watch, *, warmup=2, min_time=0.2, min_calls=5, max_calls=500):
    """{name: Timing} of {name: callable}. A round calls each once, in an order drawn anew: nobody always follows the same.

    The first `warmup` rounds (allocator, caches, just-in-time compilers) are not counted. Then rounds go on until
    every callable was called min_calls times and either min_time seconds a callable or max_calls calls are spent.
    """
    samples = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    collecting = gc.isenabled()
    gc.disable()
    try:
        spent = calls = 0
        while calls < warmup + min_calls or (spent < min_time * len(runs) and calls < warmup + max_calls):
            shuffle(order)
            for name in order:
                seconds = watch.seconds(runs[name])
                if calls >= warmup:
                    samples[name].append(seconds)
                    spent += seconds
            calls += 1
    finally:
        if collecting:
            gc.enable()
    return {name: summary(values) for name, values in samples.items()}


def summary(seconds):
    """The Timing of a list of at least two samples; percentiles are interpolated, the ends included."""
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return Timing(deciles[1], deciles[4], deciles[7], len(seconds))
