"""The command line: `python -m ckpt_ops` and the console command `ckpt-ops`."""

import argparse

import torch

from . import __version__, backends, native, verify_command
from .demo import options as demo_options

NEEDS_EXTRAS = "this command draws with rich and matplotlib, and {} is not installed: pip install 'ckpt_ops[demo]'"


def main(argv=None):
    """Runs the command that `argv` names (sys.argv by default). Returns the exit status; bad options exit with 2."""
    parser, subparsers = _parsers()
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "info":
            return info()
        return demo(arguments) if arguments.command == "demo" else verify_command.run(arguments)
    except (demo_options.BadOption, verify_command.BadArgument) as error:
        subparsers[arguments.command].error(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("rich", "matplotlib"):
            raise
        parser.exit(1, f"ckpt-ops: {NEEDS_EXTRAS.format(package)}\n")


def info():
    """Prints what this installation can do on this machine."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"ckpt_ops {__version__}", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts():
        table.add_row(name, escape(value))
    table.add_section()
    for name, state in backends().items():
        table.add_row(f"backend {name}", "[green]ready[/]" if state == "ready" else f"[yellow]no:[/] {escape(state)}")
    Console().print(table)
    return 0


def demo(arguments):
    """Trains the same small GPT with torch's layers and with ours, and reports what each remembers and takes."""
    settings = demo_options.checked(arguments)
    import matplotlib  # noqa: F401  (asked for before the training, not after it)

    from .demo.run import run

    run(settings)
    return 0


def _facts():
    from .machine import machine

    here = machine()
    yield "torch", torch.__version__ + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ", CPU build")
    yield "python", f"{here['python']} on {here['system']}"
    yield "processor", f"{here['processor']}, {here['cores']} cores, torch threads: {here['threads']}"
    yield "instruction set", torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        yield "GPU", torch.cuda.get_device_name()
    extension = native.extension()  # compiled now, if it was not built ahead of time
    yield "extension", native.status()
    if extension is not None:
        yield "compiler", extension.build_info()["compiler"]


def _parsers():
    parser = argparse.ArgumentParser(
        prog="ckpt-ops",
        description="Fused PyTorch kernels that make training remember less.",
        epilog="`ckpt-ops demo --help` lists the demo's options.",
    )
    parser.add_argument("--version", action="version", version=f"ckpt_ops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{info,demo,verify}")
    commands.add_parser(
        "info",
        help="what this installation can do here: backends and why not, instruction set, build",
        description="Prints torch, processor, build and the state of every backend.",
    )
    demo_parser = commands.add_parser(
        "demo",
        help="train a GPT with torch's layers and with ours, and compare memory, time and loss",
        description="Trains one byte-level GPT with dropout several times, from the same weights on the same batches: with "
        "torch's layers, with torch's checkpointing, with the layers of this package, with those under checkpointing, and "
        "at every rung of ckpt_ops.regenerate. Prints tables, and writes pictures and JSON. The "
        "defaults take about two minutes on two cores.",
        usage="%(prog)s [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo_options.add_arguments(demo_parser)
    verify_parser = commands.add_parser(
        "verify",
        help="compare what a model of yours computes again for backward with what its forward computed",
        description="Runs one forward and backward of a model with regeneration (and the checkpoint regions that it has), and "
        "compares bit for bit what is computed again. Names the module, the share of elements that differ, and the likely "
        "cause. Exits with 1 if something differs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    verify_command.add_arguments(verify_parser)
    return parser, {"demo": demo_parser, "verify": verify_parser}
