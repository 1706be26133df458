"""Norms, alone and behind a residual add with dropout."""

from torch import nn

from .. import functional as F
from ..saved.accepts import registers
from ._random import RandomModule
from .dropout import _check_p


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm; `save` as in `ckpt_ops.functional.layer_norm`.

    Kept for backward: input and 8 bytes a row, or with save="output" the result and 4 bytes a row.
    """

    save = "input"

    def __init__(
        self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device=None, dtype=None, *, save="input"
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.save = save

    @registers
    def forward(self, input):
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, save=self.save)


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm; `offset` and `save` as in `ckpt_ops.functional.rms_norm`.

    Kept for backward: input and 4 bytes a row, or with save="output" the result and 4 bytes a row.
    """

    offset, save = 0.0, "input"

    def __init__(
        self, normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None, *, offset=0.0, save="input"
    ):
        self.offset, self.save = offset, save  # read by reset_parameters, which nn.RMSNorm's constructor calls
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self):
        """weight + offset starts at 1."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    @registers
    def forward(self, input):
        return F.rms_norm(input, self.normalized_shape, self.weight, self.eps, offset=self.offset, save=self.save)

    def extra_repr(self):
        return super().extra_repr() + (f", offset={self.offset}" if self.offset else "")


class DropoutAddLayerNorm(RandomModule, LayerNorm):
    """(y, r): r = residual + dropout(input + input_bias, p), y = layer_norm(r).

    The state_dict is torch.nn.LayerNorm's. Kept for backward: r, 8 bytes a row, 8 bytes.
    """

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device=None, dtype=None, *, p=0.0):
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        _check_p(p)
        self.p = p

    @registers
    def forward(self, input, residual, input_bias=None):
        """input, residual [..., *normalized_shape], input_bias [C] or None."""
        return F.dropout_add_layer_norm(
            input, residual, self.normalized_shape, self.weight, self.bias, self.eps,
            p=self.p, input_bias=input_bias, training=self.training, **self.random(),
        )  # fmt: skip

    def extra_repr(self):
        return super().extra_repr() + f", p={self.p}"


class DropoutAddRMSNorm(RandomModule, RMSNorm):
    """(y, r): r = residual + dropout(input + input_bias, p), y = rms_norm(r).

    The state_dict is torch.nn.RMSNorm's. Kept for backward: r, 4 bytes a row, 8 bytes.
    """

    def __init__(self, normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None, *, offset=0.0, p=0.0):
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, offset=offset)
        _check_p(p)
        self.p = p

    @registers
    def forward(self, input, residual, input_bias=None):
        """input, residual [..., *normalized_shape], input_bias [C] or None."""
        return F.dropout_add_rms_norm(
            input, residual, self.normalized_shape, self.weight, self.eps, offset=self.offset,
            p=self.p, input_bias=input_bias, training=self.training, **self.random(),
        )  # fmt: skip

    def extra_repr(self):
        return super().extra_repr() + f", p={self.p}"
