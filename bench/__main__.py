"""python -m bench: every op beside what it replaces."""

import argparse
import os
import pathlib
import sys
import time
import warnings

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ckpt_ops.machine import cores

from . import cases, ladder, machine, must_show, plots, providers, report, runner, traffic, triton_resources

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler behind the peak column announces every start
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
OTHERS = (
    "`python -m bench ladder` measures whole blocks at every rung of ckpt_ops.regenerate; `python -m bench triton` compiles "
    "the Triton kernels and tells their registers, spills and shared memory. Each has a --help of its own."
)


def parser():
    p = argparse.ArgumentParser(
        "python -m bench",
        description="Measures every op beside torch and other packages.",
        epilog=OTHERS,
        parents=[machine.allocator_options()],
    )
    p.add_argument("--must-show", action="store_true", help="only the promised figures (float32, large shapes)")
    p.add_argument("--case", metavar="SUBSTRING", help="only cases whose name contains this")
    p.add_argument("--without", metavar="SUBSTRING", help="only cases whose name does not contain this")
    size = p.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="only small shapes")
    size.add_argument("--large", action="store_true", help="only large shapes")
    size.add_argument("--gpu", action="store_true", help="only shapes that fill a GPU (try --dtype bfloat16)")
    p.add_argument("--dtype", choices=DTYPES, default="float32")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--threads", type=int, default=min(2, cores()), help="of the CPU (default: %(default)s)")
    p.add_argument("--min-time", type=float, metavar="S", help="seconds to spend on each provider and mode of a case")
    p.add_argument(
        "--providers", metavar="A,B", help=f"default: {','.join(providers.DEFAULT)}; also reference, ours:NAME, ours:all"
    )
    p.add_argument(
        "--out", default="bench_output", metavar="FOLDER", help="for JSON, markdown and plots (default: %(default)s)"
    )
    p.add_argument("--plot", metavar="JSON", help="only draw the plots of an earlier run")
    return p


def selected(options):
    """The cases that the options ask for."""
    dtype = DTYPES[options.dtype]
    if options.must_show:
        chosen = must_show.needed_cases()
    elif options.gpu:
        chosen = cases.gpu(dtype)
    else:
        chosen = ([] if options.large else cases.small(dtype)) + ([] if options.small else cases.large(dtype))
    unwanted = options.without or "\0"
    return [case for case in chosen if (options.case or "") in case.name and unwanted not in case.name]


def measure(options, console):
    """Runs the selected cases; returns the document."""
    names = options.providers.split(",") if options.providers else providers.DEFAULT
    found, absent = providers.providers(names)
    for name, reason in absent.items():
        console.print(f"left out: {name} ({reason})", style="dim")
    torch.set_num_threads(options.threads)
    copy_bandwidth = traffic.copy_bandwidth(options.device)
    facts = machine.facts(options.device)
    if torch.device(options.device).type == "cuda":
        facts["bfloat16 matmul"] = f"{traffic.matmul_rate(options.device) / 1e12:.0f} TFLOP/s"
    console.print(machine.line(facts), style="dim")
    chosen = selected(options)
    min_time = options.min_time or (1.0 if options.must_show else 0.15)
    bar = Progress(
        TextColumn("{task.description:<48}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    rows = []
    with bar:
        task = bar.add_task("", total=len(chosen))
        for case in chosen:
            wanted = must_show.needed_providers(case) if options.must_show else None
            rows += runner.run_case(
                case,
                [p for p in found if wanted is None or p.name in wanted],
                options.device,
                copy_bandwidth=copy_bandwidth,
                modes=(runner.BOTH,) if options.must_show else runner.MODES,
                progress=lambda text: bar.update(task, description=text),
                min_time=min_time,
                warmup=2 if options.must_show else 1,  # on top of the calls that count bytes
                min_calls=7 if options.must_show else 3,
            )
            bar.advance(task)
    return report.document(facts, copy_bandwidth, rows, absent)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["ladder"]:
        ladder.main(arguments[1:])
        return
    if arguments[:1] == ["triton"]:
        triton_resources.main(arguments[1:])
        return
    options = parser().parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=220)
    if options.plot:
        _say_written(console, plots.draw(report.read(options.plot), options.plot))
        return
    if not selected(options):
        raise SystemExit(f"no case's name contains {options.case!r}")
    warnings.filterwarnings("ignore", message="ckpt_ops runs on its slower reference backend")  # the table names the backend
    started = time.perf_counter()
    doc = measure(options, console)
    for table in (*report.tables(doc), report.must_show_table(doc)):
        if table is not None:
            console.print(table)
    stem = ("must_show" if options.must_show else "bench") + ("_huge_pages" if options.huge_pages else "")
    path = report.write(doc, options.out, stem)
    console.print(f"{len(doc['rows'])} rows in {time.perf_counter() - started:.0f} s")
    _say_written(console, [path, path.with_suffix(".md"), *plots.draw(doc, path)])


def _say_written(console, paths):
    for path in paths:
        console.print(f"wrote {pathlib.Path(path)}", style="dim")


if __name__ == "__main__":
    machine.settle(sys.argv[1:])
    main()
