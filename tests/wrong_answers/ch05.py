"""Chapter 05, tensor parallelism: the mistakes people make, and the words that must tell them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from picotron_edu.memory import activations
from picotron_edu.presets import LlamaConfig
from picotron_edu.ranks import all_reduce, copy_to, gather, reduce_from, world
from picotron_edu.tensor_parallel import rank_shape

# ---- 5.1 feed_forward(x, W1, b1, W2, b2, axis) ----


def by_hand(x, W1, b1, W2, axis):
    return F.linear(F.relu(F.linear(copy_to(x, axis), W1, b1)), W2)


def bias_inside_the_sum(x, W1, b1, W2, b2, axis):
    return reduce_from(by_hand(x, W1, b1, W2, axis) + b2, axis)


def bias_divided(x, W1, b1, W2, b2, axis):
    return reduce_from(by_hand(x, W1, b1, W2, axis) + b2 / axis.size, axis)


def never_sums(x, W1, b1, W2, b2, axis):
    return by_hand(x, W1, b1, W2, axis) + b2


def forgets_copy_to(x, W1, b1, W2, b2, axis):
    return reduce_from(F.linear(F.relu(F.linear(x, W1, b1)), W2), axis) + b2


def gathers_the_channels(x, W1, b1, W2, b2, axis):
    hidden = gather(F.relu(F.linear(copy_to(x, axis), W1, b1)), axis, dim=-1)
    width = W2.shape[1]
    mine = hidden[:, axis.index * width : (axis.index + 1) * width]
    return reduce_from(F.linear(mine, W2), axis) + b2


def loses_the_history(x, W1, b1, W2, b2, axis):
    return all_reduce(by_hand(x, W1, b1, W2, axis).detach(), axis) + b2.detach()


def over_the_world(x, W1, b1, W2, b2, axis):
    return reduce_from(by_hand(x, W1, b1, W2, world()), world()) + b2


# ---- 5.2 vocabulary_loss(logits, labels, first, axis) ----


def parts(logits, labels, first, axis, top=None):
    counted, local = labels != -100, labels - first
    here = counted & (local >= 0) & (local < logits.shape[1])
    if top is None:
        top = all_reduce(logits.detach().amax(1), axis, "max")
    shifted = logits - top[:, None]
    own = shifted.gather(1, local.where(here, 0)[:, None])[:, 0] * here
    return counted, shifted, own


def gathers_the_logits(logits, labels, first, axis):
    width = -(-7 // axis.size)
    padded = F.pad(logits, (0, width - logits.shape[1]), value=-torch.inf)
    every = gather(padded, axis, dim=1)
    every = every[:, every.detach()[0].isfinite()]
    return F.cross_entropy(every, labels, ignore_index=-100, reduction="sum")


def no_largest_logit(logits, labels, first, axis):
    counted, shifted, own = parts(logits, labels, first, axis, torch.zeros(len(labels)))
    sums = reduce_from(torch.stack([shifted.exp().sum(1), own]), axis)
    return (sums[0].log() - sums[1])[counted].sum()


def its_own_largest_logit(logits, labels, first, axis):
    counted, shifted, own = parts(logits, labels, first, axis, logits.detach().amax(1))
    sums = reduce_from(torch.stack([shifted.exp().sum(1), own]), axis)
    return (sums[0].log() - sums[1])[counted].sum()


def logarithm_before_the_sum(logits, labels, first, axis):
    counted, shifted, own = parts(logits, labels, first, axis)
    sums = reduce_from(torch.stack([shifted.exp().sum(1).log(), own]), axis)
    return (sums[0] - sums[1])[counted].sum()


def every_rank_adds_a_logit(logits, labels, first, axis):
    counted, shifted, _ = parts(logits, labels, first, axis)
    nearest = (labels - first).clamp(0, logits.shape[1] - 1)
    own = shifted.gather(1, nearest[:, None])[:, 0]
    sums = reduce_from(torch.stack([shifted.exp().sum(1), own]), axis)
    return (sums[0].log() - sums[1])[counted].sum()


def counts_every_label(logits, labels, first, axis):
    _, shifted, own = parts(logits, labels, first, axis)
    sums = reduce_from(torch.stack([shifted.exp().sum(1), own]), axis)
    return (sums[0].log() - sums[1]).sum()


def mean_of_the_tokens(logits, labels, first, axis):
    counted, shifted, own = parts(logits, labels, first, axis)
    sums = reduce_from(torch.stack([shifted.exp().sum(1), own]), axis)
    return (sums[0].log() - sums[1])[counted].mean()


def sum_without_gradient(logits, labels, first, axis):
    counted, shifted, own = parts(logits, labels, first, axis)
    total = all_reduce(shifted.detach().exp().sum(1), axis)
    return (total.log() - reduce_from(own, axis))[counted].sum()


# ---- 5.3 cut_fused(weight, axis), output(x, W, b, axis) ----


def in_one_piece(weight, axis):
    return weight.chunk(axis.size)[axis.index]


def part_by_part(weight, axis):
    return torch.cat([part.chunk(axis.size)[axis.index] for part in weight.chunk(3)])


def bias_in_each(x, W, b, axis):
    return reduce_from(F.linear(x, W, b), axis)


def an_nth_of_the_bias(x, W, b, axis):
    return reduce_from(F.linear(x, W, b / axis.size), axis)


# ---- 5.4 forward, backward, unshared, gigabytes ----

RIGHT = (65, 65, 161, 130 * 2 * 7 / 8 * 8192 * 4096 * 2 / 1e9)

# ---- 5.5 layer_bytes(n), share ----

LLAMA = LlamaConfig.from_preset("llama-3-8b")


def right(n):
    kept = activations(rank_shape(LLAMA, n), 1, 8192, torch.bfloat16, gpu=True)
    return sum(k.bytes * (k.count // 32) for k in kept if k.count >= 32)


def all_of_it_divided(n):
    return right(1) / n


def key_heads_divided_for_ever(n):
    return right(n) - 8192 * 4096 * (1 / 8 - 1 / n) * (n > 8)


def without_the_scale(n):
    return right(n) - 8192 * 8


WRONG_ANSWERS = (
    ("5.1", bias_inside_the_sum, "b2 is counted 2 times"),
    ("5.1", bias_divided, "gives the right y and a wrong gradient"),
    ("5.1", never_sums, "add up the ranks' parts"),
    ("5.1", forgets_copy_to, "copy_to sums the ranks'"),
    ("5.1", gathers_the_channels, "nobody needs the other ranks' channels"),
    ("5.1", loses_the_history, "expected an output with a history"),
    ("5.1", over_the_world, "use only the axis"),
    ("5.2", gathers_the_logits, "the logits stay where they are"),
    ("5.2", no_largest_logit, "exp(1000) is inf"),
    ("5.2", its_own_largest_logit, "it must be that of all"),
    ("5.2", logarithm_before_the_sum, "then take the logarithm"),
    ("5.2", every_rank_adds_a_logit, "the others must add 0"),
    ("5.2", counts_every_label, "a label of −100 is not counted"),
    ("5.2", mean_of_the_tokens, "the sum of the losses, not their mean"),
    ("5.2", sum_without_gradient, "reduce_from can"),
    ("5.3", (in_one_piece, bias_in_each), "is there a q, a k and a v?"),
    ("5.3", (part_by_part, bias_in_each), "the bias is counted 2 times"),
    ("5.3", (part_by_part, an_nth_of_the_bias), "an n-th of the gradient"),
    ("5.4", (64, *RIGHT[1:]), "the embedding sums over the ranks, too"),
    ("5.4", (65, 161, *RIGHT[2:]), "q, k and v share one"),
    ("5.4", (*RIGHT[:2], 160, RIGHT[3]), "the head is a linear cut by columns"),
    ("5.4", (*RIGHT[:3], RIGHT[3] / 2), "an all-reduce sends 2(n − 1)/n"),
    ("5.5", (all_of_it_divided, 36.0), "whole on every rank"),
    ("5.5", (key_heads_divided_for_ever, 36.0), "each rank keeps a whole one"),
    ("5.5", (without_the_scale, 36.0), "a float32 scale a token"),
    ("5.5", (right, 19.5), "not of one rank's layer"),
)
