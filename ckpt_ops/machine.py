"""Where and with what a figure was measured."""

import os
import platform
import subprocess
from pathlib import Path

import torch

from . import __version__

_PACKAGE = Path(__file__).resolve().parent


def machine():
    """Processor, system and versions, as JSON takes them."""
    return {
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ckpt_ops": __version__,
        "commit": commit(),
    }


def processor():
    """The processor's marketing name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # no /proc: macOS, Windows
        pass
    return platform.processor() or platform.machine()


def cores():
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def gpu():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def commit():
    """The commit of a checkout, "-dirty" where tracked files changed; None for an installed package."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git("describe", "--always", "--dirty", "--exclude=*")


def _git(*arguments):
    try:
        done = subprocess.run(["git", "-C", _PACKAGE, *arguments], capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() if done.returncode == 0 else None
