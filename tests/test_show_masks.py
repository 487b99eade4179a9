"""The tiles of the mask: each where it is computed, by whom, in which ring step."""

import pytest
from matplotlib.patches import Polygon, Rectangle
from show_examples import ring_tiles

from picotron_edu import show
from picotron_edu.show.mask_stepper import mask_stepper, mask_svg, ranks_html
from picotron_edu.show.mask_tiles import pairs_of

pytestmark = pytest.mark.filterwarnings("error")  # it would stand in the reader's notebook


def tiles_in(ax):
    return [p for p in ax.patches if isinstance(p, Rectangle) and p.get_label() == "tile"]


def test_a_square_for_each_step_and_the_ranks_on_their_tiles():
    picture = show.mask_tiles({name: ring_tiles(2, name) for name in ("contiguous", "zigzag")})
    squares = picture.figure.axes
    titles = [ax.get_title(loc="left") for ax in squares]
    assert titles == [f"{name}, step {i}" for name in ("contiguous", "zigzag") for i in (0, 1)]
    numbers = [sorted(text.get_text() for text in ax.texts) for ax in squares]
    assert numbers == [["0", "1"], ["1"], [*"000111"], [*"0011"]]  # of tiles computed in this step
    pairs = [ax.get_xlabel() for ax in squares]
    below = ["pairs: 16, 16", "pairs: 0, 16", "pairs: 12, 12", "pairs: 8, 8"]
    assert pairs == [f"keys\n{text}" for text in below]


def test_what_is_masked_as_a_whole_has_no_tile_and_a_diagonal_tile_is_half():
    picture = show.mask_tiles({"contiguous": ring_tiles(4, "contiguous")})
    last = picture.figure.axes[-1]
    assert len(tiles_in(last)) == 4 * 5 / 2  # earlier steps stay
    assert all(tile.get_x() <= tile.get_y() for tile in tiles_in(last))
    halves = [p for p in last.patches if isinstance(p, Polygon)]
    assert len(halves) == 1 + 4  # all that is above the diagonal, and the four tiles on it


def test_pairs_by_rank():
    assert [pairs_of(ring_tiles(4, "contiguous"), step) for step in (0, 3)] == [
        [16, 16, 16, 16],
        [0, 0, 0, 16],
    ]
    assert pairs_of(ring_tiles(4, "zigzag"), 3) == [8, 8, 8, 8]


def test_no_tile_at_all_is_refused():
    with pytest.raises(ValueError, match="there is no tile"):
        show.mask_tiles({"zigzag": [[], []]})


def test_the_stepper_follows_its_slider_and_buttons():
    widget = mask_stepper({name: ring_tiles(4, name) for name in ("contiguous", "zigzag")})
    order, (_, step), picture = widget.children[0], widget.children[1].children, widget.children[2]
    assert step.max == 3
    assert "nothing to do" not in picture.value
    step.value = 3
    assert picture.value.count("nothing to do") == 3
    assert "rank 3: queries 12–15 meet keys 0–3" in picture.value
    order.value = "zigzag"
    assert "nothing to do" not in picture.value and step.value == 3


def test_the_stepper_draws_the_same_tiles():
    ranks = ring_tiles(4, "zigzag")
    assert mask_svg(ranks, 0).count("<title>") == 4 * 3
    assert mask_svg(ranks, 3).count("<title>") == 4 * 9
    assert mask_svg(ranks, 3).count("<text") == 4 * 2  # numbers on those of this step
    assert ranks_html(ranks, 1).count("<tr>") == 1 + 4
