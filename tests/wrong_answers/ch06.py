"""Chapter 06, sequence parallelism: the mistakes people make, and the words that must tell them."""

from __future__ import annotations

import torch

from picotron_edu.layout import layout_of
from picotron_edu.memory import activations
from picotron_edu.presets import LlamaConfig
from picotron_edu.ranks import all_reduce
from picotron_edu.sequence_parallel import rank_activations
from picotron_edu.tensor_parallel import rank_shape

# ---- 6.2 sum_parts(params, axis), gradient_norm(params, axis) ----


def partial_over(params, axis):
    return [p for p in params if axis.name in [a.name for a in layout_of(p).partial_over]]


def sum_of(mine, axis, op="sum"):
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in mine]
    vector = all_reduce(torch.cat([grad.flatten() for grad in grads]), axis, op)
    for p, total in zip(mine, vector.split([p.numel() for p in mine])):
        p.grad = total.view_as(p)


def sum_parts(params, axis):
    sum_of(partial_over(params, axis), axis)


def forgets_all(params, axis):
    for p in params:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad


def averages_parts(params, axis):
    sum_of(partial_over(params, axis), axis, "avg")


def sums_everything(params, axis):
    sum_of(params, axis)


def sums_what_is_whole(params, axis):
    sum_of([p for p in params if not layout_of(p).cuts], axis)


def sums_what_is_partial_anywhere(params, axis):
    sum_of([p for p in params if layout_of(p).partial_over], axis)


def sums_the_first_and_the_last(params, axis):
    sum_of([params[0], params[-1]], axis)


def sums_by_the_last_axis(params, axis):
    over = [(p, [a.name for a in layout_of(p).partial_over]) for p in params]
    sum_of([p for p, names in over if names and names[-1] == axis.name], axis)


def sums_by_name(params, axis):
    names = [layout_of(p).name for p in params]
    sum_of([p for p, name in zip(params, names) if "norm" in name or "bias" in name], axis)


def skips_none(params, axis):
    sum_of([p for p in partial_over(params, axis) if p.grad is not None], axis)


def one_message_each(params, axis):
    for p in partial_over(params, axis):
        sum_of([p], axis)


def squares(params, cut):
    return sum(p.grad.square().sum() for p in params if bool(layout_of(p).cuts) == cut)


def gradient_norm(params, axis):
    return (all_reduce(squares(params, True), axis) + squares(params, False)).sqrt()


def counts_whole_ones_on_each_rank(params, axis):
    return all_reduce(squares(params, True) + squares(params, False), axis).sqrt()


def its_own_part(params, axis):
    return (
        (all_reduce(torch.zeros(()).double(), axis) + squares(params, True))
        .add(squares(params, False))
        .sqrt()
    )


def without_the_root(params, axis):
    return all_reduce(squares(params, True), axis) + squares(params, False)


# ---- 6.4 whole, layer_bytes(n, regather) ----

LLAMA = LlamaConfig.from_preset("llama-3-8b")
WHOLE = {"token numbers", "cosine and sine of the positions", "labels"}


def in_a_layer(kept):
    return sum(k.bytes * (k.count // 32) for k in kept if k.count >= 32)


def layer_bytes(n, regather):
    options = {"regather": regather, "dtype": torch.bfloat16, "gpu": True}
    return in_a_layer(rank_activations(LLAMA, n, 1, 8192, **options))


def as_with_tensor_parallelism(n, regather):
    return in_a_layer(activations(rank_shape(LLAMA, n), 1, 8192, torch.bfloat16, gpu=True))


def always_an_nth(n, regather):
    return layer_bytes(1, True) / n


def never_regathers(n, regather):
    return layer_bytes(n, False)


def always_regathers(n, regather):
    return layer_bytes(n, True)


# ---- 6.5 forward, backward, recomputed, gigabytes ----

RIGHT = (130, 195, 291, 325 * 7 / 8 * 8192 * 4096 * 2 / 1e9)


WRONG_ANSWERS = (
    ("6.2", (forgets_all, gradient_norm), "it is a part: sum it over the ranks"),
    ("6.2", (averages_parts, gradient_norm), "sum, do not average"),
    ("6.2", (sums_everything, gradient_norm), "never add them"),
    ("6.2", (sums_what_is_whole, gradient_norm), "partial over nothing"),
    ("6.2", (sums_what_is_partial_anywhere, gradient_norm), "partial over another axis"),
    ("6.2", (sums_the_first_and_the_last, gradient_norm), "bias: expected a gradient of shape"),
    ("6.2", (sums_by_the_last_axis, gradient_norm), "it is a part: sum it over the ranks"),
    ("6.2", (sums_by_name, gradient_norm), "never add them"),
    ("6.2", (skips_none, gradient_norm), "rank 0"),
    ("6.2", (one_message_each, gradient_norm), "one message for all partial gradients"),
    ("6.2", (sum_parts, counts_whole_ones_on_each_rank), "is counted 2 times"),
    ("6.2", (sum_parts, its_own_part), "pieces of the others are missing"),
    ("6.2", (sum_parts, without_the_root), "where is the root?"),
    ("6.4", (WHOLE | {"norm input"}, layer_bytes), "this rank's positions only"),
    ("6.4", (WHOLE - {"labels"}, layer_bytes), "the head reads all positions"),
    ("6.4", (WHOLE | {"norm output"}, layer_bytes), "x is gathered again in backward"),
    ("6.4", (WHOLE | {"q"}, layer_bytes), "write it as it stands there"),
    ("6.4", (WHOLE, as_with_tensor_parallelism), "the norms are cut now, too"),
    ("6.4", (WHOLE, always_an_nth), "each rank keeps a whole one"),
    ("6.4", (WHOLE, never_regathers), "the norms' outputs are cut, too"),
    ("6.4", (WHOLE, always_regathers), "a gathered x that is kept is whole"),
    ("6.5", (128, *RIGHT[1:]), "the embedding scatters, the head gathers"),
    ("6.5", (65, *RIGHT[1:]), "an all-reduce is two messages"),
    ("6.5", (130, 130, *RIGHT[2:]), "once more for the weight gradients"),
    ("6.5", (130, 194, *RIGHT[2:]), "the head gathers x again, too"),
    ("6.5", (130, 195, 323, RIGHT[3]), "stops before the last reduce-scatter"),
    ("6.5", (*RIGHT[:3], 2 * RIGHT[3]), "2(n − 1)/n is both"),
)
