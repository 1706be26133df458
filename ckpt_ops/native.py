"""Finds, loads or compiles the C++ extension, and says why there is none.

A library that was built ahead of time for this very torch is loaded with the package. Otherwise the sources that
travel with the package are compiled when an op first asks (CKPT_OPS_JIT=0 forbids it). Exactly one library is loaded:
all of them register kernels for the same ops.

    CKPT_OPS_ISA=avx2|default   takes this instruction set, and no other
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import torch

from . import _compile
from .library import constant_under_compile

_PACKAGE = Path(__file__).parent

_extension = None  # the loaded module
_reason = None  # why there is none, once that is settled
_settled = False
_lock = threading.Lock()


@constant_under_compile
def why_not():
    """Why no native kernel can run in this process, or None. The first call compiles them, if that is what it takes."""
    if not _settled:
        _settle()
    return _reason


def extension():
    """The loaded extension module (build_info, instruction_set, philox), or None."""
    return None if why_not() else _extension


def loaded():
    """The extension module if it is there by now, or None. Never compiles."""
    return _extension


def status():
    """What `why_not` would find, in words. Never compiles."""
    if _extension is not None:
        info = _extension.build_info()
        return f"compiled for torch {info['torch']}, {info['isa']}"
    if _settled:
        return _reason
    problem = _jit_problem()
    return _both(problem) if problem else f"will be compiled on first use ({_prebuilt_problem})"


def instruction_sets():
    """Those this process may use, best first. ValueError if CKPT_OPS_ISA asks for one that cannot be had."""
    able = ["default"]
    if "avx2" in _compile.VARIANTS and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        able.insert(0, "avx2")
    forced = os.environ.get("CKPT_OPS_ISA")
    if not forced:
        return able
    if forced not in able:
        raise ValueError(f"CKPT_OPS_ISA={forced} cannot be had; this machine can run {' and '.join(able)}")
    return [forced]


def _load_prebuilt():
    """Loads the best library built ahead of time. Returns why that was not possible, or None."""
    try:
        info = json.loads((_PACKAGE / "_build_info.json").read_text())
    except FileNotFoundError:
        return "no extension was built ahead of time"
    if info["torch"] != torch.__version__:  # compared before loading: a foreign library may crash rather than raise
        return f"the extension was built for torch {info['torch']} and this is torch {torch.__version__}"
    try:
        wanted = instruction_sets()
    except ValueError as error:
        return str(error)
    variant = next((name for name in wanted if name in info["variants"]), None)
    if variant is None:
        return f"the extension was built for {' and '.join(info['variants'])} alone, not for {' or '.join(wanted)}"
    try:
        _load(f"_C_{variant}", _PACKAGE / info["variants"][variant]["file"])
    except (ImportError, OSError) as error:
        return f"the extension cannot be loaded ({error})"
    return None


def _load(name, path):
    """Imports a library, which registers its kernels, and publishes it as ckpt_ops._C too."""
    spec = importlib.util.spec_from_file_location(f"{__package__}.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _publish(module)


def _publish(module):
    global _extension, _settled
    _extension = sys.modules[f"{__package__}._C"] = module
    _settled = True


def _settle():
    """Compiles and loads, or records for good why not."""
    global _reason, _settled
    with _lock:
        if _settled:  # by another thread, while this one waited
            return
        if problem := _jit_problem() or _compile_on_first_use():
            _reason = _both(problem)
        _settled = True


@functools.cache
def _jit_problem():
    """Why nothing can be compiled on first use here, or None."""
    if os.environ.get("CKPT_OPS_JIT") == "0":
        return "CKPT_OPS_JIT=0 forbids compiling it on first use"
    try:
        instruction_sets()
    except ValueError as error:
        return str(error)
    if not _compile.sources():
        return f"there are no sources in {_compile.source_folder()} to compile on first use"
    if problem := _compile.compiler_problem():
        return f"it cannot be compiled on first use: {problem}"
    with _compile.scripts_on_path():
        if shutil.which("ninja") is None:
            return "it cannot be compiled on first use without ninja (pip install ninja)"
    return None


def _compile_on_first_use():
    """Compiles the best variant into torch's extension cache, once a machine. Returns what went wrong, or None."""
    try:
        from torch.utils import cpp_extension  # slow to import, and needs setuptools
    except ImportError as error:
        return f"it cannot be compiled on first use: {error}"
    variant = instruction_sets()[0]
    name = re.sub(r"\W", "_", f"ckpt_ops_{variant}_{torch.__version__}_{_compile.fingerprint(variant)}")
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    if fresh := not (folder / f"{name}.so").exists():
        _compile.say(f"ckpt_ops: compiling its CPU kernels ({variant}) for torch {torch.__version__}, once, into {folder} ... ")
        if (lock := folder / "lock").exists():
            _compile.say(f"waiting for the process that holds {lock} (delete it if there is none) ... ")
    start = time.monotonic()
    try:
        with _compile.scripts_on_path():
            module = cpp_extension.load(
                name,
                [str(path) for path in _compile.sources()],
                extra_cflags=_compile.compile_flags(variant),
                extra_ldflags=_compile.link_flags(),
                extra_include_paths=[str(_compile.source_folder())],
            )
    except (RuntimeError, ImportError, OSError) as error:
        if fresh:
            _compile.say("failed\n")
        return f"compiling it on first use failed: {_compile.first_error(str(error))}"
    if fresh:
        _compile.say(f"{time.monotonic() - start:.0f} s\n")
    _publish(module)
    return None


def _both(problem):
    """Why no library built ahead of time serves, and why none is compiled now: once where it is the same."""
    return problem if problem == _prebuilt_problem else f"{_prebuilt_problem}; {problem}"


_prebuilt_problem = _load_prebuilt()
