"""The pictures draw exactly the data they are given, show once, and stay readable."""

import itertools
import math
import warnings
from functools import cache

import nbformat
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text
from nbclient import NotebookClient

from picotron_edu import memory, show
from picotron_edu.presets import PRESETS
from picotron_edu.ranks.trace import Event, Trace
from picotron_edu.show.blocks import contributors, short
from picotron_edu.show.palette import KIND_COLOURS, RANK_COLOURS, ink, kind_of, luminance
from picotron_edu.show.source import read_source
from picotron_edu.show.treemap import layout, squarify
from picotron_edu.show.widget import memory_widget, treemap_html


@pytest.fixture(autouse=True)
def no_warnings():
    """Whatever a picture warns about would stand in the reader's notebook."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


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
    "loss": lambda: show.loss([5.5 - 0.01 * i for i in range(100)]),
    "two losses": lambda: show.loss({"one rank": [5.0, 4.0], "4 ranks": [5.0, 4.0]}),
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


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_has_a_one_sentence_caption_and_readable_texts_inside_it(name):
    picture, texts = drawn(name)
    caption = picture.figure.get_supxlabel()
    assert caption.replace("\n", " ") == picture.caption
    assert picture.caption.endswith(".") and len(picture.caption) > 15
    paper = picture.figure.bbox
    for text, box in texts:
        assert text.get_fontsize() >= 6.5, f"{text.get_text()!r} is too small to read"
        inside = box.x0 > -2 and box.y0 > -2 and box.x1 < paper.x1 + 2 and box.y1 < paper.y1 + 2
        assert inside, f"{text.get_text()!r} is cut off"


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_lies_over_another(name):
    for (a, box_a), (b, box_b) in itertools.combinations(drawn(name)[1], 2):
        across = min(box_a.x1, box_b.x1) - max(box_a.x0, box_b.x0)
        down = min(box_a.y1, box_b.y1) - max(box_a.y0, box_b.y0)
        assert across < 2 or down < 3, f"{a.get_text()!r} and {b.get_text()!r} overlap"


# ---- palette -------------------------------------------------------------------------------


def lab(linear_rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array(
        [[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]]
    )
    xyz = to_xyz @ linear_rgb / np.array([0.9505, 1.0, 1.0888])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Machado, Oliveira, Fernandes 2009, full severity.
EYES = {
    "usual": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("colours", [RANK_COLOURS, tuple(KIND_COLOURS.values())])
def test_colours_stay_apart_for_every_kind_of_eye(eye, colours):
    def seen(colour: str) -> np.ndarray:
        srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        return lab(np.clip(np.array(EYES[eye]) @ linear, 0, 1))

    for a, b in itertools.combinations(colours, 2):
        assert np.linalg.norm(seen(a) - seen(b)) > 15, (a, b)


def test_ranks_differ_in_a_greyscale_print_and_text_on_them_has_contrast():
    greys = [116 * np.cbrt(luminance(colour)) - 16 for colour in RANK_COLOURS]
    assert np.diff(sorted(greys)).min() > 5
    assert np.abs(np.diff(greys)).min() > 12  # neighbours
    for colour in RANK_COLOURS:
        light = luminance(colour), luminance(ink(colour))
        assert (max(light) + 0.05) / (min(light) + 0.05) > 4.0


def test_the_kind_of_an_event_follows_from_its_name():
    kinds = {
        ("compute", "forward"): "forward",
        ("compute", "backward 3"): "backward",
        ("compute", "F2"): "forward",
        ("compute", "W"): "weight gradient",
        ("compute", "weight gradient"): "weight gradient",
        ("compute", "optimizer step"): "optimizer",
        ("comm", "all_reduce"): "communication",
        ("comm", "barrier"): "waiting",
        ("compute", "sleep"): "other",
    }
    for (lane, name), kind in kinds.items():
        assert kind_of(Event(0, lane, name, 0.0, 1.0)) == kind


# ---- shown once ----------------------------------------------------------------------------


def test_a_notebook_shows_each_picture_and_table_exactly_once_with_its_caption_as_text():
    cells = [
        "%matplotlib inline\nimport numpy as np\nfrom picotron_edu import show\n"
        "grid = np.arange(4).reshape(1, 2, 1, 2)",
        "show.mesh(grid)",  # the last line of a cell
        "show.mesh(grid, caption='First.')\nshow.mesh(grid, caption='Second.')\n1 + 1",
        "picture = show.mesh(grid)\npicture",
        "show.compare([show.Row('a', sent=(8, 4))])",
        "show.source(show.mesh)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(book, kernel_name="python3", timeout=60).execute()
    outputs = [cell.outputs for cell in book.cells]
    assert outputs[0] == []
    assert [o.data["text/plain"] for o in outputs[1]] == ["4 ranks as dp 2 × tp 2."]
    assert "image/png" in outputs[1][0].data
    assert [o.data["text/plain"] for o in outputs[2]] == ["First.", "Second.", "2"]
    assert len(outputs[3]) == 1 and len(outputs[4]) == 1 and len(outputs[5]) == 1
    assert "<table" in outputs[4][0].data["text/html"]
    assert outputs[5][0].data["text/markdown"].startswith("picotron_edu/show/mesh.py · `mesh` · ")
    assert not any("<Figure" in str(o) or "object at 0x" in str(o) for o in outputs)


def test_outside_a_notebook_a_picture_is_a_file_to_save(tmp_path, capsys):
    show.mesh(grid(tp=2)).save(tmp_path / "mesh.png")
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == ""


def test_the_same_picture_is_the_same_bytes():
    assert PICTURES["mesh 2d"]().png() == PICTURES["mesh 2d"]().png()


# ---- source --------------------------------------------------------------------------------


def documented(x):
    """Doc."""
    y = x + 1
    return y


def test_source_shows_the_file_the_name_the_lines_and_no_absolute_path():
    heading, code = read_source(squarify, None, None)
    assert heading == f"picotron_edu/show/treemap.py · `squarify` · {len(code.splitlines())} lines"
    assert code.startswith("def squarify(")


def test_source_cuts_a_piece_and_says_of_how_many_lines():
    heading, code = read_source(documented, "y = x", "return")
    assert code == "y = x + 1\nreturn y"
    assert heading.endswith("· `documented` · 2 lines of 4")


def test_source_names_a_marker_that_is_not_there():
    with pytest.raises(ValueError, match=r"to='nothing' is in no line of documented"):
        show.source(documented, to="nothing")


# ---- tables --------------------------------------------------------------------------------


def test_ledger_prints_the_traces_own_sums(capsys):
    table = show.ledger(step_trace(4, steps=3))
    assert table.rows == [["all_reduce", "dp", "3", "12,288", "18,432"]]
    assert capsys.readouterr().out == f"{table}\n"


def test_compare_has_a_column_per_given_quantity_and_the_factor_between():
    rows = [
        show.Row("accumulation", memory=(800e6, 200e6), steps=(1, 4)),
        show.Row("data parallel", memory=(800e6, 800e6), sent=(0, 3.2e6)),
    ]
    table = show.compare(rows)
    assert table.columns == ["technique", "memory per rank", "bytes sent", "steps"]
    assert table.rows == [
        ["accumulation", "800 MB → 200 MB  (÷ 4)", "–", "1 → 4  (× 4)"],
        ["data parallel", "800 MB → 800 MB", "0 B → 3.2 MB", "–"],
    ]
    assert "÷ 4" in table.html and "time" not in table.columns


def test_table_text_is_safe_in_html():
    assert "<b>" not in show.compare([show.Row("<b>x</b>", steps=(1, 2))]).html


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


# ---- cost ----------------------------------------------------------------------------------


def test_fit_finds_latency_and_bandwidth_through_noise_over_six_decades():
    sizes = np.geomspace(64, 64e6, 13)
    noise = np.random.default_rng(0).uniform(0.9, 1.1, 13)
    alpha, beta = show.fit_alpha_beta(sizes, (40e-6 + 0.5e-9 * sizes) * noise)
    assert alpha == pytest.approx(40e-6, rel=0.1) and beta == pytest.approx(0.5e-9, rel=0.1)


def test_fit_is_exact_without_noise_and_never_negative():
    assert show.fit_alpha_beta([1, 1e6], [1e-5 + 1e-9, 1e-5 + 1e-3]) == pytest.approx((1e-5, 1e-9))
    alpha, beta = show.fit_alpha_beta([1e3, 1e4], [1e-6, 2e-5])
    assert alpha == 0 and beta > 0
    alpha, beta = show.fit_alpha_beta([1e3, 1e6], [2e-5, 1e-5])
    assert alpha > 0 and beta == 0


@pytest.mark.parametrize(("sizes", "seconds"), [([1], [1]), ([1, 1], [1, 2]), ([1, 2], [1, 0])])
def test_fit_refuses_what_has_no_line(sizes, seconds):
    with pytest.raises(ValueError, match=r"sizes|seconds"):
        show.fit_alpha_beta(sizes, seconds)


def test_cost_draws_the_measured_points_and_the_bandwidth():
    seconds = [5e-5 + 1e-9 * n for n in SIZES]
    left, right = show.alpha_beta(SIZES, {"send": seconds}).figure.axes
    assert left.lines[0].get_ydata() == pytest.approx(seconds)
    assert right.lines[0].get_ydata() == pytest.approx(np.array(SIZES) / seconds)
    assert left.get_xscale() == left.get_yscale() == "log"


# ---- memory --------------------------------------------------------------------------------


def test_memory_steps_stack_up_to_the_recorded_bytes():
    picture = show.memory_steps(moments())
    ax = picture.figure.axes[0]
    heights = [c.get_datalim(ax.transData).y1 for c in ax.collections]
    assert ax.get_ylabel() == "memory in MB"
    totals = [sum(v for k, v in r.items() if k not in ("step", "event")) for r in moments()]
    assert heights[-1] == pytest.approx(max(totals) / 1e6)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["step 0", "step 1"]
    phases = [t.get_text() for t in ax.texts]
    assert phases[:2] == ["forward", "backward"]


def test_activations_draw_measured_points_and_formula_lines():
    ax = show.activations([64, 128], {2: [4e6, 8e6]}, formula={2: [4e6, 8.4e6]}).figure.axes[0]
    assert ax.lines[0].get_ydata() == pytest.approx([4, 8])
    assert ax.lines[1].get_ydata() == pytest.approx([4, 8.4])
    with pytest.raises(ValueError, match="batch 2 has 1 values for 2"):
        show.activations([64, 128], {2: [4e6]})


@pytest.mark.parametrize("values", [[1], [6, 6, 4, 3, 2, 2, 1], [1e12, 3, 1e-3], [1] * 17])
def test_squarify_fills_the_area_in_proportion_without_overlap(values):
    boxes = squarify(values, (1, 2, 8, 5))
    for value, (_, _, width, height) in zip(values, boxes):
        assert width * height == pytest.approx(40 * value / sum(values), rel=1e-6)
    for a, b in itertools.combinations(boxes, 2):
        across = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
        down = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
        assert across < 1e-9 or down < 1e-9
    assert min(b[0] for b in boxes) == 1 and min(b[1] for b in boxes) == 2
    assert max(b[0] + b[2] for b in boxes) == pytest.approx(9)
    assert max(b[1] + b[3] for b in boxes) == pytest.approx(7)


def test_squarify_makes_squares_where_it_can():
    assert all(max(w / h, h / w) < 1.01 for _, _, w, h in squarify([1] * 4, (0, 0, 2, 2)))


def test_treemap_draws_every_byte_and_names_every_part():
    picture = show.treemap(BREAKDOWN)
    total = 2 * 2.47e9 + 3 * 4.94e9 + 3.2e9 + 4.4e9 + 2.1e9 + 2e6 + 1e7
    boxes = [p for p in picture.figure.axes[0].patches if p.get_label()]
    area = sum(box.get_width() * box.get_height() for box in boxes)
    drawn = {box.get_label(): box.get_width() * box.get_height() / area * total for box in boxes}
    assert drawn["parameters"] == pytest.approx(2.47e9)
    assert drawn["activations · attention"] == pytest.approx(3.2e9)
    assert drawn["activations · rope"] == pytest.approx(2e6)
    said = " ".join(t.get_text() for t, _ in texts_of(picture))
    for name in ("parameters", "fp32 master weights", "attention", "rope: 2 MB", "other: 10 MB"):
        assert name in said


def test_treemap_merges_hairlines_of_one_category_without_losing_bytes():
    parts = layout({"activations": {"big": 1e9, "a": 1e3, "b": 2e3}}, (0, 0, 1, 1))
    assert [(p.name, p.bytes) for p in parts] == [("big", 1e9), ("other parts", 3e3)]


def test_treemap_refuses_negative_and_empty_breakdowns():
    with pytest.raises(ValueError, match="gradients"):
        show.treemap({"parameters": 5, "gradients": -1})
    with pytest.raises(ValueError, match="no bytes"):
        show.treemap({"parameters": 0})


def test_breakdown_adds_up_to_the_formulas_of_a_step():
    config = PRESETS["llama-3.2-1b"]
    count = config.num_parameters()
    found = show.memory_breakdown(config, 2, 1024, precision="bf16", fp32_gradients=False)
    assert found["parameters"] == found["gradients"] == 2 * count
    assert sum(found["optimizer states"].values()) == 12 * count
    kept = memory.activation_bytes(config, 2, 1024, torch.bfloat16, gpu=True)
    assert sum(found["activations"].values()) == kept
    wide = show.memory_breakdown(config, 2, 1024, precision="fp32", gpu=False)
    assert sum(sum(v.values()) if isinstance(v, dict) else v for v in wide.values()) == (
        16 * count + memory.activation_bytes(config, 2, 1024, torch.float32, gpu=False)
    )


def test_recomputing_keeps_less_and_nothing_but_activations_changes():
    def kept(recompute, sequence=8192):
        found = show.memory_breakdown(PRESETS["llama-3-8b"], 1, sequence, recompute=recompute)
        return found.pop("activations"), found

    none, selective, full = kept("none"), kept("selective"), kept("full")
    assert none[1] == selective[1] == full[1]
    assert none[0].pop("attention scores") == 2 * 32 * 8192**2 * 32  # bytes · heads · S² · layers
    assert none[0] == selective[0]
    assert full[0].pop("inputs of other layers") == 2 * 8192 * 4096 * 31
    assert full[0]["feed-forward"] == selective[0]["feed-forward"] / 32
    with pytest.raises(ValueError, match="recompute is none, selective or full, got 'some'"):
        kept("some")


# ---- widget --------------------------------------------------------------------------------


def simple_breakdown(config, batch, sequence, *, precision, fp32_gradients, recompute):
    count = config.num_parameters()
    kept = {"none": 34, "selective": 20, "full": 2}[recompute]
    return {
        "parameters": count * (2 if precision == "bf16" else 4),
        "gradients": count * (4 if fp32_gradients or precision == "fp32" else 2),
        "optimizer states": {"master weights": 4 * count, "moments": 8 * count},
        "activations": kept * batch * sequence * config.hidden_size * config.num_hidden_layers,
    }


def control(widget, description):
    everything = [w for row in widget.children[:2] for w in walk(row)]
    found = [w for w in everything if getattr(w, "description", "") == description]
    assert len(found) == 1
    return found[0]


def walk(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)


def test_widget_follows_sliders_and_presets():
    widget = memory_widget(simple_breakdown, start="tiny")
    message, picture = widget.children[2:]
    assert f"{PRESETS['tiny'].num_parameters():,} parameters" in message.value
    control(widget, "model").value = "llama-3-8b"
    assert "8,030,261,248 parameters" in message.value
    assert control(widget, "kv heads").value == 8
    before = picture.value
    control(widget, "batch").value = 4
    assert picture.value != before
    control(widget, "model").value = "llama-3.2-1b"
    assert "1,235,814,400 parameters" in message.value
    control(widget, "tied embeddings").value = False
    assert "1,498,482,688 parameters" in message.value


def test_widget_explains_an_illegal_combination_and_keeps_the_last_picture():
    widget = memory_widget(simple_breakdown, start="llama-3-8b")
    message, picture = widget.children[2:]
    before = picture.value
    control(widget, "kv heads").value = 5
    assert "not possible" in message.value and "num_key_value_heads (5)" in message.value
    assert picture.value == before
    control(widget, "kv heads").value = 4
    assert "not possible" not in message.value and picture.value != before


def test_widget_has_real_formulas_and_all_five_models():
    widget = memory_widget()
    for name in control(widget, "model").options:
        control(widget, "model").value = name
        assert f"{PRESETS[name].num_parameters():,} parameters" in widget.children[2].value
    for way in ("none", "full", "selective"):
        control(widget, "recompute").value = way
        assert "not possible" not in widget.children[2].value


def test_widget_takes_no_choice_of_gradients_in_fp32():
    widget = memory_widget(simple_breakdown, start="tiny")
    assert not control(widget, "fp32 gradients").disabled
    control(widget, "precision").value = "fp32"
    assert control(widget, "fp32 gradients").disabled


def test_widget_draws_once_per_preset():
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return simple_breakdown(*args, **kwargs)

    widget = memory_widget(counted, start="tiny")
    assert len(calls) == 1
    control(widget, "model").value = "llama-3-70b"
    assert len(calls) == 2


def test_widget_boxes_say_their_bytes_when_pointed_at():
    page = treemap_html(layout(BREAKDOWN, (0, 0, 840, 340)))
    assert 'title="activations · attention: 3.2 GB"' in page
    assert page.count("position:absolute") == len(layout(BREAKDOWN, (0, 0, 840, 340)))


# ---- bars and loss -------------------------------------------------------------------------


def test_bars_have_the_given_lengths_and_say_them():
    ax = show.bars({"a": 812e6, "b": 331e6}, unit="bytes").figure.axes[0]
    assert [p.get_width() for p in ax.patches] == [812e6, 331e6]
    assert [t.get_text() for t in ax.texts] == ["812 MB", "331 MB"]


def test_loss_draws_each_step_and_the_mean_around_it():
    values = [5.0 - 0.01 * i for i in range(100)]
    ax = show.loss(values).figure.axes[0]
    assert ax.lines[0].get_ydata() == pytest.approx(values)
    assert ax.lines[1].get_ydata()[50] == pytest.approx(np.mean(values[48:52]))
    assert ax.lines[0].get_xdata()[0] == 1
