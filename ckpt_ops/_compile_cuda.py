"""How the CUDA kernels are compiled: ahead of time by setup.py, on first use by native_cuda.py.

nvcc compiles csrc/cuda/*.cu, which know nothing of torch; the C++ compiler compiles the bindings, against torch's headers
and CUDA's. What the toolkit lacks comes from the nvidia wheels that torch brings. Nothing here asks for a GPU.
Standard library only, and alone: setup.py runs this file where torch and the package cannot be imported.
"""

import concurrent.futures
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# What the bindings include, torch's headers included. The toolkit has all of them, parts of a toolkit do not.
HEADERS = ("cuda_runtime.h", "cuda_fp16.h", "crt/host_defines.h", "cusparse.h", "cublas_v2.h", "cublasLt.h", "cusolverDn.h")
# Code for one minor version runs on the later ones too.
TARGETS = ("8.0", "9.0", "10.0", "12.0")
KERNEL_FLAGS = ("-std=c++17", "-O3")
GENERATIONS = {
    "volta": "7.0+PTX",
    "turing": "7.5+PTX",
    "ampere": "8.0;8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell": "10.0;10.3;12.0;12.1+PTX",
}


class CannotCompileError(Exception):
    """Why the CUDA kernels cannot be compiled here."""


class Toolkit(NamedTuple):
    nvcc: str
    version: str  # "13.0"
    headers: tuple  # its folders of headers
    borrowed: tuple  # those of the nvidia wheels: they fill gaps, and never come before a toolkit's own
    runtime: str  # the file of libcudart to link


def wish(environ=os.environ):
    """CKPT_OPS_CUDA: True demands the kernels, False forbids them, None takes them where they can be had."""
    text = environ.get("CKPT_OPS_CUDA", "")
    if text not in ("", "0", "1"):
        raise CannotCompileError(f"CKPT_OPS_CUDA={text} is neither 1 (demands the CUDA kernels) nor 0 (forbids them)")
    return {"": None, "0": False, "1": True}[text]


def find_toolkit(torch_version, torch_cuda, environ=os.environ, wheels=None, platform=sys.platform):
    """The toolkit that compiles for this torch. CannotCompileError says what is missing.

    torch_cuda: torch.version.cuda.  wheels: the folder of the nvidia wheels, by default that of this Python.
    """
    if wish(environ) is False:
        raise CannotCompileError("CKPT_OPS_CUDA=0 forbids them")
    if torch_cuda is None:
        raise CannotCompileError(f"no CUDA build of torch (this is torch {torch_version})")
    if platform != "linux":
        raise CannotCompileError(f"they are compiled on Linux alone, not on {platform}")
    major = torch_cuda.partition(".")[0]
    parts = _wheel_folders(major, wheels)
    nvcc = find_nvcc(environ, parts)
    version = _nvcc_version(nvcc)
    if version.partition(".")[0] != major:
        raise CannotCompileError(f"{nvcc} is of CUDA {version} and torch {torch_version} of CUDA {torch_cuda}: other majors")
    root = _toolkit_folder(nvcc, environ)
    own = [folder for folder in (root / "include", *root.glob("targets/*/include")) if folder.is_dir()]
    borrowed = [part / "include" for part in parts if (part / "include").is_dir()]
    folders = [*own, *borrowed, Path("/usr/include")]
    lacking = [name for name in HEADERS if not any((folder / name).exists() for folder in folders)]
    if lacking:
        raise CannotCompileError(f"{', '.join(lacking)} lie neither in {root} nor in the nvidia wheels beside torch")
    return Toolkit(nvcc, version, tuple(map(str, own)), tuple(map(str, borrowed)), _find_runtime(major, parts, root))


def _wheel_folders(major, wheels):
    """nvidia/cu13 or nvidia/cuda_runtime, nvidia/cusparse, ...: each with include and lib folders."""
    if wheels is None:
        spec = importlib.util.find_spec("nvidia")
        roots = [Path(root) for root in spec.submodule_search_locations] if spec else []
    else:
        roots = [Path(wheels)]
    folders = [folder for root in roots for folder in sorted(root.glob("*")) if folder.is_dir()]
    return [folder for folder in folders if re.fullmatch(rf"cu{major}|(?!cu\d+$).*", folder.name)]


def find_nvcc(environ, parts):
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := environ.get(variable):  # obeyed or refused: another toolkit would surprise
            nvcc = Path(home) / "bin" / "nvcc"
            if not nvcc.exists():
                raise CannotCompileError(f"{variable}={home} has no bin/nvcc")
            return str(nvcc)
    candidates = [Path("/usr/local/cuda/bin/nvcc"), *(part / "bin" / "nvcc" for part in parts)]
    found = shutil.which("nvcc", path=environ.get("PATH")) or next((str(path) for path in candidates if path.exists()), None)
    if found is None:
        raise CannotCompileError("there is no nvcc: neither on PATH nor in /usr/local/cuda; CUDA_HOME may name a toolkit")
    return found


def _nvcc_version(nvcc):
    said = _output([nvcc, "--version"])
    if match := re.search(r"release (\d+\.\d+)", said):
        return match[1]
    raise CannotCompileError(f"{nvcc} --version says nothing of a release: {said.strip()[:200]!r}")


def _toolkit_folder(nvcc, environ):
    """Where include and lib64 lie. nvcc on PATH may be a link, or a script that runs another: nvcc itself knows."""
    if home := environ.get("CUDA_HOME") or environ.get("CUDA_PATH"):
        return Path(home)
    if match := re.search(r"^#\$ TOP=(.+)$", _output([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]), re.MULTILINE):
        return Path(match[1].strip()).resolve()
    return Path(nvcc).resolve().parent.parent


def _find_runtime(major, parts, root):
    """The libcudart to link: the one that torch loads where a wheel brings it."""
    places = [*(part / "lib" / f"libcudart.so.{major}" for part in parts)]
    folders = [root / "lib64", root / "lib", *root.glob("targets/*/lib"), *Path("/usr/lib").glob("*-linux-gnu")]
    places += [folder / "libcudart.so" for folder in folders]
    if found := next((path for path in places if path.exists()), None):
        return str(found)
    raise CannotCompileError(f"libcudart.so lies neither in {root} nor in the nvidia wheels beside torch")


def _output(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotCompileError(f"{command[0]} does not run ({error})") from error
    return done.stdout + done.stderr


def targets(toolkit, environ=os.environ, capabilities=()):
    """What to compile for, as nvcc names it: ["sm_80", "sm_90", "compute_90"].

    TORCH_CUDA_ARCH_LIST as torch reads it; else these capabilities, (9, 0) each; else TARGETS as far as nvcc knows them,
    and PTX of the first for whatever GPU comes.
    """
    if chosen := environ.get("TORCH_CUDA_ARCH_LIST", "").strip():
        return parse_targets(chosen)
    if capabilities:
        return [f"sm_{major}{minor}" for major, minor in sorted(set(capabilities))]
    known = _output([toolkit.nvcc, "--list-gpu-arch"]).split()
    known = [target for target in TARGETS if f"compute_{target.replace('.', '')}" in known]
    if not known:
        raise CannotCompileError(
            f"{toolkit.nvcc} knows none of the targets {', '.join(TARGETS)}; TORCH_CUDA_ARCH_LIST names others"
        )
    return parse_targets(";".join([f"{known[0]}+PTX", *known[1:]]))


def parse_targets(text):
    found = []
    for word in re.split(r"[;,\s]+", text.strip()):
        for item in GENERATIONS.get(word.lower(), word).split(";"):
            match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
            if match is None:
                raise CannotCompileError(f"TORCH_CUDA_ARCH_LIST={text}: {item!r} is no target such as 9.0, 9.0a or 9.0+PTX")
            number = "".join(match.group(1, 2, 3))
            found += [f"sm_{number}", *([f"compute_{number}"] if match[4] else [])]
    return list(dict.fromkeys(found))


def serves(built, capability):
    """Whether code for these targets runs on a GPU of this capability, (9, 0): the same major, or PTX of an earlier one."""
    for target in built:
        kind, major, minor, special = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", target).groups()
        made_for = (int(major), int(minor))
        if special == "a":
            fits = made_for == capability
        elif kind == "sm" or special == "f":
            fits = made_for[0] == capability[0] and made_for <= capability
        else:
            fits = made_for <= capability
        if fits:
            return True
    return False


def sources(csrc):
    return sorted([*csrc.glob("cuda/*.cu"), *csrc.glob("cuda/*.cpp")])


def fingerprint(csrc, toolkit, built_for):
    """16 hex digits that change with any source, header, target or toolkit."""
    return _digest(csrc, sources(csrc), repr((_kernel_flags(toolkit, built_for), toolkit)))


def _digest(csrc, files, text):
    digest = hashlib.sha256(text.encode())
    for path in [*files, *sorted(csrc.glob("*/*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _kernel_flags(toolkit, built_for):
    # Its own folders are -I, which come first.
    host = "--compiler-options=-fPIC,-fvisibility=hidden"
    return [*KERNEL_FLAGS, host, *code_flags(built_for), *_each("-isystem", toolkit.borrowed)]


def code_flags(built_for):
    """nvcc's flags for these targets, ["sm_80", "sm_90", "compute_80"].

    The kernels ask for nothing that the lowest target lacks: its PTX becomes the machine code of all. To make PTX is the
    longer half of a compilation, and so it is done once.
    """
    plain = sorted((t for t in built_for if re.fullmatch(r"sm_\d+", t)), key=lambda t: int(t[3:]))
    lowest = plain[0].replace("sm", "compute") if plain else None
    shared = [*plain, *(t for t in built_for if t == lowest)]
    groups = [(lowest, shared)] if plain else []
    groups += [(t.replace("sm", "compute"), [t]) for t in built_for if t not in shared]
    return [f"-gencode=arch={ptx},code=[{','.join(codes)}]" for ptx, codes in groups]


def _each(flag, folders):
    return [word for folder in folders for word in (flag, str(folder))]


def torch_folders():
    """(include folders, library folder) of torch."""
    import torch
    from torch.utils import cpp_extension

    return cpp_extension.include_paths(), Path(torch.__file__).parent / "lib"


def build(csrc, toolkit, built_for, target, folder, torch_folders, compiler="c++"):
    """Compiles the library `target`, objects in `folder`. RuntimeError with the compiler's words where that fails.

    torch_folders: as the function gives them.  MAX_JOBS: compilers at a time.
    """
    includes, libraries = torch_folders
    cxx = shlex.split(compiler)
    headers = [*_each("-isystem", [*includes, *toolkit.headers]), *_each("-idirafter", toolkit.borrowed)]
    bind = [*cxx, "-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", *headers]
    nvcc = [toolkit.nvcc, *_kernel_flags(toolkit, built_for), *(["-ccbin", cxx[0]] if len(cxx) == 1 else [])]
    folder, target = Path(folder), Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The longest first: norms are the larger sources.
    files = sorted(sources(csrc), key=lambda path: ("norm" not in path.stem, -path.stat().st_size))
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        compiled = pool.map(lambda path: _object(nvcc if path.suffix == ".cu" else bind, path, csrc, folder), files)
        objects = [str(path) for path in compiled]
    own = ["-lc10", "-lc10_cuda", "-ltorch", "-ltorch_cpu", "-ltorch_cuda"]
    new = target.with_name(f"{target.name}.new")
    _run([*cxx, "-shared", *objects, f"-L{libraries}", *own, toolkit.runtime, "-Wl,--no-undefined", "-o", str(new)])
    os.replace(new, target)


def _object(command, source, csrc, folder):
    """The object of a source: compiled anew where it, a header or the command has changed."""
    target = folder / f"{source.stem}{source.suffix}_{_digest(csrc, [source], repr(command))}.o"
    if not target.exists():
        new = target.with_suffix(".new")
        _run([*command, "-c", str(source), "-o", str(new)])
        for old in folder.glob(f"{source.stem}{source.suffix}_*.o"):
            old.unlink()
        os.replace(new, target)
    return target


def _run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
