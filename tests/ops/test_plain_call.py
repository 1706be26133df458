"""The C++ functions of csrc/autograd do what the Python ones do: same bits, same tensors kept; the rest they decline."""

import itertools

import pytest
import torch
from torch.overrides import TorchFunctionMode

import ckpt_ops
from ckpt_ops import native
from helpers_backends import READY
from helpers_numerics import SEED
from helpers_ops import ALL_OPS, EACH_OP, PARAMETERS, make, run

pytestmark = pytest.mark.skipif("cpu" not in READY, reason=f"cpu is not under test, only {', '.join(READY)}")

# With save="output" a norm is Python's.
OPS = [op for op in ALL_OPS if "output" not in op.name]
every = pytest.mark.parametrize("op", OPS, ids=str)
each = pytest.mark.parametrize("op", [op for op in EACH_OP if op in OPS], ids=str)


@pytest.fixture(autouse=True)
def on_cpu():
    with ckpt_ops.use_backend("cpu"):
        yield


def is_plain(y):
    return "CppNode" in y.grad_fn.name()


def run_and_look(op, tensors, p):
    """(outputs and gradients, what is kept, whether C++ served it)"""
    kept, served = [], []

    def pack(t):
        kept.append((tuple(t.shape), t.dtype))
        return t

    def call(tensors, **random):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            outputs = op.ours(tensors, **random)
        served.append(any("CppNode" in name for name in _names(outputs[0].grad_fn)))
        return outputs

    return run(op, tensors, dict(p=p, seed=SEED), call=call), sorted(kept, key=str), served[0]


def _names(node):
    """Of a node, and of those behind a view or a cast."""
    names, todo = set(), [node]
    while todo:
        if (node := todo.pop()) is not None:
            names.add(node.name())
            todo += [following for following, _ in node.next_functions]
    return names


def subsets(names):
    return itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))


@every
@pytest.mark.parametrize("dtype, param_dtype", [(torch.float32, None), (torch.bfloat16, torch.float32), (torch.float64, None)])
def test_same_bits_and_same_tensors_kept(op, dtype, param_dtype, monkeypatch):
    names = list(op.shapes(op.shape))
    parameters = [name for name in names if name in PARAMETERS]
    for without in subsets(parameters):
        for frozen in subsets([name for name in names if name not in without]):
            for p in (0.0, 0.4, 1.0) if op.random and not frozen else (0.4,):
                tensors = make(op, dtype=dtype, param_dtype=param_dtype, without=without, frozen=frozen)
                results, kept, served = run_and_look(op, tensors, p)
                with monkeypatch.context() as patch:
                    patch.setattr(native, "loaded", lambda: None)
                    expected, expected_kept, served_in_python = run_and_look(op, tensors, p)
                assert kept == expected_kept, (without, frozen, p)
                assert results.keys() == expected.keys()
                for name, value in expected.items():
                    assert torch.equal(results[name], value) and results[name].dtype == value.dtype, (name, without, frozen, p)
                assert not served_in_python
                assert served or len(frozen) + len(without) == len(names) or (op.stem == "dropout" and p == 0)


class Subclass(torch.Tensor):
    pass


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_what_is_not_plain_is_declined():
    x, w, b = (torch.randn(size, requires_grad=True) for size in ((5, 24), 24, 24))
    assert is_plain(ckpt_ops.layer_norm(x, (24,), w, b))
    assert is_plain(ckpt_ops.layer_norm(torch.nn.Parameter(x.detach()), torch.Size([24]), w, b))
    for change in (
        dict(normalized_shape=[24]),
        dict(eps=1),
        dict(save="output"),
        dict(backend="reference"),
        dict(input=x.as_subclass(Subclass)),
    ):
        arguments = dict(input=x, normalized_shape=(24,), weight=w, bias=b) | change
        y = ckpt_ops.layer_norm(**arguments)
        assert not is_plain(y)
        expected = ckpt_ops.layer_norm(x, (24,), w, b, float(arguments.get("eps", 1e-5)))
        torch.testing.assert_close(y.as_subclass(torch.Tensor), expected)
    with Mode():
        assert not is_plain(ckpt_ops.layer_norm(x, (24,), w, b))


@pytest.mark.parametrize(
    "change, error",
    [
        (dict(normalized_shape=(23,)), ValueError),
        (dict(normalized_shape=()), ValueError),
        (dict(normalized_shape=10**30), ValueError),
        (dict(normalized_shape=(-24,)), ValueError),
        (dict(weight=torch.ones(23)), ValueError),
        (dict(weight=torch.ones(24, dtype=torch.int64)), TypeError),
        (dict(weight=torch.ones(24, device="meta")), ValueError),
        (dict(input=torch.ones(5, 24, dtype=torch.int64)), TypeError),
        (dict(input=[1.0]), TypeError),
        (dict(save="nothing"), ValueError),
        (dict(backend="nonsense"), ValueError),
    ],
    ids=str,
)
def test_errors_are_the_python_functions(change, error):
    with pytest.raises(error, match="layer_norm|backend"):
        ckpt_ops.layer_norm(**(dict(input=torch.ones(5, 24), normalized_shape=(24,)) | change))


@each
def test_a_second_backward_is_torchs_error(op):
    y = sum(o.sum() for o in op.ours(make(op), p=0.4, seed=torch.tensor([SEED])))
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@each
def test_an_in_place_change_of_what_is_kept_is_torchs_error(op):
    seed = torch.tensor([SEED])
    tensors = {name: t * 1 for name, t in make(op).items()}
    outputs = op.ours(tensors, p=0.4, seed=seed)
    with torch.no_grad():
        (seed if op.random else tensors["x"]).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(o.sum() for o in outputs).backward()


@each
def test_compiled_autograd(op):
    tensors = make(op)
    expected = run(op, tensors, dict(p=0.4, seed=SEED))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        results = run(op, tensors, dict(p=0.4, seed=SEED))
    for name, value in expected.items():
        assert torch.equal(results[name], value), name
