"""The grid of ranks: which rank sits where, which ranks form a group, where a node ends.

The last axis (tp, the fastest: neighbours share a node) runs to the right inside a block, the one
before it downwards; a third axis puts blocks beside each other, a fourth below each other:

        tp →                tp →
    dp  [0][1]          dp  [4][5]
     ↓  [2][3]           ↓  [6][7]
             ———— pp ————→
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from picotron_edu.show.figure import WIDTH, Picture, finish, new_figure, style
from picotron_edu.show.palette import FRAME, PAPER, TEXT, ink, rank_colour

GAP = 0.75  # between blocks, in cells
BOX = 0.84  # side of a rank's box; the rest of its cell is air
STRIP = 0.26  # below a row of boxes, for the node's name


def mesh(
    grid: Any,
    axes: Sequence[str] = ("pp", "dp", "cp", "tp"),
    *,
    highlight: str | None = None,
    ranks_per_node: int | None = None,
    caption: str | None = None,
) -> Picture:
    """Draw an array of rank numbers, one dimension per name in `axes`; sizes of 1 are left out.

    highlight        an axis: the ranks of each of its groups get one colour, and the group a letter
    ranks_per_node   draw the boundary of every node (ranks 0 … k−1 sit on node 0, and so on)

        show.mesh(Mesh.grid(dp=2, tp=2), highlight="tp", ranks_per_node=2)
    """
    ranks = np.asarray(grid)
    if ranks.ndim != len(axes):
        raise ValueError(
            f"grid has {ranks.ndim} dimensions and axes={tuple(axes)} names {len(axes)}; "
            "give one name per dimension"
        )
    names = [name for name, size in zip(axes, ranks.shape) if size > 1] or list(axes[-1:])
    ranks = ranks.reshape([size for size in ranks.shape if size > 1] or [1])
    if ranks.ndim > 4:
        raise ValueError(f"a picture shows up to 4 axes larger than 1, got {names}")
    if highlight is not None and highlight not in names:
        raise ValueError(f"highlight={highlight!r} is none of the axes larger than 1: {names}")

    where = _positions(ranks, row_height=1 + STRIP if ranks_per_node else 1)
    colours, letters = _groups(ranks, names, highlight)
    right = max(x for x, _ in where.values()) + 1
    bottom = max(y for _, y in where.values()) + (1 + STRIP if ranks_per_node else 1)
    with style():
        scale = min(0.8, (WIDTH - 0.3) / (right + 1.25))  # inches a cell
        lower = bottom + (0.5 if ranks.ndim > 2 else 0.1)
        figure = new_figure(height=0.5 + scale * (lower + 0.45))
        ax = figure.add_subplot()
        ax.set_xlim(-0.95, (WIDTH - 0.3) / scale - 0.95)
        ax.set_ylim(lower, -0.45)
        ax.set_aspect("equal", anchor="W")
        ax.set_axis_off()
        if ranks_per_node is not None:
            _nodes(ax, where, ranks_per_node, scale)
        for rank, (x, y) in where.items():
            _box(ax, rank, x, y, colours[rank], letters.get(rank), scale)
        _arrows(ax, ranks, names, where)
        return finish(figure, caption or _caption(ranks, names, highlight, ranks_per_node))


def _positions(ranks: np.ndarray, row_height: float) -> dict[int, tuple[float, float]]:
    """Upper left corner of every rank's cell; y grows downwards."""
    shape = (1,) * (4 - ranks.ndim) + ranks.shape
    _, _, rows, columns = shape
    return {
        int(rank): (
            block_x * (columns + GAP) + x,
            block_y * (rows * row_height + GAP) + y * row_height,
        )
        for (block_y, block_x, y, x), rank in np.ndenumerate(ranks.reshape(shape))
    }


def _groups(
    ranks: np.ndarray, names: list[str], highlight: str | None
) -> tuple[dict[int, str], dict[int, str]]:
    """Colour of every rank, and the letter of its group along the highlighted axis."""
    if highlight is None:
        return {int(r): rank_colour(int(r)) for r in ranks.flat}, {}
    lines = np.moveaxis(ranks, names.index(highlight), -1).reshape(
        -1, ranks.shape[names.index(highlight)]
    )
    colours = {int(r): rank_colour(i) for i, line in enumerate(lines) for r in line}
    letters = {int(r): chr(ord("A") + i) for i, line in enumerate(lines) for r in line}
    return colours, letters


def _box(
    ax: Axes, rank: int, x: float, y: float, colour: str, letter: str | None, scale: float
) -> None:
    margin = (1 - BOX) / 2
    shape = FancyBboxPatch(
        (x + margin, y + margin), BOX, BOX, "round,pad=0,rounding_size=0.1", fc=colour, ec="none"
    )
    ax.add_patch(shape)
    font = max(9, min(17, 19 * scale))
    ax.text(
        x + 0.5,
        y + 0.5,
        str(rank),
        ha="center",
        va="center",
        color=ink(colour),
        fontsize=font,
        fontweight="bold",
    )
    if letter is not None:
        ax.text(
            x + 0.16,
            y + 0.17,
            letter,
            ha="left",
            va="top",
            color=ink(colour),
            fontsize=max(7.5, font * 0.5),
        )


def _nodes(
    ax: Axes, where: dict[int, tuple[float, float]], ranks_per_node: int, scale: float
) -> None:
    """A dashed frame around the ranks of each node; they must fill a rectangle of the picture."""
    for first in range(0, len(where), ranks_per_node):
        members = {rank for rank in where if first <= rank < first + ranks_per_node}
        xs, ys = [where[r][0] for r in members], [where[r][1] for r in members]
        left, top, width, height = min(xs), min(ys), max(xs) - min(xs) + 1, max(ys) - min(ys) + 1
        inside = {
            r for r, (x, y) in where.items() if left <= x < left + width and top <= y < top + height
        }
        if inside != members:
            raise ValueError(
                f"ranks_per_node={ranks_per_node} does not cut the grid into rectangles; use a "
                "product of the last axes' sizes, or a divisor of one axis times the axes after it"
            )
        height += STRIP - 0.06
        frame = FancyBboxPatch(
            (left, top),
            width,
            height,
            "round,pad=-0.02,rounding_size=0.12",
            fc="#F1F1F1",
            ec=FRAME,
            lw=1.2,
            ls=(0, (4, 2)),
            zorder=0,
        )
        ax.add_patch(frame)
        name = f"node {first // ranks_per_node}"
        x, y = left + 0.1, top + height - STRIP / 2
        ax.text(
            x,
            y,
            name,
            ha="left",
            va="center",
            fontsize=max(6.5, min(8.5, 13 * scale)),
            color="#555555",
        )


def _arrows(
    ax: Axes, ranks: np.ndarray, names: list[str], where: dict[int, tuple[float, float]]
) -> None:
    """One arrow per axis, from the first to the last position along it."""
    shape = (1,) * (4 - ranks.ndim) + ranks.shape
    sizes = dict(zip(names[::-1], shape[::-1]))
    columns = shape[3]
    right = max(x for x, _ in where.values()) + 1
    bottom = ax.get_ylim()[0]
    block = where[int(ranks.reshape(shape)[0, 0, -1, 0])][1] + 1
    lines = [
        ((0.1, -0.22), (columns - 0.1, -0.22)),
        ((-0.22, 0.1), (-0.22, block - 0.1)),
        ((0.1, bottom - 0.2), (right - 0.1, bottom - 0.2)),
        ((-0.72, 0.1), (-0.72, bottom - 0.6)),
    ]
    for name, (tail, head) in zip(names[::-1], lines):
        ax.annotate(
            "", xy=head, xytext=tail, arrowprops={"arrowstyle": "-|>", "color": TEXT, "lw": 1.4}
        )
        upright = tail[0] == head[0]
        ax.text(
            (tail[0] + head[0]) / 2,
            (tail[1] + head[1]) / 2,
            f" {name} = {sizes[name]} ",
            ha="center",
            va="center",
            rotation=90 if upright else 0,
            fontsize=10,
            bbox={"fc": PAPER, "ec": "none", "pad": 0.5},
        )


def _caption(
    ranks: np.ndarray, names: list[str], highlight: str | None, ranks_per_node: int | None
) -> str:
    product = " × ".join(f"{name} {size}" for name, size in zip(names, ranks.shape))
    text = f"{math.prod(ranks.shape)} ranks as {product}"
    if highlight is not None:
        text += f"; boxes of one colour and letter form one {highlight} group"
    if ranks_per_node is not None:
        text += f"; dashed: nodes of {ranks_per_node}"
    return text + "."
