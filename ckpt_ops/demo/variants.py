"""What the demo compares: which layers, and how a block is called."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch.utils.checkpoint import checkpoint

from .. import nn, regenerate, seeds
from . import torch_layers
from .model import GPT
from .options import DTYPES


@dataclass(frozen=True)
class Variant:
    title: str
    layers: ModuleType
    run_block: Callable
    rung: str = "store"


def _plain(block, x):
    return block(x)


def _checkpoint(block, x):
    return checkpoint(block, x, use_reentrant=False)


def _checkpoint_with_seeds(block, x):
    # The block's seeds are taped, 8 bytes each, so torch's random state need not be kept and restored.
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=seeds.replay())


VARIANTS = {
    "torch": Variant("torch", torch_layers, _plain),
    "torch-checkpoint": Variant("torch + checkpoint", torch_layers, _checkpoint),
    "ours": Variant("ckpt_ops", nn, _plain),
    "ours-activations": Variant("ckpt_ops, rung activations", nn, _plain, "activations"),
    "ours-checkpoint": Variant("ckpt_ops + checkpoint", nn, _checkpoint_with_seeds),
}


def build(name, settings, rung=None):
    """The variant's model, with the initial weights that all variants share, on the settings' device; on another `rung`."""
    variant = VARIANTS[name]
    model = GPT(
        variant.layers,
        depth=settings.layers,
        hidden=settings.hidden,
        heads=settings.heads,
        context=settings.context,
        dropout=settings.dropout,
        run_block=variant.run_block,
    )
    model.initialise(settings.seed).to(settings.device, DTYPES[settings.dtype])
    if (rung := rung or variant.rung) != "store":
        regenerate(model, rung)
    return model
