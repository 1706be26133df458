"""memory.kept and memory.peak on cases whose figures are known."""

import torch
import torch.nn.functional as F
from torch import nn

import ckpt_ops
from ckpt_ops.memory import kept, peak


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_the_readme_example_of_torchs_own_layers():
    """torch's dropout(gelu(x)): x, the activation's output is dropped, a mask of a byte an element."""
    x = leaf(64, 256)
    assert kept(lambda: F.gelu(x)).bytes == 64 * 256 * 4
    assert kept(lambda: torch.relu(x)).bytes == 64 * 256 * 4  # its result


def test_a_storage_counts_once_and_whole():
    x = leaf(8, 16)
    result = kept(lambda: (x[:2].sin() + x[2:4].cos()) * x.view(-1)[:1])
    rows = [row for row in result.rows if row.bytes == x.nbytes]
    assert len(rows) == 1 and "Sin" in rows[0].op and "Cos" in rows[0].op


def test_parameters_are_apart():
    linear, x = nn.Linear(16, 4), leaf(8, 16)
    result = kept(linear, x)
    assert result.bytes == x.nbytes and result.parameter_bytes == linear.weight.nbytes
    by_op = {row.parameter: row.op for row in result.rows}
    assert by_op[True] == by_op[False] == "Addmm"


def test_methods_and_modules_among_the_arguments_give_their_parameters():
    linear, x = nn.Linear(16, 4), leaf(8, 16)
    assert kept(linear.forward, x).parameter_bytes == linear.weight.nbytes
    assert kept(lambda m, x: m(x), linear, x).parameter_bytes == linear.weight.nbytes


def test_rows_are_largest_first_and_printed():
    x, y = leaf(8, 16), leaf(8, 1)
    result = kept(lambda: (x * 2).exp() * y)
    assert [row.bytes for row in result.rows] == sorted((row.bytes for row in result.rows), reverse=True)
    text = str(result)
    assert f"{result.bytes:,} bytes kept" in text and "float32 [8, 16]" in text and "Exp" in text


def test_the_output_keeps_its_graph():
    x = leaf(8, 16)
    result = kept(torch.exp, x)
    result.output.sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_nothing_is_kept_without_grad():
    with torch.no_grad():
        assert kept(torch.exp, leaf(3)).rows == []


def test_outputs_in_containers():
    x = leaf(8, 16)
    result = kept(lambda: {"a": [x.exp()], "b": (x.sin(),)})
    assert {row.op for row in result.rows} == {"Exp", "Sin"}


def test_kept_names_our_ops(fused):
    x = torch.randn(64, 256, device=fused.device, requires_grad=True)
    result = kept(ckpt_ops.gelu_dropout, x, 0.1)
    assert {row.op for row in result.rows} == {"ActDropout"}


def test_peak_counts_what_is_alive_at_once():
    x = torch.randn(256, 1024)
    for fn, alive in [(lambda: x + 1, 1), (lambda: (x + 1) * 2, 2), (lambda: [x + 1 for _ in range(3)], 3)]:
        assert alive * x.nbytes <= peak(fn) < alive * x.nbytes + 4096  # and the scalars, as tensors


def test_peak_of_a_fused_op_is_its_result(fused):
    x = torch.randn(256, 1024, device=fused.device)
    assert x.nbytes <= peak(ckpt_ops.dropout, x, 0.1) < x.nbytes + 4096
