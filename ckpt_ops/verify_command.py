"""`ckpt-ops verify MODULE:FACTORY`: one forward and backward of a model of yours, and what of it does not replay."""

import importlib
import os
import sys

import torch
from torch import nn

from .policies.rungs import RUNGS, regenerate
from .saved.verify import verify


class BadArgument(Exception):
    """What the command line cannot use, and why."""


def add_arguments(parser):
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="what to import (from the current directory, too) and call: it returns (model, args) or (model, args, kwargs), "
        "or a model alone with --input-shape",
    )
    parser.add_argument("--rung", choices=RUNGS, default="activations", help="what is regenerated")
    parser.add_argument("--seed", type=int, default=0, help="of torch's generators, set before the factory is called")
    parser.add_argument("--input-shape", metavar="N,N,...", help="of a random float32 input, where the factory gives no inputs")


def run(arguments):
    """Prints the findings. Returns the exit status: 0, or 1 where something differs."""
    torch.manual_seed(arguments.seed)
    model, args, kwargs = _made(_factory(arguments.factory), arguments.input_shape)
    try:
        handle = regenerate(model, arguments.rung)
    except ValueError as error:
        raise BadArgument(str(error)) from error
    broken = None
    with verify(model) as v:
        loss = _loss(model(*args, **kwargs))
        try:
            loss.backward()
        except torch.utils.checkpoint.CheckpointError as error:  # another shape or dtype: it cannot go on
            broken = error
    _print(handle, v, broken)
    return 0 if v.ok and broken is None else 1


def _factory(name):
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise BadArgument(f"expected MODULE:FACTORY, for example mypackage.models:small, got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise BadArgument(f"there is no module named {error.name}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadArgument(f"{module_name} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        raise BadArgument(f"{name} cannot be called: it is of type {type(found).__name__}")
    return found


def _made(factory, input_shape):
    made = factory()
    if isinstance(made, nn.Module):
        if input_shape is None:
            raise BadArgument("the factory gave a model without inputs: let it return (model, args), or pass --input-shape")
        return made, (torch.randn(_shape(input_shape)),), {}
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise BadArgument(f"the factory must return (model, args), (model, args, kwargs) or a model, got {type(made).__name__}")
    model, args, kwargs = (*made, {})[:3]
    return model, args if isinstance(args, (tuple, list)) else (args,), kwargs


def _shape(text):
    try:
        return [int(n) for n in text.split(",")]
    except ValueError as error:
        raise BadArgument(f"--input-shape takes sizes joined by commas, for example 2,16,64, got {text!r}") from error


def _loss(output):
    """The sum of all floating tensors in what the model returned."""
    parts = [t.float().sum() for t in _tensors(output) if t.requires_grad]
    if not parts:
        raise BadArgument("nothing that the model returns needs a gradient, so nothing is kept for backward")
    return sum(parts)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from _tensors(v)


def _print(handle, v, broken):
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(escape(str(handle.report())), highlight=False)
    if v.findings:
        table = Table(title="What was not the same when it was computed again", title_justify="left")
        for column in ("module", "tensor", "elements", "largest difference", "likely cause"):
            table.add_column(column, overflow="fold")
        for f in v.findings:
            tensor = f"{str(f.dtype).removeprefix('torch.')} {list(f.shape)}"
            table.add_row(*map(escape, (f.module, tensor, f"{f.share:.2%}", f"{f.largest:.3g}", f.cause.partition(":")[0])))
        console.print(table)
    if broken is not None:
        console.print(escape(str(broken).strip().partition("\n")[0]), highlight=False)
    console.print(escape(str(v)), highlight=False)
