"""The demo's options: their defaults, and what is refused before anything runs."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VARIANTS = ("torch", "torch-checkpoint", "ours", "ours-activations", "ours-checkpoint")


class BadOption(ValueError):
    """An option that the demo cannot run with; the message is for the user."""


@dataclass(frozen=True)
class Settings:
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    context: int = 1024
    batch: int = 2
    steps: int = 20
    dropout: float = 0.1
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 1
    threads: int | None = None
    text: Path | None = None
    out: Path = Path("demo_output")
    variants: tuple = VARIANTS
    ladder: bool = True


def add_arguments(parser):
    default = Settings()
    size = parser.add_argument_group("model")
    size.add_argument("--layers", type=int, default=default.layers, help="transformer blocks")
    size.add_argument("--hidden", type=int, default=default.hidden, help="width of the residual stream")
    size.add_argument("--heads", type=int, default=default.heads, help="attention heads; must divide --hidden")
    size.add_argument("--context", type=int, default=default.context, help="bytes a sequence")
    size.add_argument("--dropout", type=float, default=default.dropout, help="drop probability everywhere, in [0, 1)")
    size.add_argument("--dtype", choices=DTYPES, default=default.dtype, help="of parameters and activations")
    training = parser.add_argument_group("training")
    training.add_argument("--batch", type=int, default=default.batch, help="sequences a step")
    training.add_argument("--steps", type=int, default=default.steps, help="training steps a variant")
    training.add_argument("--seed", type=int, default=default.seed, help="of weights, batches and dropout")
    training.add_argument("--device", default=default.device, help="cpu, cuda, cuda:1, ...")
    training.add_argument("--threads", type=int, default=argparse.SUPPRESS, help="torch threads (default: torch's choice)")
    training.add_argument(
        "--text", type=Path, default=argparse.SUPPRESS, metavar="PATH",
        help="file or folder to train on (default: the sources of Python's standard library)",
    )  # fmt: skip
    report = parser.add_argument_group("report")
    report.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=argparse.SUPPRESS, metavar="NAME",
        help=f"what to train, of {', '.join(VARIANTS)} (default: all)",
    )  # fmt: skip
    report.add_argument(
        "--no-ladder", dest="ladder", action="store_false", default=argparse.SUPPRESS,
        help="leave out the sweep over the rungs of ckpt_ops.regenerate",
    )  # fmt: skip
    report.add_argument("--out", type=Path, default=default.out, metavar="FOLDER", help="where picture and JSON go")


def checked(arguments):
    """The `Settings` of parsed arguments; BadOption says what cannot work."""
    given = {name: value for name, value in vars(arguments).items() if name in Settings.__dataclass_fields__}
    if "variants" in given:
        given["variants"] = tuple(v for v in VARIANTS if v in given["variants"])  # in this order, each once
    settings = Settings(**given)
    for name in ("layers", "hidden", "heads", "context", "batch", "steps", "threads"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise BadOption(f"--{name} must be at least 1, got {value}")
    if settings.hidden % settings.heads:
        raise BadOption(f"--heads must divide --hidden, got {settings.heads} and {settings.hidden}")
    if settings.hidden // settings.heads > 256:
        raise BadOption(f"a head has at most 256 columns, got {settings.hidden // settings.heads} (--hidden / --heads)")
    if not 0 <= settings.dropout < 1:
        raise BadOption(f"--dropout must be at least 0 and below 1, got {settings.dropout}")
    if not 0 <= settings.seed < 2**63:
        raise BadOption(f"--seed must fit in 63 bits, and not be negative; got {settings.seed}")
    if settings.text is not None and not settings.text.exists():
        raise BadOption(f"--text {settings.text}: no such file or folder")
    if settings.out.exists() and not settings.out.is_dir():
        raise BadOption(f"--out {settings.out} is not a folder")
    _check_device(settings.device)
    return settings


def _check_device(name):
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadOption(f"--device {name!r} is no device that torch knows; try cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise BadOption(f"--device {name!r}: the demo runs on cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadOption(f"--device {name!r}: this torch sees {torch.cuda.device_count()} CUDA devices")
