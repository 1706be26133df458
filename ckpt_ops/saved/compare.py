"""How two tensors that should be the same differ, and what usually makes them so."""

from dataclasses import dataclass

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Finding:
    """One saved tensor that was not the same when it was computed again."""

    module: str  # the module that computed it (of a recipe), or that saved it (of a checkpoint region)
    recipe: str  # the name of the recipe, or "checkpoint"
    shape: tuple
    dtype: torch.dtype
    share: float  # of the elements, how many differ; 1 where shape or dtype differ
    largest: float  # difference; inf where shape or dtype differ
    cause: str  # the likely one

    def __str__(self):
        where = self.module if self.recipe == self.module else f"{self.module}, {self.recipe}"
        what = f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
        return f"{where}: {what}: {self.share:.2%} differ, by up to {self.largest:.3g}: {self.cause}"


def difference(a, b):
    """None if b has a's bits (a NaN equals a NaN), else (share of elements that differ, largest difference)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return 1.0, float("inf")
    differs = _bits(a) != _bits(b)
    if a.is_floating_point() or a.is_complex():
        nan = torch.isnan(a) & torch.isnan(b)
        differs = (differs.any(-1) if a.is_complex() else differs) & ~nan
    if not differs.any():
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    largest = (a[differs].to(wide) - b[differs].to(wide)).abs().max().item()
    return differs.double().mean().item(), largest


def _bits(t):
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return t.contiguous().view(_BITS[t.element_size()]) if t.is_floating_point() else t


def likely_cause(a, b, found, moved):
    """a: the original, b: the recomputed, found: their `difference`, moved: whether computing b drew random numbers."""
    if a.dtype != b.dtype:
        return f"autocast: {b.dtype} when computed again, so another autocast state or a cached cast"
    if a.shape != b.shape:
        return f"mutated state: shape {tuple(b.shape)} when computed again"
    if moved or _zeros_differ(a, b):
        return "unseeded randomness: it draws other numbers when computed again"
    if _small(a, found[1]):
        return "nondeterministic kernel: the difference is one of rounding"
    return "mutated state: something it reads has changed in between, or it has a random generator of its own"


def _zeros_differ(a, b):
    """Another dropout mask: many zeros elsewhere (rounding moves a few at most)."""
    return ((a == 0) != (b == 0)).double().mean().item() > 0.01


def _small(a, largest):
    """Sums in another order err by a few ulps of the largest value; 16-bit results were summed in more bits."""
    if not a.is_floating_point():
        return False
    ulps = 4 if a.element_size() <= 2 else 64
    return largest <= ulps * torch.finfo(a.dtype).eps * a.abs().max().item()


def generator_states():
    """Torch's generators, in a form that compares."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return [state.numpy().tobytes() for state in states]
