"""Builds a wheel with the CUDA kernels against a CUDA torch, installs it into a fresh environment, and looks at it. No GPU.

    python tests/install/cuda_wheel.py FOLDER [--torch torch==X]

FOLDER keeps the environment with torch (6 GB), so that a second run is quick. Skipped out loud without nvcc, disk or torch.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED_GB = 12  # torch's wheels, what they unpack to, objects and the wheel

PROBE = """
    import json, pathlib, torch, ckpt_ops
    from ckpt_ops.schemas import SCHEMAS
    state = ckpt_ops.backends()["cuda"]
    names = ["ckpt_ops::" + schema.partition("(")[0] for schema in SCHEMAS]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    x = torch.ones(64, 128)
    folder = pathlib.Path(ckpt_ops.__file__).parent
    print(json.dumps({
        "torch": torch.__version__,
        "state": state,
        "gpu": torch.cuda.is_available(),
        "registered": [name for name in names if has(name, "CUDA")],
        "missing": [name for name in names if not has(name, "CUDA")],
        "cpu": ckpt_ops.native.status(),
        "equal": torch.equal(ckpt_ops.dropout(x, 0.5, seed=1), ckpt_ops.dropout(x, 0.5, seed=1, backend="reference")),
        "build": json.loads((folder / "_build_info.json").read_text())["cuda"],
        "needs_cuda": [p.name for p in folder.glob("_C_*") if b"libcudart" in p.read_bytes()],
    }))
"""


def why_skipped(folder, nvcc, free_bytes):
    """Why no wheel can be built here, or None."""
    if nvcc is None:
        return "there is no nvcc on PATH"
    if not (folder / "torch_is_there").exists() and free_bytes < NEEDED_GB * 10**9:
        return f"it takes {NEEDED_GB} GB of disk, and {free_bytes / 1e9:.0f} are free in {folder}"
    return None


def problems(found):
    """What the installed wheel lacks, in words."""
    wanted = "ready" if found["gpu"] else "compiled; no GPU here"
    checks = {
        f"backends()['cuda'] says {found['state']!r}, not {wanted!r}": found["state"] == wanted,
        f"without a CUDA kernel: {found['missing']}": {name.partition("::attention")[1] for name in found["missing"]}
        == {"::attention"},
        "the CPU kernels were not compiled ahead of time": found["cpu"].startswith("compiled for torch"),
        "the CPU kernels give other results than the reference": found["equal"],
        f"libraries that need CUDA: {found['needs_cuda']}": [n.partition(".")[0] for n in found["needs_cuda"]] == ["_C_cuda"],
    }
    return [text for text, fine in checks.items() if not fine]


def venv(folder):
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    return folder / "bin" / "python"


def torch_venv(folder, torch):
    """The environment with torch, made once. CalledProcessError where pip cannot install it."""
    python, stamp = folder / "torch" / "bin" / "python", folder / "torch_is_there"
    if not stamp.exists() or stamp.read_text() != torch:
        start = time.monotonic()
        stamp.unlink(missing_ok=True)
        venv(folder / "torch")
        run([str(python), "-m", "pip", "install", "-q", "--no-compile", "setuptools>=77", "wheel", "numpy", "ninja", torch])
        stamp.write_text(torch)
        print(f"{torch} installed: {time.monotonic() - start:.0f} s")
    return python


def copied_sources(folder):
    """The package without what is built in the clone: that is for another torch. Objects of earlier runs stay."""
    for part in ("ckpt_ops", "csrc", "triton_kernels"):
        shutil.rmtree(folder / part, ignore_errors=True)
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.so", "_build_info.json"))
    for part in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy2(ROOT / part, folder)
    return str(folder)


def run(command, **options):
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CKPT_OPS_JIT")}
    return subprocess.run(command, check=True, env=clean | options.pop("env", {}), text=True, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="torch", help="a requirement that pip resolves to a CUDA build")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if reason := why_skipped(folder, shutil.which("nvcc"), shutil.disk_usage(folder).free):
        print(f"wheel-cuda: SKIPPED, {reason}")
        return 0
    try:
        python = torch_venv(folder, options.torch)
    except subprocess.CalledProcessError as error:
        print(f"wheel-cuda: SKIPPED, {options.torch} cannot be installed here: pip ended with {error.returncode}")
        return 0
    wheels = folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    start = time.monotonic()
    env = {"CKPT_OPS_CUDA": "1"}
    command = [str(python), "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    run([*command, copied_sources(folder / "source")], env=env)
    seconds = time.monotonic() - start
    wheel = next(wheels.glob("*.whl"))
    user = venv(folder / "user")
    run([str(user), "-m", "pip", "install", "-q", "--no-deps", str(wheel)])
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    of_torch, own = (run([str(p), "-c", purelib], stdout=subprocess.PIPE).stdout.strip() for p in (python, user))
    (Path(own) / "torch.pth").write_text(of_torch + "\n")  # 6 GB less than a second torch
    done = run([str(user), "-c", textwrap.dedent(PROBE)], cwd=folder, env={"CKPT_OPS_JIT": "0"}, stdout=subprocess.PIPE)
    found = json.loads(done.stdout.splitlines()[-1])
    library = next(info for info in zipfile.ZipFile(wheel).infolist() if "_C_cuda" in info.filename)
    sizes = f"{wheel.stat().st_size / 1e6:.1f} MB, its CUDA library {library.file_size / 1e6:.1f} MB"
    print(f"{wheel.name}: {sizes}, built in {seconds:.0f} s")
    print(f"torch {found['torch']}, nvcc {found['build']['nvcc']}, for {', '.join(found['build']['targets'])}")
    print(f"backends()['cuda']: {found['state']}; {len(found['registered'])} ops registered for CUDA")
    for text in (wrong := problems(found)):
        print(f"wheel-cuda: WRONG: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
