"""Every op has all its parts, under one name; the README's examples run."""

import re
from pathlib import Path

import pytest
import torch

import bench.cases
import ckpt_ops
from ckpt_ops import reference
from ckpt_ops.schemas import SCHEMAS
from helpers_ops import ALL_OPS

ROOT = Path(__file__).resolve().parent.parent
STEMS = sorted(p.stem for p in (ROOT / "ckpt_ops" / "ops").glob("[a-z]*.py"))
# An op's functions (also in the reference and, with _fwd and _bwd, the schemas) where they are not named as its stem.
FUNCTIONS = {"dropout_add_norm": ("dropout_add_layer_norm", "dropout_add_rms_norm")}
NOT_WRITTEN = ("csrc/cuda/attention.cu",)  # on GPUs attention is Triton's
PUBLIC = {"attention": "scaled_dot_product_attention"}


def functions(stem):
    return FUNCTIONS.get(stem, (stem,))


def schema_names():
    return {schema.split("(")[0] for schema in SCHEMAS}


def _parts(stem):
    """Each part an op is made of, and whether it is there."""
    files = [f"csrc/autograd/{stem}.h", f"csrc/cpu/{stem}.cpp", f"csrc/cuda/{stem}.cu", f"triton_kernels/{stem}.py"]
    files += [f"tests/ops/test_{stem}.py"]
    for file in files:
        yield file, (ROOT / file).exists() or file in NOT_WRITTEN
    yield f"a case in bench/cases.py with stem {stem!r}", any(case.stem == stem for case in bench.cases.small())
    yield f"an Op in tests/helpers_ops.py with stem {stem!r}", any(op.stem == stem for op in ALL_OPS)
    for name in functions(stem):
        public = PUBLIC.get(name, name)
        yield f"reference.{name}", hasattr(reference, name)
        yield f"schema {name}_fwd", f"{name}_fwd" in schema_names()
        yield f"schema {name}_bwd", f"{name}_bwd" in schema_names() or name == "dropout"  # its own backward
        yield f"ckpt_ops.functional.{public}", public in ckpt_ops.functional.__all__ and hasattr(ckpt_ops, public)
        yield (
            f"'Kept for backward' in the docstring of {public}",
            "Kept for backward:" in (getattr(ckpt_ops, public).__doc__ or ""),
        )


@pytest.mark.parametrize("stem", STEMS)
def test_an_op_has_all_its_parts(stem):
    missing = [part for part, there in _parts(stem) if not there]
    assert not missing, f"op {stem} lacks: " + "; ".join(missing)


def test_stems_are_found():
    assert {"dropout", "act_dropout", "dropout_add", "layer_norm", "rms_norm", "dropout_add_norm", "attention"} <= set(STEMS)


def test_every_public_function_has_a_stem():
    known = {PUBLIC.get(name, name) for stem in STEMS for name in functions(stem)} | {"gelu_dropout"}
    assert set(ckpt_ops.functional.__all__) == known


def test_every_schema_has_a_fake_kernel_in_every_namespace():
    from ckpt_ops.library import NAMESPACES

    for namespace in NAMESPACES:
        for name in schema_names():
            entry = torch._library.simple_registry.singleton.find(f"{namespace}::{name}")
            assert entry.fake_impl.kernel is not None, f"{namespace}::{name}"


def test_every_schema_has_a_cpu_kernel(fused):
    if fused.name != "cpu":
        pytest.skip("about the native namespace")
    for name in schema_names():
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ckpt_ops::{name}", "CPU"), name


def snippets():
    """The README's python blocks; one test for all, as later ones may build on earlier ones."""
    readme = ROOT / "README.md"
    return re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE) if readme.exists() else []


def test_readme_snippets_run():
    blocks = snippets()
    assert blocks, "README.md has no python example"
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
