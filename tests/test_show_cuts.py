"""The picture of cut weights draws every piece, as large as it is, with its ranks."""

import pytest
from matplotlib.patches import Rectangle

from picotron_edu import show

pytestmark = pytest.mark.filterwarnings("error")  # it would stand in the reader's notebook


def piece(outputs: tuple[int, int], inputs: tuple[int, int]) -> list[slice]:
    return [slice(*outputs), slice(*inputs)]


def test_columns_are_side_by_side_rows_below_each_other_and_shared_pieces_striped():
    columns = [piece((0, 4), (0, 6)), piece((4, 8), (0, 6))]
    rows = [piece((0, 6), (0, 4)), piece((0, 6), (4, 8))]
    shared = [piece((0, 2), (0, 6))] * 2
    picture = show.cuts([{"up": columns, "down": rows}, {"key": shared}], caption="two ranks")
    ax = picture.figure.axes[0]
    blocks = [p for p in ax.patches if isinstance(p, Rectangle) and p.get_label() == "block"]
    sizes = [(b.get_width(), b.get_height()) for b in blocks]
    assert sizes == [(4, 6), (4, 6), (6, 4), (6, 4), (2, 6)]
    up, down = blocks[:2], blocks[2:4]
    assert up[0].get_y() == up[1].get_y() and up[0].get_x() + 4 == up[1].get_x()
    assert down[0].get_x() == down[1].get_x() and down[0].get_y() + 4 == down[1].get_y()
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["up\n6 × 8", "0", "1", "down\n8 × 6", "0", "1", "key\n6 × 2", "0, 1"]
