"""Weights as rectangles, and which rank holds which part of them.

    cuts([{"gate": [piece of rank 0, piece of rank 1], …}, …])      a row of the picture each

Drawn as in y = x · W: as high as x is wide, as wide as y. So a cut "by columns" is vertical and one
"by rows" horizontal (torch keeps the transpose). A piece that several ranks hold has their stripes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from picotron_edu.show.blocks import block
from picotron_edu.show.figure import WIDTH, Picture, finish, new_figure, style

Piece = Sequence[slice]  # a rank's part of a weight: outputs, then inputs, as in a layout


def cuts(
    rows: Sequence[Mapping[str, Sequence[Piece]]],
    caption: str = "Weights and the ranks that hold their parts.",
) -> Picture:
    """Each row: weights by name, and for each of them the piece of every rank.

    A weight's full size is where its pieces end; `layout.slice_of` gives a piece.
    """
    shapes = [
        {
            name: [max(piece[dim].stop for piece in pieces) for dim in (0, 1)]
            for name, pieces in r.items()
        }
        for r in rows
    ]
    most = max(sum(out for out, _ in row.values()) for row in shapes)
    gap = most / 12
    width = max(sum(out for out, _ in row.values()) + gap * (len(row) - 1) for row in shapes)
    height = sum(max(inp for _, inp in row.values()) + 4 / 3 * gap for row in shapes)
    with style():
        figure = new_figure(height=0.45 + (WIDTH - 0.4) * height / width)
        ax = figure.add_subplot()
        ax.set(xlim=(-gap / 4, width + gap / 4), ylim=(height, 0), aspect="equal")
        ax.set_axis_off()
        top = 0.0
        for row, sizes in zip(rows, shapes):
            left, top = 0.0, top + gap
            for name, pieces in row.items():
                out, inp = sizes[name]
                label: dict[str, Any] = {
                    "ha": "center",
                    "va": "bottom",
                    "fontsize": 10,
                    "in_layout": False,
                }
                ax.text(left + out / 2, top - gap / 6, f"{name}\n{inp} × {out}", **label)
                for (columns, lines), ranks in holders(pieces).items():
                    place = left + columns[0], top + lines[0]
                    size = columns[1] - columns[0], lines[1] - lines[0]
                    text, times = ", ".join(map(str, ranks)), 1 if len(ranks) == 1 else 4
                    block(ax, *place, *size, ranks, text, font=10, times=times)
                left += out + gap
            top += max(inp for _, inp in sizes.values()) + gap / 3
        return finish(figure, caption)


def holders(pieces: Sequence[Piece]) -> dict[tuple[tuple[int, int], tuple[int, int]], list[int]]:
    """Piece (first and last column, first and last row) → the ranks that hold it."""
    found: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
    for rank, (columns, lines) in enumerate(pieces):
        where = (columns.start, columns.stop), (lines.start, lines.stop)
        found.setdefault(where, []).append(rank)
    return found
