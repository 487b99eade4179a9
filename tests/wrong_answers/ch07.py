"""Chapter 07, context parallelism: the mistakes people make, and the words that must tell them."""

from __future__ import annotations

import math

import torch

from picotron_edu.ranks import world

# ---- 7.1 merge(out, lse, more_out, more_lse) ----


def weighted(out, lse, more_out, more_lse, both):
    return (lse - both).exp()[..., None] * out + (more_lse - both).exp()[..., None] * more_out


def without_a_shift(out, lse, more_out, more_lse):
    both = (lse.exp() + more_lse.exp()).log()
    return weighted(out, lse, more_out, more_lse, both), both


def nan_where_nothing_is_seen(out, lse, more_out, more_lse):
    both = torch.logaddexp(lse, more_lse)
    return weighted(out, lse, more_out, more_lse, both), both


def mean_of_two(out, lse, more_out, more_lse):
    return (out + more_out) / 2, torch.logaddexp(lse, more_lse)


def sum_of_two(out, lse, more_out, more_lse):
    return out + more_out, torch.logaddexp(lse, more_lse)


def weighs_by_logarithms(out, lse, more_out, more_lse):
    share = (lse / (lse + more_lse))[..., None]
    return share * out + (1 - share) * more_out, torch.logaddexp(lse, more_lse)


def right_merge(out, lse, more_out, more_lse):
    both = torch.logaddexp(lse, more_lse)
    safe = both.masked_fill(both == -math.inf, 0)
    return weighted(out, lse, more_out, more_lse, safe), both


def keeps_the_first_lse(out, lse, more_out, more_lse):
    return right_merge(out, lse, more_out, more_lse)[0], lse


def the_larger_lse(out, lse, more_out, more_lse):
    return right_merge(out, lse, more_out, more_lse)[0], torch.maximum(lse, more_lse)


def rounds_each_time(out, lse, more_out, more_lse):
    merged, both = right_merge(out, lse, more_out, more_lse)
    return merged.to(more_out.dtype), both


def weighs_in_bfloat16(out, lse, more_out, more_lse):
    both = torch.logaddexp(lse, more_lse)
    safe = both.masked_fill(both == -math.inf, 0)
    a, b = ((x - safe).exp()[..., None].to(more_out.dtype) for x in (lse, more_lse))
    return (a * out.to(more_out.dtype) + b * more_out).to(lse.dtype), both


def only_out(out, lse, more_out, more_lse):
    return right_merge(out, lse, more_out, more_lse)[0]


# ---- 7.2 tiles(rank, step, n, order), contiguous_pairs, zigzag_pairs ----


def kind(query, key):
    return "whole" if key < query else "diagonal" if key == query else "skipped"


def chunks(i, n, order):
    return [i, 2 * n - 1 - i] if order == "zigzag" else [i]


def right_tiles(rank, step, n, order):
    keys = chunks((rank - step) % n, n, order)
    return [kind(q, k) for q in chunks(rank, n, order) for k in keys]


def from_the_right(rank, step, n, order):
    return right_tiles(rank, -step, n, order)


def by_rank(rank, step, n, order):
    return [kind(rank, (rank - step) % n)] * len(chunks(rank, n, order)) ** 2


def a_triangle_in_each(rank, step, n, order):
    return ["diagonal"] * len(chunks(rank, n, order)) ** 2


def never_mirrored(rank, step, n, order):
    if order == "contiguous":
        return right_tiles(rank, step, n, order)
    owner = (rank - step) % n
    return [kind(q, k) for q in (rank, n + rank) for k in (owner, n + owner)]


def for_two_ranks(rank, step, n, order):
    return right_tiles(rank % 2, step % 2, 2, order)


PAIRS = (904, 520)

# ---- 7.3 zigzag(length, axis) ----


def in_pieces(length, axis):
    check_length(length, axis)
    return torch.arange(length).chunk(axis.size)[axis.index]


def check_length(length, axis):
    if length % (2 * axis.size):
        raise ValueError(f"{length} tokens are not divisible by {2 * axis.size}")


def every_nth(length, axis):
    check_length(length, axis)
    return torch.arange(axis.index, length, axis.size)


def not_mirrored(length, axis):
    check_length(length, axis)
    parts = torch.arange(length).chunk(2 * axis.size)
    return torch.cat([parts[axis.index], parts[axis.size + axis.index]])


def backwards_in_the_second(length, axis):
    check_length(length, axis)
    parts = torch.arange(length).chunk(2 * axis.size)
    return torch.cat([parts[axis.index], parts[-1 - axis.index].flip(0)])


def right_zigzag(length, axis):
    parts = torch.arange(length).chunk(2 * axis.size)
    return torch.cat([parts[axis.index], parts[-1 - axis.index]])


def divisible_by_n_is_enough(length, axis):
    if length % axis.size:
        raise ValueError(f"{length} tokens are not divisible by {axis.size}")
    return right_zigzag(length, axis)


def says_no_numbers(length, axis):
    if length % (2 * axis.size):
        raise ValueError("the sequence does not divide")
    return right_zigzag(length, axis)


def asserts_it(length, axis):
    assert length % (2 * axis.size) == 0
    return right_zigzag(length, axis)


def zigzag_of_the_world(length, axis):
    check_length(length, world())
    return right_zigzag(length, world())


WRONG_ANSWERS = (
    ("7.1", without_a_shift, "exp(1000) is inf"),
    ("7.1", nan_where_nothing_is_seen, "−inf − (−inf) is NaN"),
    ("7.1", mean_of_two, "the mean of two outs"),
    ("7.1", sum_of_two, "divided by its own sum already"),
    ("7.1", weighs_by_logarithms, "lse is a logarithm"),
    ("7.1", keeps_the_first_lse, "that is the first lse"),
    ("7.1", the_larger_lse, "the other's sum is missing"),
    ("7.1", rounds_each_time, "a rounding at each would add up"),
    ("7.1", weighs_in_bfloat16, "a bfloat16 weight has three digits"),
    ("7.1", only_out, "return out, lse"),
    ("7.2", (from_the_right, *PAIRS), "keys come from the left"),
    ("7.2", (by_rank, *PAIRS), "compare the numbers of the chunks"),
    ("7.2", (a_triangle_in_each, *PAIRS), "a mask for every tile?"),
    ("7.2", (never_mirrored, *PAIRS), "the i-th from the end"),
    ("7.2", (for_two_ranks, *PAIRS), "tiles(0, 2, 3, "),
    ("7.2", (right_tiles, 4 * 16**2, PAIRS[1]), "each query sees itself"),
    ("7.2", (right_tiles, PAIRS[1], PAIRS[1]), "that is the mean of the ranks"),
    ("7.2", (right_tiles, PAIRS[0], 7 * 8**2 + 8 * 9 // 2), "two diagonal tiles"),
    ("7.3", in_pieces, "the last rank has most of the work"),
    ("7.3", every_nth, "striped"),
    ("7.3", not_mirrored, "the i-th from the end"),
    ("7.3", backwards_in_the_second, "inside one, positions ascend"),
    ("7.3", right_zigzag, "expected a ValueError, got positions"),
    ("7.3", divisible_by_n_is_enough, "but not by 4"),
    ("7.3", says_no_numbers, "name both numbers"),
    ("7.3", asserts_it, "expected a ValueError, got AssertionError"),
    ("7.3", zigzag_of_the_world, "use only the axis"),
)
