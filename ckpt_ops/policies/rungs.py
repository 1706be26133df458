"""`regenerate(model, rung)`: gives a model's saved tensors their fate, block by block.

A rung is a set of a block's modules whose outputs are made again in backward instead of being kept:

    store        nothing
    norms        norms
    activations  norms, activations
    mlp          norms, activations, the MLP's first projection(s)
    qkv          norms, activations, the MLP's first projection(s), the query, key and value projection(s)
    block        the whole block: a checkpoint
"""

import contextlib
from dataclasses import dataclass, field

from torch import nn

from ..memory import kept
from ..saved.accepts import Accepts, call_for
from ..saved.engine import new_engine
from ..saved.scope import entered, wanted
from ..saved.verify import current_verifier
from .checkpoint import CheckpointedForward, caches_off, refuse_checkpointed
from .find import find_blocks
from .forwards import WrappedForward
from .module_hooks import Registers

RUNGS = ("store", "norms", "activations", "mlp", "qkv", "block")
_KINDS = ("norms", "activations", "mlp", "qkv")


def regenerate(model, rung="activations", *, modules=()):
    """Makes the model keep less: outputs of chosen modules are made again in backward, bit for bit.

    Args:
        model: any nn.Module. Its repeated blocks, and in them norms, activations, MLP and qkv projections, are found by
            structure; `report()` says what was found.
        rung: one of RUNGS for all blocks, or a dict {block name: rung} (blocks left out are at "store").
        modules: names of more modules (as in model.named_modules()) whose outputs are regenerated, whatever they are.

    A module whose output cannot be made again (it draws unseeded randomness, changes its state, works in place, ...) is
    left alone, with the reason in the report. Without a recorded graph (no_grad, inference_mode) nothing happens.

    Returns: `Regenerated`, with report() and remove().
    Raises: ValueError for an unknown rung, block or module name, or where the model is regenerated already.
    """
    if isinstance(vars(model).get("forward"), _Regenerating):
        raise ValueError("regenerate: this model is regenerated already; call remove() on the handle it gave first")
    blocks = find_blocks(model)
    rungs = _rung_of_each(blocks, rung)
    if "block" in rungs.values():
        refuse_checkpointed(model, [block.module for block in blocks if rungs[block.name] == "block"])
    named = dict(model.named_modules())
    if unknown := [name for name in modules if name not in named]:
        raise ValueError(f"regenerate: the model has no module named {', '.join(map(repr, unknown))}")
    return Regenerated(model, blocks, rungs, {name: named[name] for name in modules})


def _rung_of_each(blocks, rung):
    names = [block.name for block in blocks]
    rungs = dict.fromkeys(names, rung) if isinstance(rung, str) else {**dict.fromkeys(names, "store"), **rung}
    if unknown := set(rungs) - set(names):
        raise ValueError(
            f"regenerate: no block named {', '.join(map(repr, sorted(unknown)))}; found {', '.join(map(repr, names))}"
        )
    for name in rungs.values():
        if name not in RUNGS:
            raise ValueError(f"regenerate: unknown rung {name!r}; choose one of {', '.join(RUNGS)}")
    return rungs


class _Regenerating(WrappedForward):
    """The model's forward, with an engine for each call that records a graph.

    needed: whether any module registers; at rungs store and block none does, and there is no engine to pay for.
    recomputed: whether blocks are checkpointed.
    """

    def __init__(self, model):
        super().__init__(model)
        self.needed = self.recomputed = False
        self.refused = {}

    def around(self, module, forward, args, kwargs):
        with caches_off(module) if self.recomputed else contextlib.nullcontext():
            if not self.needed or not wanted():
                return forward(*args, **kwargs)
            engine = new_engine(accepts=False, verifier=current_verifier())
            self.refused = engine.refused
            with entered(engine):
                return call_for(module, forward, *args, **kwargs)


@dataclass
class BlockReport:
    """One block: its rung, what is regenerated, what is left alone and why, and (once measured) the bytes it keeps."""

    name: str
    rung: str
    regenerated: list = field(default_factory=list)  # module names
    left: dict = field(default_factory=dict)  # module name -> why its output is kept after all
    notes: list = field(default_factory=list)  # what was looked for and not found


class Regenerated:
    """What `regenerate` returns."""

    def __init__(self, model, blocks, rungs, modules):
        self.model, self._rungs, self._blocks = model, rungs, blocks
        self._handles, self._registers, self._hooks = [], {}, {}
        checkpointed = [CheckpointedForward(block.module) for block in blocks if rungs[block.name] == "block"]
        self._forward = _Regenerating(model)
        for block in blocks:
            if rungs[block.name] == "block":
                continue
            for kind in _KINDS[: RUNGS.index(rungs[block.name])]:
                for name, module in getattr(block, kind):
                    self._add(name, module)
        for name, module in modules.items():
            self._add(name, module)
        self._forward.needed, self._forward.recomputed = bool(self._registers), bool(checkpointed)
        self._handles += [self._forward, *checkpointed]

    def _add(self, name, module):
        if name in self._registers:
            return
        hooks = self._hooks.get(module)  # it may go by several names
        if hooks is None:
            hooks = self._hooks[module] = (Accepts if is_ours(module) else Registers)(name)
            self._handles += hooks.install(module)
        self._registers[name] = hooks

    def report(self, *args, **kwargs):
        """What is regenerated, block by block; printable. With the model's arguments: also the bytes it keeps, measured."""
        rows = []
        for block in self._blocks:
            rung = self._rungs[block.name]
            row = BlockReport(block.name or "(the model)", rung, notes=list(block.notes))
            for kind in _KINDS[: RUNGS.index(rung)] if rung != "block" else ():
                for name, _ in getattr(block, kind):
                    if reason := self._reason(name):
                        row.left[name] = reason
                    else:
                        row.regenerated.append(name)
            rows.append(row)
        in_blocks = {name for row in rows for name in (*row.regenerated, *row.left)}
        more = BlockReport("(named modules)", "-")
        for name in self._registers:
            if name not in in_blocks:
                if reason := self._reason(name):
                    more.left[name] = reason
                else:
                    more.regenerated.append(name)
        measured = kept(self.model, *args, **kwargs) if args or kwargs else None
        return Report([*rows, more] if more.regenerated or more.left else rows, measured)

    def _reason(self, name):
        """Why the module's output is kept after all, or None."""
        hooks = self._registers[name]
        return hooks.refused or self._forward.refused.get(hooks.name)

    def remove(self):
        """Takes all hooks away and gives checkpointed blocks their own forward back."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._forward.needed, self._forward.recomputed = [], False, False


@dataclass
class Report:
    """`blocks`: a BlockReport each.  `kept`: ckpt_ops.memory.Kept of one forward, or None."""

    blocks: list
    kept: object = None

    def __str__(self):
        lines = []
        for block in self.blocks:
            lines.append(f"{block.name}  [{block.rung}]")
            if block.regenerated:
                lines.append(f"    regenerated: {', '.join(block.regenerated)}")
            lines += [f"    kept: {name}: {reason}" for name, reason in block.left.items()]
            lines += [f"    {note}" for note in block.notes]
        if self.kept is not None:
            lines.append(f"{self.kept.bytes:,} bytes kept for backward (and {self.kept.parameter_bytes:,} in parameters)")
        return "\n".join(lines)


def is_ours(module):
    """A module of this package registers its outputs itself, with a better recipe than calling it again."""
    return type(module).__module__.startswith("ckpt_ops.nn") and not isinstance(module, nn.Linear)
