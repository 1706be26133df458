"""Fresh environments, and clones with one kernel: enough to prove each way to install, at a tenth of the compile time."""

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from helpers_install import run

ROOT = Path(__file__).parents[2]
ONE_KERNEL = ("dropout.cpp", "fresh.cpp")


@pytest.fixture(scope="session")
def new_venv(tmp_path_factory):
    """Makes an environment that sees this one's torch, but not its ckpt_ops: .pth files work in its own folder only."""

    def make(name):
        folder = tmp_path_factory.mktemp(name)
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)], cwd=folder)
        python = folder / "bin" / "python"
        own = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], cwd=folder).stdout.strip()
        (Path(own) / "torch_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return python

    return make


@pytest.fixture(scope="session")
def new_clone(tmp_path_factory):
    """Makes a copy of the sources, with one kernel and nothing built."""

    def make(name):
        folder = tmp_path_factory.mktemp(name) / "ckpt_ops"
        folder.mkdir()
        built = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.json")
        for part in ("ckpt_ops", "csrc", "triton_kernels"):
            shutil.copytree(ROOT / part, folder / part, ignore=built)
        for part in ("setup.py", "pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / part, folder)
        (folder / "README.md").write_text("A clone for tests.\n")
        for source in (folder / "csrc" / "cpu").glob("*.cpp"):
            if source.name not in ONE_KERNEL:
                source.unlink()
        return folder

    return make


@pytest.fixture(scope="session")
def bare(new_venv):
    """An environment with torch and nothing of ours: for clones that run without install."""
    return new_venv("bare")
