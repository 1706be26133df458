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


def native_arguments():
    """What setup() needs to build the extension: one library for each instruction set."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class Build(BuildExtension):
        def run(self):
            with recipe["scripts_on_path"]():
                super().run()
            self.write_build_info()

        def build_extension(self, ext):
            # Objects of two variants have the same names: a folder each.
            temp, self.build_temp = self.build_temp, os.path.join(self.build_temp, ext.name)
            super().build_extension(ext)
            self.build_temp = temp

        def write_build_info(self):
            """Beside the libraries: what native.py must know before it loads one."""
            files = {ext.name.rpartition("_")[2]: Path(self.get_ext_fullpath(ext.name)) for ext in self.extensions}
            info = {
                "torch": torch.__version__,
                "compiler": recipe["compiler"](),
                "variants": {name: {"file": path.name, "flags": recipe["compile_flags"](name)} for name, path in files.items()},
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
    return {"ext_modules": extensions, "cmdclass": {"build_ext": Build}}


if reason := why_pure():
    print(f"ckpt_ops: no native extension is built: {reason}", file=sys.stderr)

setup(
    packages=[*find_packages(include=["ckpt_ops*"]), "ckpt_ops.csrc", "ckpt_ops.triton_kernels"],
    package_dir={"ckpt_ops.csrc": "csrc", "ckpt_ops.triton_kernels": "triton_kernels"},
    package_data={"ckpt_ops.csrc": ["*/*.h", "*/*.cpp"]},
    **({} if reason else native_arguments()),
)
