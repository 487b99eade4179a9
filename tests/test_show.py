"""Every picture is readable, shows once and keeps to the palette; source and tables are exact."""

import itertools

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from show_examples import (
    PICTURES,
    drawn,
    grid,
    step_trace,
)

from picotron_edu import show
from picotron_edu.ranks.trace import Event
from picotron_edu.show.palette import KIND_COLOURS, RANK_COLOURS, ink, kind_of, luminance
from picotron_edu.show.source import read_source
from picotron_edu.show.treemap import squarify

pytestmark = pytest.mark.filterwarnings("error")  # it would stand in the reader's notebook


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


def test_an_image_in_a_notebook_is_small():
    assert len(drawn("ring of 4")[0].png()) < 60_000
    assert len(drawn("all_reduce")[0].png()) < 30_000


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


def test_a_number_that_rounds_up_takes_the_next_unit():
    from picotron_edu.show.ledger import duration, size

    assert duration(999.6e-6) == "1 ms" and duration(999.4e-6) == "999 µs"
    assert duration(0.9996) == "1 s" and size(999.6e3) == "1 MB"
