"""Ring attention in tiles: each visible pair once, and exact however the tiles fall."""

from unittest.mock import patch

import pytest
import torch
from test_context_parallel import attention_on_ranks

from picotron_edu import ring_attention
from picotron_edu.ranks import launch
from picotron_edu.ring_attention import blocks_of, chunks_of, tiles_of

SIZES = [(4, 8), (5, 7), (3, 3), (128, 512)]


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_tiles_hold_each_visible_pair_once(order, causal, rows, width):
    n, length = 2, 10
    with patch.multiple(ring_attention, ROWS=rows, WIDTH=width):
        for rank in range(n):
            mine = chunks_of(rank, n, order)
            for owner in range(n):
                theirs = chunks_of(owner, n, order)
                shape = len(mine) * length, len(theirs) * length
                found = torch.zeros(shape, dtype=torch.int64)
                for down, across, own in tiles_of(blocks_of(mine, theirs, length, causal)):
                    tile = torch.ones(down.stop - down.start, across.stop - across.start)
                    if own:
                        tile[:, -own:] = tile[:, -own:].tril()
                    found[down, across] += tile.long()
                places = [
                    torch.cat([torch.arange(length) + length * chunk for chunk in chunks])
                    for chunks in (mine, theirs)
                ]
                visible = places[0][:, None] >= places[1] if causal else torch.ones(shape)
                assert torch.equal(found, visible.long())


@pytest.mark.parametrize(("rows", "width"), SIZES[:2])
def test_attention_in_tiles_is_exact(rows, width):
    work = attention_on_ranks("ring", "zigzag", True, torch.float64, S=48)

    def in_tiles():
        with patch.multiple(ring_attention, ROWS=rows, WIDTH=width):
            return work()

    for got, expected in launch(in_tiles, world_size=2, quiet=True):
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, msg=f"{name} in tiles")
