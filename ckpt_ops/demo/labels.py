"""Where the names of points stand in a picture, so that none covers another, a point or a line.

All lengths are shares of the axes' width and height.
"""

from dataclasses import dataclass

_LETTER, _LINE = 0.0138, 0.047  # of text in axes of half a figure 12 inches wide and 5 high
_MARKER = 0.022  # half of a marker's size
_BESIDE = (0.03, 0.09, 0.15)  # from a point to its name
_SHIFTS = tuple(i / 20 for i in range(-14, 15))  # up or down


@dataclass(frozen=True)
class Box:
    left: float
    bottom: float
    right: float
    top: float

    def touches(self, other):
        apart = self.right < other.left or other.right < self.left or self.top < other.bottom or other.top < self.bottom
        return not apart

    def inside(self):
        return min(self.left, self.bottom) >= 0 and max(self.right, self.top) <= 1.02


def name_points(axes, points, colours, line=()):
    """Writes points' names on axes with linear limits from 0: points of (text, x, y), with a thin line to the point.

    line: more places (x, y), joined by a drawn line, that no name may cover.
    """
    width, height = axes.get_xlim()[1], axes.get_ylim()[1]
    places = [(x / width, y / height) for _, x, y in points]
    joints = [(x / width, y / height) for x, y in line]
    taken = [_around(x, y, _MARKER) for x, y in places + joints]
    taken += [box for start, end in zip(joints, joints[1:]) for box in _along(start, end)]
    for (text, x, y), place, colour in zip(points, places, colours, strict=True):
        (label_x, label_y, align), box, leader = _free(text, *place, taken)
        taken += [box, *leader]
        name = axes.annotate(
            text,
            (x, y),
            xytext=(label_x * width, label_y * height),
            ha=align,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "shrinkA": 0, "relpos": (0 if align == "left" else 1, 0.5)},
        )
        name.set_in_layout(False)


def _free(text, x, y, taken):
    """The place that covers least, of those a near one: ((x, y, alignment), its box, the boxes of its thin line)."""
    lines = text.split("\n")
    wide, high = _LETTER * max(map(len, lines)), _LINE * len(lines)

    def cost(found):
        (label_x, label_y, _), box, leader = found
        covered = sum(box.touches(t) for t in taken) + (0 if box.inside() else 10)
        crossed = sum(any(t.touches(b) for t in taken) for b in leader)
        return 10 * covered + 0.05 * crossed + abs(label_y - y) + 2 * abs(label_x - x)

    places = [_place(x, y, beside * side, shift, wide, high) for beside in _BESIDE for side in (1, -1) for shift in _SHIFTS]
    return min(places, key=cost)


def _place(x, y, beside, shift, wide, high):
    """A name's place beside the point (to the left where negative), with what it covers."""
    label_x, label_y = x + beside, y + shift
    left = label_x if beside > 0 else label_x - wide
    box = Box(left, label_y - high / 2, left + wide, label_y + high / 2)
    marker = _around(x, y, _MARKER)
    leader = [b for b in _along((x, y), (label_x, label_y)) if not b.touches(marker)]
    return (label_x, label_y, "left" if beside > 0 else "right"), box, leader


def _around(x, y, reach):
    return Box(x - reach, y - reach, x + reach, y + reach)


def _along(start, end, pieces=20):
    """Small boxes along a line."""
    steps = [i / pieces for i in range(pieces + 1)]
    return [_around(*(a + (b - a) * t for a, b in zip(start, end)), 0.004) for t in steps]
