"""Ring all-reduce step by step: which piece is summed how far, on which rank.

One small picture a step; rows are ranks, columns are pieces. In the first N−1 steps (reduce-
scatter) sums grow as they travel round the ring, in the next N−1 (all-gather) finished sums are
handed on:

    start          step 1            step 2 …
    [a0][a1][a2]   [a0][a1][a2+c2]   a frame in bold: the sum of all ranks is complete
    [b0][b1][b2]   [a0+b0][b1][b2]
    [c0][c1][c2]   [c0][b1+c1][c2]
"""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from picotron_edu.show.blocks import block, contributors, short, values_of
from picotron_edu.show.figure import WIDTH, Picture, finish, new_figure, style
from picotron_edu.show.palette import TEXT, ink, rank_colour


def ring(steps: Sequence[Sequence[Any]], caption: str | None = None) -> Picture:
    """Draw the pieces of every rank at every step of a ring algorithm.

    steps[rank][step][piece]: what `rank` held of each piece after `step` exchanges, step 0 being
    its own data; one number per piece (of a longer piece the first number is drawn). A rank records
    it with `history.append([piece.clone() for piece in pieces])`, so that the values of a run fit
    as they are:

        show.ring(run.values)
    """
    table = [[[values_of(piece)[0] for piece in step] for step in rank] for rank in steps]
    ranks, moments, pieces = len(table), len(table[0]), len(table[0][0])
    if any(len(rank) != moments or any(len(step) != pieces for step in rank) for rank in table):
        raise ValueError(
            "steps must hold the same number of steps for every rank and of pieces for every step: "
            f"rank 0 has {moments} steps of {pieces} pieces"
        )
    columns = min(moments, 4 if pieces <= 4 else 2)
    if moments in (5, 6) and pieces <= 4:
        columns = 3  # 3 + 3 fills the page better than 4 + 2
    rows = math.ceil(moments / columns)
    longest = max(len(short(v)) for rank in table for step in rank for v in step)
    inches = (WIDTH - 0.6) / columns / pieces  # width of a block
    font = max(7.0, min(11.0, 72 * (inches - 0.15) / (0.66 * longest)))
    with style():
        figure = new_figure(height=0.65 + rows * (0.42 + 0.43 * ranks))
        grid = figure.subplots(rows, columns, squeeze=False)
        for cell in grid.flat:
            cell.set_axis_off()
        for moment in range(moments):
            ax = grid[moment // columns][moment % columns]
            ax.set_title("start" if moment == 0 else f"after step {moment}", fontsize=10.5)
            _state(ax, [rank[moment] for rank in table], [rank[0] for rank in table], font)
        return finish(figure, caption or _caption(table))


def _state(ax: Axes, now: list[list[float]], start: list[list[float]], font: float) -> None:
    ranks, pieces = len(now), len(now[0])
    ax.set_xlim(-0.55, pieces)
    ax.set_ylim(ranks, -0.02)
    for rank in range(ranks):
        colour = rank_colour(rank)
        chip = {"boxstyle": "round,pad=0.2", "fc": colour, "ec": "none"}
        ax.text(
            -0.3,
            rank + 0.47,
            str(rank),
            ha="center",
            va="center",
            fontsize=9.5,
            bbox=chip,
            color=ink(colour),
            fontweight="bold",
        )
        for piece in range(pieces):
            own = [start[other][piece] for other in range(ranks)]
            found = contributors(now[rank][piece], own)
            block(
                ax,
                piece + 0.03,
                rank + 0.03,
                0.94,
                0.88,
                found,
                short(now[rank][piece]),
                font,
                band=0.4,
            )
            if len(found) == ranks:
                frame = Rectangle(
                    (piece + 0.03, rank + 0.03), 0.94, 0.88, fc="none", ec=TEXT, lw=2.6
                )
                ax.add_patch(frame)


def _caption(table: list[list[list[float]]]) -> str:
    return (
        f"Rows are ranks, columns are the {len(table[0][0])} pieces; a block's stripes are the "
        "ranks already summed in it, a bold frame says that the sum is complete."
    )
