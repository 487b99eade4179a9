"""Attention over several ranks as tiles of the mask: which rank computes which pairs, and when.

    queries ↓  keys →       one square a ring step; a tile is a block of queries that meets a block
    │0╲                     of keys, in the colour of the rank that computes it, with its number.
    │1 0╲                   Half of a tile on the diagonal is computed in vain: nobody sees ahead.
    │   1 0╲                What was computed in earlier steps is grey. What stays white below the
    │      1 0╲             diagonal comes later; above the diagonal no tile is ever computed.

A step is over when its busiest rank is: below each square stand the pairs that each rank computes.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

from picotron_edu.show.figure import WIDTH, Picture, finish, new_figure, style
from picotron_edu.show.palette import FRAME, TEXT, ink, rank_colour

# (ring step, positions of the queries, positions of the keys), each block of neighbouring tokens
Tile = tuple[int, Sequence[int], Sequence[int]]
Ranks = Sequence[Sequence[Tile]]  # of each rank, in any order

EARLIER, MASKED, IN_VAIN = "#C4C4C4", "#F3F3F3", "#FFFFFF"


def size_of(ranks: Ranks) -> tuple[int, int]:
    """Number of ring steps, and of tokens."""
    tiles = [tile for rank in ranks for tile in rank]
    if not tiles:
        raise ValueError("there is no tile: give (ring step, queries, keys) of each, rank by rank")
    return max(step for step, _, _ in tiles) + 1, max(max(keys) for _, _, keys in tiles) + 1


def pairs_of(ranks: Ranks, step: int) -> list[int]:
    """How many pairs of query and key each rank computes in a ring step."""
    return [sum(len(q) * len(k) for at, q, k in tiles if at == step) for tiles in ranks]


def mask_tiles(
    orders: Mapping[str, Ranks],
    caption: str = "Who computes which pairs of query and key, ring step by ring step.",
) -> Picture:
    """A row of squares for each order of the tokens, a square for each ring step.

    orders: name → for each rank the tiles it computed, as (ring step, queries, keys), each with
    the positions of its tokens in the text.
    """
    steps = {name: size_of(ranks)[0] for name, ranks in orders.items()}
    columns = min(4, max(steps.values()))
    lines = [(name, first) for name in orders for first in range(0, steps[name], columns)]
    side = WIDTH / max(columns, 3) - 0.4
    with style():
        figure = new_figure(height=0.65 + len(lines) * (side + 0.7))
        grid = figure.subplots(len(lines), columns, squeeze=False)
        for (name, first), row in zip(lines, grid):
            for ax, step in zip(row, count(first)):
                ax.set_axis_off()
                if step < steps[name]:
                    _square(ax, orders[name], step, side)
                    ax.set_title(f"{name}, step {step}", fontsize=10.5, loc="left")
        return finish(figure, caption)


def _square(ax: Axes, ranks: Ranks, step: int, side: float) -> None:
    S = size_of(ranks)[1]
    ax.set_axis_on()
    ax.set(xlim=(0, S), ylim=(S, 0), aspect="equal", xticks=[], yticks=[])
    ax.spines[["top", "right"]].set_visible(True)
    ax.add_patch(Polygon([(0, 0), (S, 0), (S, S)], fc=MASKED, ec="none"))
    for rank, tiles in enumerate(ranks):
        for at, queries, keys in tiles:
            if at <= step:
                _tile(ax, rank, queries, keys, at == step, side / S)
    ax.plot((0, S), (0, S), color=FRAME, lw=0.9)
    pairs = pairs_of(ranks, step)
    few = "pairs: " + ", ".join(map(str, pairs))
    few = few if len(few) < 28 else f"busiest rank: {max(pairs)} pairs"
    ax.set_xlabel(f"keys\n{few}", fontsize=9)
    ax.set_ylabel("queries", fontsize=9)


def _tile(
    ax: Axes, rank: int, queries: Sequence[int], keys: Sequence[int], now: bool, inches: float
) -> None:
    """inches: of a token on paper; a number that does not fit is left out."""
    x, y, width, height = min(keys), min(queries), len(keys), len(queries)
    colour = rank_colour(rank) if now else EARLIER
    look: dict[str, Any] = {"ec": TEXT if now else FRAME, "lw": 0.8, "label": "tile"}
    whole = max(keys) <= min(queries)
    ax.add_patch(Rectangle((x, y), width, height, fc=colour if whole else IN_VAIN, **look))
    if not whole:
        corners = [(x, y), (x, y + height), (x + width, y + height)]
        ax.add_patch(Polygon(corners, fc=colour, ec="none"))
    if now and width * inches > (0.1 if whole else 0.2):
        at = (0.5, 0.5) if whole else (0.3, 0.72)
        place: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 9}
        ax.text(x + at[0] * width, y + at[1] * height, str(rank), color=ink(colour), **place)
