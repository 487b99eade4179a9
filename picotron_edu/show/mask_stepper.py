"""The ring, step by step, with a slider: which tiles each rank computes, and with which keys.

    show.mask_stepper({"contiguous": tiles, "zigzag": tiles})

A second view of `show.mask_tiles`, for the same tiles of a run: one large square, drawn as SVG, and
a line for each rank. Point at a tile to read which queries meet which keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from picotron_edu.show.mask_tiles import EARLIER, IN_VAIN, MASKED, Ranks, pairs_of, size_of
from picotron_edu.show.palette import FRAME, TEXT, ink, rank_colour

PIXELS = 360  # side of the square


def mask_stepper(orders: Mapping[str, Ranks]) -> widgets.VBox:
    """A slider for the ring step and a button for each order, over the mask and a table of ranks.

    orders: as `mask_tiles` takes them.
    """
    order = widgets.ToggleButtons(options=list(orders), description="order")
    step = widgets.IntSlider(min=0, max=0, description="ring step", continuous_update=True)
    play = widgets.Play(min=0, max=0, interval=1200)
    widgets.jslink((play, "value"), (step, "value"))
    picture = widgets.HTML()

    def draw(_: Any = None) -> None:
        ranks = orders[order.value]
        step.max = play.max = size_of(ranks)[0] - 1
        square, table = mask_svg(ranks, step.value), ranks_html(ranks, step.value)
        picture.value = f'<div style="display:flex;gap:28px;flex-wrap:wrap">{square}{table}</div>'

    order.observe(draw, "value")
    step.observe(draw, "value")
    draw()
    return widgets.VBox([order, widgets.HBox([play, step]), picture])


def mask_svg(ranks: Ranks, step: int) -> str:
    S = size_of(ranks)[1]
    unit = PIXELS / S
    half = f'<polygon points="0,0 {PIXELS},0 {PIXELS},{PIXELS}" fill="{MASKED}"/>'
    shapes = [half]
    for rank, tiles in enumerate(ranks):
        for at, queries, keys in tiles:
            if at <= step:
                shapes.append(_tile_svg(rank, queries, keys, at == step, unit))
    frame = f'<rect width="{PIXELS}" height="{PIXELS}" fill="none" stroke="{FRAME}"/>'
    line = f'<line x2="{PIXELS}" y2="{PIXELS}" stroke="{FRAME}"/>'
    box = f'viewBox="-1 -1 {PIXELS + 2} {PIXELS + 2}" width="{PIXELS}" height="{PIXELS}"'
    label = f"queries down, keys to the right, ring step {step}"
    inside = "".join([*shapes, line, frame])
    return f'<svg role="img" aria-label="{label}" {box} font-size="14">{inside}</svg>'


def _tile_svg(
    rank: int, queries: Sequence[int], keys: Sequence[int], now: bool, unit: float
) -> str:
    x, y, width, height = (n * unit for n in (min(keys), min(queries), len(keys), len(queries)))
    colour, edge = (rank_colour(rank), TEXT) if now else (EARLIER, FRAME)
    whole = max(keys) <= min(queries)
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    shape += f' fill="{colour if whole else IN_VAIN}" stroke="{edge}"/>'
    if not whole:
        corners = f"{x:.1f},{y:.1f} {x:.1f},{y + height:.1f} {x + width:.1f},{y + height:.1f}"
        shape += f'<polygon points="{corners}" fill="{colour}"/>'
    if now:
        across, down = (0.5, 0.5) if whole else (0.3, 0.72)
        place = f'x="{x + across * width:.1f}" y="{y + down * height:.1f}" text-anchor="middle"'
        shape += f'<text {place} dominant-baseline="central" fill="{ink(colour)}">{rank}</text>'
    told = f"rank {rank}: queries {_span(queries)} meet keys {_span(keys)}"
    return f"<g><title>{told}</title>{shape}</g>"


def ranks_html(ranks: Ranks, step: int) -> str:
    """A line for each rank: what it computes in this step, and the pairs of it."""
    lines = []
    for rank, (tiles, pairs) in enumerate(zip(ranks, pairs_of(ranks, step))):
        met = [f"{_span(q)} × {_span(k)}" for at, q, k in tiles if at == step]
        colour = rank_colour(rank)
        chip = (
            f'<span style="background:{colour};color:{ink(colour)};padding:1px 7px">{rank}</span>'
        )
        cells = chip, ", ".join(met) or "nothing to do", str(pairs)
        lines.append("".join(f'<td style="padding:3px 10px">{cell}</td>' for cell in cells))
    heads = "".join(f"<th>{text}</th>" for text in ("rank", "queries × keys", "pairs"))
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="font-size:14px;height:min-content"><tr>{heads}</tr>{rows}</table>'


def _span(positions: Sequence[int]) -> str:
    first, last = min(positions), max(positions)
    return f"{first}" if first == last else f"{first}–{last}"
