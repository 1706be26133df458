"""The sweep over rungs: what each keeps and takes, the same training at each.

The rungs step in turn, so that the machine's noise hits all alike, and with the same seeds, so that their losses can be
compared to the bit.
"""

import torch

from ..policies.rungs import RUNGS
from .training import Result, kept_bytes, training_steps
from .variants import build

ROUNDS = 4  # steps a rung
WARMUP_ROUNDS = 1  # not timed
BACKGROUND = ("torch", "torch-checkpoint")  # what the picture compares the rungs with


def sweep(settings, data, after_step=lambda: None):
    """A `Result` a rung, each named and titled by its rung."""
    models = {rung: build("ours", settings, rung=rung) for rung in RUNGS}
    ids, targets = (t.to(settings.device) for t in data[0])
    results = [Result(rung, rung, kept_bytes(model, ids, targets), warmup=WARMUP_ROUNDS) for rung, model in models.items()]
    batches = [data[step % len(data)] for step in range(ROUNDS)]
    runs = [training_steps(model, settings, batches) for model in models.values()]
    for step in range(ROUNDS):
        for result, run in zip(results, runs, strict=True):
            torch.manual_seed(settings.seed + step)
            result.add(*next(run))
            after_step()
    return results


def same_losses(results):
    return all(r.losses == results[0].losses for r in results)
