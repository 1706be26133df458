"""Where and when a table was measured: ckpt_ops.machine, and what else bears on a benchmark."""

import datetime
import importlib.metadata
import os
import pathlib
import sys

import torch

from ckpt_ops import native
from ckpt_ops.machine import commit, cores, gpu, processor

THP = "THP_MEM_ALLOC_ENABLE"  # set: torch asks for huge pages for every CPU tensor of 2 MiB and more


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
        "huge pages for torch's tensors": "on" if huge_pages() else "off",
        "system's huge pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load before": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",  # others' work on the cores
        "commit": commit() or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def line(machine):
    """The facts as one line under a table."""
    return " | ".join(f"{label} {value}" if label != "machine" else value for label, value in machine.items())


def huge_pages():
    """Whether torch's CPU allocator asks for huge pages in this process."""
    return os.environ.get(THP) == "1"


def restart_with_huge_pages(arguments):
    """Runs this command line again in place of this process, with torch's allocator asking for huge pages."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "bench", *(sys.argv[1:] if arguments is None else arguments)]
    os.execve(sys.executable, command, {**os.environ, THP: "1"})


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _chosen(path):
    """The bracketed word of a kernel setting, e.g. "always [madvise] never"."""
    file = pathlib.Path(path)
    return file.read_text().partition("[")[2].partition("]")[0] if file.exists() else "unknown"
