"""The feed-forward half of a transformer block."""

from torch import nn

from ..saved.accepts import registers
from .dropout import ActDropout


class MLP(nn.Module):
    """down(dropout(act(up(x)), p)).

    Args:
        hidden: size of input and result.  intermediate: size between, 4 * hidden if None.
        activation: "gelu" (exact), "gelu_tanh", "relu", "silu" or "relu2".
        dropout: drop probability behind the activation.
        bias: for both projections, or a pair (up, down).
    Kept for backward: input (unless up.weight is frozen), up(x), the result of the activation, 8 bytes.
    """

    def __init__(
        self, hidden, intermediate=None, activation="gelu", dropout=0.0, bias=True, device=None, dtype=None
    ):  # fmt: skip
        super().__init__()
        intermediate = 4 * hidden if intermediate is None else intermediate
        up_bias, down_bias = bias if isinstance(bias, tuple) else (bias, bias)
        self.up = nn.Linear(hidden, intermediate, up_bias, device, dtype)
        self.activation = ActDropout(activation, dropout)
        self.down = nn.Linear(intermediate, hidden, down_bias, device, dtype)

    @registers
    def forward(self, input):
        """input [..., hidden] -> the same shape."""
        return self.down(self.activation(self.up(input)))
