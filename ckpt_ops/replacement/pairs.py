"""An activation whose result goes into a dropout and nowhere else: the two become one kernel.

The dropout's place is taken by an ActDropout, which is an nn.Dropout too; the activation's by an Identity. That is right
only if the one never runs without the other. In an nn.Sequential that can be read off (one whose members are called one by
one from outside belongs in replace's skip=); elsewhere torch.fx traces the parent's forward, and its source must have no
branch and name the two once each.
"""

import ast
import inspect
import textwrap

import torch.fx
from torch import nn

from .. import nn as ours
from ..nn._fused import act_name
from ..saved.accepts import has_own_hooks
from .twins import Skip, Twin, check_untouched

_ACTIVATIONS = (nn.GELU, nn.SiLU, nn.ReLU)
_BRANCHES = (ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While, ast.Try, ast.Match)
_FRESH = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # make memory of their own, and do not keep their result


def pairs_of(parent):
    """(name of the activation, name of the dropout) of each pair among the children; Skip if that cannot be told."""
    children = parent._modules
    if type(parent).forward is nn.Sequential.forward:
        names = list(children)
        pairs = [(a, d) for a, d in zip(names, names[1:]) if _is_pair(children[a], children[d])]
        if pairs:
            check_untouched(parent)
        return pairs
    acts = [name for name, m in children.items() if type(m) in _ACTIVATIONS]
    drops = [name for name, m in children.items() if type(m) is nn.Dropout]
    if not acts or not drops or type(parent).__module__.startswith(("torch.", "ckpt_ops.")):
        return []
    check_untouched(parent)
    return _traced_pairs(parent, acts, drops)


def _is_pair(act, drop):
    return type(act) in _ACTIVATIONS and type(drop) is nn.Dropout


def twins_of_pair(parent, act_name_, drop_name):
    """The Twins of the activation and of the dropout, or Skip."""
    act, drop = parent._modules[act_name_], parent._modules[drop_name]
    for m in (act, drop):
        check_untouched(m)
        if has_own_hooks(m):
            raise Skip(f"the activation or dropout of the pair {act_name_}, {drop_name} has hooks")
    if getattr(act, "inplace", False) and not _after_fresh_memory(parent, act_name_):
        raise Skip("it works in place, perhaps on what the caller still uses")
    return Twin(act, nn.Identity), Twin(drop, ours.ActDropout, act=act_name(act), inplace=False)


def _after_fresh_memory(parent, name):
    """Whether an in-place activation overwrites nothing but a projection's result that nobody else sees."""
    names = list(parent._modules)
    before = names.index(name) - 1
    in_sequence = type(parent).forward is nn.Sequential.forward
    return in_sequence and before >= 0 and type(parent._modules[names[before]]) in _FRESH


# --- by trace -----------------------------------------------------------------------------------------------------


class _Shallow(torch.fx.Tracer):
    """Sees the calls of the parent's children, not into them, and runs nothing on its buffers."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m, qualified_name):
        return True


def _traced_pairs(parent, acts, drops):
    _check_straight(parent)
    shell = type(parent).__new__(type(parent))  # what the forward sets as attributes stays there
    vars(shell).update(vars(parent))
    try:
        graph = _Shallow().trace(shell)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Skip(f"torch.fx cannot trace its {type(parent).__name__}: {error}") from error
    calls = [node for node in graph.nodes if node.op == "call_module"]
    return [
        (node.target, user.target)
        for node in calls
        for user in list(node.users)[:1]
        if node.target in acts and user.op == "call_module" and user.target in drops and len(node.users) == 1
        if _once(calls, node.target) and _once(calls, user.target) and _named_once(parent, node.target, user.target)
    ]


def _once(calls, target):
    return sum(node.target == target for node in calls) == 1


def _check_straight(parent):
    """Skip unless one trace shows all that the forward can do."""
    forward = _source(type(parent).forward)
    if any(isinstance(node, _BRANCHES) for node in ast.walk(forward)):
        raise Skip(f"the forward of its {type(parent).__name__} branches: a trace does not show all that it does")


def _named_once(parent, *names):
    """Whether the methods of the parent's class name each child once: no other method calls it."""
    counts = dict.fromkeys(names, 0)
    for cls in type(parent).__mro__:
        if cls.__module__.startswith("torch.") or cls is object:
            continue
        for method in _source(cls).body[0].body:
            if getattr(method, "name", None) == "__init__":
                continue
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and node.attr in counts:
                    counts[node.attr] += 1
    return all(count == 1 for count in counts.values())


def _source(thing):
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing)))
    except (OSError, TypeError, SyntaxError) as error:
        raise Skip(f"the source of {thing.__qualname__} cannot be read") from error
