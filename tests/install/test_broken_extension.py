"""An extension that cannot serve never breaks the import: it is noticed, named, and the reference serves."""

import json
import os
import shlex
import subprocess

import pytest
import torch

from helpers_install import check_reference_serves, probe, run

pytestmark = pytest.mark.install

# As after an upgrade of torch: a symbol is gone. (Without a body, so that no header is needed.)
STALE = 'extern "C" void* gone_since_the_upgrade(); extern "C" void* PyInit__C_default() { return gone_since_the_upgrade(); }\n'


@pytest.fixture(scope="module")
def stale_library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stale")
    (folder / "stale.cpp").write_text(STALE)
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    subprocess.run([*compiler, "-shared", "-fPIC", "stale.cpp", "-o", "stale.so"], cwd=folder, check=True)
    return folder / "stale.so"


@pytest.fixture
def clone_with(new_clone, stale_library):
    """A clone whose prebuilt extension is the stale library, said to be built for a given torch."""

    def make(torch_version):
        clone = new_clone("broken_extension")
        (clone / "ckpt_ops" / stale_library.name).write_bytes(stale_library.read_bytes())
        info = {"torch": torch_version, "compiler": "c++", "variants": {"default": {"file": stale_library.name, "flags": []}}}
        (clone / "ckpt_ops" / "_build_info.json").write_text(json.dumps(info))
        return clone

    return make


def test_undefined_symbol(clone_with, bare):
    found = probe(bare, clone_with(torch.__version__), CKPT_OPS_JIT="0")
    check_reference_serves(found, "gone_since_the_upgrade")


def test_another_torch_is_noticed_before_loading(clone_with, bare):
    found = probe(bare, clone_with("2.0.0"), CKPT_OPS_JIT="0")
    check_reference_serves(found, f"built for torch 2.0.0 and this is torch {torch.__version__}")
    assert "gone_since_the_upgrade" not in found["backends"]["cpu"]


def test_a_named_backend_is_refused_at_the_first_call(clone_with, bare):
    code = "import torch, ckpt_ops; ckpt_ops.dropout(torch.ones(2, 2), 0.5)"
    env = {"CKPT_OPS_BACKEND": "cpu", "CKPT_OPS_JIT": "0"}
    with pytest.raises(AssertionError, match="backend 'cpu' cannot serve this call: .*built for torch 2.0.0"):
        run([str(bare), "-c", code], cwd=clone_with("2.0.0"), env=env)


def test_no_triton(bare, new_clone):
    code = "import sys; sys.modules['triton'] = None; import ckpt_ops; print(ckpt_ops.backends()['triton'])"
    done = run([str(bare), "-c", code], cwd=new_clone("no_triton"), env={"CKPT_OPS_JIT": "0"})
    assert done.stdout.strip() != "ready"
