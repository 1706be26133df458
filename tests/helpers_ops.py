"""Every op in one table: what it takes, how ours and plain torch's are called. Tests of "all ops" loop over it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import ckpt_ops

EPS = 1e-5
PARAMETERS = ("bias", "input_bias", "weight")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Op:
    name: str  # the test id
    stem: str  # of its files
    shapes: Callable  # shape -> {input's name: its shape}; a parameter may be left out of the tensors
    ours: Callable  # (tensors, **random) -> tuple of outputs; random: p, seed, stream, origin, generator
    plain: Callable  # (tensors, m) -> the same in plain torch; m: mask * scale in the tensors' dtype
    backwards: Callable | None = None  # `plain` with every sum in the other order
    shape: tuple = (6, 40)  # a small one
    outputs: tuple = ("y",)
    random: bool = True
    mask_shape: Callable = lambda shape: shape

    def __str__(self):
        return self.name

    def plain_reversed(self, t, m):
        """Plain torch again, with its sums in the opposite order: equally right, other rounding."""
        if self.backwards:
            return self.backwards(t, m)
        flipped = {n: x.flip(tuple(range(x.dim()))) for n, x in t.items()}
        outputs = self.plain(flipped, m if isinstance(m, float) else m.flip(tuple(range(m.dim()))))
        return tuple(o.flip(tuple(range(o.dim()))) for o in outputs)


def _rows(*names):
    """x and further inputs of one shape; parameters of the last dimension."""
    return lambda shape: {n: shape[-1:] if n in PARAMETERS else shape for n in names}


# --- element-wise -----------------------------------------------------------------------------------------------

PLAIN_ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "relu2": lambda x: F.relu(x) ** 2,
}


def _plus(x, bias):
    return x if bias is None else x + bias


def _act_dropout(act):
    return Op(
        f"act_dropout-{act}",
        "act_dropout",
        _rows("x", "bias"),
        lambda t, **k: (ckpt_ops.act_dropout(t["x"], act, bias=t.get("bias"), **k),),
        lambda t, m: ((PLAIN_ACTIVATIONS[act](_plus(t["x"], t.get("bias"))) * m).to(t["x"].dtype),),
    )


DROPOUT = Op(
    "dropout",
    "dropout",
    _rows("x"),
    lambda t, **k: (ckpt_ops.dropout(t["x"], **k),),
    lambda t, m: (t["x"] * m,),
)
ACT_DROPOUTS = [_act_dropout(act) for act in PLAIN_ACTIVATIONS]
DROPOUT_ADD = Op(
    "dropout_add",
    "dropout_add",
    _rows("x", "residual", "bias"),
    lambda t, **k: (ckpt_ops.dropout_add(t["x"], t["residual"], bias=t.get("bias"), **k),),
    lambda t, m: ((t["residual"] + _plus(t["x"], t.get("bias")) * m).to(t["x"].dtype),),
)

# --- norms ------------------------------------------------------------------------------------------------------


def _columns(t):
    """A norm's normalized_shape: its weight's."""
    return t["weight"].shape if "weight" in t else t["x"].shape[-1:]


def _layer_norm(x, t):
    return F.layer_norm(x, _columns(t), t.get("weight"), t.get("bias"), EPS)


def _rms_norm(x, t, offset=0.0):
    weight = t.get("weight")
    return F.rms_norm(x, _columns(t), None if weight is None else weight + offset, EPS).to(x.dtype)


def layer_norm_op(save):
    return Op(
        f"layer_norm-{save}",
        "layer_norm",
        _rows("x", "weight", "bias"),
        lambda t, **_: (ckpt_ops.layer_norm(t["x"], _columns(t), t.get("weight"), t.get("bias"), EPS, save=save),),
        lambda t, m: (_layer_norm(t["x"], t),),
        random=False,
    )


def rms_norm_op(save, offset=0.0):
    return Op(
        f"rms_norm-{save}" + (f"-offset{offset}" if offset else ""),
        "rms_norm",
        _rows("x", "weight"),
        lambda t, **_: (ckpt_ops.rms_norm(t["x"], _columns(t), t.get("weight"), EPS, offset=offset, save=save),),
        lambda t, m: (_rms_norm(t["x"], t, offset),),
        random=False,
    )


def _plain_stream(t, m):
    return (t["residual"] + _plus(t["x"], t.get("input_bias")) * m).to(t["x"].dtype)


def _plain_dropout_add_layer_norm(t, m):
    r = _plain_stream(t, m)
    return _layer_norm(r, t), r


def _plain_dropout_add_rms_norm(t, m):
    r = _plain_stream(t, m)
    return _rms_norm(r, t, offset=1.0), r


DROPOUT_ADD_LAYER_NORM = Op(
    "dropout_add_layer_norm",
    "dropout_add_norm",
    _rows("x", "residual", "input_bias", "weight", "bias"),
    lambda t, **k: ckpt_ops.dropout_add_layer_norm(
        t["x"], t["residual"], _columns(t), t.get("weight"), t.get("bias"), EPS, input_bias=t.get("input_bias"), **k
    ),
    _plain_dropout_add_layer_norm,
    outputs=("y", "r"),
)
DROPOUT_ADD_RMS_NORM = Op(
    "dropout_add_rms_norm",
    "dropout_add_norm",
    _rows("x", "residual", "input_bias", "weight"),
    lambda t, **k: ckpt_ops.dropout_add_rms_norm(
        t["x"], t["residual"], _columns(t), t.get("weight"), EPS, offset=1.0, input_bias=t.get("input_bias"), **k
    ),
    _plain_dropout_add_rms_norm,
    outputs=("y", "r"),
)

# --- attention --------------------------------------------------------------------------------------------------


def _attention_shapes(shape):
    batch, heads, kv_heads, queries, keys, width, value_width = shape
    return {
        "q": (batch, heads, queries, width),
        "k": (batch, kv_heads, keys, width),
        "v": (batch, kv_heads, keys, value_width),
    }


def _seen(t, causal):
    """The attention mask of a call as torch's one argument."""
    q, mask = t["q"], t.get("attn_mask")
    queries, keys = q.shape[-2], t["k"].shape[-2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(keys - queries if causal == "lower_right" else 0)
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def _attention_math(q, k, v, mask, m):
    group, keys = q.shape[1] // k.shape[1], k.shape[-2]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    # torch's own math path with the identity as v gives the probabilities, so that the mask can be multiplied in
    eye = torch.eye(keys, dtype=q.dtype, device=q.device).expand(*k.shape[:2], keys, keys)
    return (torch.ops.aten._scaled_dot_product_attention_math(q, k, eye, mask)[0] * m) @ v


def _plain_attention(causal):
    return lambda t, m: (_attention_math(t["q"], t["k"], t["v"], _seen(t, causal), m),)


def _reversed_attention(causal):
    def plain(t, m):
        q, k, v = t["q"].flip(-1, -2), t["k"].flip(-1, -2), t["v"].flip(-2)
        mask = _seen(t, causal).flip(-1, -2)
        return (_attention_math(q, k, v, mask, m if isinstance(m, float) else m.flip(-1, -2)).flip(-2),)

    return plain


def attention_op(causal=None, shape=(2, 2, 2, 9, 11, 8, 8)):
    return Op(
        "attention" + (f"-{causal}" if causal else "") + ("-gqa" if shape[1] != shape[2] else ""),
        "attention",
        _attention_shapes,
        lambda t, p=0.0, **k: (
            ckpt_ops.scaled_dot_product_attention(
                t["q"], t["k"], t["v"], t.get("attn_mask"), p, causal_align=causal, enable_gqa=True, **k
            ),
        ),
        _plain_attention(causal),
        _reversed_attention(causal),
        shape=shape,
        mask_shape=lambda s: (s[0], s[1], s[3], s[4]),
    )


ATTENTIONS = [
    attention_op(),
    attention_op("upper_left"),
    attention_op("lower_right"),
    attention_op("lower_right", (1, 4, 2, 7, 12, 8, 6)),
]

RANDOM_OPS = [DROPOUT, *ACT_DROPOUTS, DROPOUT_ADD, DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM, *ATTENTIONS]
NORM_OPS = [layer_norm_op("input"), layer_norm_op("output"), rms_norm_op("input"), rms_norm_op("output", 1.0)]
ALL_OPS = RANDOM_OPS + NORM_OPS
# One of each kind, for tests whose subject is not the op's own arithmetic.
EACH_OP = [DROPOUT, ACT_DROPOUTS[0], DROPOUT_ADD, DROPOUT_ADD_LAYER_NORM, DROPOUT_ADD_RMS_NORM, ATTENTIONS[3], *NORM_OPS]


# --- inputs -----------------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "offset", "channels_last")


def relayout(t, layout):
    """A tensor of t's shape in another memory layout; of t's values, except that "expanded" repeats its first row."""
    if layout == "transposed" and t.dim() > 1:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced" and t.dim() > 0:
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
        wide[..., ::2] = t
        return wide[..., ::2]
    if layout == "expanded" and t.dim() > 1 and t.shape[-2] > 0:
        return t[..., :1, :].expand(t.shape)
    if layout == "offset":
        storage = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype, device=t.device)
        storage[1:] = t.reshape(-1)
        return storage[1:].view(t.shape)
    if layout == "channels_last" and t.dim() == 4:
        return t.contiguous(memory_format=torch.channels_last)
    return t.contiguous()


def make(op, shape=None, dtype=torch.float32, device="cpu", *, param_dtype=None, layout="contiguous", without=(), frozen=()):
    """The op's inputs by name, each needing a gradient unless frozen."""
    g = torch.Generator().manual_seed(1)
    tensors = {}
    for name, size in op.shapes(op.shape if shape is None else shape).items():
        t = torch.randn(size, generator=g, dtype=torch.float64)
        if name == "weight":
            t = 1 + 0.3 * t.clamp(-3, 3)  # clear of 0, so that save="output" does not fall back
        if name == "bias":
            t = 0.1 * t.clamp(-3, 3)
        if name in without:
            continue
        wanted = param_dtype if param_dtype and name in PARAMETERS else dtype
        t = relayout(t.to(wanted).to(device), "contiguous" if name in PARAMETERS else layout)
        tensors[name] = t.detach().requires_grad_(name not in frozen)
    return tensors


def upstream(op, outputs):
    """A gradient for each output, by name."""
    g = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype).to(o.device)
        for name, o in zip(op.outputs, outputs)
    }


def run(op, tensors, random=None, grads=None, call=None):
    """Outputs and gradients by name: y (and r), dx, ... `call` replaces op.ours."""
    outputs = (call or op.ours)(tensors, **(random or {}))
    grads = grads or upstream(op, outputs)
    wrt = {name: t for name, t in tensors.items() if t.requires_grad}
    result = {name: o.detach() for name, o in zip(op.outputs, outputs)}
    if wrt:
        ends = [(o, grads[name].to(o.dtype)) for name, o in zip(op.outputs, outputs) if o.requires_grad]
        roots, root_grads = zip(*ends)
        for name, grad in zip(wrt, torch.autograd.grad(roots, list(wrt.values()), root_grads)):
            result["d" + name] = grad
    return result
