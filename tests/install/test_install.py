"""Each way to install works: with and without torch at build time, editable, without a compiler, from the sdist."""

import sys
import tarfile
import zipfile

import pytest
import torch

from helpers_install import check_reference_serves, pip_install, probe, run

pytestmark = pytest.mark.install

NO_COMPILER = {"CXX": "/bin/false", "CC": "/bin/false"}


@pytest.fixture(scope="module")
def sdist(new_clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    code = f"import setuptools.build_meta as b; b.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", code], cwd=new_clone("sdist_source"), env=NO_COMPILER)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def isolated_wheel(sdist, tmp_path_factory):
    """What `pip install .` builds in an environment of its own, where there is no torch."""
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(folder), str(sdist)], cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def isolated(isolated_wheel, new_venv, tmp_path_factory):
    python = new_venv("isolated")
    pip_install(python, str(isolated_wheel), cwd=tmp_path_factory.mktemp("cwd"))
    return python


@pytest.fixture(scope="module")
def prebuilt(new_clone, new_venv, tmp_path_factory):
    """Installed without build isolation, hence with the extension; an old nvcc is around and must not matter."""
    tools = tmp_path_factory.mktemp("cuda")
    (tools / "bin").mkdir()
    nvcc = tools / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.0, V11.0.194'\n")
    nvcc.chmod(0o755)
    python = new_venv("prebuilt")
    env = {"CKPT_OPS_VARIANTS": "default", "CUDA_HOME": str(tools), "MAX_JOBS": "2"}
    pip_install(python, "--no-build-isolation", ".", cwd=new_clone("prebuilt_source"), **env)
    return python


def test_sdist_and_wheel_carry_the_sources(sdist, isolated_wheel):
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "LICENSE", "csrc/math/philox.h", "csrc/cpu/dropout.cpp", "triton_kernels/__init__.py"} <= in_sdist
    with zipfile.ZipFile(isolated_wheel) as archive:
        in_wheel = set(archive.namelist())
    assert {"ckpt_ops/csrc/math/philox.h", "ckpt_ops/csrc/cpu/dropout.cpp", "ckpt_ops/triton_kernels/__init__.py"} <= in_wheel
    assert {"ckpt_ops/csrc/cuda/dropout.cu", "ckpt_ops/csrc/cuda/bindings.cpp"} <= in_wheel
    assert isolated_wheel.name.endswith("-py3-none-any.whl")


def test_isolated_install_compiles_on_first_use_and_only_once(isolated, tmp_path):
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "MAX_JOBS": "2"}
    first = probe(isolated, tmp_path, **env)
    assert first["backends"]["cpu"] == "ready"
    assert first["equal"]
    assert first["refused"] is False
    assert first["warnings"] == []
    assert first["stderr"].count("compiling its CPU kernels") == 1
    again = probe(isolated, tmp_path, **env)
    assert again["backends"]["cpu"] == "ready"
    assert "compiling" not in again["stderr"]


def test_import_alone_compiles_nothing(isolated, tmp_path):
    code = "import ckpt_ops; print(ckpt_ops.native.status())"
    done = run([str(isolated), "-c", code], cwd=tmp_path, env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")})
    assert done.stdout.startswith("will be compiled on first use (no extension was built ahead of time)")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"CKPT_OPS_JIT": "0"}, "CKPT_OPS_JIT=0 forbids"),
        ({"CXX": "no-such-compiler"}, "no C++ compiler: 'no-such-compiler' (from CXX)"),
        ({"CC": "/bin/false"}, "no C++ compiler: '/bin/false' (from CC)"),
    ],
)
def test_what_cannot_be_compiled_leaves_the_reference_and_says_why(isolated, tmp_path, env, reason):
    check_reference_serves(probe(isolated, tmp_path, **env), reason)


def test_no_compiler_at_install_time(new_clone, new_venv, tmp_path):
    python = new_venv("no_compiler")
    done = pip_install(python, "-v", "--no-build-isolation", ".", cwd=new_clone("no_compiler_source"), **NO_COMPILER)
    assert "no native extension is built: no C++ compiler" in done.stdout + done.stderr
    check_reference_serves(probe(python, tmp_path, **NO_COMPILER), "no C++ compiler")


def test_install_without_isolation_has_the_extension(prebuilt, tmp_path):
    found = probe(prebuilt, tmp_path, CKPT_OPS_JIT="0")
    assert found["backends"]["cpu"] == "ready"
    assert found["status"] == f"compiled for torch {torch.__version__.partition('+')[0]}, default"
    assert found["equal"]
    assert found["refused"] is False
    assert found["warnings"] == []
    assert "no CUDA" in found["backends"]["cuda"]


def test_editable_install(new_clone, new_venv, tmp_path):
    python, clone = new_venv("editable"), new_clone("editable_source")
    pip_install(python, "--no-build-isolation", "-e", ".", cwd=clone, CKPT_OPS_VARIANTS="default", MAX_JOBS="2")
    found = probe(python, tmp_path, CKPT_OPS_JIT="0")
    assert found["file"] == str(clone / "ckpt_ops" / "__init__.py")
    assert found["backends"]["cpu"] == "ready"
    assert found["equal"]


def test_a_clone_runs_without_install(new_clone, bare):
    found = probe(bare, new_clone("bare_source"), CKPT_OPS_JIT="0")
    check_reference_serves(found, "CKPT_OPS_JIT=0 forbids")


def test_a_compile_error_fails_the_build(new_clone, bare):
    clone = new_clone("broken_source")
    (clone / "csrc" / "common" / "module.cpp").write_text("#error broken on purpose\n")
    with pytest.raises(AssertionError, match="broken on purpose"):
        pip_install(bare, "--no-build-isolation", ".", cwd=clone, CKPT_OPS_VARIANTS="default", MAX_JOBS="1")
