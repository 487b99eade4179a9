"""A treemap: a rectangle for the whole memory, cut into boxes whose areas are the bytes.

    show.treemap({"parameters": 2.5e9, "gradients": 2.5e9, "optimizer states": 15e9,
                  "activations": {"attention": 3e9, "feed-forward": 4e9}})

`squarify` chooses the cuts so that boxes are as square as possible (Bruls, Huizing, van Wijk,
*Squarified Treemaps*, 2000): fill a row along the shorter side while its worst box gets squarer,
then go on with the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.patches import Rectangle

from picotron_edu.show.figure import WIDTH, Picture, finish, new_figure, style
from picotron_edu.show.ledger import size
from picotron_edu.show.palette import MEMORY_COLOURS, PAPER, RANK_COLOURS, ink

Breakdown = Mapping[str, "float | Mapping[str, float]"]
Box = tuple[float, float, float, float]  # x, y, width, height; y grows downwards
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
    """All boxes of a breakdown: categories squarified over `area`, then each one's parts inside it."""
    groups = {
        category: {category: float(value)} if not isinstance(value, Mapping) else dict(value)
        for category, value in breakdown.items()
    }
    totals = {category: sum(parts.values()) for category, parts in groups.items()}
    for category, parts in groups.items():
        for name, value in parts.items():
            if value < 0:
                raise ValueError(f"{category} · {name} is {value}; bytes cannot be below 0")
    total = sum(totals.values())
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

    Boxes too small for their name carry a number, explained under the picture.
    """
    height = 3.6
    parts = layout(breakdown, (0, 0, WIDTH - 0.3, height))
    total = sum(part.bytes for part in parts)
    numbered: list[str] = []
    with style():
        small = [part for part in parts if not _fitting(part)]
        figure = new_figure(height=height + 0.85 + 0.2 * -(-len(small) // 3))
        ax = figure.add_subplot()
        ax.set_xlim(0, WIDTH - 0.3)
        ax.set_axis_off()
        ax.set_title(title or f"{size(total)} in all")
        for part in parts:
            x, y, width, tall = part.box
            look = {"fc": part.colour, "ec": PAPER, "lw": 1.2, "label": part.label}
            ax.add_patch(Rectangle((x, y), width, tall, **look))
            text, font = _fitting(part) or ("", 0.0)
            if not text:
                numbered.append(f"{len(numbered) + 1}  {part.label}: {size(part.bytes)}")
                text, font = str(len(numbered)), 8
                if min(width, tall) < 0.1:
                    continue  # too small even for its number: the list below names it
            place = {"ha": "center", "va": "center", "fontsize": font, "linespacing": 1.35}
            ax.text(x + width / 2, y + tall / 2, text, color=ink(part.colour), **place)
        for i, line in enumerate(numbered):
            at = ((i % 3) * (WIDTH - 0.3) / 3, height + 0.14 + 0.2 * (i // 3))
            ax.text(*at, line, fontsize=8.5, va="center")
        ax.set_ylim(height + 0.2 * -(-len(numbered) // 3) + 0.05 * bool(numbered), 0)
        return finish(figure, caption or _caption(breakdown, parts, total))


def _fitting(part: Part) -> tuple[str, float] | None:
    """The label that fits into the box and its font size; None if none does."""
    _, _, width, height = part.box
    percent_free = size(part.bytes)
    for font in (12.0, 10.5, 9.0, 8.0):
        for lines in ([part.name, percent_free], [f"{part.name} {percent_free}"], [part.name]):
            longest = max(len(line) for line in lines)
            fits_across = longest * font * 0.62 / 72 + 0.1 <= width
            if fits_across and len(lines) * font * 1.4 / 72 + 0.05 <= height:
                return "\n".join(lines), font
    return None


def _caption(breakdown: Breakdown, parts: list[Part], total: float) -> str:
    sums = {c: sum(p.bytes for p in parts if p.category == c) for c in breakdown}
    shares = ", ".join(f"{c} {100 * s / total:.0f} %" for c, s in sums.items() if s > 0)
    return f"The area of a box is its bytes: {shares}."
