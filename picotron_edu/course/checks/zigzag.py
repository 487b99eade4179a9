"""Checks of who has which tokens, and of the tiles of the causal mask that follow from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from picotron_edu.course.checks.small_models import one_thread
from picotron_edu.course.comparing import (
    assert_close,
    assert_keeps_to_axis,
    assert_messages,
    brief,
    fail,
    run_each,
)
from picotron_edu.ranks import Axis

SEQUENCE, RANKS = 64, 4


def chunks_of(rank: int, n: int, order: str) -> list[int]:
    return [rank, 2 * n - 1 - rank] if order == "zigzag" else [rank]


def kind_of(query: int, key: int) -> str:
    """Looked up in a mask of two tokens a chunk, as the mask itself would say."""
    tokens = torch.tensor([0, 1])
    sees = 2 * query + tokens[:, None] >= 2 * key + tokens
    return "whole" if sees.all() else "diagonal" if sees.any() else "skipped"


def right_tiles(rank: int, step: int, n: int, order: str) -> list[str]:
    keys = chunks_of((rank - step) % n, n, order)
    return [kind_of(query, key) for query in chunks_of(rank, n, order) for key in keys]


def wrong_tiles(rank: int, step: int, n: int, order: str) -> Mapping[str, list[str]]:
    """What people say, in place of `right_tiles`."""
    owner = (rank - step) % n
    mine, theirs = chunks_of(rank, n, order), chunks_of(owner, n, order)
    kind = kind_of(rank, owner)
    return {
        "keys come from the left: in this step they are those of rank (rank − step) % n": (
            right_tiles(rank, -step, n, order)
        ),
        "a mask for every tile? Only where queries and keys are the same tokens": (
            ["diagonal"] * len(mine) ** 2
        ),
        "compare the numbers of the chunks: in zig-zag order they are not the ranks'": (
            [kind] * len(mine) ** 2
        ),
        "the second chunk of rank i is the i-th from the end, 2n − 1 − i": (
            [kind_of(q, k) for q in (rank, n + rank) for k in (owner, n + owner)]
            if order == "zigzag"
            else []
        ),
        "keys before the queries are seen, keys behind them are not: the other way round": (
            [kind_of(k, q) for q in mine for k in theirs]
        ),
        "in this order: the first chunk of queries with all chunks of keys, then the second": (
            [kind_of(q, k) for k in theirs for q in mine]
        ),
    }


def tiles_of_the_mask(tiles: Callable[..., Any], contiguous_pairs: Any, zigzag_pairs: Any) -> str:
    if not callable(tiles):
        fail(f"expected a function, got {brief(tiles)}", "give its name alone")
    for order in ("contiguous", "zigzag"):
        for n in (2, 3, 4, 8):
            for rank in range(n):
                for step in (*range(1, n), 0):  # in step 0 mistakes look alike
                    said = tiles(rank, step, n, order)
                    assert_tiles(said, rank, step, n, order)
    c, half = SEQUENCE // RANKS, SEQUENCE // RANKS // 2
    diagonal = c * (c + 1) // 2
    assert_close(
        3 * c * c + diagonal,
        contiguous_pairs,
        what="pairs of the last rank, contiguous",
        mistakes={
            "on the diagonal each query sees itself and those before it: c · (c + 1)/2": (
                4 * c * c
            ),
            "c · (c + 1)/2: a query sees itself, too": 3 * c * c + c * (c - 1) // 2,
            "half of c²? Count a small one: 2 tokens make 3 pairs": 3 * c * c + c * c // 2,
            "that is the first rank": diagonal,
            "that is the mean of the ranks: the last one has the most": (
                SEQUENCE * (SEQUENCE + 1) // 2 // RANKS
            ),
        },
        hint="it sees all keys of the three ranks before it, and half of its own",
        rtol=1e-9,
    )
    assert_close(
        7 * half * half + half * (half + 1),
        zigzag_pairs,
        what="pairs of a rank in zig-zag order",
        mistakes={
            "two diagonal tiles, one for each chunk": 7 * half * half + half * (half + 1) // 2,
            "on the diagonal each query sees itself and those before it: c · (c + 1)/2": (
                9 * half * half
            ),
            "that is all ranks together": SEQUENCE * (SEQUENCE + 1) // 2,
        },
        hint="all ranks have the same, and together S · (S + 1)/2",
        rtol=1e-9,
    )
    slow = contiguous_pairs / zigzag_pairs
    return f"contiguous, the last of 4 ranks has {slow:.2f} times the work, and all wait for it"


def assert_tiles(said: Any, rank: int, step: int, n: int, order: str) -> None:
    right = right_tiles(rank, step, n, order)
    if isinstance(said, str) or not hasattr(said, "__iter__"):
        fail(f"expected a list of words, got {brief(said)}", 'for example ["whole"]')
    if list(said) == right:
        return
    hint = next(
        (text for text, wrong in wrong_tiles(rank, step, n, order).items() if list(said) == wrong),
        "a tile is whole, diagonal or skipped as its keys are before, at or behind its queries",
    )
    fail(
        f"tiles({rank}, {step}, {n}, {order!r}): expected {brief(right)}, got {brief(list(said))}",
        hint,
    )


def wrong_positions(rank: int, n: int, length: int) -> dict[str, Tensor]:
    """What people make of this rank's tokens."""
    chunks = torch.arange(length).view(2 * n, -1)
    first, second = chunks[rank], chunks[2 * n - 1 - rank]
    return {
        "one piece of the sequence: then the last rank has most of the work": (
            torch.arange(length).view(n, -1)[rank]
        ),
        "two neighbours: one early chunk and one late chunk make the work equal": (
            chunks[[2 * rank, 2 * rank + 1]].flatten()
        ),
        "the second one is the i-th from the end, 2n − 1 − i": chunks[[rank, n + rank]].flatten(),
        "only the order of the chunks is mirrored: inside one, positions ascend": (
            torch.cat([first, second.flip(0)])
        ),
        "first the early chunk, then the late one": torch.cat([second, first]),
        "every n-th token is another order (striped)": torch.arange(rank, length, n),
        "every 2n-th token? A chunk is a piece of the sequence": (
            torch.cat([torch.arange(i, length, 2 * n) for i in (rank, 2 * n - 1 - rank)])
        ),
    }


@one_thread()
def positions_of_a_rank(zigzag: Callable[..., Any]) -> str:
    def on_rank(length: int, refused: int, axis: Axis) -> Tensor:
        positions = zigzag(length, axis)
        if isinstance(positions, Tensor) and positions.is_floating_point():
            fail(f"expected integers, got {positions.dtype}", "they are places in the text")
        assert_refuses(zigzag, refused, axis)
        return positions

    for n in (2, 3, 4):
        length = 6 * n
        run = run_each(on_rank, [(length, 5 * n)] * n, "no message is needed")
        for rank in range(n):
            assert_close(
                torch.cat([torch.arange(3) + 3 * c for c in (rank, 2 * n - 1 - rank)]),
                run[rank],
                rank=rank,
                what=f"positions in {length} tokens on {n} ranks",
                mistakes=wrong_positions(rank, n, length),
                hint="chunk i and chunk 2n − 1 − i of 2n",
            )
        assert_messages(run, {}, hint="each rank can work it out for itself")
        if n == 2:
            assert_keeps_to_axis(on_rank, [(length, 5 * n)] * n, run)
    return "one early chunk, one late chunk: equal work for all"


def assert_refuses(zigzag: Callable[..., Any], length: int, axis: Axis) -> None:
    """`length` is divisible by n, not by 2n."""
    n, where = axis.size, f"{length} tokens on {axis.size} ranks"
    try:
        got = zigzag(length, axis)
    except ValueError as error:
        if not {str(length), str(2 * n)} <= set(re.findall(r"\d+", str(error))):
            fail(
                f"{where}: expected a ValueError with {length} and {2 * n}, got: {error}",
                "name both numbers, so that the reader knows what to change",
            )
        return
    except Exception as error:
        fail(
            f"{where}: expected a ValueError, got {type(error).__name__}: {error}",
            "look whether the length divides before you cut",
        )
    fail(
        f"{where}: expected a ValueError, got positions {brief(got)}",
        f"two chunks a rank: {length} is divisible by {n}, but not by {2 * n}",
    )
