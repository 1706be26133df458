"""Row 48 of the collected bug reports: regenerated and checkpointed layers under fully_shard, two processes."""

import copy
import socket
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt_ops
from ckpt_ops.demo.model import Block

HIDDEN, HEADS, DEPTH = 16, 2, 3


class Calls(nn.Module):
    _calls = 0

    def forward(self, x):
        self._calls += 1
        return x


class Layer(nn.Module):
    """Ours and torch's own layers."""

    def __init__(self):
        super().__init__()
        self.block, self.calls = Block(ckpt_ops.nn, HIDDEN, HEADS, 0.1), Calls()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN))

    def forward(self, x):
        return x + self.mlp(self.norm(self.block(self.calls(x))))


class Checkpointing(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = ckpt_ops.checkpoint(layer, x)
        return x


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "allgather" in str(func)
        return func(*args, **(kwargs or {}))


def _gradients(model, x):
    torch.manual_seed(5)
    model(x).sin().sum().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def _shard(model):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _case(how, first):
    """(gathers a layer, calls of each layer, gradients are those of one process, reasons in the report, bytes kept)"""
    torch.manual_seed(0)
    model = (Checkpointing if how == "checkpoint" else nn.Sequential)(*(Layer() for _ in range(DEPTH)))
    x = torch.randn(2, 4, HIDDEN, requires_grad=True)
    expected = _gradients(copy.deepcopy(model), x)
    if first == "sharded":
        _shard(model)
    handle = ckpt_ops.regenerate(model, how) if how in ckpt_ops.RUNGS else None
    if first == "regenerated":
        _shard(model)
    with Gathers() as gathers:
        got = _gradients(model, x)
    same = all(map(torch.equal, got, expected))
    left = [reason for block in handle.report().blocks for reason in block.left.values()] if handle else []
    return gathers.count / DEPTH, [layer.calls._calls for layer in model], same, left


HOWS = ("plain", *ckpt_ops.RUNGS, "checkpoint")


def _rank(rank, port, results):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch's, about views that it returns
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = {(how, first): _case(how, first) for how in HOWS for first in ("sharded", "regenerated")}
    results.put(found)
    dist.barrier()  # neither leaves while the other still talks to it
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_rank, (port, results), nprocs=2)
    return [results.get() for _ in range(2)]


@pytest.mark.parametrize("first", ["sharded", "regenerated"])
@pytest.mark.parametrize("how", HOWS)
def test_case_48_two_all_gathers_a_layer(found, how, first):
    for of_rank in found:
        gathers, calls, same, left = of_rank[how, first]
        assert gathers == 2
        assert calls == [2 if how in ("block", "checkpoint") else 1] * DEPTH
        assert same and not left
