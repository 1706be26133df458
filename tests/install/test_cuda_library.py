"""What a build and a process say of the CUDA kernels, with torch for CUDA and GPUs pretended. Real ones: `make wheel-cuda`."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from ckpt_ops import _compile_cuda, dispatch, native_cuda
from helpers_install import pip_install, run

# setup.py as under a torch for CUDA 13: says its name, after it has decided what to build.
SETUP = """
import runpy, sys, torch
torch.version.cuda = sys.argv.pop(1) or None
sys.argv = ["setup.py", "--name"]
runpy.run_path("setup.py", run_name="__main__")
"""
NO_NVCC = {"PATH": "/usr/bin:/bin", "CUDA_HOME": "/nowhere"}


@pytest.fixture(scope="module")
def clone(new_clone):
    return new_clone("cuda_source")


def setup(clone, torch_cuda, **environ):
    """setup.py's exit status and what it said."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CKPT_OPS_", "CUDA_"))}
    command = [sys.executable, "-c", SETUP, torch_cuda]
    done = subprocess.run(command, cwd=clone, env=clean | environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def old_nvcc(folder):
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.0, V11.0.194'\n")
    nvcc.chmod(0o755)
    return str(folder)


@pytest.mark.install
def test_demanded_without_nvcc(clone):
    status, said = setup(clone, "13.0", CKPT_OPS_CUDA="1", **NO_NVCC)
    assert status != 0
    assert "CKPT_OPS_CUDA=1, and no CUDA kernels can be built: CUDA_HOME=/nowhere has no bin/nvcc" in said


@pytest.mark.install
def test_demanded_with_nvcc_of_another_major(clone, tmp_path):
    status, said = setup(clone, "13.0", CKPT_OPS_CUDA="1", CUDA_HOME=old_nvcc(tmp_path))
    assert status != 0
    assert "is of CUDA 11.0 and torch" in said


@pytest.mark.install
def test_demanded_of_a_torch_without_cuda(clone):
    status, said = setup(clone, "", CKPT_OPS_CUDA="1")
    assert status != 0
    assert "no CUDA build of torch" in said


@pytest.mark.install
def test_a_wish_that_is_none(clone):
    status, said = setup(clone, "", CKPT_OPS_CUDA="on")
    assert status != 0
    assert "CKPT_OPS_CUDA=on is neither 1 (demands the CUDA kernels) nor 0 (forbids them)" in said


@pytest.mark.install
@pytest.mark.parametrize("environ", [NO_NVCC, {"CKPT_OPS_CUDA": "0"}], ids=["no nvcc", "forbidden"])
def test_not_demanded_the_build_goes_on_without(clone, environ):
    status, said = setup(clone, "13.0", **environ)
    assert (status, said.splitlines()[-1]) == (0, "ckpt_ops"), said


@pytest.mark.install
def test_demanded_in_an_isolated_build_says_what_is_missing(new_clone, new_venv, tmp_path):
    with pytest.raises(AssertionError, match="CKPT_OPS_CUDA=1, and no CUDA kernels can be built: torch cannot be imported"):
        pip_install(new_venv("isolated_cuda"), ".", cwd=new_clone("isolated_cuda_source"), CKPT_OPS_CUDA="1")


@pytest.fixture
def state(monkeypatch, tmp_path):
    """why_not() of a process with a torch for CUDA 13.0, these GPUs and this build information."""

    def state(gpus=(), jit="0", **cuda):
        info = {"torch": torch.__version__, "torch_cuda": "13.0", "variants": {}, "cuda": cuda}
        if cuda:
            (tmp_path / "_build_info.json").write_text(json.dumps(info | cuda.pop("info", {})))
        monkeypatch.setattr(native_cuda, "_settled", False)
        monkeypatch.setattr(native_cuda, "_PACKAGE", tmp_path)
        monkeypatch.setattr(native_cuda, "_capabilities", lambda: list(gpus))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setenv("CKPT_OPS_JIT", jit)
        return native_cuda.why_not()

    yield state
    native_cuda._settled = False


@pytest.fixture
def library(tmp_path):
    """A library that loads and does nothing."""
    (tmp_path / "empty.cpp").write_text("")
    run([*os.environ.get("CXX", "c++").split(), "-shared", "-fPIC", "empty.cpp", "-o", "_C_cuda.so"], cwd=tmp_path)
    return {"file": "_C_cuda.so", "targets": ["sm_80", "sm_90"]}


@pytest.fixture
def never_loaded(monkeypatch):
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail(f"{path} was loaded"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this is a CUDA build of torch")
def test_a_torch_without_cuda():
    assert native_cuda.why_not() == f"no CUDA build of torch (this is torch {torch.__version__})"


def test_compiled_without_a_gpu(state, library):
    assert state(**library) == "compiled; no GPU here"


def test_compiled_for_this_gpu(state, library):
    assert state([(8, 6), (9, 0)], **library) is None


def test_not_compiled_says_why(state, never_loaded):
    assert state() == "not compiled: no extension was built ahead of time; no GPU here to compile them for"
    assert "when the package was built: there is no nvcc" in state(why_not="there is no nvcc")


def test_torch_upgraded_after_the_build(state, library, never_loaded):
    found = state([(9, 0)], info={"torch": "2.0.0"}, **library)
    assert f"built for torch 2.0.0 and this is torch {torch.__version__}" in found
    found = state([(9, 0)], info={"torch_cuda": "12.6"}, **library)
    assert "built for CUDA 12.6 and this torch is for CUDA 13.0" in found


def test_a_gpu_that_nothing_was_compiled_for(state, library, never_loaded):
    assert "built for sm_80, sm_90 and this GPU is sm_120; CKPT_OPS_JIT=0 forbids" in state([(9, 0), (12, 0)], **library)


def test_a_library_that_cannot_be_loaded(state, library, tmp_path):
    (tmp_path / "_C_cuda.so").write_text("no library")
    assert "the extension cannot be loaded" in state(**library)
    (tmp_path / "_C_cuda.so").unlink()
    assert "the extension cannot be loaded" in state(**library)


def test_first_use_without_nvcc(state, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert "they cannot be compiled on first use: CUDA_HOME=/nowhere has no bin/nvcc" in state([(9, 0)], jit="1")
    assert "compiling" not in capfd.readouterr().err


@pytest.fixture
def first_use(monkeypatch, tmp_path):
    """Compilers that are pretended: the targets of each build."""
    builds = []
    toolkit = _compile_cuda.Toolkit("nvcc", "13.0", (), (), "libcudart.so")
    monkeypatch.setattr(_compile_cuda, "find_toolkit", lambda *a, **k: toolkit)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)

    def build(csrc, toolkit, targets, target, folder, torch_folders, compiler):
        builds.append(targets)
        shutil.copy(tmp_path / "_C_cuda.so", target)

    monkeypatch.setattr(_compile_cuda, "build", build)
    return builds


def test_first_use_compiles_once_for_the_gpus_here(state, library, first_use, capfd):
    assert state([(9, 0), (8, 9)], jit="1", why_not="no nvcc") is None
    assert state([(9, 0), (8, 9)], jit="1", why_not="no nvcc") is None
    assert first_use == [["sm_89", "sm_90"]]
    assert capfd.readouterr().err.count("compiling its CUDA kernels (sm_89, sm_90) for torch") == 1


def test_first_use_that_fails_names_the_error(state, first_use, monkeypatch):
    def build(*a):
        raise RuntimeError("nvcc -c x.cu\nx.cu(1): error: on purpose\n")

    monkeypatch.setattr(_compile_cuda, "build", build)
    assert state([(9, 0)], jit="1").endswith("compiling them on first use failed: x.cu(1): error: on purpose")


def test_cuda_serves_what_it_has_and_triton_serves_attention(monkeypatch):
    monkeypatch.setattr(dispatch, "not_ready", lambda name: None)
    monkeypatch.setattr(dispatch, "_named", None)

    class OnGpu:
        device, dtype = torch.device("cuda"), torch.float32

    assert dispatch.choose("layer_norm", None, OnGpu) == "cuda"
    assert dispatch.choose("attention", None, OnGpu) == "triton"
    with pytest.raises(RuntimeError, match="backend 'cuda' cannot serve this call: attention on a GPU is Triton's"):
        dispatch.choose("attention", "cuda", OnGpu)


def test_the_build_without_ninja_or_a_second_compile(monkeypatch, tmp_path):
    """The compilers run by themselves; an object is compiled anew only where its source or a header has changed."""
    csrc = tmp_path / "csrc"
    (csrc / "cuda").mkdir(parents=True)
    for name in ("a.cu", "b.cpp", "c.h"):
        (csrc / "cuda" / name).write_text("// one\n")
    ran = []

    def fake(command):
        ran.append(next((word.rpartition("/")[2] for word in command if word.endswith((".cu", ".cpp"))), "link"))
        open(command[command.index("-o") + 1], "w").close()

    monkeypatch.setattr(_compile_cuda, "_run", fake)
    toolkit = _compile_cuda.Toolkit("nvcc", "13.0", (), (), "libcudart.so")

    def compiled():
        ran.clear()
        _compile_cuda.build(csrc, toolkit, ["sm_90"], tmp_path / "out.so", tmp_path / "objects", ([], "lib"))
        return sorted(ran)

    assert compiled() == ["a.cu", "b.cpp", "link"]
    assert compiled() == ["link"]
    (csrc / "cuda" / "a.cu").write_text("// two\n")
    assert compiled() == ["a.cu", "link"]
    (csrc / "cuda" / "c.h").write_text("// two\n")
    assert compiled() == ["a.cu", "b.cpp", "link"]
    assert len(list((tmp_path / "objects").iterdir())) == 2
