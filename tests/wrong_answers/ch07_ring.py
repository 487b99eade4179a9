"""Chapter 07, the ring: the mistakes people make, and the words that must tell them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from picotron_edu.context_parallel import positions_of
from picotron_edu.ranks import all_gather, send_recv, world

# ---- 7.4 ring(q, kv, axis, attend, merge) ----


def start(kv, axis, async_op=True):
    right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    return send_recv(axis, [(kv, right)], [(torch.empty_like(kv), left)], async_op=async_op)


def any_ring(q, kv, axis, attend, merge, sees=lambda owner, i: owner <= i, mask=None, hops=0):
    """Right, but for what an argument changes."""
    i, n, so_far = axis.index, axis.size, None
    for step in range(n):
        message = start(kv, axis) if step < n - 1 + hops else None
        owner = (i - step) % n
        if sees(owner, i):
            more = attend(q, *kv, mask(owner, i) if mask else owner == i)
            so_far = more if so_far is None else merge(*so_far, *more)
        if message:
            (kv,) = message.wait()
    return so_far[0]


def sees_the_future(*given):
    return any_ring(*given, sees=lambda owner, i: True)


def no_mask(*given):
    return any_ring(*given, mask=lambda owner, i: False)


def a_mask_in_each(*given):
    return any_ring(*given, mask=lambda owner, i: True)


def one_hop_too_many(*given):
    return any_ring(*given, hops=1)


def gathers_the_keys(q, kv, axis, attend, merge):
    parts = all_gather(kv, axis, dim=2).chunk(axis.size, 2)
    so_far = attend(q, *parts[axis.index], True)
    for part in parts[: axis.index]:
        so_far = merge(*so_far, *attend(q, *part, False))
    return so_far[0]


def waits_at_once(q, kv, axis, attend, merge):
    so_far = attend(q, *kv, True)
    for step in range(1, axis.size):
        (kv,) = start(kv, axis, async_op=False)
        if step <= axis.index:
            so_far = merge(*so_far, *attend(q, *kv, False))
    return so_far[0]


def sends_and_waits_first(q, kv, axis, attend, merge):
    so_far = None
    for step in range(axis.size):
        now = kv
        if step < axis.size - 1:
            (kv,) = start(now, axis).wait()
        if step <= axis.index:
            more = attend(q, *now, step == 0)
            so_far = more if step == 0 else merge(*so_far, *more)
    return so_far[0]


def all_round_and_then_computes(q, kv, axis, attend, merge):
    i, n, keys = axis.index, axis.size, [kv]
    for _ in range(n - 1):
        keys.append(start(keys[-1], axis).wait()[0])
    so_far = attend(q, *keys[0], True)
    for step in range(1, i + 1):
        so_far = merge(*so_far, *attend(q, *keys[step], False))
    return so_far[0]


def throws_it_away(q, kv, axis, attend, merge):
    so_far = attend(q, *kv, True)
    nothing = torch.full_like(so_far[1], -math.inf)
    for step in range(axis.size):
        message = start(kv, axis) if step < axis.size - 1 else None
        out, lse = attend(q, *kv, False)
        if step > 0:
            so_far = merge(*so_far, out, lse if step <= axis.index else nothing)
        if message:
            (kv,) = message.wait()
    return so_far[0]


def never_takes_what_came(q, kv, axis, attend, merge):
    so_far = None
    for step in range(axis.size):
        message = start(kv, axis) if step < axis.size - 1 else None
        if step <= axis.index:
            more = attend(q, *kv, step == 0)
            so_far = more if step == 0 else merge(*so_far, *more)
        if message:
            message.wait()
    return so_far[0]


def receives_into_its_own(q, kv, axis, attend, merge):
    right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    so_far = attend(q, *kv, True)
    for step in range(1, axis.size):
        send_recv(axis, [(kv.clone(), right)], [(kv, left)])
        if step <= axis.index:
            so_far = merge(*so_far, *attend(q, *kv, False))
    return so_far[0]


def only_who_needs_them(q, kv, axis, attend, merge):
    so_far = attend(q, *kv, True)
    for _ in range(axis.index):
        (kv,) = start(kv, axis).wait()
        so_far = merge(*so_far, *attend(q, *kv, False))
    return so_far[0]


def in_a_ring_of_the_world(q, kv, axis, attend, merge):
    return any_ring(q, kv, world(), attend, merge)


# ---- 7.5 cut_text(tokens, axis), angles(length, axis, frequency), ring_backward(...) ----


def here(length, axis):
    return positions_of(axis.index, axis.size, "zigzag", length)


def shifts_after_the_cut(tokens, axis):
    inputs = tokens[here(len(tokens), axis)]
    return inputs, F.pad(inputs[1:], (0, 1), value=-100)


def round_the_end(tokens, axis):
    return tokens[here(len(tokens), axis)], tokens.roll(-1)[here(len(tokens), axis)]


def right_cut(tokens, axis):
    place = here(len(tokens), axis)
    return tokens[place], F.pad(tokens[1:], (0, 1), value=-100)[place]


def from_nought(length, axis, frequency):
    return torch.arange(length // axis.size)[:, None] * frequency


def in_one_piece(length, axis, frequency):
    first = axis.index * length // axis.size
    return torch.arange(first, first + length // axis.size)[:, None] * frequency


def right_angles(length, axis, frequency):
    return here(length, axis)[:, None] * frequency


def any_backward(q, kv, axis, gradients, stale=False, home=True):
    n, i = axis.size, axis.index
    dq, behind, visiting = torch.zeros_like(q), None, kv
    for step in range(n):
        ahead = start(visiting, axis) if step < n - 1 else None
        dkv, owner = torch.zeros_like(kv), (i - step) % n
        if owner <= i:
            more_dq, dk, dv = gradients(q, *(kv if stale else visiting), owner == i)
            dq, dkv = dq + more_dq, torch.stack([dk, dv])
        if behind:
            dkv = dkv + behind.wait()[0]
        behind = start(dkv, axis) if home or step < n - 1 else None
        if ahead:
            (visiting,) = ahead.wait()
    return dq, behind.wait()[0] if behind else dkv


def with_its_own_keys(*given):
    return any_backward(*given, stale=True)


def never_home(*given):
    return any_backward(*given, home=False)


# ---- 7.6 sent(kind, n, B, S, H, K, d), times ----

TIMES = 2.14


def any_sent(kind, n, B, S, H, K, d, hops=1, grad=4, out=1):
    kv, q_and_out = 2 * B * K * S / n * d, (1 + out) * B * H * S / n * d
    if kind == "ring":
        return 2 * (n - 1) * kv * 2 + (n - 1 + hops) * kv * grad
    return 2 * (n - 1) * kv * 2 if kind == "all_gather" else 4 * (n - 1) / n * (kv + q_and_out)


def never_comes_home(*shape):
    return any_sent(*shape, hops=0)


def gradients_in_bfloat16(*shape):
    return any_sent(*shape, grad=2)


def output_stays(*shape):
    return any_sent(*shape, out=0)


def as_many_key_heads(kind, n, B, S, H, K, d):
    return any_sent(kind, n, B, S, H, H, d)


WRONG_ANSWERS = (
    ("7.4", sees_the_future, "are in the future"),
    ("7.4", no_mask, "without a mask a query sees what comes after it"),
    ("7.4", a_mask_in_each, "no mask there"),
    ("7.4", one_hop_too_many, "n − 1 hops, not n"),
    ("7.4", gathers_the_keys, "no rank has all keys at one time"),
    ("7.4", waits_at_once, "send the keys on before you compute"),
    ("7.4", sends_and_waits_first, "and only then wait()"),
    ("7.4", all_round_and_then_computes, "computes while no message is under way"),
    ("7.4", throws_it_away, "pass them on, compute nothing"),
    ("7.4", never_takes_what_came, "take what wait() returns"),
    ("7.4", receives_into_its_own, "your function changed its input"),
    ("7.4", only_who_needs_them, "also where nothing is seen"),
    ("7.4", in_a_ring_of_the_world, "use only the axis"),
    ("7.5", (shifts_after_the_cut, from_nought, with_its_own_keys), "not neighbours in the text"),
    ("7.5", (round_the_end, right_angles, any_backward), "has no label: −100"),
    ("7.5", (right_cut, from_nought, any_backward), "where in the text do"),
    ("7.5", (right_cut, in_one_piece, any_backward), "the tokens are in zig-zag order"),
    ("7.5", (right_cut, right_angles, with_its_own_keys), "which ones have come?"),
    ("7.5", (right_cut, right_angles, never_home), "one more hop, and they are home"),
    ("7.6", (never_comes_home, TIMES), "one more hop to come home"),
    ("7.6", (gradients_in_bfloat16, TIMES), "travel as float32"),
    ("7.6", (output_stays, TIMES), "the output goes back"),
    ("7.6", (as_many_key_heads, TIMES), "K heads, not H"),
    ("7.6", (any_sent, 1), "that is the forward pass"),
    ("7.6", (any_sent, 2), "n hops, not n − 1, to come home"),
    ("7.6", (any_sent, 11 / 7), "travel as float32"),
)
