"""torch's own transformer layers on the ladder: replaced and regenerated, compared with what they compute without."""

import torch
from torch import nn

import ckpt_ops


def build(size, dropout, device, dtype, rung=None):
    """Pre-norm encoder layers with the same weights every time; at a rung they are replaced and regenerated."""
    torch.manual_seed(1)
    options = dict(activation="gelu", batch_first=True, norm_first=True)
    layers = (
        nn.TransformerEncoderLayer(size.hidden, size.heads, 4 * size.hidden, dropout, **options) for _ in range(size.blocks)
    )
    model = nn.Sequential(*layers).to(device, dtype)
    if rung is not None:
        ckpt_ops.replace(model)
        ckpt_ops.regenerate(model, rung)
    return model


def results(model, x, dy):
    """Result and gradients by name, always with the same seeds."""
    torch.manual_seed(3)
    y = model(x)
    grads = torch.autograd.grad(y, [x, *model.parameters()], dy)
    return dict(zip(("y", "dx", *(f"d{name}" for name, _ in model.named_parameters())), (y.detach(), *grads), strict=True))


class Expected:
    """What the layers should give: `truth` in float64, `plain` in the dtype at hand.

    Without dropout both are torch's own layers. With it, torch's masks are others: both are the reference backend, plain
    torch with the masks of this package.
    """

    def __init__(self, size, dropout, x, dy):
        rung, backend = ("store", "reference") if dropout else (None, None)
        wide = x.detach().double().requires_grad_()
        with ckpt_ops.use_backend(backend) if backend else torch.enable_grad():
            self.truth = results(build(size, dropout, x.device, torch.float64, rung), wide, dy.double())
            self.plain = results(build(size, dropout, x.device, x.dtype, rung), x, dy)

    def worst(self, ours):
        """(name, share) of the result whose error is nearest to what it may be: twice plain's, and an ulp."""
        shares = {}
        for name, truth in self.truth.items():
            mine, theirs = (_error(_moved(name, r[name]), _moved(name, truth)) for r in (ours, self.plain))
            shares[name] = mine / (2 * theirs + torch.finfo(ours[name].dtype).eps)
        return max(shares.items(), key=lambda item: item[1])


def _moved(name, t):
    """Without the key's bias: it shifts all scores of a query alike, so its gradient is 0 but for rounding."""
    return torch.cat([t.chunk(3)[0], t.chunk(3)[2]]) if name.endswith("in_proj_bias") else t


def _error(result, truth):
    """Relative root mean square error."""
    return (torch.linalg.vector_norm(result.double() - truth) / torch.linalg.vector_norm(truth)).item()
