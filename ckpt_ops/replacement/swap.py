"""`replace(model)`: this package's modules in the place of torch's, on this model only."""

from dataclasses import dataclass, field

from .pairs import pairs_of, twins_of_pair
from .twins import EXACT, Skip, twin_of


def replace(model, *, skip=()):
    """Swaps modules of a model, in place, for twins that keep less for backward.

    LayerNorm, RMSNorm (torch's, Llama's and the families that add 1 to the weight), Dropout, GELU, SiLU or ReLU followed by
    Dropout, MultiheadAttention, TransformerEncoderLayer and TransformerDecoderLayer. A twin has the same Parameter objects,
    buffers, hooks, attributes (eps, p, training, ...) and state_dict keys, and is an instance of the torch class it
    replaces; optimizers built before go on working. Other models, and classes, are not touched.

    Only what is known to mean the same is replaced: a subclass, an unknown norm, a module whose forward was replaced, ... is
    left, with the reason in the report.

    Args:
        model: any nn.Module.
        skip: names (as in model.named_modules()) of modules to leave, with all that is in them.

    Returns: `Replaced`, with .replaced, .skipped and restore(); printable.
    Raises: ValueError where the model itself would have to be replaced, and for unknown names in skip.
    """
    if type(model) in EXACT:
        name = type(model).__name__
        raise ValueError(
            f"replace: the model itself is a {name}, and there is no parent to put its twin into; build a "
            f"ckpt_ops.nn.{name} and load its state_dict, or replace the model that it is a part of"
        )
    named = dict(model.named_modules())
    if unknown := [name for name in skip if name not in named]:
        raise ValueError(f"replace: the model has no module named {', '.join(map(repr, unknown))}")
    left = {m for name in skip for m in named[name].modules()}
    report = Replaced(skipped=[(name, type(named[name]), "asked for") for name in skip])
    twins = _pairs(named, left, report)
    for name, m in named.items():
        if m in left or m in twins or m is model:
            continue
        try:
            twin = twin_of(m)
        except Skip as reason:
            report.skipped.append((name, type(m), str(reason)))
            continue
        if twin is not None:
            report.add(name, twin, twins)
    report.put(named, twins)
    return report


def _pairs(named, left, report):
    """The twins of activations and dropouts that become one, by old module."""
    twins, places = {}, _places(named.values())
    for name, parent in named.items():
        if parent in left:
            continue
        try:
            pairs = pairs_of(parent)
        except Skip as reason:
            report.skipped.append((name, type(parent), f"activation and dropout stay two: {reason}"))
            continue
        for pair in pairs:
            olds = [parent._modules[child] for child in pair]
            try:
                if any(len(places[m]) > 1 for m in olds):
                    raise Skip("one of the two is used in several places")
                made = twins_of_pair(parent, *pair) if not left.intersection(olds) else ()
            except Skip as reason:
                path = f"{name}.{pair[0]}" if name else pair[0]
                report.skipped.append((path, type(olds[0]), f"activation and dropout stay two: {reason}"))
                continue
            for child, twin in zip(pair, made):
                report.add(f"{name}.{child}" if name else child, twin, twins)
    return twins


def _places(modules):
    """Every (parent, child's name) of every module: a shared one has several."""
    places = {}
    for parent in modules:
        for name, child in parent._modules.items():
            places.setdefault(child, []).append((parent, name))
    return places


@dataclass
class Replaced:
    """What `replace` did.

    replaced: (name, old class, new class) of each module, once however often it is used.  skipped: (name, class, reason).
    """

    replaced: list = field(default_factory=list)
    skipped: list = field(default_factory=list)
    _swaps: list = field(default_factory=list, repr=False)  # (Twin, its places)

    def add(self, name, twin, twins):
        twins[twin.old] = twin
        self.replaced.append((name, type(twin.old), type(twin.new)))

    def put(self, named, twins):
        """Puts every twin into all places of its old module."""
        order = {name: i for i, name in enumerate(named)}
        self.replaced.sort(key=lambda row: order[row[0]])
        places = _places(named.values())
        for old, twin in twins.items():
            self._swaps.append((twin, places[old]))
            for parent, name in places[old]:
                parent._modules[name] = twin.new

    def restore(self):
        """Puts the original module objects back, in the state (training, p, ...) that their twins are in now."""
        for twin, places in self._swaps:
            twin.restore()
            for parent, name in places:
                if parent._modules.get(name) is twin.new:
                    parent._modules[name] = twin.old
        self._swaps = []

    def __str__(self):
        lines = [f"{len(self.replaced)} modules replaced, {len(self.skipped)} skipped"]
        lines += [f"    {name}: {_label(old)} -> {_label(new)}" for name, old, new in self.replaced]
        lines += [f"    {name or '(the model)'}: {_label(cls)} left: {reason}" for name, cls, reason in self.skipped]
        return "\n".join(lines)


def _label(cls):
    """The class with its package: torch's and ours often share a name."""
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
