"""The Triton backend: registered without Triton, imported when first needed, every launch on its input's device."""

import contextlib
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_ops import triton_backend
from ckpt_ops.schemas import SCHEMAS
from helpers_backends import READY
from helpers_ops import EACH_OP, make, run

ROOT = Path(__file__).resolve().parent.parent
needs_kernels = pytest.mark.skipif("triton" not in READY, reason="the triton backend is not under test")
ALL = [(module, name) for module, names in triton_backend.LAUNCHERS.items() for name in names]


def python(code, interpret=None):
    """The output of a fresh process."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CKPT_OPS_BACKEND")}
    if interpret is not None:
        environment["TRITON_INTERPRET"] = interpret
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_schema_has_a_launcher():
    assert sorted(name for _, name in ALL) == sorted(schema.split("(")[0] for schema in SCHEMAS)


@pytest.mark.parametrize("name", [name for _, name in ALL])
def test_every_op_is_registered(name):
    for key in ("CUDA", "CPU") if triton_backend.INTERPRETED else ("CUDA",):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ckpt_ops_triton::{name}", key), key


@needs_kernels
@pytest.mark.parametrize("module, name", ALL)
def test_every_launcher_is_where_the_table_says(module, name):
    assert callable(getattr(importlib.import_module(f"ckpt_ops.triton_kernels.{module}"), name))


def test_a_kernels_module_is_imported_at_its_first_call():
    pytest.importorskip("triton")
    python(
        """
import sys, torch, ckpt_ops
def imported():
    return {name.rpartition(".")[2] for name in sys.modules if name.startswith("ckpt_ops.triton_kernels.")}
assert not {"triton", "torch._dynamo"} & sys.modules.keys(), "import ckpt_ops takes seconds longer"
assert ckpt_ops.backends()["triton"] == "ready" and not imported()
ckpt_ops.dropout(torch.ones(2), 0.5, backend="triton")
assert "dropout" in imported() and "layer_norm" not in imported(), imported()
""",
        interpret="1",
    )


def test_without_triton_the_package_works_and_says_why():
    python("""
import sys
sys.modules["triton"] = None
import torch, ckpt_ops
reason = ckpt_ops.backends()["triton"]
assert "triton cannot be imported" in reason, reason
x = torch.randn(5, 40)
assert torch.equal(ckpt_ops.dropout(x, 0.5, seed=1) != 0, ckpt_ops.dropout(x, 0.5, seed=1, backend="reference") != 0)
try:
    ckpt_ops.dropout(x, 0.5, backend="triton")
except RuntimeError as error:
    assert "backend 'triton' cannot serve this call" in str(error) and reason in str(error), error
else:
    raise AssertionError("a named backend was swapped")
""")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so():
    pytest.importorskip("triton")
    code = "import ckpt_ops; print(ckpt_ops.backends()['triton'])"
    assert "torch sees no GPU" in python(code) and "TRITON_INTERPRET=1" in python(code)
    assert python(code, interpret="1").strip() == "ready"


@needs_kernels
@pytest.mark.parametrize("op", EACH_OP, ids=str)
def test_every_launch_is_in_a_guard_of_its_inputs_device(op, monkeypatch):
    """Counted at the interpreter's end, or the compiler's: a launch that goes around launch() is seen."""
    from ckpt_ops.triton_kernels import _launch

    entered, guarded, launches = [], [], []

    @contextlib.contextmanager
    def guard(x):
        entered.append(x.device)
        guarded.append(True)
        yield
        guarded.pop()

    if triton_backend.INTERPRETED:
        from triton.runtime.interpreter import GridExecutor as Launcher

        name = "__call__"
    else:
        from triton.runtime.jit import JITFunction as Launcher

        name = "run"
    original = getattr(Launcher, name)

    def counted(self, *args, **options):
        launches.append(bool(guarded))
        return original(self, *args, **options)

    monkeypatch.setattr(_launch, "device_guard", guard)
    monkeypatch.setattr(Launcher, name, counted)
    device = "cpu" if triton_backend.INTERPRETED else "cuda"
    import ckpt_ops

    with ckpt_ops.use_backend("triton"):
        run(op, make(op, device=device), dict(p=0.4, seed=1))
    assert launches and all(launches) and len(entered) == len(launches)
    assert {d.type for d in entered} == {device}


def test_kernels_are_launched_in_one_place():
    for path in (ROOT / "triton_kernels").glob("*.py"):
        calls = re.findall(r"_kernel\s*\[", path.read_text())
        assert not calls, f"{path.name} launches a kernel outside launch(): {calls}"
