"""Other packages' functions, imported on first use. Each maker returns a callable of the op's tensors and p."""

EPS = 1e-5


def liger_layer_norm():
    from liger_kernel.transformers.functional import liger_layer_norm as norm

    return lambda x, weight, bias, p: norm(x, weight, bias, EPS)


def liger_rms_norm():
    from liger_kernel.transformers.functional import liger_rms_norm as norm

    return lambda x, weight, p: norm(x, weight, EPS, in_place=False)  # in place, its backward writes into dy


def apex_layer_norm():
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine as norm

    return lambda x, weight, bias, p: norm(x, weight, bias, tuple(weight.shape), EPS)


def apex_rms_norm():
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine as norm

    return lambda x, weight, p: norm(x, weight, tuple(weight.shape), EPS)


def flash_dropout_add_layer_norm():
    from flash_attn.ops.triton.layer_norm import layer_norm_fn as norm

    return lambda x, residual, weight, bias, p: norm(x, weight, bias, residual, eps=EPS, dropout_p=p, prenorm=True)


def flash_dropout_add_rms_norm():
    from flash_attn.ops.triton.layer_norm import rms_norm_fn as norm

    return lambda x, residual, weight, p: norm(x, weight, None, residual, eps=EPS, dropout_p=p, prenorm=True)


def flash_attention(causal):
    from flash_attn import flash_attn_func

    def run(q, k, v, p):  # its layout is [B, N, H, D]
        o = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), dropout_p=p, causal=causal)
        return o.transpose(1, 2)

    return run
