"""How many bytes a provider reads and writes, and how many this machine can copy a second."""

import statistics

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .timing import stopwatch

# Ops that give out memory without touching it, and in-place ops that never read what they overwrite.
_ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_OVERWRITE = ("bernoulli_", "copy_", "fill_", "normal_", "random_", "uniform_", "zero_")


class Traffic(TorchDispatchMode):
    """Sums the bytes of the tensors that every dispatcher op reads and writes; views move nothing.

    A tensor counts once an op, as whole: what an op re-reads inside itself is its own affair.
    """

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        read, written = _distinct((args, kwargs)), _distinct(result)
        if name in _ALLOCATE or (not func._schema.is_mutable and _aliases(written, read)):
            return result
        if name in _OVERWRITE:
            read = {key: t for key, t in read.items() if key not in written}
        self.bytes += sum(map(touched, read.values())) + sum(map(touched, written.values()))
        return result


def touched(t):
    """Bytes of a tensor's distinct elements: an expanded dimension is one element long."""
    elements = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * t.element_size()


def measure(run):
    """Bytes read and written by run(), forward and backward alike, op by op."""
    with Traffic() as traffic:
        run()
    return traffic.bytes


def lower_bound(forward, tensors, grad_outputs, backward):
    """Bytes that any kernel behind `forward` must move, where its ops cannot be seen (a compiled graph).

    Forward: reads every input, writes every output and every saved tensor that is neither.
    Backward: reads the saved tensors and the outputs' gradients, writes the inputs' gradients.
    """
    saved = {}

    def pack(t):
        saved.setdefault(t.untyped_storage()._cdata, t.detach())
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = tree_leaves(forward(*tensors))
    storages = {t.untyped_storage()._cdata: t for t in (*tensors, *outputs)}
    total = sum(map(touched, storages.values())) + sum(touched(t) for key, t in saved.items() if key not in storages)
    if backward:
        total += sum(map(touched, (*saved.values(), *grad_outputs, *tensors)))
    return total


def copy_bandwidth(device, mib=256, calls=7):
    """Bytes a second, read plus written, of a copy between two warm tensors."""
    source = torch.ones(mib << 18, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    watch = stopwatch(device)
    seconds = [watch.seconds(lambda: target.copy_(source)) for _ in range(calls)]
    return 2 * source.nbytes / statistics.median(seconds[2:])


def matmul_rate(device, n=8192, calls=7):
    """Operations a second of an n x n matrix product in bfloat16."""
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    watch = stopwatch(device)
    seconds = [watch.seconds(lambda: a @ b) for _ in range(calls)]
    return 2 * n**3 / statistics.median(seconds[2:])


def _distinct(tree):
    """The tensors of a tree of arguments, each region of memory once."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return {(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t for t in tensors}


def _aliases(written, read):
    storages = {key[0] for key in read}
    return bool(written) and all(key[0] in storages for key in written)
