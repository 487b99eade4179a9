"""The timeline of a run: who computed, who sent, who waited for whom.

    rank 0  compute  │ forward ││   backward   │
            comm                  │░░░░ all_reduce │      ░ waits for rank 1, which comes last
    rank 1  compute  │ forward    ││   backward    │   │
            comm                               │ all_reduce │

Two lanes a rank. Operations that run at the same time in one lane (overlapping messages, a span
inside a span) share its height. A message that names the rank it waited for is hatched until that
rank arrives, and an arrow leads from the late rank to the waiting one. Where some messages gather
and some reduce, those that gather are striped.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from picotron_edu.show.figure import WIDTH, Picture, finish, new_figure, style
from picotron_edu.show.palette import FRAME, KIND_COLOURS, PAPER, TEXT, ink, kind_of, rank_colour

LANES = {"compute": (0.00, 0.46), "comm": (0.48, 0.34)}  # offset from the rank's top, height
RANK_HEIGHT = 1.0
INCHES_PER_CHARACTER = 0.078
SHORTEST_WAIT = 0.004  # of the whole time; shorter waits are noise
COLOURS = {**KIND_COLOURS, "gathering": KIND_COLOURS["communication"]}
HATCHES = {"waiting": "////", "gathering": "\\\\\\\\"}


def timeline(
    trace: Sequence[Any],
    caption: str = "Each rank's work and messages; arrows lead from a late rank to those waiting.",
    until: float | None = None,
) -> Picture:
    """Draw the events of `trace` (or any sequence of Event-like objects), times in milliseconds.

    show.timeline(run.trace)

    until: where the time axis ends, in seconds after the first event, so that several pictures can
    be compared; None for the last event.
    """
    events = list(trace)
    if not events:
        raise ValueError("the trace holds no event: was anything sent, or any span opened?")
    ranks = sorted({event.rank for event in events})
    begin = min(event.start for event in events)
    whole = max(max(event.end for event in events) - begin, until or 0, 1e-9)
    sent = {event.name for event in events if event.lane == "comm"}
    both = any("gather" in name for name in sent) and any("reduce" in name for name in sent)
    with style():
        figure = new_figure(height=1.35 + 0.72 * len(ranks))
        ax = figure.add_subplot()
        kinds: set[str] = set()
        for rank in ranks:
            for lane in LANES:
                mine = [e for e in events if e.rank == rank and e.lane == lane]
                for event, row, rows in _stacked(mine):
                    late = _late_start(event, events)
                    if late is not None and late - event.start <= SHORTEST_WAIT * whole:
                        late = None
                    top, height = _place(ranks.index(rank), lane, row, rows)
                    kind = kind_of(event)
                    if both and kind == "communication" and "gather" in event.name:
                        kind = "gathering"
                    kinds |= _bar(ax, event, kind, late, begin, whole, top, height)
                    if late is not None:
                        _arrow(ax, event, ranks, (late - begin) * 1e3, top + height / 2)
        _axes(ax, ranks, whole)
        handles = [_legend_patch(kind) for kind in COLOURS if kind in kinds]
        left = 0.0 if len(handles) < 6 else -0.2  # six and more begin above the names of the ranks
        ax.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(left, 1), ncols=7, columnspacing=1.2
        )
        return finish(figure, caption)


def _stacked(events: list[Any]) -> list[tuple[Any, int, int]]:
    """(event, its row, number of rows): events which overlap in time lie in different rows."""
    free_from: list[float] = []
    placed = []
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        row = next((i for i, end in enumerate(free_from) if end <= event.start), len(free_from))
        if row == len(free_from):
            free_from.append(event.end)
        free_from[row] = event.end
        placed.append((event, row))
    return [(event, row, len(free_from)) for event, row in placed]


def _place(position: int, lane: str, row: int, rows: int) -> tuple[float, float]:
    """Top and height of a bar; y grows downwards."""
    offset, height = LANES[lane]
    return position * RANK_HEIGHT + offset + row * height / rows, height / rows


def _late_start(event: Any, events: list[Any]) -> float | None:
    """When the rank this event waited for came to the same collective; None if nobody was late."""
    late_rank = getattr(event, "waits_for", None)
    if late_rank is None or late_rank == event.rank:
        return None
    starts = [
        other.start
        for other in events
        if (other.rank, other.name, other.axis) == (late_rank, event.name, event.axis)
        and event.start <= other.start <= event.end
    ]
    return min(starts, default=None)


def _bar(
    ax: Axes,
    event: Any,
    kind: str,
    late: float | None,
    begin: float,
    whole: float,
    top: float,
    height: float,
) -> set[str]:
    """Draw one event, its waiting part hatched, its name if it fits; return the kinds drawn."""
    left, width = (event.start - begin) * 1e3, (event.end - event.start) * 1e3
    wait = 0.0 if late is None else (late - event.start) * 1e3
    kinds = {kind}
    if wait > 0:
        kinds.add("waiting")
        ax.add_patch(_rectangle(left, top, wait, height, "waiting"))
    ax.add_patch(_rectangle(left + wait, top, width - wait, height, kind))

    inches = (WIDTH - 1.4) / (whole * 1e3)  # an inch of paper holds this many milliseconds
    names = [event.name]
    if event.lane == "comm" and event.axis not in ("", "world"):
        names.insert(0, f"{event.name} {event.axis}")
    places = [(left + wait, width - wait, kind), (left, wait, "waiting")]
    for (start, room, under), name in itertools.product(places, names):
        if height >= 0.15 and room * inches > len(name) * INCHES_PER_CHARACTER + 0.06:
            look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 9}
            if under in HATCHES:  # the hatching would make the name hard to read
                look["bbox"] = {"fc": PAPER, "ec": "none", "pad": 1}
            x, y = start + room / 2, top + height / 2
            colour = TEXT if under in HATCHES else ink(COLOURS[under])
            ax.text(x, y, name, color=colour, clip_on=True, **look)
            break
    return kinds


def _rectangle(left: float, top: float, width: float, height: float, kind: str) -> Rectangle:
    edge = FRAME if kind == "waiting" else PAPER
    look: dict[str, Any] = {"fc": COLOURS[kind], "ec": edge, "hatch": HATCHES.get(kind)}
    return Rectangle((left, top), width, height, lw=0.5, label=kind, **look)


def _legend_patch(kind: str) -> Patch:
    edge = PAPER if kind == "gathering" else FRAME
    return Patch(fc=COLOURS[kind], ec=edge, lw=0.5, hatch=HATCHES.get(kind), label=kind)


def _arrow(ax: Axes, event: Any, ranks: list[int], x: float, y: float) -> None:
    """From the comm lane of the late rank to the bar that waited for it."""
    if event.waits_for not in ranks:
        return
    offset, height = LANES["comm"]
    source = ranks.index(event.waits_for) * RANK_HEIGHT + offset + height / 2
    look = {"arrowstyle": "-|>", "color": rank_colour(event.waits_for), "lw": 1.3, "shrinkB": 0}
    ax.annotate("", xy=(x, y), xytext=(x, source), arrowprops={**look, "shrinkA": 0})


def _axes(ax: Axes, ranks: list[int], whole: float) -> None:
    ax.set_xlim(-0.002 * whole * 1e3, 1.01 * whole * 1e3)
    ax.set_ylim(len(ranks) * RANK_HEIGHT - 0.1, -0.08)
    ax.set_xlabel("time in ms")
    middle = [
        i * RANK_HEIGHT + offset + h / 2 for i in range(len(ranks)) for offset, h in LANES.values()
    ]
    ax.set_yticks(middle, list(LANES) * len(ranks), fontsize=9, color="#555555")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    for i, rank in enumerate(ranks):
        chip = {"boxstyle": "round,pad=0.25", "fc": rank_colour(rank), "ec": "none"}
        ax.annotate(
            f"rank {rank}",
            xy=(0, i * RANK_HEIGHT + 0.42),
            xycoords=ax.get_yaxis_transform(),
            xytext=(-64, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=ink(rank_colour(rank)),
            fontweight="bold",
            bbox=chip,
        )
        if i:
            ax.axhline(i * RANK_HEIGHT - 0.09, color="#DDDDDD", lw=0.8)
