"""The demo in order: data, training of every variant, exactness, report."""

import gc
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import data, ladder, ladder_picture, picture, report, training
from .variants import VARIANTS


def run(settings):
    """Runs the demo with checked `Settings`. Prints the report, writes pictures and demo.json, returns the JSON's content."""
    console = Console()
    with _threads(settings.threads):
        text = data.load(settings.text)
        batches = data.batches(text, settings.batch, settings.context, settings.steps, settings.seed)
        report.print_heading(console, settings, text)
        with _progress(console) as progress:
            results = [_train(name, settings, batches, progress) for name in settings.variants]
            exactness = _exactness(settings, text, progress) if "ours" in settings.variants else None
            rungs = _sweep(settings, batches, progress) if settings.ladder else []
        content = report.content(settings, results, exactness, rungs)
        written = _write(settings, results, rungs, content)
    report.print_results(console, settings, results, exactness, rungs, written)
    return content


def _train(name, settings, batches, progress):
    advance = _bar(progress, VARIANTS[name].title, settings.steps)
    gc.collect()  # the variant before has left nothing
    return training.train(name, settings, batches, advance)


def _sweep(settings, batches, progress):
    gc.collect()
    return ladder.sweep(settings, batches, _bar(progress, "the ladder of rungs", ladder.ROUNDS * len(ladder.RUNGS)))


def _write(settings, results, rungs, content):
    """Writes pictures and JSON; returns the paths, the JSON last."""
    settings.out.mkdir(parents=True, exist_ok=True)
    pictures = [settings.out / "demo.png"]
    picture.save(pictures[0], results, report.caption(settings))
    if rungs:
        pictures.append(settings.out / "ladder.png")
        ladder_picture.save(pictures[1], rungs, [r for r in results if r.name in ladder.BACKGROUND], report.caption(settings))
    report.save(settings.out / "demo.json", content)
    return *pictures, settings.out / "demo.json"


def _exactness(settings, text, progress):
    if training.serving_backend(settings) == "reference":
        return None  # nothing to compare: ours ran on it
    advance = _bar(progress, "exactness, against plain torch", 2 * min(training.EXACT_STEPS, settings.steps))
    return training.exactness(settings, text, advance)


def _bar(progress, title, steps):
    task = progress.add_task(title, total=steps)
    return lambda: progress.advance(task)


def _progress(console):
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


@contextmanager
def _threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
