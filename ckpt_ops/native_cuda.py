"""Finds, loads or compiles the CUDA kernels, and says why there are none.

They lie in a library of their own, so that the CPU kernels need nothing of CUDA. It is loaded when a backend is first
asked for on behalf of a GPU. One that was built ahead of time for this very torch and these GPUs is taken; otherwise, where
there is a GPU, the sources that travel with the package are compiled (CKPT_OPS_JIT=0 forbids it).
"""

import json
import os
import re
import threading
import time
from pathlib import Path

import torch

from . import _compile, _compile_cuda
from .library import constant_under_compile

NO_GPU = "compiled; no GPU here"

_PACKAGE = Path(__file__).parent

_settled = False
_reason = None
_lock = threading.Lock()


@constant_under_compile
def why_not():
    """Why no CUDA kernel can run in this process, or None. The first call loads them, or compiles them for a GPU."""
    global _reason, _settled
    with _lock:
        if not _settled:
            _reason = _settle()
            _settled = True
    return _reason


def _settle():
    if torch.version.cuda is None:
        return f"no CUDA build of torch (this is torch {torch.__version__})"
    capabilities = _capabilities()
    problem = _load_prebuilt(capabilities)
    if problem is None:
        return None if capabilities else NO_GPU
    if not capabilities:
        return f"not compiled: {problem}; no GPU here to compile them for"
    if os.environ.get("CKPT_OPS_JIT") == "0":
        return f"not compiled: {problem}; CKPT_OPS_JIT=0 forbids compiling them on first use"
    failed = _compile_on_first_use(capabilities)
    return f"not compiled: {problem}; {failed}" if failed else None


def _capabilities():
    """(9, 0) for each GPU that this process sees."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


def _load_prebuilt(capabilities):
    """Loads the library built ahead of time. Returns why that was not possible, or None."""
    try:
        info = json.loads((_PACKAGE / "_build_info.json").read_text())
    except FileNotFoundError:
        return "no extension was built ahead of time"
    built = info.get("cuda", {"why_not": "the extension was built without them"})
    if reason := built.get("why_not"):
        return f"when the package was built: {reason}"
    if info["torch"] != torch.__version__:  # compared before loading: a foreign library may crash rather than raise
        return f"the extension was built for torch {info['torch']} and this is torch {torch.__version__}"
    if info.get("torch_cuda") != torch.version.cuda:
        return f"the extension was built for CUDA {info.get('torch_cuda')} and this torch is for CUDA {torch.version.cuda}"
    for major, minor in capabilities:
        if not _compile_cuda.serves(built["targets"], (major, minor)):
            return f"the extension was built for {', '.join(built['targets'])} and this GPU is sm_{major}{minor}"
    return _load(_PACKAGE / built["file"])


def _load(path):
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"the extension cannot be loaded ({error})"
    return None


def _compile_on_first_use(capabilities):
    """Compiles for the GPUs here into torch's extension cache, once a machine. Returns what went wrong, or None."""
    try:
        from torch.utils import cpp_extension  # slow to import, and needs setuptools
    except ImportError as error:
        return f"they cannot be compiled on first use: {error}"
    try:
        toolkit = _compile_cuda.find_toolkit(torch.__version__, torch.version.cuda)
        targets = _compile_cuda.targets(toolkit, capabilities=capabilities)
    except _compile_cuda.CannotCompileError as error:
        return f"they cannot be compiled on first use: {error}"
    import fcntl  # Windows has none, and got its answer above

    csrc = _compile.source_folder()
    if problem := _compile.compiler_problem() or (None if _compile_cuda.sources(csrc) else f"no CUDA sources in {csrc}"):
        return f"they cannot be compiled on first use: {problem}"
    digest = _compile_cuda.fingerprint(csrc, toolkit, targets)
    folder = Path(cpp_extension._get_build_directory(re.sub(r"\W", "_", f"ckpt_ops_cuda_{torch.__version__}_{digest}"), False))
    library = folder / "ckpt_ops_cuda.so"
    with open(folder / "compiling", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait for the process that compiles
        if not library.exists():
            try:
                _build(csrc, toolkit, targets, library)
            except (RuntimeError, OSError) as error:
                return f"compiling them on first use failed: {_compile.first_error(str(error))}"
    return _load(library)


def _build(csrc, toolkit, targets, library):
    start = time.monotonic()
    what = f"its CUDA kernels ({', '.join(targets)}) for torch {torch.__version__}"
    _compile.say(f"ckpt_ops: compiling {what}, once, into {library.parent} ... ")
    try:
        _compile_cuda.build(csrc, toolkit, targets, library, library.parent, _compile_cuda.torch_folders(), _compile.compiler())
    except RuntimeError:
        _compile.say("failed\n")
        raise
    _compile.say(f"{time.monotonic() - start:.0f} s\n")
