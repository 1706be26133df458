"""What the extension is compiled from, and with which flags: ahead of time by setup.py, on first use by native.py.

The same sources are compiled once per instruction set, into a library each. Standard library only: setup.py runs
this file where torch and the package cannot be imported.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_PACKAGE = Path(__file__).parent

# Best first. No -march=native anywhere: what one machine builds must run on another.
VARIANTS = {"default": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS = {"avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"], "default": []}


def source_folder():
    """csrc: inside an installed package, beside the package in a clone."""
    installed = _PACKAGE / "csrc"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc"


def sources():
    """Every .cpp of the extension, sorted, so that a build is the same everywhere."""
    folder = source_folder()
    return sorted(path for part in ("autograd", "common", "cpu") for path in folder.glob(f"{part}/*.cpp"))


def headers():
    return sorted(source_folder().glob("*/*.h"))


def compile_flags(variant):
    """Flags beyond those that torch.utils.cpp_extension adds (-std, include folders of torch)."""
    if sanitizer := os.environ.get("CKPT_OPS_SANITIZE"):
        level = [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", "-O1", "-g"]
    else:
        level = ["-O3", "-g0"]  # Python's own flags ask for -g: a fifth more time and 15 times the size
    return [*level, "-fvisibility=hidden", "-Wno-psabi", f"-DCKPT_OPS_ISA={variant}", *VARIANTS[variant], *_openmp()]


def link_flags():
    sanitizer = os.environ.get("CKPT_OPS_SANITIZE")
    return [*_openmp(), *([f"-fsanitize={sanitizer}"] if sanitizer else [])]


def _openmp():
    # at::parallel_for is a header: without this it would silently be serial. Apple's clang has no -fopenmp.
    return ["-fopenmp"] if sys.platform == "linux" else []


def fingerprint(variant):
    """16 hex digits that change with any source, header or flag."""
    digest = hashlib.sha256(repr((compile_flags(variant), link_flags())).encode())
    for path in [*sources(), *headers()]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler():
    """The C++ compiler command that torch.utils.cpp_extension will run."""
    return os.environ.get("CXX", "c++")


def compiler_problem():
    """Why no extension can be compiled here, or None."""
    if sys.platform == "win32":
        return "the kernels need GCC's or Clang's vector extensions, which the compiler for Windows lacks"
    for variable, command in ("CXX", compiler()), ("CC", os.environ.get("CC", "")):
        if command and not _runs(shlex.split(command)):
            set_by = f" (from {variable})" if variable in os.environ else ""
            return f"no C++ compiler: {command!r}{set_by} does not run"
    return None


def _runs(command):
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0


def first_error(text):
    """The line of a compiler's output that matters."""
    lines = text.strip().splitlines() or [text]
    return next((line for line in lines if "error:" in line), lines[0])


def say(text):
    """At once, on stderr."""
    sys.stderr.write(text)
    sys.stderr.flush()


@contextlib.contextmanager
def scripts_on_path():
    """Adds this Python's scripts folder to PATH: there lies the ninja that pip installed, venv active or not."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join(filter(None, [before, sysconfig.get_path("scripts")]))
    try:
        yield
    finally:
        os.environ["PATH"] = before
