"""Builds the native extension where torch and a compiler are at hand, and a pure Python package otherwise.

The sources travel with the package either way, and are compiled on first use where no library fits (ckpt_ops/native.py).
"""

import json
import os
import runpy
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
recipe = runpy.run_path(str(ROOT / "ckpt_ops" / "_compile.py"))
cuda = runpy.run_path(str(ROOT / "ckpt_ops" / "_compile_cuda.py"))


def variants():
    """Instruction sets to build; CKPT_OPS_VARIANTS=avx2,default picks some of them."""
    chosen = os.environ.get("CKPT_OPS_VARIANTS")
    return chosen.split(",") if chosen else list(recipe["VARIANTS"])


def why_pure():
    """Why no extension is built now, or None."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        return f"torch cannot be imported at build time ({error})"
    return recipe["compiler_problem"]()


def cuda_plan():
    """(toolkit, targets, why not) for the CUDA kernels. Ends the build where there are none and they are demanded."""
    import torch

    try:
        toolkit = cuda["find_toolkit"](torch.__version__, torch.version.cuda)
        return toolkit, cuda["targets"](toolkit), None
    except cuda["CannotCompileError"] as error:
        refuse_if_cuda_is_demanded(error)
        return None, None, str(error)


def refuse_if_cuda_is_demanded(reason):
    if os.environ.get("CKPT_OPS_CUDA") not in (None, "", "0"):
        raise SystemExit(f"ckpt_ops: CKPT_OPS_CUDA={os.environ['CKPT_OPS_CUDA']}, and no CUDA kernels can be built: {reason}")


def native_arguments():
    """What setup() needs to build the extension: one library for each instruction set, and one for CUDA."""
    import torch
    from setuptools import Extension
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    toolkit, targets, why_no_cuda = cuda_plan()
    cuda_name = "ckpt_ops._C_cuda"

    class Build(BuildExtension):
        def run(self):
            with recipe["scripts_on_path"]():
                super().run()
            self.write_build_info()

        def build_extension(self, ext):
            if ext.name == cuda_name:
                temp = os.path.join(self.build_temp, ext.name)
                path = self.get_ext_fullpath(ext.name)
                try:
                    cuda["build"](csrc, toolkit, targets, path, temp, cuda["torch_folders"](), recipe["compiler"]())
                except RuntimeError as error:
                    raise SystemExit(f"{error}\nckpt_ops: CKPT_OPS_CUDA=0 leaves the CUDA kernels out") from None
                return
            # Objects of two variants have the same names: a folder each.
            temp, self.build_temp = self.build_temp, os.path.join(self.build_temp, ext.name)
            super().build_extension(ext)
            self.build_temp = temp

        def write_build_info(self):
            """Beside the libraries: what native.py must know before it loads one."""
            files = {ext.name.rpartition("_")[2]: Path(self.get_ext_fullpath(ext.name)) for ext in self.extensions}
            gpu = files.pop("cuda", None)
            info = {
                "torch": torch.__version__,
                "torch_cuda": torch.version.cuda,
                "compiler": recipe["compiler"](),
                "variants": {name: {"file": path.name, "flags": recipe["compile_flags"](name)} for name, path in files.items()},
                "cuda": {"file": gpu.name, "targets": targets, "nvcc": toolkit.version} if gpu else {"why_not": why_no_cuda},
            }
            for folder in {path.parent for path in files.values()}:
                (folder / "_build_info.json").write_text(json.dumps(info, indent=1) + "\n")

    csrc = recipe["source_folder"]()
    extensions = [
        CppExtension(
            f"ckpt_ops._C_{variant}",
            [str(path.relative_to(ROOT)) for path in recipe["sources"]()],
            include_dirs=[str(csrc)],
            depends=[str(path.relative_to(ROOT)) for path in recipe["headers"]()],
            extra_compile_args=recipe["compile_flags"](variant),
            extra_link_args=recipe["link_flags"](),
        )
        for variant in variants()
    ]
    if toolkit:
        extensions.append(Extension(cuda_name, []))  # no sources: torch would look for a toolkit of its own
    return {"ext_modules": extensions, "cmdclass": {"build_ext": Build}}


if reason := why_pure():
    refuse_if_cuda_is_demanded(reason)
    print(f"ckpt_ops: no native extension is built: {reason}", file=sys.stderr)

setup(
    packages=[*find_packages(include=["ckpt_ops*"]), "ckpt_ops.csrc", "ckpt_ops.triton_kernels"],
    package_dir={"ckpt_ops.csrc": "csrc", "ckpt_ops.triton_kernels": "triton_kernels"},
    package_data={"ckpt_ops.csrc": ["*/*.h", "*/*.cpp", "*/*.cu"]},
    **({} if reason else native_arguments()),
)
