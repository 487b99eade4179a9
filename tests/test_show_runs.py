"""Timeline, mesh, collectives and ring draw exactly the run they are given."""

import itertools

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch, Rectangle
from show_examples import (
    blocks_of,
    grid,
    ring_steps,
    step_trace,
    texts_of,
)

from picotron_edu import show
from picotron_edu.ranks.trace import Event
from picotron_edu.show.blocks import contributors, short
from picotron_edu.show.palette import KIND_COLOURS, RANK_COLOURS

pytestmark = pytest.mark.filterwarnings("error")  # it would stand in the reader's notebook


# ---- timeline ------------------------------------------------------------------------------


def bars_of(picture):
    return [p for p in picture.figure.axes[0].patches if p.get_label() in KIND_COLOURS]


def test_timeline_draws_every_event_with_its_start_and_length_in_ms():
    trace = step_trace(3)
    drawn = {
        (round(b.get_x(), 6), round(b.get_width(), 6))
        for b in bars_of(show.timeline(trace))
        if b.get_label() != "communication"
    }
    for event in trace.of(lane="compute"):
        assert (round(event.start * 1e3, 6), round((event.end - event.start) * 1e3, 6)) in drawn


def test_timeline_hatches_the_wait_until_the_late_rank_comes_and_points_at_who():
    trace = step_trace(2)
    picture = show.timeline(trace)
    late = trace.of(rank=1, lane="comm")[0]
    waits = [b for b in bars_of(picture) if b.get_label() == "waiting"]
    sends = [b for b in bars_of(picture) if b.get_label() == "communication"]
    assert len(waits) == 1 and len(sends) == 2
    assert waits[0].get_x() + waits[0].get_width() == pytest.approx(late.start * 1e3)
    assert {round(b.get_x(), 6) for b in sends} == {round(late.start * 1e3, 6)}
    arrows = [t for t in picture.figure.axes[0].texts if getattr(t, "arrow_patch", None)]
    assert [a.xy[0] for a in arrows] == [pytest.approx(late.start * 1e3)]
    assert to_hex(arrows[0].arrow_patch.get_edgecolor()).upper() == RANK_COLOURS[1]


def test_timeline_puts_operations_of_the_same_moment_side_by_side():
    events = [
        Event(0, "comm", "all_reduce", 0.01 * i, 0.01 * i + 0.03, 1, 1.0, "dp") for i in range(3)
    ]
    bars = bars_of(show.timeline(events))
    for a, b in itertools.combinations(bars, 2):
        together = min(a.get_x() + a.get_width(), b.get_x() + b.get_width()) - max(
            a.get_x(), b.get_x()
        )
        rows = abs(a.get_y() - b.get_y())
        assert together <= 1e-9 or rows >= a.get_height() - 1e-9


def test_timeline_stripes_what_gathers_where_other_messages_reduce():
    names = ["all_gather", "reduce_scatter"]
    events = [Event(0, "comm", name, 0.01 * i, 0.01 * (i + 1)) for i, name in enumerate(names)]
    patches = show.timeline(events).figure.axes[0].patches
    assert [(p.get_label(), p.get_hatch() is not None) for p in patches] == [
        ("gathering", True),
        ("communication", False),
    ]
    alone = show.timeline(events[:1]).figure.axes[0].patches
    assert [(p.get_label(), p.get_hatch()) for p in alone] == [("communication", None)]


def test_timelines_can_share_their_time_axis():
    events = [Event(0, "comm", "all_reduce", 1.0, 1.01)]
    widths = [show.timeline(events, until=t).figure.axes[0].get_xlim()[1] for t in (None, 0.02)]
    assert widths == pytest.approx([10.1, 20.2])


def test_timeline_of_nothing_says_so():
    with pytest.raises(ValueError, match="no event"):
        show.timeline([])


# ---- mesh ----------------------------------------------------------------------------------


def boxes_of(picture):
    """Rank -> (x, y, colour) from the numbers in the picture and the box under each."""
    ax = picture.figure.axes[0]
    numbers = [t for t in ax.texts if t.get_text().isdigit()]
    boxes = [p for p in ax.patches if isinstance(p, FancyBboxPatch) and p.get_width() < 0.9]
    found = {}
    for text in numbers:
        x, y = text.get_position()
        under = [
            box
            for box in boxes
            if 0 < x - box.get_x() < box.get_width() and 0 < y - box.get_y() < box.get_height()
        ]
        assert len(under) == 1
        found[int(text.get_text())] = (x, y, to_hex(under[0].get_facecolor()).upper())
    return found


def test_mesh_draws_each_rank_once_tp_to_the_right_dp_down():
    boxes = boxes_of(show.mesh(grid(dp=2, tp=4)))
    assert sorted(boxes) == list(range(8))
    assert boxes[1][0] > boxes[0][0] and boxes[1][1] == boxes[0][1]
    assert boxes[4][1] > boxes[0][1] and boxes[4][0] == boxes[0][0]


def test_mesh_highlights_the_groups_of_an_axis():
    boxes = boxes_of(show.mesh(grid(pp=2, dp=2, tp=2), highlight="dp"))
    colour = {rank: box[2] for rank, box in boxes.items()}
    assert colour[0] == colour[2] and colour[1] == colour[3] and colour[4] == colour[6]
    assert len({colour[r] for r in (0, 1, 4, 5)}) == 4


def test_mesh_frames_each_node():
    ax = show.mesh(grid(pp=2, dp=2, tp=2), ranks_per_node=4).figure.axes[0]
    assert [t.get_text() for t in ax.texts if "node" in t.get_text()] == ["node 0", "node 1"]


def test_mesh_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="highlight='tp'"):
        show.mesh(grid(dp=2), highlight="tp")
    with pytest.raises(ValueError, match="ranks_per_node=3"):
        show.mesh(grid(dp=2, tp=2), ranks_per_node=3)
    with pytest.raises(ValueError, match="4 dimensions"):
        show.mesh(grid(dp=2), axes=("dp",))


# ---- collectives ---------------------------------------------------------------------------


def colours_under(picture, block):
    """The colours of the stripes that fill a block, from left to right."""
    stripes = [
        p
        for p in picture.figure.axes[0].patches
        if isinstance(p, Rectangle)
        and p.get_label() != "block"
        and block.get_x() - 1e-6 <= p.get_x() < block.get_x() + block.get_width() - 1e-6
        and abs(p.get_y() - block.get_y()) < 1e-6
    ]
    return [to_hex(p.get_facecolor()).upper() for p in sorted(stripes, key=lambda p: p.get_x())]


@pytest.mark.parametrize(
    ("name", "before", "after", "origins"),
    [
        ("all_gather", [[1], [2], [3]], [[1, 2, 3]] * 3, [[0], [1], [2]] * 3),
        ("broadcast", [[5], [0], [0]], [[5]] * 3, [[0]] * 3),
        ("all_reduce", [[1], [10], [100]], [[111]] * 3, [[0, 1, 2]] * 3),
        ("reduce", [[1], [10], [100]], [[111], [10], [100]], [[0, 1, 2], [1], [2]]),
        ("send_recv", [[1.5], [2.5], [3.5]], [[3.5], [1.5], [2.5]], [[2], [0], [1]]),
        ("scatter", [[1, 2, 3], None, None], [[1], [2], [3]], [[0]] * 3),
        ("gather", [[1], [2], [3]], [[1, 2, 3], None, None], [[0], [1], [2]]),
        (
            "reduce_scatter",
            [[1, 2, 3], [10, 20, 30], [100, 200, 300]],
            [[111], [222], [333]],
            [[0, 1, 2]] * 3,
        ),
        (
            "all_to_all",
            [[0, 1, 2], [10, 11, 12], [20, 21, 22]],
            [[0, 10, 20], [1, 11, 21], [2, 12, 22]],
            [[0], [1], [2]] * 3,
        ),
    ],
)
def test_a_block_has_the_colour_of_the_ranks_its_number_comes_from(name, before, after, origins):
    tensors = [
        [None if part is None else torch.tensor(part) for part in side] for side in (before, after)
    ]
    picture = show.collective(name, *tensors)
    top = {b.get_y() for b in blocks_of(picture)}
    height = blocks_of(picture)[0].get_height()
    longest = max(len(part or [0]) for part in before)
    below = [b for b in blocks_of(picture) if b.get_y() > longest * height]
    assert len(top) == longest + max(len(part or [0]) for part in after)
    below.sort(key=lambda b: (round(b.get_x()), b.get_y()))
    drawn = [colours_under(picture, block) for block in below]
    assert drawn == [[RANK_COLOURS[rank] for rank in origin] for origin in origins]


def test_a_number_that_nobody_held_is_not_given_a_colour():
    picture = show.collective("broadcast", [[5], [0]], [[5], [6]])
    hatched = [b for b in blocks_of(picture) if b.get_hatch()]
    assert len(hatched) == 1


def test_collective_writes_values_and_bytes():
    picture = show.collective("all_reduce", [[1], [2]], [[3], [3]], wire_bytes=[1200, 1200])
    texts = [t.get_text() for t, _ in texts_of(picture)]
    assert "all_reduce · 2 ranks · each sends 1,200 bytes" in texts
    assert texts.count("3") == 2 and "1" in texts and "2" in texts
    uneven = show.collective("reduce", [[1], [2]], [[3], [2]], wire_bytes=[0, 4])
    assert "they send 0, 4 bytes" in uneven.figure.axes[0].get_title(loc="left")


def test_collective_wants_an_entry_per_rank():
    with pytest.raises(ValueError, match="before holds the data of 2 ranks and after of 1"):
        show.collective("gather", [[1], [2]], [[1, 2]])


def test_a_partial_sum_is_read_back_into_its_ranks():
    assert contributors(101, [1, 10, 100]) == [0, 2]
    assert contributors(0.1 + 0.2, [0.1, 0.2, 0.4]) == [0, 1]
    assert contributors(7, [1, 10, 100]) == []


def test_numbers_in_blocks_are_short_but_whole_ones_stay_whole():
    assert [short(v) for v in (3, 12345.0, 0.1 + 0.2, 1234567.0)] == [
        "3",
        "12345",
        "0.3",
        "1.235e+06",
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring_frames_every_piece_once_its_sum_is_complete(ranks):
    picture = show.ring([[torch.tensor(step) for step in rank] for rank in ring_steps(ranks)])
    panels = [ax for ax in picture.figure.axes if ax.patches]
    assert len(panels) == 2 * ranks - 1
    bold = [sum(p.get_linewidth() > 2 for p in ax.patches) for ax in panels]
    # One sum per rank is complete after N−1 exchanges, then one more per rank and exchange.
    assert bold == [0] * (ranks - 1) + [ranks * done for done in range(1, ranks + 1)]
