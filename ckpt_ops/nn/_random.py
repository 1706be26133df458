"""Where a random module's seed comes from."""


class RandomModule:
    """Mixin. By default a call draws its own seed; `ckpt_ops.seeds.attach(model)` gives all modules one a forward.

    Attributes:
        seed_source: None, or the shared `seeds.Source`.
        stream: int, tells the masks of modules with one seed apart.
    """

    seed_source = None
    stream = 0

    def random(self):
        """The keyword arguments `seed` and `stream` of this call."""
        if self.seed_source is None or not self.training:
            return {"stream": self.stream}
        return {"seed": self.seed_source.current(self.stream), "stream": self.stream}
