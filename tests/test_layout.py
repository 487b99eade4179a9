"""A layout says which piece of which full weight a rank holds."""

import pytest
import torch
from fakes import FakeAxis
from torch import nn

from picotron_edu.layout import Cut, Layout, attach, describe, layout_of, piece_of, slice_of


@pytest.mark.parametrize("length", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_pieces_cover_the_range_once_and_differ_by_at_most_one(length, count):
    pieces = [piece_of(length, count, index) for index in range(count)]
    assert [i for piece in pieces for i in range(length)[piece]] == list(range(length))
    sizes = [len(range(length)[piece]) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_the_slices_of_all_ranks_put_the_full_weight_together_again():
    full = torch.arange(7 * 6).view(7, 6)
    rebuilt = torch.full_like(full, -1)
    for tp in range(2):
        for dp in range(4):
            cuts = (Cut(1, FakeAxis("tp", 2, tp)), Cut(0, FakeAxis("dp", 4, dp)))
            layout = Layout("w", (7, 6), cuts)
            rebuilt[slice_of(layout)] = full[slice_of(layout)]
            assert full[slice_of(layout)].shape == layout.local_shape
    assert torch.equal(rebuilt, full)


def test_two_cuts_of_one_dim_cut_the_piece_again():
    layout = Layout("w", (8,), (Cut(0, FakeAxis("tp", 2, 1)), Cut(0, FakeAxis("dp", 2, 0))))
    assert slice_of(layout) == (slice(4, 6),)
    assert [axis.name for axis in layout.cut_axes] == ["tp", "dp"]


def test_a_cut_of_a_dim_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"norm.*dim 1.*\(6,\)"):
        Layout("norm", (6,), (Cut(1, FakeAxis("tp", 2, 0)),))


def test_a_piece_of_the_wrong_shape_is_refused_with_both_shapes():
    layout = Layout("w", (8, 6), (Cut(0, FakeAxis("tp", 2, 0)),))
    with pytest.raises(ValueError, match=r"w has shape \(8, 6\).*says \(4, 6\): .*dim 0 over tp=2"):
        attach(nn.Parameter(torch.zeros(8, 6)), layout)
    assert layout_of(attach(nn.Parameter(torch.zeros(4, 6)), layout)) is layout


def test_a_parameter_without_layout_is_an_error_and_describe_mends_it():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"\(2, 3\) has no layout: call describe"):
        layout_of(model.weight)
    describe(model)
    assert layout_of(model.weight) == Layout("weight", (2, 3))


def test_describe_keeps_the_layout_a_technique_has_attached():
    model = nn.Linear(3, 2)
    cut = Layout("weight", (4, 3), (Cut(0, FakeAxis("tp", 2, 1)),))
    attach(model.weight, cut)
    describe(model)
    assert layout_of(model.weight) is cut
