"""A training run of one variant, what it keeps, and how far the kernels are from the reference."""

import statistics
import time
from dataclasses import dataclass, field

import torch

from .. import dispatch, memory, use_backend
from .data import batches
from .options import DTYPES
from .variants import VARIANTS, build

WARMUP_STEPS = 3  # not timed: allocator, caches and thread pool settle
END_STEPS = 5  # the loss at the end is a mean over them: single batches are noisy
EXACT_STEPS = 20
EXACT_CONTEXT = 256  # the reference materialises every mask and every score: one short sequence a step is enough
EXACT_LIMIT = 1e-4  # float32; a loss near 5 is rounded to 5e-7


@dataclass
class Result:
    """One variant's figures. step_ms and losses have an entry a step; kept_bytes is between forward and backward."""

    name: str
    title: str
    kept_bytes: int
    step_ms: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    warmup: int = WARMUP_STEPS

    def add(self, loss, milliseconds):
        self.losses.append(loss)
        self.step_ms.append(milliseconds)

    @property
    def timed(self):
        return self.step_ms[min(self.warmup, len(self.step_ms) - 1) :]

    @property
    def end_loss(self):
        return statistics.fmean(self.losses[-END_STEPS:])

    @property
    def median_ms(self):
        return statistics.median(self.timed)

    def quantile_ms(self, share):
        ordered = sorted(self.timed)
        return ordered[round(share * (len(ordered) - 1))]


def train(name, settings, data, after_step=lambda: None):
    """Trains the variant on `data`, (ids, targets) a step, from the shared weights and seed."""
    model = build(name, settings)
    result = Result(name, VARIANTS[name].title, kept_bytes(model, *_to(settings.device, data[0])))
    for loss, milliseconds in training_steps(model, settings, data):
        result.add(loss, milliseconds)
        after_step()
    return result


def kept_bytes(model, ids, targets):
    """What autograd keeps between forward and backward, parameters apart: for a checkpointed block its input alone."""
    # detached, so that nothing walks the graph to name the keepers: under checkpoint a look at a tensor recomputes it
    return memory.kept(lambda m: m(ids, targets).detach(), model).bytes


@dataclass
class Exactness:
    """Loss curves of ours on its kernels and on the reference backend."""

    backend: str
    context: int
    ours: list
    reference: list

    @property
    def largest_difference(self):
        return max(abs(a - b) for a, b in zip(self.ours, self.reference, strict=True))


def exactness(settings, text, after_step=lambda: None):
    """Trains ours twice with the same seeds, so the same masks: on the kernels, and in plain torch on the reference backend."""
    steps, context = min(EXACT_STEPS, settings.steps), min(EXACT_CONTEXT, settings.context)
    data = batches(text, 1, context, steps, settings.seed)
    backend = serving_backend(settings)
    curves = {backend: [], "reference": []}
    for name, losses in curves.items():
        with use_backend(name):
            for loss, _ in training_steps(build("ours", settings), settings, data):
                losses.append(loss)
                after_step()
    return Exactness(backend, context, curves[backend], curves["reference"])


def serving_backend(settings):
    """The backend that serves ours here."""
    return dispatch.choose("attention", None, torch.empty(0, dtype=DTYPES[settings.dtype], device=settings.device))


def training_steps(model, settings, data):
    """Yields (loss, milliseconds) of every step: forward, backward and optimizer."""
    torch.manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for ids, targets in data:
        ids, targets = _to(settings.device, (ids, targets))
        _synchronise(settings.device)
        start = time.perf_counter()
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _synchronise(settings.device)
        yield loss.item(), 1000 * (time.perf_counter() - start)


def _to(device, tensors):
    return tuple(t.to(device) for t in tensors)


def _synchronise(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
