"""The CUDA kernels on the CPU, as backend "cuda-host": csrc/cuda/*.cu compiled by g++ with tests/cuda_host in place of CUDA.

Only headers of CUDA are needed: the toolkit's, or those of the nvidia-cuda-runtime wheel.

    CKPT_CUDA_HOST_BUILD=values|asan|race    plain; address and undefined-behaviour sanitizers; a checker of data races
    CKPT_CUDA_HOST_ORDER=forward|reverse|random    of blocks, warps and lanes
    CKPT_CUDA_HOST_LIBRARY=FILE    a library that `build` has made
"""

import concurrent.futures
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

from ckpt_ops import dispatch, library

ROOT = Path(__file__).resolve().parent.parent
NAME, NAMESPACE = "cuda-host", "ckpt_ops_cuda_host"
RUNTIME = Path(__file__).parent / "cuda_host"

_COMMON = ["-std=c++20", "-fPIC", "-g1", "-DCKPT_CUDA_HOST", "-Wall", "-Wno-unknown-pragmas", "-Wno-psabi"]
_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
# The race checker answers the calls that -fsanitize=thread adds to the kernels; libtsan is not linked.
KERNEL_FLAGS = {"values": ["-O1"], "asan": ["-O1", *_SANITIZERS], "race": ["-O1", "-fsanitize=thread"]}
LINK_FLAGS = {"values": [], "asan": _SANITIZERS, "race": []}


def includes():
    """The folder with CUDA's headers, or None."""
    nvcc = shutil.which("nvcc")
    toolkits = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parent.parent, "/usr/local/cuda"]
    spec = importlib.util.find_spec("nvidia")
    wheels = [path for root in (spec.submodule_search_locations if spec else ()) for path in Path(root).glob("*/include")]
    folders = [*(Path(root) / "include" for root in toolkits if root), *wheels]
    needed = ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "crt/host_defines.h")
    return next((folder for folder in folders if all((folder / name).exists() for name in needed)), None)


def why_not():
    """Why the kernels cannot run here, or None."""
    if includes() is None:
        return "needs CUDA's headers: the toolkit, or pip install nvidia-cuda-runtime nvidia-cuda-crt"
    return None


def add_backend():
    """Builds the kernels, loads them and makes them a backend of this process; only says why not where it cannot."""
    reason = why_not()
    if reason is None:
        library.add_namespace(NAMESPACE)
        given = os.environ.get("CKPT_CUDA_HOST_LIBRARY")
        torch.ops.load_library(given or build(os.environ.get("CKPT_CUDA_HOST_BUILD", "values")))
    dispatch.add_backend(NAME, NAMESPACE, ("cpu",), reason=reason, lacks={"attention": "it has no attention"})


def asan_environment():
    """What loads the build with sanitizers: their run time first. torch's own leaks are not ours to report."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    paths = (_output(["g++", f"-print-file-name={name}"]) for name in names)
    return {"LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


def build(variant, planted=None, stem=None):
    """The library of a variant. An object is compiled anew where it, a header of its or a flag has changed.

    planted: another csrc, that csrc/cuda/{stem}.cu is taken from.
    """
    folder = ROOT / "build" / "cuda-host"  # of all variants: what has the same flags is compiled once
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        csrc = ROOT / "csrc" / "cuda"
        kernels, bindings = sorted(csrc.glob("*.cu")), sorted(csrc.glob("*.cpp"))
        kernels = [planted / "cuda" / path.name if planted and path.stem == stem else path for path in kernels]
        runtime = [RUNTIME / "fibres.cpp", *([RUNTIME / "race_check.cpp"] if variant == "race" else [])]
        torch_flags = [flag for path in _torch_includes() for flag in ("-isystem", path)]
        binding_flags = ["-O1", *torch_flags, *LINK_FLAGS[variant]]
        hook = ["-DCKPT_CUDA_HOST_RACE"] if variant == "race" else []
        jobs = [
            *((path, KERNEL_FLAGS[variant]) for path in kernels),
            *((path, binding_flags) for path in bindings),
            *((path, ["-O2", *hook]) for path in runtime),  # never instrumented: it switches stacks
        ]
        objects = list(pool.map(lambda job: _compile(*job, folder), jobs))
        digest = hashlib.sha256("".join(map(str, objects)).encode()).hexdigest()[:16]
        target = folder / f"kernels_{digest}.so"
        if not target.exists():
            libraries = [f"-L{path}" for path in _torch_libraries()] + ["-lc10", "-ltorch_cpu", "-ltorch"]
            _run(["g++", "-shared", *LINK_FLAGS[variant], *map(str, objects), *libraries, "-o", str(target)])
    return target


def _compile(source, flags, folder):
    command = ["g++", *_COMMON, *flags, f"-I{RUNTIME}", "-isystem", str(includes()), "-x", "c++", "-c"]
    digest = hashlib.sha256(repr((command, torch.__version__)).encode())
    for path in sorted(_closure(source, (source.parent, RUNTIME))):
        digest.update(path.read_bytes())
    target = folder / f"{source.stem}{source.suffix}_{digest.hexdigest()[:16]}.o"
    if not target.exists():
        _run([*command, str(source), "-o", f"{target}.new"])
        os.replace(f"{target}.new", target)
    return target


def _closure(source, folders, seen=None):
    """The file and every header of ours that it includes."""
    seen = set() if seen is None else seen
    seen.add(source)
    for name in re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE):
        for candidate in (source.parent / name, *(folder / name for folder in folders)):
            if candidate.exists() and candidate.resolve() not in seen:
                _closure(candidate.resolve(), folders, seen)
                break
    return seen


def _torch_includes():
    from torch.utils import cpp_extension  # slow to import

    return cpp_extension.include_paths()


def _torch_libraries():
    return [Path(torch.__file__).parent / "lib"]


def _output(command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr[-4000:]}")
