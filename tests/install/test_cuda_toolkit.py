"""Which toolkit compiles the CUDA kernels, for which GPUs, and which words say that none does. No CUDA is needed."""

import re
import stat

import pytest

from ckpt_ops import _compile_cuda as cc

NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo 'Cuda compilation tools, release {version}, V{version}.88' ;;
  *--dryrun*) echo '#$ TOP={root}/bin/..' >&2 ;;
  *--list-gpu-arch*) echo 'compute_75 compute_80 compute_90 compute_100 compute_120' | tr ' ' '\\n' ;;
esac
"""


def files(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def toolkit(tmp_path):
    """Makes a toolkit of a version, with all headers or some."""

    def make(version="13.0", headers=cc.HEADERS, runtime=True):
        root = tmp_path / f"cuda-{version}"
        script(root / "bin" / "nvcc", NVCC.format(version=version, root=root))
        files(root, *(f"include/{name}" for name in headers), *(["lib64/libcudart.so"] if runtime else []))
        return root

    return make


@pytest.fixture
def wheels(tmp_path):
    """The folder of the nvidia wheels that a torch for CUDA 13 brings: no crt/, no libcudart.so without a number."""
    names = [name for name in cc.HEADERS if not name.startswith("crt/")]
    files(tmp_path / "nvidia" / "cu13", "lib/libcudart.so.13", *(f"include/{name}" for name in names))
    files(tmp_path / "nvidia" / "cudnn", "include/cudnn.h")
    return tmp_path / "nvidia"


@pytest.fixture
def find(tmp_path, monkeypatch):
    """find_toolkit for torch 2.14.1 of CUDA 13.0, on a machine that has what the arguments say and nothing else."""
    real = cc.Path.exists
    monkeypatch.setattr(cc.Path, "exists", lambda self: str(self).startswith(str(tmp_path)) and real(self))

    def find(path=None, wheels=tmp_path / "none", torch_cuda="13.0", **environ):
        return cc.find_toolkit("2.14.1", torch_cuda, {"PATH": str(path or tmp_path / "empty"), **environ}, wheels, "linux")

    return find


def refused(text):
    return pytest.raises(cc.CannotCompileError, match=re.escape(text))


def test_a_full_toolkit_needs_no_wheels(find, toolkit):
    root = toolkit()
    found = find(root / "bin")
    assert found == (f"{root}/bin/nvcc", "13.0", (f"{root}/include",), (), f"{root}/lib64/libcudart.so")


def test_the_toolkit_behind_a_script_on_the_path(find, toolkit, tmp_path):
    root = toolkit()
    script(tmp_path / "local" / "bin" / "nvcc", f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n')
    assert find(tmp_path / "local" / "bin").headers == (f"{root}/include",)


def test_the_toolkit_behind_a_link_on_the_path(find, toolkit, tmp_path):
    root = toolkit()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "nvcc").symlink_to(root / "bin" / "nvcc")
    script(root / "bin" / "nvcc", NVCC.format(version="13.0", root=root).replace("--dryrun", "--never"))
    assert find(tmp_path / "links").headers == (f"{root}/include",)


def test_nvcc_alone_takes_the_rest_from_the_wheels(find, toolkit, wheels):
    root = toolkit(headers=["crt/host_defines.h"], runtime=False)
    found = find(root / "bin", wheels)
    assert found.headers == (f"{root}/include",)
    assert found.borrowed == (f"{wheels}/cu13/include", f"{wheels}/cudnn/include")
    assert found.runtime == f"{wheels}/cu13/lib/libcudart.so.13"


def test_headers_that_lie_nowhere_are_named(find, toolkit, wheels):
    with refused("cusparse.h, cublas_v2.h, cublasLt.h, cusolverDn.h lie neither in"):
        find(toolkit(headers=cc.HEADERS[:3]) / "bin")
    with refused("crt/host_defines.h lie neither in"):
        find(toolkit("13.1", headers=()) / "bin", wheels)


def test_wheels_of_another_cuda_are_left_alone(find, toolkit, wheels):
    (wheels / "cu13").rename(wheels / "cu12")
    with refused("libcudart.so lies neither in"):
        find(toolkit(runtime=False) / "bin", wheels)


def test_no_nvcc(find):
    with refused("there is no nvcc: neither on PATH nor in /usr/local/cuda"):
        find()


def test_nvcc_of_another_major(find, toolkit):
    with refused("/bin/nvcc is of CUDA 11.0 and torch 2.14.1 of CUDA 13.0"):
        find(toolkit("11.0") / "bin")


def test_another_minor_is_fine(find, toolkit):
    assert find(toolkit("13.2") / "bin").version == "13.2"


def test_cuda_home_is_obeyed_or_refused(find, toolkit, tmp_path):
    good, old = toolkit(), toolkit("11.0")
    assert find(old / "bin", CUDA_HOME=str(good)).nvcc == f"{good}/bin/nvcc"
    with refused("is of CUDA 11.0"):
        find(good / "bin", CUDA_HOME=str(old))
    with refused("CUDA_HOME=/nowhere has no bin/nvcc"):
        find(good / "bin", CUDA_HOME="/nowhere")
    with refused("CUDA_PATH=/nowhere has no bin/nvcc"):
        find(good / "bin", CUDA_PATH="/nowhere")


def test_an_nvcc_that_is_broken(find, tmp_path):
    script(tmp_path / "bin" / "nvcc", "#!/bin/sh\necho 'no such file' >&2; exit 1\n")
    with refused("/bin/nvcc --version says nothing of a release: 'no such file'"):
        find(tmp_path / "bin")
    script(tmp_path / "bin" / "nvcc", "#!/no/such/shell\n")
    with refused("/bin/nvcc does not run"):
        find(tmp_path / "bin")


def test_no_cuda_build_of_torch(find, toolkit):
    with refused("no CUDA build of torch (this is torch 2.14.1)"):
        find(toolkit() / "bin", torch_cuda=None)


def test_other_platforms():
    with refused("compiled on Linux alone, not on win32"):
        cc.find_toolkit("2.14.1", "13.0", {}, platform="win32")


def test_the_wish(find, toolkit):
    assert [cc.wish({}), cc.wish({"CKPT_OPS_CUDA": "0"}), cc.wish({"CKPT_OPS_CUDA": "1"})] == [None, False, True]
    with refused("CKPT_OPS_CUDA=0 forbids them"):
        find(toolkit() / "bin", CKPT_OPS_CUDA="0")
    with refused("CKPT_OPS_CUDA=yes is neither 1"):
        find(toolkit() / "bin", CKPT_OPS_CUDA="yes")


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("9.0", ["sm_90"]),
        ("8.0;9.0a+PTX", ["sm_80", "sm_90a", "compute_90a"]),
        ("8.0 8.6, 12.0f", ["sm_80", "sm_86", "sm_120f"]),
        ("Hopper;9.0", ["sm_90", "compute_90"]),
        ("Ampere", ["sm_80", "sm_86", "compute_86"]),
    ],
)
def test_arch_list(text, targets):
    assert cc.parse_targets(text) == targets


def test_arch_list_that_makes_no_sense():
    with refused("TORCH_CUDA_ARCH_LIST=sm_90: 'sm_90' is no target such as 9.0"):
        cc.parse_targets("sm_90")


def test_what_is_compiled_for(find, toolkit):
    found = find(toolkit() / "bin")
    assert cc.targets(found, {}) == ["sm_80", "compute_80", "sm_90", "sm_100", "sm_120"]
    assert cc.targets(found, {"TORCH_CUDA_ARCH_LIST": "9.0"}, [(8, 0)]) == ["sm_90"]
    assert cc.targets(found, {}, [(9, 0), (8, 0), (9, 0)]) == ["sm_80", "sm_90"]


@pytest.mark.parametrize(
    ("built_for", "flags"),
    [
        (["sm_90"], ["compute_90,code=[sm_90]"]),
        (["sm_100", "compute_80", "sm_80"], ["compute_80,code=[sm_80,sm_100,compute_80]"]),
        (["sm_80", "sm_90a"], ["compute_80,code=[sm_80]", "compute_90a,code=[sm_90a]"]),
        (["compute_90"], ["compute_90,code=[compute_90]"]),
    ],
)  # fmt: skip
def test_one_ptx_serves_all_plain_targets(built_for, flags):
    assert cc.code_flags(built_for) == [f"-gencode=arch={flag}" for flag in flags]


def test_an_older_nvcc_is_asked_for_what_it_knows(find, toolkit):
    root = toolkit()
    script(root / "bin" / "nvcc", NVCC.format(version="13.0", root=root).replace(" compute_100 compute_120", ""))
    assert cc.targets(find(root / "bin"), {}) == ["sm_80", "compute_80", "sm_90"]
    script(root / "bin" / "nvcc", re.sub(r"compute_\d+ ?", "", NVCC.format(version="13.0", root=root)))
    with refused("knows none of the targets 8.0, 9.0"):
        cc.targets(find(root / "bin"), {})


@pytest.mark.parametrize(
    ("built", "capability", "fits"),
    [
        (["sm_80"], (8, 0), True),
        (["sm_80"], (8, 9), True),  # a later minor of the same major
        (["sm_89"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (9, 0), True),  # PTX is compiled by the driver
        (["compute_90"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_100f"], (10, 3), True),
        (["compute_90a"], (10, 0), False),
    ],
)
def test_whether_code_serves_a_gpu(built, capability, fits):
    assert cc.serves(built, capability) is fits
