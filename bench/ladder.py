"""python -m bench ladder: what GPT blocks keep and take at every rung of ckpt_ops.regenerate, beside torch's layers."""

import argparse
import pathlib
import warnings
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint

import ckpt_ops
from ckpt_ops import dispatch, memory
from ckpt_ops.demo import torch_layers
from ckpt_ops.demo.model import Block
from ckpt_ops.machine import cores

from . import engine_cost, ladder_layers, ladder_report, machine, report, timing

TORCH, CHECKPOINT = "torch", "torch + checkpoint"
PROVIDERS = (*ckpt_ops.RUNGS, TORCH, CHECKPOINT)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALL = {"tokens": 32, "hidden": 32, "heads": 2, "blocks": 2}


@dataclass(frozen=True)
class Size:
    """Of blocks: [batch, tokens, hidden] is the residual stream."""

    tokens: int = 1024
    hidden: int = 1024
    heads: int = 16
    batch: int = 1
    blocks: int = 2
    dtype: str = "float32"

    @property
    def elements(self):
        """Of the residual streams of all blocks: what bytes are counted against."""
        return self.batch * self.tokens * self.hidden * self.blocks


def parser():
    default = Size()
    parents = [machine.allocator_options()]
    p = argparse.ArgumentParser("python -m bench ladder", description=__doc__.partition(": ")[2], parents=parents)
    p.add_argument("--dropout", type=float, help="only this drop probability (default: 0 and 0.1)")
    for name in ("tokens", "hidden", "heads", "batch", "blocks"):
        p.add_argument(f"--{name}", type=int, default=getattr(default, name), help="(default: %(default)s)")
    p.add_argument("--dtype", choices=DTYPES, default=default.dtype)
    p.add_argument("--small", action="store_true", help="a size that runs in milliseconds, for a try")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--threads", type=int, default=min(2, cores()), help="of the CPU (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=9, help="timed steps of each, in turn (default: %(default)s)")
    p.add_argument("--engine-calls", type=int, default=300, help="of the engine's own cost (default: %(default)s)")
    p.add_argument("--out", default="bench_output", metavar="FOLDER", help="for JSON and picture (default: %(default)s)")
    p.add_argument("--plot", metavar="JSON", help="only draw the picture of an earlier run")
    return p


def main(arguments):
    options = parser().parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if options.plot:
        path = pathlib.Path(options.plot)
        ladder_report.draw(report.read(path), path.with_suffix(".png"))
        return
    warnings.filterwarnings("ignore", message="ckpt_ops runs on its slower reference backend")  # the table names the backend
    doc = measure(options, lambda text: console.print(text, style="dim"))
    for table in ladder_report.tables(doc):
        console.print(table)
    path = ladder_report.write(doc, options.out)
    ladder_report.draw(doc, path.with_suffix(".png"))
    console.print(f"wrote {path} and {path.with_suffix('.png')}", style="dim")


def measure(options, say=lambda text: None):
    """Measures all providers at each drop probability; returns the document."""
    chosen = {name: getattr(options, name) for name in Size.__dataclass_fields__}
    size = Size(**{**chosen, **(SMALL if options.small else {})})
    torch.set_num_threads(options.threads)
    facts = machine.facts(options.device)
    say(machine.line(facts))
    rows, layers = [], []
    for dropout in (0.0, 0.1) if options.dropout is None else (options.dropout,):
        say(f"dropout {dropout:g}: {options.rounds} rounds of {', '.join(PROVIDERS)}")
        rows += run(size, dropout, options.device, options.rounds)
        layers += layers_of_torch(size, dropout, options.device)
    say("the engine's own cost")
    engine = engine_cost.measure(options.device, options.engine_calls)
    backend = dispatch.choose("attention", None, torch.empty(0, dtype=DTYPES[size.dtype], device=options.device))
    doc = {"machine": facts, "backend": backend, "size": asdict(size), "rows": rows, "layers": layers, "engine": engine}
    return {**doc, "must_show": ladder_report.must_show(doc, timed=not options.small)}


def run(size, dropout, device, rounds):
    """A row a provider: plain dictionaries, as they stand in the JSON."""
    contenders = {name: _Contender(build(name, size, dropout, device), size, device) for name in PROVIDERS}
    rows = {name: {"provider": name, "dropout": dropout, **_kept(c, size)} for name, c in contenders.items()}
    _compare_gradients(contenders, rows)
    times = timing.interleaved(
        {name: c.step for name, c in contenders.items()}, timing.stopwatch(device), warmup=1, min_time=0, min_calls=rounds
    )
    for name, row in rows.items():
        row |= asdict(times[name])
        row["ratio_to_store"] = times[name].p50 / times["store"].p50
    return list(rows.values())


def layers_of_torch(size, dropout, device):
    """A row a rung: torch's encoder layers, replaced and regenerated. Bytes and numerics, not timed."""
    contenders = {
        rung: _Contender(ladder_layers.build(size, dropout, device, DTYPES[size.dtype], rung), size, device)
        for rung in ckpt_ops.RUNGS
    }
    x, dy = contenders["store"].x, contenders["store"].dy
    expected = ladder_layers.Expected(size, dropout, x, dy)
    results = {rung: ladder_layers.results(c.model, x, dy) for rung, c in contenders.items()}
    rows = []
    for rung, ours in results.items():
        worst, share = expected.worst(ours)
        same = all(torch.equal(value, results["store"][name]) for name, value in ours.items())
        row = {"provider": rung, "dropout": dropout, **_kept(contenders[rung], size), "gradients_of": "store"}
        rows.append({**row, "same_gradients": same, "worst": worst, "share_of_allowed_error": share})
    return rows


def build(name, size, dropout, device):
    """Blocks with the same weights for every provider."""
    torch.manual_seed(1)
    layers = torch_layers if name in (TORCH, CHECKPOINT) else ckpt_ops.nn
    blocks = [Block(layers, size.hidden, size.heads, dropout) for _ in range(size.blocks)]
    model = nn.Sequential(*(map(_Checkpointed, blocks) if name == CHECKPOINT else blocks)).to(device, DTYPES[size.dtype])
    if name in ckpt_ops.RUNGS:
        ckpt_ops.regenerate(model, name)
    return model


class _Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class _Contender:
    """Blocks, and the input and output gradient that all of them get."""

    def __init__(self, model, size, device):
        self.model = model
        generator = torch.Generator().manual_seed(2)
        shape = size.batch, size.tokens, size.hidden
        x, self.dy = (torch.randn(shape, generator=generator).to(device, DTYPES[size.dtype]) for _ in range(2))
        self.x = x.requires_grad_()

    def step(self):
        """A forward and backward, always with the same seeds. Returns the gradients, the input's first."""
        torch.manual_seed(3)
        return torch.autograd.grad(self.model(self.x), [self.x, *self.model.parameters()], self.dy)


def _kept(contender, size):
    """What autograd keeps, and how much of it are statistics: storages smaller than a residual stream.

    Per token and hidden column also as if values had 16 bits; statistics are in float32 either way.
    """
    x = contender.x
    kept = memory.kept(lambda model, x: model(x).detach(), contender.model, x)
    statistics = sum(row.bytes for row in kept.rows if not row.parameter and row.bytes < x.nbytes)
    return {
        "kept_bytes": kept.bytes,
        "statistics_bytes": statistics,
        "kept_16bit": ((kept.bytes - statistics) / x.itemsize * 2 + statistics) / size.elements,
        "statistics_16bit": statistics / size.elements,
    }


def _compare_gradients(contenders, rows):
    """same_gradients: whether they equal, to the bit, a run of store's (for rungs) or of torch's own (for its checkpoint)."""
    for base in ("store", TORCH):
        family = (TORCH, CHECKPOINT) if base == TORCH else ckpt_ops.RUNGS
        expected = contenders[base].step()
        for name in family:
            same = map(torch.equal, contenders[name].step(), expected)
            rows[name] |= {"gradients_of": base, "same_gradients": all(same)}
