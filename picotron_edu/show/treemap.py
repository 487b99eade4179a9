"""A treemap: a rectangle for the whole memory, cut into boxes whose areas are the bytes.

    show.treemap({"parameters": 2.5e9, "gradients": 2.5e9, "optimizer states": 15e9,
                  "activations": {"attention": 3e9, "feed-forward": 4e9}})

`squarify` chooses the cuts so that boxes are as square as possible (Bruls, Huizing, van Wijk,
*Squarified Treemaps*, 2000): fill a row along the shorter side while its worst box gets squarer,
then go on with the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.patches import Patch, Rectangle

from picotron_edu.show.figure import WIDTH, Picture, finish, new_figure, style
from picotron_edu.show.ledger import size
from picotron_edu.show.palette import MEMORY_COLOURS, PAPER, RANK_COLOURS, TEXT, ink

Breakdown = Mapping[str, "float | Mapping[str, float]"]
Box = tuple[float, float, float, float]  # x, y, width, height; y grows downwards
KEY: dict[str, Any] = {"handlelength": 1.0, "handletextpad": 0.4, "columnspacing": 1.1}
MERGE_BELOW = 0.002  # of the total: smaller parts of one category share a box


def squarify(values: Sequence[float], area: Box) -> list[Box]:
    """One box per value inside `area`, areas in proportion; `values` sorted from large to small."""
    x, y, width, height = area
    if not values:
        return []
    scale = width * height / sum(values)
    areas = [value * scale for value in values]
    short = min(width, height)

    def worst(row: Sequence[float]) -> float:
        thickness = sum(row) / short
        return max(max(thickness**2 / a, a / thickness**2) for a in row)

    count = 1
    while count < len(areas) and worst(areas[: count + 1]) <= worst(areas[:count]):
        count += 1
    row, thickness = areas[:count], sum(areas[:count]) / short
    boxes, at = [], 0.0
    for a in row:
        length = a / thickness
        boxes.append(
            (x, y + at, thickness, length) if width >= height else (x + at, y, length, thickness)
        )
        at += length
    rest: Box = (
        (x + thickness, y, width - thickness, height)
        if width >= height
        else (x, y + thickness, width, height - thickness)
    )
    return boxes + squarify(values[count:], rest)


@dataclass(frozen=True)
class Part:
    """A box of the treemap: its category, its name inside it, bytes, place and colour."""

    category: str
    name: str
    bytes: float
    box: Box
    colour: str

    @property
    def label(self) -> str:
        return self.name if self.name == self.category else f"{self.category} · {self.name}"


def layout(breakdown: Breakdown, area: Box) -> list[Part]:
    """All boxes of a breakdown: categories squarified over `area`, then the parts inside each."""
    groups = {
        category: {category: float(value)} if not isinstance(value, Mapping) else dict(value)
        for category, value in breakdown.items()
    }
    totals = {category: sum(parts.values()) for category, parts in groups.items()}
    for category, parts in groups.items():
        for name, value in parts.items():
            if value < 0:
                raise ValueError(f"{category} · {name} is {value}; bytes cannot be below 0")
    total = total_bytes(breakdown)
    if total <= 0:
        raise ValueError(f"the breakdown {dict(breakdown)} holds no bytes: nothing to draw")
    order = sorted((c for c in groups if totals[c] > 0), key=lambda c: -totals[c])
    found = []
    for category, box in zip(order, squarify([totals[c] for c in order], area)):
        parts = _merged(groups[category], MERGE_BELOW * total)
        names = sorted(parts, key=lambda name: -parts[name])
        colours = _shades(_colour(category, list(groups).index(category)), len(names))
        inner = squarify([parts[name] for name in names], box)
        found += [
            Part(category, name, parts[name], place, colour)
            for name, place, colour in zip(names, inner, colours)
        ]
    return found


def total_bytes(breakdown: Breakdown) -> float:
    """All bytes of a breakdown together."""
    values = breakdown.values()
    return sum(sum(v.values()) if isinstance(v, Mapping) else float(v) for v in values)


def _merged(parts: Mapping[str, float], smallest: float) -> dict[str, float]:
    """Parts below `smallest` summed up as one, so that no box is a hairline."""
    small = {name: value for name, value in parts.items() if 0 < value < smallest}
    kept = {name: value for name, value in parts.items() if value >= smallest and value > 0}
    if len(small) > 1:
        return kept | {"other parts": sum(small.values())}
    return kept | small


def _colour(category: str, position: int) -> str:
    return MEMORY_COLOURS.get(category, RANK_COLOURS[(position + 4) % len(RANK_COLOURS)])


def _shades(colour: str, count: int) -> list[str]:
    """`count` tints of a colour, from itself towards white."""
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    shades = []
    for i in range(count):
        white = 0.45 * i / max(1, count - 1) if count > 1 else 0.0
        mixed = [round(c + (255 - c) * white) for c in channels]
        shades.append("#" + "".join(f"{c:02X}" for c in mixed))
    return shades


def treemap(breakdown: Breakdown, caption: str | None = None, title: str | None = None) -> Picture:
    """Draw bytes as areas: category → bytes, or category → {part → bytes}.

    Boxes too small for their name are listed under the picture, with their colour.
    """
    width, height = WIDTH - 0.3, 3.6  # inches
    parts = layout(breakdown, (0, 0, width, height))
    total = sum(part.bytes for part in parts)
    labels = [_fitting(part) for part in parts]
    unnamed = [part for part, label in zip(parts, labels) if label is None]
    listed = _listed(unnamed, width)
    list_height = max((y for _, y, _ in listed), default=-0.21) + 0.21 + 0.06 * bool(listed)
    with style():
        figure = new_figure(height=height + 1.15 + list_height)
        ax = figure.add_subplot()
        ax.set(xlim=(0, width), ylim=(height + list_height, 0))
        ax.set_axis_off()
        ax.set_title(f"{title}: {size(total)}" if title else f"{size(total)} in all")
        for part, label in zip(parts, labels):
            x, y, wide, tall = part.box
            box = Rectangle((x, y), wide, tall, fc=part.colour, ec=PAPER, lw=1.2, label=part.label)
            ax.add_patch(box)
            if label is not None:
                text, font = label
                place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": font}
                ax.text(x + wide / 2, y + tall / 2, text, color=ink(part.colour), **place)
        for part, (x, y, text) in zip(unnamed, listed):
            y += height + 0.06
            ax.add_patch(Rectangle((x, y + 0.04), 0.13, 0.13, fc=part.colour, ec=TEXT, lw=0.5))
            ax.text(x + 0.2, y + 0.105, text, fontsize=9, va="center")
        sums = category_sums(parts)
        first = {part.category: part.colour for part in reversed(parts)}
        keys = [Patch(fc=first[c], label=f"{c} {size(value)}") for c, value in sums.items()]
        figure.legend(handles=keys, loc="outside upper left", ncols=5, **KEY)
        return finish(figure, caption or _caption(sums, total))


def _listed(parts: Sequence[Part], width: float) -> list[tuple[float, float, str]]:
    """Place and text of the parts named under the picture: as many a line as there is room for."""
    x, y, found = 0.0, 0.0, []
    for part in parts:
        text = f"{part.name}: {size(part.bytes)}"
        needed = 0.45 + 0.075 * len(text)
        if x > 0 and x + needed > width:
            x, y = 0.0, y + 0.21
        found.append((x, y, text))
        x += needed
    return found


def category_sums(parts: Sequence[Part]) -> dict[str, float]:
    """Bytes of each category, the largest first."""
    sums: dict[str, float] = {}
    for part in parts:
        sums[part.category] = sums.get(part.category, 0.0) + part.bytes
    return sums


def _fitting(part: Part) -> tuple[str, float] | None:
    """The label that fits into the box and its font size; None if none does."""
    _, _, width, height = part.box
    amount = size(part.bytes)
    for font in (12.0, 10.5, 9.0, 8.5):
        for lines in ([part.name, amount], [f"{part.name} {amount}"], [*part.name.split(), amount]):
            across = max(len(line) for line in lines) * font * 0.62 / 72 + 0.1
            if across <= width and len(lines) * font * 1.4 / 72 + 0.05 <= height:
                return "\n".join(lines), font
    return None


def _caption(sums: Mapping[str, float], total: float) -> str:
    shares = ", ".join(f"{category} {percent(value / total)}" for category, value in sums.items())
    return f"The area of a box is its bytes: {shares}."


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "under 1 %"
