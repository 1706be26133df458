"""Where and when a table was measured: ckpt_ops.machine, and what else bears on a benchmark."""

import argparse
import datetime
import importlib.metadata
import os
import pathlib
import sys

import torch

from ckpt_ops import native
from ckpt_ops.machine import commit, cores, gpu, processor

# Set: torch asks for huge pages for every CPU tensor of 2 MiB and more.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
# Set: the C library keeps freed memory, large blocks too, in place of giving it back to the system. Fresh pages cost
# more than most kernels, and several times more again where a virtual machine has to ask its host for them.
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def facts(device):
    """{label: text}, the same for every row of a run."""
    return {
        "machine": ", ".join(filter(None, (processor(), f"{cores()} cores", gpu()))),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "torch's instruction set": torch.backends.cpu.get_cpu_capability(),
        "cpu kernels": native.status(),
        "freed memory": "kept by the process" if is_set(KEPT_MEMORY) else "given back to the system",
        "huge pages for torch's tensors": "on" if is_set(HUGE_PAGES) else "off",
        "system's huge pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load before": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",  # others' work on the cores
        "commit": commit() or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def line(machine):
    """The facts as one line under a table."""
    return " | ".join(f"{label} {value}" if label != "machine" else value for label, value in machine.items())


def allocator_options():
    """A parent of the parsers of all measuring commands."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--memory", choices=("kept", "system"), default="system",
        help="freed memory: kept by the process, or given back to the system (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--huge-pages", action="store_true", help="for torch's tensors too: THP_MEM_ALLOC_ENABLE=1")
    return parser


def settle(arguments):
    """Runs this command line again in place of this process, where the allocators have other settings than it asks for.

    They read them when a process starts.
    """
    options, _ = allocator_options().parse_known_args(arguments)
    asked = {**(KEPT_MEMORY if options.memory == "kept" else {}), **(HUGE_PAGES if options.huge_pages else {})}
    if not is_set(asked):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", "bench", *arguments], {**os.environ, **asked})


def is_set(settings):
    """Whether the environment of this process holds all the settings."""
    return settings.items() <= os.environ.items()


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _chosen(path):
    """The bracketed word of a kernel setting, e.g. "always [madvise] never"."""
    file = pathlib.Path(path)
    return file.read_text().partition("[")[2].partition("]")[0] if file.exists() else "unknown"
