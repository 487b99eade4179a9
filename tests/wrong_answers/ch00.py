"""Chapter 00: the mistakes people make, and the words that must tell them."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from picotron_edu.ranks import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    receive,
    send,
    send_recv,
    world,
)

# ---- 0.2 global_mean(values, axis) ----


def mean_of_means(values, axis):
    return all_reduce(values.mean(), axis, op="avg")


def mean_of_means_that_skips_the_empty(values, axis):
    mean_and_one = torch.stack([values.mean(), torch.tensor(1.0)])
    if len(values) == 0:
        mean_and_one.zero_()
    all_reduce(mean_and_one, axis)
    return mean_and_one[0] / mean_and_one[1]


def divides_by_ranks(values, axis):
    return all_reduce(values.sum(), axis, op="avg")


def forgets_to_divide(values, axis):
    return all_reduce(values.sum(), axis)


def stays_at_home(values, axis):
    return values.mean()


def empty_rank_stays_away(values, axis):
    if len(values) == 0:
        return torch.tensor(0.0)
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    all_reduce(total, axis)
    return total[0] / total[1]


def two_messages(values, axis):
    total = all_reduce(values.sum(), axis)
    count = all_reduce(torch.tensor(float(len(values))), axis)
    return total / count


def gathers_the_values(values, axis):
    return all_gather(values, axis).mean()


def gathers_sums_and_counts(values, axis):
    pairs = all_gather(torch.tensor([[values.sum(), len(values)]]), axis)
    return pairs[:, 0].sum() / pairs[:, 1].sum()


def a_slot_for_each_rank(values, axis):
    slots = torch.zeros(2, axis.size)
    slots[:, axis.index] = torch.tensor([values.sum(), len(values)])
    all_reduce(slots, axis)
    return slots[0].sum() / slots[1].sum()


def returns_nothing(values, axis):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    all_reduce(total, axis)
    total[0] / total[1]


def returns_one_number_as_a_list(values, axis):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    all_reduce(total, axis)
    return total[:1] / total[1:]


def asks_the_world(values, axis):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    all_reduce(total, world())
    return total[0] / total[1]


def goes_round_the_trace(values, axis):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(total)
    return total[0] / total[1]


def sums_in_place(values, axis):
    counts = torch.tensor([float(len(values))])
    values[:1] = values.sum()
    total = torch.cat([values[:1] if len(values) else torch.zeros(1), counts])
    all_reduce(total, axis)
    return total[0] / total[1]


def misspells(values, axis):
    return values.summ()


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


# ---- 0.4 shift_right(x, axis) ----


def neighbours(axis):
    return (axis.index + 1) % axis.size, (axis.index - 1) % axis.size


def as_it_was(x, axis):
    right, left = neighbours(axis)
    came = torch.empty_like(x)
    send(x, axis, right)
    receive(came, axis, left)
    return came


def all_receive_first(x, axis):
    right, left = neighbours(axis)
    came = torch.empty_like(x)
    receive(came, axis, left)
    send(x, axis, right)
    return came


def sleeps_first(x, axis):
    time.sleep(0.1 * axis.index)
    return as_it_was(x, axis)


def a_barrier_between(x, axis):
    right, left = neighbours(axis)
    came = torch.empty_like(x)
    send(x, axis, right)
    barrier(axis)
    receive(came, axis, left)
    return came


def rank_0_receives_first(x, axis):
    return (all_receive_first if axis.index == 0 else as_it_was)(x, axis)


def odd_ranks_receive_first(x, axis):
    return (all_receive_first if axis.index % 2 else as_it_was)(x, axis)


def gathers_everything(x, axis):
    return all_gather(x[None], axis)[axis.index - 1]


def nobody_waits_for_the_receive(x, axis):
    right, left = neighbours(axis)
    came = torch.zeros_like(x)
    receive(came, axis, left, async_op=True)
    result = came.clone()
    send(x, axis, right)
    return result


def receives_into_x(x, axis):
    right, left = neighbours(axis)
    send_recv(axis, sends=[(x.clone(), right)], receives=[(x, left)])
    return x


def shifts_to_the_left(x, axis):
    right, left = neighbours(axis)
    came = torch.empty_like(x)
    send_recv(axis, sends=[(x, left)], receives=[(came, right)])
    return came


def receives_where_it_sends(x, axis):
    right, _ = neighbours(axis)
    came = torch.empty_like(x)
    send_recv(axis, sends=[(x, right)], receives=[(came, right)])
    return came


def returns_x(x, axis):
    right, left = neighbours(axis)
    send_recv(axis, sends=[(x, right)], receives=[(torch.empty_like(x), left)])
    return x


def returns_the_list(x, axis):
    right, left = neighbours(axis)
    return send_recv(axis, [(x, right)], [(torch.empty_like(x), left)])


def global_neighbours(x, axis):
    right, left = (dist.get_rank() + 1) % axis.size, (dist.get_rank() - 1) % axis.size
    came = torch.empty_like(x)
    send_recv(axis, sends=[(x, right)], receives=[(came, left)])
    return came


# ---- 0.5 doubling_all_reduce(x, axis) ----


def swap(x, axis, partner):
    came = torch.empty_like(x)
    send_recv(axis, sends=[(x, partner)], receives=[(came, partner)])
    return came


def calls_all_reduce(x, axis):
    return all_reduce(x.clone(), axis)


def all_reduce_in_place(x, axis):
    return all_reduce(x, axis)


def gathers_and_sums(x, axis):
    return all_gather(x[None], axis).sum(0)


def once_round_the_ring(x, axis):
    total, leaving = x.clone(), x
    for _ in range(axis.size - 1):
        came = torch.empty_like(x)
        right, left = neighbours(axis)
        send_recv(axis, sends=[(leaving, right)], receives=[(came, left)])
        total, leaving = total + came, came
    return total


def sends_x_again(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        total += swap(x, axis, axis.index ^ distance)
        distance *= 2
    return total


def adds_to_x(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        total = x + swap(total, axis, axis.index ^ distance)
        distance *= 2
    return total


def adds_in_place(x, axis):
    distance = 1
    while distance < axis.size:
        x += swap(x, axis, axis.index ^ distance)
        distance *= 2
    return x


def averages(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        total = (total + swap(total, axis, axis.index ^ distance)) / 2
        distance *= 2
    return total


def never_doubles(x, axis):
    total = x.clone()
    for distance in range(1, axis.size):
        total += swap(total, axis, axis.index ^ distance)
    return total


def swaps_with_itself(x, axis):
    total = x.clone()
    for k in range(axis.size.bit_length() - 1):
        total += swap(total, axis, axis.index ^ k)
    return total


def partner_to_the_right(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        total += swap(total, axis, (axis.index + distance) % axis.size)
        distance *= 2
    return total


def passes_on_to_the_right(x, axis):
    """Dissemination: right in log2(n) rounds, but each rank adds in another order."""
    total, distance = x.clone(), 1
    while distance < axis.size:
        to, source = (axis.index + distance) % axis.size, (axis.index - distance) % axis.size
        came = torch.empty_like(total)
        send_recv(axis, sends=[(total, to)], receives=[(came, source)])
        total = total + came
        distance *= 2
    return total


def blocking_messages(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        came = torch.empty_like(total)
        send(total, axis, axis.index ^ distance)
        receive(came, axis, axis.index ^ distance)
        total += came
        distance *= 2
    return total


def one_of_two_sends_first(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        came, partner = torch.empty_like(total), axis.index ^ distance
        if axis.index < partner:
            send(total, axis, partner)
            receive(came, axis, partner)
        else:
            receive(came, axis, partner)
            send(total, axis, partner)
        total += came
        distance *= 2
    return total


def float32_totals(x, axis):
    total, distance = x.float(), 1
    while distance < axis.size:
        total = total + swap(total, axis, axis.index ^ distance)
        distance *= 2
    return total


def flat_totals(x, axis):
    total, distance = x.flatten().clone(), 1
    while distance < axis.size:
        total += swap(total, axis, axis.index ^ distance)
        distance *= 2
    return total


def tree(x, axis):
    """Up to rank 0 and down again: log2(n) rounds twice, and ranks that do nothing in most."""
    total, distance = x.clone(), 1
    while distance < axis.size:
        if axis.index % (2 * distance) == distance:
            send_recv(axis, sends=[(total, axis.index - distance)])
        elif axis.index % (2 * distance) == 0:
            came = torch.empty_like(total)
            send_recv(axis, receives=[(came, axis.index + distance)])
            total += came
        distance *= 2
    while distance > 1:
        distance //= 2
        if axis.index % (2 * distance) == distance:
            send_recv(axis, receives=[(total, axis.index - distance)])
        elif axis.index % (2 * distance) == 0:
            send_recv(axis, sends=[(total, axis.index + distance)])
    return total


def calls_torch(x, axis):
    total = x.clone()
    dist.all_reduce(total, group=axis.group)
    return total


WRONG_ANSWERS = (
    (
        "0.1",
        (4800, 9600, 3200, 3200),
        "all_reduce_bytes: expected 6400, got 4800. Hint: two rounds",
    ),
    ("0.1", (3200, 9600, 3200, 3200), "2 times too small. Hint: that is one round"),
    ("0.1", (9600, 9600, 3200, 3200), "need not send"),
    (
        "0.1",
        (6400, 3200, 3200, 3200),
        "all_gather_bytes: expected 9600, got 3200: 3 times too small",
    ),
    ("0.1", (6400, 14400, 3200, 3200), "Hint: n−1 of n pieces"),
    ("0.1", (6400, 9600, 800, 3200), "4 times too small. Hint: bytes, not elements"),
    ("0.1", (6400, 9600, 9600, 3200), "Hint: what one rank sends, not all three together"),
    ("0.1", (6400, 9600, 3200, 4800), "all_to_all_bytes: expected 3200, got 4800. Hint: n−1"),
    ("0.1", (6400, 9600, 3200, 1600), "2 times too small. Hint: a rank keeps one piece"),
    ("0.1", (6400, 9600, 3200, "a third"), "expected 3200, got 'a third'"),
    ("0.2", mean_of_means, "expected 6, got 8 on rank 0. Hint: a mean of means"),
    ("0.2", mean_of_means_that_skips_the_empty, "Hint: a mean of means"),
    ("0.2", divides_by_ranks, "Hint: divide by the number of values, not of ranks"),
    ("0.2", forgets_to_divide, "4 times too large. Hint: that is the sum"),
    ("0.2", stays_at_home, "Hint: that is the mean of this rank's own values"),
    ("0.2", empty_rank_stays_away, "Hint: every rank must make the same calls"),
    (
        "0.2",
        two_messages,
        "expected 1 × all_reduce, got 2 × all_reduce on rank 0. Hint: the sum and",
    ),
    ("0.2", gathers_the_values, "on 2 ranks, the ranks do not agree on what they call"),
    ("0.2", gathers_sums_and_counts, "got 1 × all_gather on rank 0. Hint: every rank now gets n"),
    ("0.2", a_slot_for_each_rank, "expected an all_reduce of 2 numbers, got 24 bytes"),
    ("0.2", returns_nothing, "got None on rank 0. Hint: does your function return its result?"),
    ("0.2", returns_one_number_as_a_list, "expected shape (), got (1,) on rank 0"),
    (
        "0.2",
        asks_the_world,
        "in two pairs, 0 with 2 and 1 with 3: expected messages over axis 'dp'",
    ),
    ("0.2", goes_round_the_trace, "got no messages on rank 0. Hint: messages count when"),
    ("0.2", sums_in_place, "your function changed its input from [2, 4, 6] to [12, 4, 6]"),
    ("0.2", misspells, "AttributeError: 'Tensor' object has no attribute 'summ'"),
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
    (
        "0.4",
        as_it_was,
        "on 2 ranks, the ranks wait for each other for ever: ranks 0, 1 wait in send",
    ),
    ("0.4", all_receive_first, "ranks 0, 1 wait in receive"),
    ("0.4", sleeps_first, "Hint: a send ends when it is received"),
    ("0.4", a_barrier_between, "ranks 0, 1 wait in send"),
    ("0.4", rank_0_receives_first, "right, but the ranks take turns"),
    ("0.4", odd_ranks_receive_first, "right, but the ranks take turns"),
    ("0.4", gathers_everything, "expected 8 bytes on the wire, got 16 on rank 0 of 3"),
    ("0.4", nobody_waits_for_the_receive, "all zeros. Hint: return the buffer"),
    ("0.4", receives_into_x, "your function changed its input from"),
    ("0.4", shifts_to_the_left, "Hint: that came from the right"),
    ("0.4", receives_where_it_sends, "on 3 ranks, the ranks wait for each other for ever"),
    ("0.4", returns_x, "Hint: that is this rank's own x"),
    (
        "0.4",
        returns_the_list,
        "got [[10, 2]] on rank 0. Hint: return the buffer (send_recv returns a list",
    ),
    ("0.4", global_neighbours, "in two pairs, 0 with 2 and 1 with 3"),
    (
        "0.5",
        calls_all_reduce,
        "got 1 × all_reduce on rank 0. Hint: that is the one you are building",
    ),
    ("0.5", all_reduce_in_place, "your function changed its input from"),
    ("0.5", gathers_and_sums, "expected 1 × send_recv, got 1 × all_gather"),
    (
        "0.5",
        once_round_the_ring,
        "expected 2 × send_recv, got 3 × send_recv on rank 0. Hint: each round",
    ),
    ("0.5", sends_x_again, "Hint: in the next round send what you have added up, not x again"),
    ("0.5", adds_to_x, "Hint: in round k swap totals with the rank 2**k places away"),
    ("0.5", adds_in_place, "your function changed its input from"),
    ("0.5", averages, "2 times too small. Hint: the sum, not the average"),
    ("0.5", never_doubles, "on 4 ranks: expected"),
    ("0.5", swaps_with_itself, "is this rank itself"),
    ("0.5", partner_to_the_right, "Hint: two partners must call each other in the same round"),
    ("0.5", passes_on_to_the_right, "expected the same bits everywhere"),
    ("0.5", blocking_messages, "Hint: two partners must call each other in the same round"),
    ("0.5", one_of_two_sends_first, "Hint: send_recv does both in one call"),
    ("0.5", float32_totals, "expected torch.float64, got torch.float32 on rank 0"),
    ("0.5", flat_totals, "expected shape (1, 3), got (3,) on rank 0"),
    ("0.5", tree, "expected 1 × send_recv, got 2 × send_recv"),
    ("0.5", calls_torch, "expected 1 × send_recv, got no messages on rank 0. Hint: messages count"),
)
