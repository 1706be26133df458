"""Compiles every CUDA kernel for every target with nvcc, no GPU needed: registers, spills and shared memory of each.

    python tests/cuda_host/cuda_check.py [--arch 90] [--only layer_norm] [--json FILE]

Fails where a kernel spills. Torch is not needed: the kernels know none of it.
"""

import argparse
import concurrent.futures
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CSRC = ROOT / "csrc" / "cuda"
recipe = runpy.run_path(str(ROOT / "ckpt_ops" / "_compile_cuda.py"))  # how the package compiles them
TARGETS = tuple(target.replace(".", "") for target in recipe["TARGETS"])
ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\S+)' for '(?P<target>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def compile_one(nvcc, source, targets, folder):
    """The kernels of a file, for each target: a dict each."""
    code = recipe["code_flags"]([f"sm_{target}" for target in targets])
    command = [nvcc, *recipe["KERNEL_FLAGS"], *code, "-Xptxas", "-v", "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{source.name} does not compile:\n{result.stderr}")
    kernels = [match.groupdict() for match in ENTRY.finditer(result.stderr)]
    if len(kernels) != result.stderr.count("Compiling entry function"):
        raise SystemExit(f"ptxas said something else of {source.name}:\n{result.stderr}")
    return [
        {
            "file": source.name,
            "target": kernel["target"],
            "symbol": kernel["symbol"],
            "registers": int(kernel["registers"]),
            "spills": int(kernel["stores"]) + int(kernel["loads"]),
            "shared": int(found.group(1)) if (found := re.search(r"(\d+) bytes smem", kernel["rest"])) else 0,
        }
        for kernel in kernels
    ]


def readable(symbols):
    """Names of kernels without what is the same in all of them."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None:
        return {symbol: symbol for symbol in symbols}
    names = subprocess.run([tool], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout.splitlines()
    return {symbol: _short(name) for symbol, name in zip(symbols, names)}


def _short(name):
    name = re.sub(r"^void |ckpt::cuda::|ckpt::|\(anonymous namespace\)::|_GLOBAL__N__\w+::|\(bool\)|\(int\)|__nv_|__", "", name)
    return name[: name.index(">(") + 1] if ">(" in name else name.split("(")[0]


def _cell(kernel):
    return f"{kernel['registers']}s{kernel['spills']}" if kernel["spills"] else str(kernel["registers"])


def show(kernels, seconds):
    names = readable(sorted({kernel["symbol"] for kernel in kernels}))
    targets = sorted({kernel["target"] for kernel in kernels}, key=lambda t: int(t[3:]))
    by_name = {}
    for kernel in kernels:
        by_name.setdefault((kernel["file"], names[kernel["symbol"]]), {})[kernel["target"]] = kernel
    print(f"{'registers on ' + ', '.join(targets):<34} dynamic shared memory is set at launch; s: spilled bytes")
    for (file, name), found in sorted(by_name.items()):
        cells = [_cell(found[target]) for target in targets if target in found]
        print(f"{file:<22}{' '.join(f'{cell:>6}' for cell in cells)}  {name}")
    spilled = [kernel for kernel in kernels if kernel["spills"]]
    print(f"{len(by_name)} kernels, {len(targets)} targets, {len(spilled)} spill, {seconds:.0f} s")
    return spilled


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help=f"a target, by default all of {', '.join(TARGETS)}")
    parser.add_argument("--only", action="append", help="the stem of a file")
    parser.add_argument("--json", type=Path, help="also write what is shown there")
    options = parser.parse_args()
    try:
        nvcc = recipe["find_nvcc"](os.environ, ())
    except recipe["CannotCompileError"] as error:
        print(f"cuda-check: skipped, {error}")
        return 0
    sources = [path for path in sorted(CSRC.glob("*.cu")) if not options.only or path.stem in options.only]
    sources.sort(key=lambda source: "dropout_add_norm" not in source.stem)  # the longest first
    targets, start = options.arch or TARGETS, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        targets = options.arch or TARGETS
        kernels = [
            k for found in pool.map(lambda source: compile_one(nvcc, source, targets, Path(folder)), sources) for k in found
        ]
    seconds = time.monotonic() - start
    spilled = show(kernels, seconds)
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "kernels": kernels}, indent=1) + "\n")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
