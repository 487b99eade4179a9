"""Realistic data for every picture, and a look at what a picture really draws."""

import math
from functools import cache

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from picotron_edu import show
from picotron_edu.context_parallel import positions_of
from picotron_edu.presets import PRESETS
from picotron_edu.ranks.trace import Event, Trace
from picotron_edu.ring_attention import blocks_of as blocks_to_compute
from picotron_edu.ring_attention import chunks_of


def step_trace(ranks: int, steps: int = 1) -> Trace:
    """Each rank is a little later than the one before; the last one keeps all waiting."""
    events = []
    for step in range(steps):
        begin = 0.062 * step
        ready = [begin + 0.032 + 0.003 * rank for rank in range(ranks)]
        for rank in range(ranks):
            events += [
                Event(rank, "compute", "forward", begin, begin + 0.012 + 0.001 * rank),
                Event(rank, "compute", "backward", begin + 0.012 + 0.001 * rank, ready[rank]),
                Event(rank, "compute", "optimizer", ready[-1] + 0.0112, ready[-1] + 0.015),
            ]
            meeting = (ready[rank], ready[-1] + 0.011, 4096, 6144.0, "dp", ranks - 1)
            events.append(Event(rank, "comm", "all_reduce", *meeting))
    return Trace(events)


def ring_steps(ranks: int) -> list[list[list[int]]]:
    """What a ring all-reduce leaves on every rank after every exchange."""
    pieces = [[10**rank * (p + 1) for p in range(ranks)] for rank in range(ranks)]
    history = [[list(mine)] for mine in pieces]
    for step in range(2 * ranks - 2):
        before = [list(mine) for mine in pieces]
        for rank in range(ranks):
            left, piece = (rank - 1) % ranks, (rank - 1 - step) % ranks
            summing = step < ranks - 1
            pieces[rank][piece] = before[left][piece] + summing * before[rank][piece]
        for rank in range(ranks):
            history[rank].append(list(pieces[rank]))
    return history


def grid(**sizes: int) -> np.ndarray:
    shape = [sizes.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")]
    return np.arange(math.prod(shape)).reshape(shape)


def moments() -> list[dict]:
    records = []
    for step in range(2):
        fixed = {"step": step, "parameters": 4e6, "optimizer_states": 0 if step == 0 else 8e6}
        for i in range(6):
            records.append({"event": "forward", "activations": 1e6 * i, **fixed})
        for i in range(6):
            alive = {"gradients": 4e6 * (i + 1) / 6, "activations": 1e6 * (5 - i)}
            records.append({"event": "backward", **alive, **fixed})
        end = {"event": "optimizer", **fixed, "gradients": 4e6, "optimizer_states": 8e6}
        records += [end, end]
    return records


def ring_tiles(n: int, order: str) -> list[list[tuple]]:
    """(ring step, queries, keys) of each tile that each of `n` ranks computes, 4 tokens a rank."""
    ranks = []
    for rank in range(n):
        here, tiles = positions_of(rank, n, order, 4 * n), []
        for step in range(n):
            owner = (rank - step) % n
            there, chunks = positions_of(owner, n, order, 4 * n), chunks_of(owner, n, order)
            mine, length = chunks_of(rank, n, order), 4 // len(chunks)
            blocks = blocks_to_compute(mine, chunks, length, causal=True)
            tiles += [(step, here[q].tolist(), there[k].tolist()) for q, k, _ in blocks]
        ranks.append(tiles)
    return ranks


BREAKDOWN = {
    "parameters": 2.47e9,
    "gradients": 2.47e9,
    "optimizer states": {"fp32 master weights": 4.94e9, "first moment": 4.94e9, "second": 4.94e9},
    "activations": {"attention": 3.2e9, "feed-forward": 4.4e9, "logits": 2.1e9, "rope": 2e6},
    "other": 1e7,
}
SIZES = [256.0, 4096.0, 65536.0, 1e6, 16e6]

PICTURES = {
    "timeline of 2": lambda: show.timeline(step_trace(2)),
    "timeline of 4": lambda: show.timeline(step_trace(4, steps=3)),
    "mesh of 4": lambda: show.mesh(grid(tp=4)),
    "mesh 2d": lambda: show.mesh(grid(dp=2, tp=4), highlight="dp", ranks_per_node=4),
    "mesh 4d": lambda: show.mesh(grid(pp=2, dp=2, cp=2, tp=2), highlight="tp", ranks_per_node=8),
    "mesh of 16": lambda: show.mesh(grid(tp=16), ranks_per_node=8),
    "all_reduce": lambda: show.collective(
        "all_reduce", [[1, 2], [10, 20], [100, 200]], [[111, 222]] * 3, wire_bytes=[16, 16, 16]
    ),
    "all_to_all": lambda: show.collective(
        "all_to_all",
        [[10 * r + p for p in range(8)] for r in range(8)],
        [[10 * p + r for p in range(8)] for r in range(8)],
        wire_bytes=56,
    ),
    "gather": lambda: show.collective("gather", [[1], [2]], [[1, 2], None]),
    "ring of 2": lambda: show.ring(ring_steps(2)),
    "ring of 3": lambda: show.ring(ring_steps(3)),
    "ring of 4": lambda: show.ring(ring_steps(4)),
    "cost": lambda: show.alpha_beta(
        SIZES, {name: [5e-5 * (i + 1) + 1e-9 * n for n in SIZES] for i, name in enumerate("abc")}
    ),
    "memory steps": lambda: show.memory_steps(moments()),
    "activations": lambda: show.activations(
        [64, 128, 256], {1: [2e6, 4e6, 8e6], 2: [4e6, 8e6, 16e6]}, formula={1: [2e6, 4e6, 8e6]}
    ),
    "treemap": lambda: show.treemap(BREAKDOWN),
    "treemap of tiny": lambda: show.treemap(
        show.memory_breakdown(PRESETS["tiny"], 8, 256, gpu=False), title="tiny on a CPU"
    ),
    "treemap of 8B": lambda: show.treemap(
        show.memory_breakdown(PRESETS["llama-3-8b"], 1, 4096, recompute="none")
    ),
    "treemap of 70B": lambda: show.treemap(
        show.memory_breakdown(PRESETS["llama-3-70b"], 1, 8192, recompute="full")
    ),
    "bars": lambda: show.bars({"before": 812e6, "after, with a long name": 331e6}, unit="bytes"),
    "cuts": lambda: show.cuts(
        [
            {name: [[slice(0, 64), slice(64 * r, 64 * r + 64)] for r in range(2)] for name in "qo"},
            {"up": [[slice(96 * r, 96 * r + 96), slice(0, 128)] for r in range(4)]},
            {
                "shared key": [
                    [slice(32 * (r // 2), 32 * (r // 2) + 32), slice(0, 128)] for r in range(4)
                ]
            },
        ]
    ),
    "loss": lambda: show.loss([5.5 - 0.01 * i for i in range(100)]),
    "two losses": lambda: show.loss({"one rank": [5.0, 4.0], "4 ranks": [5.0, 4.0]}),
}


PICTURES |= {
    f"mask tiles of {n}": lambda n=n: show.mask_tiles(
        {order: ring_tiles(n, order) for order in ("contiguous", "zigzag")}
    )
    for n in (2, 4, 8)
}


def texts_of(picture):
    """Every text that a picture really draws (ticks out of range are not), with its pixels."""
    drawn, draw = [], Text.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", lambda text, *a, **k: (drawn.append(text), draw(text, *a, **k)))
        canvas = FigureCanvasAgg(picture.figure)
        canvas.draw()
    said = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    return [(text, Text.get_window_extent(text, canvas.get_renderer())) for text in said]


def blocks_of(picture):
    return [p for p in picture.figure.findobj(Rectangle) if p.get_label() == "block"]


@cache
def drawn(name):
    picture = PICTURES[name]()
    return picture, texts_of(picture)
