"""Where and when a table was measured."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys

import torch

from ckpt_ops import native

THP = "THP_MEM_ALLOC_ENABLE"  # set: torch asks for huge pages for every CPU tensor of 2 MiB and more


def facts(device):
    """{label: text}, the same for every row of a run."""
    return {
        "machine": f"{_cpu()}, {cores()} cores" + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "torch's instruction set": torch.backends.cpu.get_cpu_capability(),
        "cpu kernels": native.status(),
        "huge pages for torch's tensors": "on" if huge_pages() else "off",
        "system's huge pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load before": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",  # others' work on the cores
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def line(machine):
    """The facts as one line under a table."""
    return " | ".join(f"{label} {value}" if label != "machine" else value for label, value in machine.items())


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def huge_pages():
    """Whether torch's CPU allocator asks for huge pages in this process."""
    return os.environ.get(THP) == "1"


def restart_with_huge_pages(arguments):
    """Runs this command line again in place of this process, with torch's allocator asking for huge pages."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "bench", *(sys.argv[1:] if arguments is None else arguments)]
    os.execve(sys.executable, command, {**os.environ, THP: "1"})


def _cpu():
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for entry in info.read_text().splitlines():
            if entry.startswith("model name"):
                return entry.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _chosen(path):
    """The bracketed word of a kernel setting, e.g. "always [madvise] never"."""
    file = pathlib.Path(path)
    return file.read_text().partition("[")[2].partition("]")[0] if file.exists() else "unknown"


def _commit():
    if shutil.which("git") is None:
        return "unknown"

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True).stdout

    return git("rev-parse", "--short", "HEAD").strip() + ("+changes" if git("status", "--porcelain", "-uno") else "")
