"""The text, as bytes, and the batches cut from it."""

import sysconfig
from pathlib import Path

import torch

from .options import BadOption

MOST_BYTES = 16_000_000  # more than a demo can read in minutes
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "encodings", "pydoc_data"}  # tables


def load(path=None):
    """uint8 [bytes]: of a file, of every text file in a folder, or of the standard library's sources."""
    if path is None:
        path = Path(sysconfig.get_path("stdlib"))
        files = [f for f in sorted(path.rglob("*.py")) if not _SKIPPED_FOLDERS & set(f.relative_to(path).parts)]
        if not files:
            raise BadOption(f"this Python has no sources in {path}; give a text with --text PATH")
    else:
        files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    text = bytearray()
    for file in files:
        content = file.read_bytes()
        if b"\0" not in content:  # a zero byte: not text
            text += content
        if len(text) >= MOST_BYTES:
            break
    return torch.frombuffer(text[:MOST_BYTES], dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def batches(text, batch, context, steps, seed):
    """A list of `steps` pairs (ids, targets), int64 [batch, context], cut at random places; the same for a seed."""
    if len(text) <= context:
        raise BadOption(f"the text has {len(text)} bytes; --context {context} needs more than {context}")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (steps, batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()  # [steps, batch, context + 1]
    return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows]
