"""python -m bench triton: compiles the Triton kernels for GPUs that need not be there, and tells what each one takes.

Every module of triton_kernels lists its kernels' main configurations:

    COMPILE_CASES = (
        CompileCase("bf16 4096", _kernel, dict(x_ptr="*bf16", C="i32:16", stride_xn=1, bias_ptr=None, BLOCK_N=1024)),
    )

An argument is a type where its value is known at the launch alone ("*bf16", "i32", "fp32"; "i32:16" for a multiple of
16), and a value where it is part of the kernel (a constexpr, a stride of 1, a pointer that is None). Pointers are aligned
to 16 bytes. triton_kernels/_launch.py has the class.
"""

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import pathlib
import pkgutil
import re
import subprocess
import tempfile
import time

from rich.console import Console
from rich.table import Table

TARGETS = {  # backend, architecture, threads a warp, bytes of shared memory that a program may use
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}


@dataclasses.dataclass
class Row:
    kernel: str
    configuration: str
    target: str
    warps: int
    wide: bool  # its accesses ought to be 128 bits wide
    seconds: float = 0.0
    error: str = ""
    registers: int = 0  # of a thread
    spilled: int = 0  # bytes of a thread's stack in memory
    shared: int = 0  # bytes of a program
    shared_limit: int = 0
    load_bits: int = 0  # the widest access of a thread
    store_bits: int = 0


def modules():
    """The modules of ckpt_ops.triton_kernels."""
    package = importlib.import_module("ckpt_ops.triton_kernels")
    return [importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]


def kernels():
    """The kernels by name: what a module's own names ending in _kernel stand for, without an autotuner around it."""
    own = ((module, name, value) for module in modules() for name, value in vars(module).items())
    return {
        name: bare(value)
        for module, name, value in own
        if name.endswith("_kernel") and bare(value).__module__ == module.__name__
    }


def bare(kernel):
    """The jitted function inside an autotuner or heuristics."""
    while hasattr(kernel, "fn") and hasattr(kernel.fn, "fn"):
        kernel = kernel.fn
    return kernel


def cases():
    return [case for module in modules() for case in getattr(module, "COMPILE_CASES", ())]


def source(case):
    """The case as Triton's compiler takes it."""
    from triton.compiler import ASTSource

    kernel = bare(case.kernel)
    if missing := set(kernel.arg_names) ^ set(case.arguments):
        raise ValueError(f"{kernel.__name__}, {case.name}: arguments {sorted(missing)} are missing, or not the kernel's")
    constexpr = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        given = case.arguments[name]
        if name in constexpr or not isinstance(given, str):
            signature[name], values[name] = "constexpr", given
            continue
        signature[name], _, multiple = given.partition(":")
        if multiple or given.startswith("*"):
            attributes[i,] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)


def compile_case(case, target):
    """The Row of a case on a target."""
    import triton
    from triton.backends.compiler import GPUTarget

    backend, architecture, warp, limit = TARGETS[target]
    case = case.on(target)
    row = Row(bare(case.kernel).__name__, case.name, target, case.num_warps, case.wide, shared_limit=limit)
    started = time.perf_counter()
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    try:
        compiled = triton.compile(source(case), target=GPUTarget(backend, architecture, warp), options=options)
    except (triton.TritonError, RuntimeError) as error:
        row.error = str(error).strip() or type(error).__name__
    else:
        row.shared = compiled.metadata.shared
        (_read_nvidia if backend == "cuda" else _read_amd)(row, compiled.asm)
    row.seconds = round(time.perf_counter() - started, 2)
    return row


def _read_nvidia(row, asm):
    accesses = re.findall(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[a-z]+(\d+)\s", asm["ptx"])
    bits = {kind: [int(lanes or 1) * int(size) for k, lanes, size in accesses if k == kind] for kind in ("ld", "st")}
    # A pipelined loop's loads go to shared memory, a number of bytes each.
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global\s*\[[^]]*\],\s*\[[^]]*\],\s*(\w+)", asm["ptx"])
    bits["ld"] += [8 * int(size, 0) for size in copies]
    row.load_bits, row.store_bits = max(bits["ld"], default=0), max(bits["st"], default=0)
    usage = _resource_usage(asm["cubin"])
    row.registers, row.spilled = usage["REG"], usage["STACK"] + usage["LOCAL"]


def _resource_usage(cubin):
    """What cuobjdump tells of a kernel, by its own words: REG, STACK, SHARED, LOCAL."""
    from triton.backends import nvidia

    tool = pathlib.Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", output.partition("Function")[2])}


def _read_amd(row, asm):
    text = asm["amdgcn"]

    def widest(kind):
        found = re.findall(rf"\b(?:global|buffer)_{kind}_(?:dwordx(\d)|(dword)|(short|ushort)|\S+)", text)
        return max((32 * int(n or 1) if n or dword else 16 if short else 8 for n, dword, short in found), default=0)

    def count(name):
        return max(int(n) for n in re.findall(rf"\.{name}:\s+(\d+)", text))

    row.load_bits, row.store_bits = widest("load"), widest("store")
    row.registers = count("vgpr_count")
    row.spilled = count("private_segment_fixed_size")  # scalar registers spill to vector registers, not to memory


def compile_all(chosen, targets, jobs, done=lambda row: None):
    """Every case for every target, in `jobs` processes."""
    global _work  # forked processes find it: a kernel cannot be pickled
    _work = [(case, target) for case in chosen for target in targets]
    rows = []
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for row in pool.imap(_compile_work, range(len(_work))):
            rows.append(row)
            done(row)
    return rows


def _compile_work(i):
    return compile_case(*_work[i])


def problems(row):
    """What must not be, in words: no spills, shared memory that fits, 128-bit accesses where promised."""
    if row.error:
        yield [line for line in row.error.splitlines() if line.strip(" ^")][-1]
    if row.spilled:
        yield f"{row.spilled} bytes spilled"
    if row.shared > row.shared_limit:
        yield f"{row.shared} bytes of shared memory, {row.target} has {row.shared_limit}"
    if row.wide and not row.error and row.target != "gfx942" and min(row.load_bits, row.store_bits) < 128:
        yield f"loads of {row.load_bits} bits, stores of {row.store_bits}"


def table(rows):
    columns = ("kernel", "configuration", "target", "registers", "spilled", "shared", "warps", "load bits", "store bits", "s")
    result = Table(*columns, title="Triton kernels, compiled without a GPU")
    for row in rows:
        cells = (row.registers, row.spilled, row.shared, row.warps, row.load_bits, row.store_bits, row.seconds)
        style = "red" if any(problems(row)) else None
        result.add_row(
            row.kernel.strip("_").removesuffix("_kernel"), row.configuration, row.target, *map(str, cells), style=style
        )
    return result


def parser():
    p = argparse.ArgumentParser(
        "python -m bench triton", description="Compiles every Triton kernel for GPUs that need not be there."
    )
    p.add_argument("--case", metavar="SUBSTRING", default="", help="only kernels whose name, or configuration, contains this")
    p.add_argument("--target", choices=TARGETS, action="append", help="only this one; may be repeated")
    p.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes (default: %(default)s)")
    p.add_argument("--out", metavar="JSON", default="bench_output/triton_resources.json", help="default: %(default)s")
    return p


def main(arguments):
    options = parser().parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 leaves nothing to compile: unset it")
    chosen = [case for case in cases() if options.case in f"{bare(case.kernel).__name__} {case.name}"]
    if not chosen:
        raise SystemExit(f"no kernel's name or configuration contains {options.case!r}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    with console.status("") as status:
        rows = compile_all(
            chosen,
            options.target or list(TARGETS),
            options.jobs,
            done=lambda row: status.update(f"{row.kernel}, {row.configuration}, {row.target}"),
        )
    console.print(table(rows))
    path = pathlib.Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    console.print(f"wrote {path}", style="dim")
    wrong = [f"{row.kernel}, {row.configuration}, {row.target}: {problem}" for row in rows for problem in problems(row)]
    if wrong:
        raise SystemExit("\n".join(wrong))
