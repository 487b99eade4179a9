"""Chapter 00, an all-gather by hand: the mistakes people make."""

from __future__ import annotations

import torch

from picotron_edu.ranks import (
    all_gather,
    all_reduce,
    all_to_all,
    receive,
    send,
    send_recv,
)

# ---- 0.3 all_gather_uneven(x, lengths, axis) ----


def ring(x, lengths, axis, order):
    """Right but for `order`, what it does with the pieces at the end."""
    n, me = axis.size, axis.index
    pieces = [x.new_empty(rows, *x.shape[1:]) for rows in lengths]
    pieces[me] = x
    for step in range(n - 1):
        leaving, coming = pieces[(me - step) % n], pieces[(me - step - 1) % n]
        send_recv(axis, sends=[(leaving, (me + 1) % n)], receives=[(coming, (me - 1) % n)])
    return order(pieces, me)


def in_order_of_arrival(x, lengths, axis):
    return ring(
        x, lengths, axis, lambda pieces, me: torch.cat([pieces[me - i] for i in range(axis.size)])
    )


def a_list_of_pieces(x, lengths, axis):
    return ring(x, lengths, axis, lambda pieces, me: pieces)


def as_float32(x, lengths, axis):
    return ring(x.float(), lengths, axis, lambda pieces, me: torch.cat(pieces))


def all_reduce_of_padded_pieces(x, lengths, axis):
    whole = x.new_zeros(sum(lengths), *x.shape[1:])
    start = sum(lengths[: axis.index])
    whole[start : start + len(x)] = x
    return all_reduce(whole, axis)


def all_gather_of_padded_pieces(x, lengths, axis):
    padded = x.new_zeros(max(lengths), *x.shape[1:])
    padded[: len(x)] = x
    parts = all_gather(padded, axis).chunk(axis.size)
    return torch.cat([part[:rows] for part, rows in zip(parts, lengths)])


def ring_of_padded_pieces(x, lengths, axis):
    padded = x.new_zeros(max(lengths), *x.shape[1:])
    padded[: len(x)] = x
    whole = ring(padded, [max(lengths)] * axis.size, axis, lambda pieces, me: pieces)
    return torch.cat([part[:rows] for part, rows in zip(whole, lengths)])


def sends_to_everybody_at_once(x, lengths, axis):
    pieces = [x.new_empty(rows, *x.shape[1:]) for rows in lengths]
    pieces[axis.index] = x
    others = [i for i in range(axis.size) if i != axis.index]
    send_recv(axis, [(x, i) for i in others], [(pieces[i], i) for i in others])
    return torch.cat(pieces)


def all_to_all_of_copies(x, lengths, axis):
    return all_to_all(torch.cat([x] * axis.size), axis, [len(x)] * axis.size, lengths)


def sends_its_own_piece_to_each_in_turn(x, lengths, axis):
    n, me = axis.size, axis.index
    pieces = [x.new_empty(rows, *x.shape[1:]) for rows in lengths]
    pieces[me] = x
    for k in range(1, n):
        send_recv(axis, sends=[(x, (me + k) % n)], receives=[(pieces[me - k], (me - k) % n)])
    return torch.cat(pieces)


def always_sends_its_own_piece(x, lengths, axis):
    n, me = axis.size, axis.index
    pieces = [x.new_empty(rows, *x.shape[1:]) for rows in lengths]
    pieces[me] = x
    for step in range(n - 1):
        coming = pieces[(me - step - 1) % n]
        send_recv(axis, sends=[(x, (me + 1) % n)], receives=[(coming, (me - 1) % n)])
    return torch.cat(pieces)


def one_step_too_few(x, lengths, axis):
    n, me = axis.size, axis.index
    pieces = [x.new_zeros(rows, *x.shape[1:]) for rows in lengths]
    pieces[me] = x
    for step in range(n - 2):
        leaving, coming = pieces[(me - step) % n], pieces[(me - step - 1) % n]
        send_recv(axis, sends=[(leaving, (me + 1) % n)], receives=[(coming, (me - 1) % n)])
    return torch.cat(pieces)


def float_buffers(x, lengths, axis):
    n, me = axis.size, axis.index
    pieces = [torch.empty(rows, *x.shape[1:]) for rows in lengths]
    pieces[me] = x
    for step in range(n - 1):
        leaving, coming = pieces[(me - step) % n], pieces[(me - step - 1) % n]
        send_recv(axis, sends=[(leaving, (me + 1) % n)], receives=[(coming, (me - 1) % n)])
    return torch.cat(pieces)


def sends_then_receives(x, lengths, axis):
    n, me = axis.size, axis.index
    pieces = [x.new_empty(rows, *x.shape[1:]) for rows in lengths]
    pieces[me] = x
    for step in range(n - 1):
        send(pieces[(me - step) % n], axis, (me + 1) % n)
        receive(pieces[(me - step - 1) % n], axis, (me - 1) % n)
    return torch.cat(pieces)


def forgets_the_modulo(x, lengths, axis):
    came = x.new_empty(lengths[axis.index - 1], *x.shape[1:])
    send_recv(axis, sends=[(x, axis.index + 1)], receives=[(came, axis.index - 1)])
    return torch.cat([came, x])


WRONG_ANSWERS = (
    ("0.3", in_order_of_arrival, "Hint: that is the order in which they came"),
    ("0.3", a_list_of_pieces, "Hint: after n−1 steps return torch.cat"),
    (
        "0.3",
        as_float32,
        "expected torch.int64, got torch.float32 on rank 0. Hint: torch.empty_like",
    ),
    ("0.3", all_reduce_of_padded_pieces, "Hint: right, but 64 bytes where 16 do: zeros need not"),
    (
        "0.3",
        all_gather_of_padded_pieces,
        "got 1 × all_gather on rank 0. Hint: right, but 48 bytes where 16 do",
    ),
    ("0.3", ring_of_padded_pieces, "bytes on the wire, got"),
    (
        "0.3",
        sends_to_everybody_at_once,
        "expected 2 × send_recv, got 1 × send_recv on rank 0. Hint: n−1",
    ),
    ("0.3", all_to_all_of_copies, "expected 1 × send_recv, got 1 × all_to_all"),
    ("0.3", sends_its_own_piece_to_each_in_turn, "bytes on the wire, got"),
    ("0.3", always_sends_its_own_piece, "on 3 ranks, the ranks do not agree on what they call"),
    ("0.3", one_step_too_few, "[0, 0]] on rank 0. Hint: after n−1 steps"),
    ("0.3", float_buffers, "receive float32"),
    ("0.3", sends_then_receives, "Hint: in one call send a piece right and receive one"),
    ("0.3", forgets_the_modulo, "has places 0 to 1"),
)
