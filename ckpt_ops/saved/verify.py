"""Does what is recomputed equal what the forward computed? `with ckpt_ops.verify() as v:` compares, bit for bit."""


def current_verifier():
    """The verifier of the innermost `verify()` in this thread, or None."""
    return
