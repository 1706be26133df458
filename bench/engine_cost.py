"""What the engine's hooks themselves cost: the demo's model, so narrow that its kernels take next to nothing.

What a rung takes longer there than `store` is the engine: modules register outputs, saved tensors become handles, and
in backward recipes are called. The demo's own step says what share of it that is.

The engine is built on torch's saved-tensor hooks, which cost something themselves: a row has `store` under the least that
hooks may do, which is to detach.
"""

import contextlib
import dataclasses

import torch
from rich.table import Table

import ckpt_ops
from ckpt_ops.demo.options import Settings
from ckpt_ops.demo.variants import build

from . import timing

RUNGS = ckpt_ops.RUNGS[:-1]  # a block at rung "block" is a checkpoint, and has no engine
HOOKS = "torch's hooks alone"
NARROW = {"hidden": 8, "context": 2, "batch": 1}
PER_BLOCK, SHARE = 60e-6, 0.02  # goals: seconds a block, at rung activations; of a step on a CPU
CAPTION = (
    "Longer than at store, medians of calls in turn, the demo's model at {hidden} columns and {context} tokens. forward: "
    "registration and pack hooks. backward: unpack hooks, and the calls of the recipes. share: of a step of the demo. "
    + f"{HOOKS}: store, with saved-tensor hooks that only detach."
)


def measure(device, calls):
    """A row a rung: plain dictionaries, as they stand in the JSON."""
    settings = Settings(device=str(device))
    narrow = dataclasses.replace(settings, **NARROW)
    steps = {rung: _Step(narrow, rung) for rung in RUNGS}
    steps[HOOKS] = _Step(narrow, "store", _detaching)
    watch, often = timing.stopwatch(device), {"min_time": 0, "min_calls": calls, "warmup": max(2, calls // 15)}
    forward = timing.interleaved({rung: step.forward for rung, step in steps.items()}, watch, **often)
    both = timing.interleaved({rung: step.both for rung, step in steps.items()}, watch, **often)
    demo = timing.interleaved({"store": _Step(settings, "store").both}, watch, min_time=0, min_calls=max(2, min(5, calls)))[
        "store"
    ].p50
    rows = []
    for rung in (HOOKS, *RUNGS[1:]):
        more, all_of_it = forward[rung].p50 - forward["store"].p50, both[rung].p50 - both["store"].p50
        rows.append({
            "rung": rung, "forward": more / settings.layers, "backward": (all_of_it - more) / settings.layers,
            "share_of_demo_step": all_of_it / demo, "demo_step": demo,
        })  # fmt: skip
    return rows


def _detaching():
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t)


class _Step:
    """A forward, or forward and backward, of the demo's model."""

    def __init__(self, settings, rung, context=contextlib.nullcontext):
        self.model, self._context = build("ours", settings, rung=rung), context
        generator = torch.Generator().manual_seed(1)
        shape = 2, settings.batch, settings.context
        self.ids, self.targets = torch.randint(256, shape, generator=generator).to(settings.device)

    def forward(self):
        with self._context():
            return self.model(self.ids, self.targets)

    def both(self):
        torch.autograd.grad(self.forward(), list(self.model.parameters()))


def promises(rows):
    """The goals, as the ladder's promises stand in its JSON."""
    rows = {row["rung"]: row for row in rows}
    more, share = rows["activations"]["forward"], rows["activations"]["share_of_demo_step"]
    own, goal = more - rows[HOOKS]["forward"], f"<= {1e6 * PER_BLOCK:.0f} us"
    for what, required, measured, passed in (
        ("hooks in forward, a block, beyond torch's", goal, f"{1e6 * own:.0f} us", own <= PER_BLOCK),
        ("hooks in forward, a block, torch's included", goal, f"{1e6 * more:.0f} us", more <= PER_BLOCK),
        ("hooks, of a demo step", f"<= {SHARE:.0%}", f"{share:.2%}", share <= SHARE),
    ):
        yield {"provider": "activations", "what": what, "required": required, "measured": measured, "passed": passed}


def table(rows):
    title = f"the engine's own cost, a block; a step of the demo takes {1e3 * rows[0]['demo_step']:.0f} ms"
    table = Table(title=title, caption=CAPTION.format(**NARROW), caption_justify="left")
    for column in ("rung", "forward", "backward", "share"):
        table.add_column(column, justify="right" if column != "rung" else "left")
    for row in rows:
        microseconds = (f"{1e6 * row[key]:.0f} us" for key in ("forward", "backward"))
        table.add_row(row["rung"], *microseconds, f"{row['share_of_demo_step']:.2%}")
    return table
