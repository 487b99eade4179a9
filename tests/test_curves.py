"""Curves: lines through what they are given, dots where it was measured."""

import pytest

from picotron_edu.show.curves import curves


def test_curves_draw_what_they_are_given():
    lines = {"measured": [8.0, 4.0, 2.0], "formula": [8.0, 4.1, 2.05]}
    picture = curves([1, 2, 4], lines, x="batch", y="noise", log=True, dots={"measured"})
    (ax,) = picture.figure.axes
    drawn = {line.get_label(): (line.get_ydata().tolist(), line.get_marker()) for line in ax.lines}
    assert drawn == {"measured": (lines["measured"], "o"), "formula": (lines["formula"], "")}
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "2", "4"]
    with pytest.raises(ValueError, match="'formula' has 2 values for 3 places"):
        curves([1, 2, 4], {"formula": [1, 2]}, x="x", y="y")
