"""What a collective does, drawn from the data of a run.

Columns are ranks, blocks are pieces, colours are origins:

               rank 0    rank 1    rank 2
    before     [0]       [1]       [2]             all_gather: everybody ends with everybody's piece
                  ╲   ╱   │  ╲   ╱
    after      [0][1][2] [0][1][2] [0][1][2]

Nothing here knows what a collective should do: origins are found by looking the numbers up in
what the ranks held before. A wrong result looks wrong, and a number that nobody held is drawn
grey.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from picotron_edu.show.blocks import block, contributors, empty_block, short, values_of
from picotron_edu.show.figure import WIDTH, Picture, finish, new_figure, style
from picotron_edu.show.ledger import number
from picotron_edu.show.palette import ink, rank_colour

ROW = 0.36  # inches: height of a block
FLOW = 0.95  # inches between before and after: room for the arrows

MEANING = {
    "broadcast": "one rank's data go to every rank",
    "reduce": "the sum over all ranks arrives on one rank",
    "all_reduce": "every rank ends with the sum over all ranks",
    "gather": "one rank collects everybody's piece",
    "all_gather": "every rank ends with everybody's piece",
    "scatter": "one rank deals its pieces out",
    "reduce_scatter": "every rank ends with one piece of the sum over all ranks",
    "all_to_all": "every rank sends a different piece to every rank: rows become columns",
    "send_recv": "every rank passes its data on along the ring",
}


def collective(
    name: str,
    before: Sequence[Any],
    after: Sequence[Any],
    *,
    wire_bytes: float | Sequence[float] | None = None,
    caption: str | None = None,
) -> Picture:
    """Draw what each rank held `before` and `after`: one tensor, list or None per rank.

    wire_bytes   bytes on the wire, for each rank or one number for all; written into the title

        show.collective("all_gather", [r[0] for r in run], [r[1] for r in run], wire_bytes=8)

    Sums are recognised in operations with "reduce" in their name. Give the ranks different numbers.
    """
    if len(before) != len(after):
        raise ValueError(
            f"before holds the data of {len(before)} ranks and after of {len(after)}; "
            "give one entry per rank"
        )
    ranks = range(len(before))
    held, got = [values_of(x) for x in before], [values_of(x) for x in after]
    origins = [[_origin(name, rank, i, got, held) for i in range(len(got[rank]))] for rank in ranks]
    rows_before, rows_after = (max(1, *(len(v) for v in side)) for side in (held, got))

    with style():
        inches = rows_before * ROW + FLOW + rows_after * ROW
        figure = new_figure(height=inches + 1.35)
        ax = figure.add_subplot()
        ax.set_xlim(-0.62, len(held))
        ax.set_ylim(inches + 0.02, -0.38)
        ax.set_axis_off()
        ax.set_title(_title(name, len(held), wire_bytes))
        wide = min(0.72, 1.3 * len(held) / (WIDTH - 1))  # of a column
        left = (1 - wide) / 2
        start = rows_before * ROW + FLOW  # where "after" begins
        longest = max(
            (len(short(v)) for side in (held, got) for part in side for v in part), default=1
        )
        font = 11 if longest <= 5 and len(held) <= 6 else 8.5
        for rank in ranks:
            _chip(ax, rank)
            before_blocks = [([rank], value) for value in held[rank]]
            _column(ax, rank + left, 0, wide, before_blocks, font)
            _column(ax, rank + left, start, wide, list(zip(origins[rank], got[rank])), font)
        _flow(ax, origins, held, got, (rows_before * ROW, start))
        for text, y in (("before", 0), ("after", start)):
            ax.text(-0.6, y + ROW / 2, text, va="center", fontweight="bold", color="#555555")
        stripes = "; stripes: their sum" if "reduce" in name else ""
        meaning = MEANING.get(name, "what each rank holds before and after")
        return finish(figure, caption or f"{name}: {meaning} (colours: whose data{stripes}).")


def _origin(
    name: str, rank: int, index: int, got: list[list[float]], held: list[list[float]]
) -> list[int]:
    """The ranks whose data make up number `index` on `rank` afterwards."""
    value = got[rank][index]
    if index < len(held[rank]) and held[rank][index] == value and "reduce" not in name:
        return [rank]
    holders = [r for r, values in enumerate(held) if value in values]
    if "reduce" not in name:
        return holders[:1]
    if value in held[rank] and got[rank] == held[rank]:
        return [rank]  # reduce leaves the other ranks' data alone
    # The sum runs over one place of every rank's data: usually the same place, for
    # reduce_scatter the place where this rank's piece begins.
    longest = max(len(values) for values in held)
    for place in [index, *range(longest)]:
        parts = [values[place] for values in held if place < len(values)]
        if len(parts) == len(held) and (found := contributors(value, parts)) and len(found) > 1:
            return found
    if name.endswith(("max", "min", "avg", "prod")) or not holders:
        return list(range(len(held)))
    return holders[:1]


def _title(name: str, ranks: int, wire_bytes: float | Sequence[float] | None) -> str:
    title = f"{name} · {ranks} ranks"
    if wire_bytes is None:
        return title
    if isinstance(wire_bytes, (int, float)):
        return f"{title} · each sends {number(wire_bytes)} bytes"
    if len(set(wire_bytes)) == 1:
        return f"{title} · each sends {number(wire_bytes[0])} bytes"
    listed = ", ".join(number(count) for count in wire_bytes)
    return f"{title} · they send {listed} bytes"


def _chip(ax: Axes, rank: int) -> None:
    chip = {"boxstyle": "round,pad=0.25", "fc": rank_colour(rank), "ec": "none"}
    ax.text(
        rank + 0.5,
        -0.2,
        f"rank {rank}",
        ha="center",
        va="center",
        bbox=chip,
        color=ink(rank_colour(rank)),
        fontweight="bold",
    )


def _column(
    ax: Axes, x: float, y: float, width: float, blocks: list[tuple[list[int], float]], font: float
) -> None:
    if not blocks:
        empty_block(ax, x, y, width, ROW)
    for i, (origin, value) in enumerate(blocks):
        block(ax, x, y + i * ROW, width, ROW, origin, short(value), font)


def _flow(
    ax: Axes,
    origins: list[list[list[int]]],
    held: list[list[float]],
    got: list[list[float]],
    gap: tuple[float, float],
) -> None:
    """An arrow in the sender's colour for every pair of ranks between which data moved."""
    for target, pieces in enumerate(origins):
        if got[target] == held[target]:
            continue  # nothing arrived here
        sources = sorted({rank for origin in pieces for rank in origin})
        for source in sources:
            # Arrows leave and arrive side by side, in the order of the other end.
            shift = 0.10 * (2 * target / max(1, len(held) - 1) - 1)
            shift_in = 0.10 * (2 * source / max(1, len(held) - 1) - 1)
            lower = gap[0] - (max(len(h) for h in held) - max(1, len(held[source]))) * ROW
            look = {"arrowstyle": "-|>", "color": rank_colour(source), "lw": 1.5}
            ax.annotate(
                "",
                xy=(target + 0.5 + shift_in, gap[1] - 0.03),
                xytext=(source + 0.5 + shift, lower + 0.03),
                arrowprops={**look, "shrinkA": 0, "shrinkB": 0},
            )
