"""Chapter 06, exercises 6.1 and 6.3: mistakes with pieces of a sequence, and the words for them."""

from __future__ import annotations

import torch.nn.functional as F
from torch.autograd import Function

from picotron_edu.ranks import all_gather, all_reduce, gather, reduce_scatter, scatter_sum, world

# ---- 6.1 GatherSequence, ScatterSequence ----


def piece(x, axis):
    return x.chunk(axis.size, 1)[axis.index].clone()


class Gather(Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return all_gather(x, axis, dim=1)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.axis, dim=1), None


class Scatter(Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return reduce_scatter(x, axis, dim=1)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.axis, dim=1), None


class OnlyCuts(Gather):
    @staticmethod
    def backward(ctx, grad):
        return piece(grad, ctx.axis), None


class Averages(Gather):
    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.axis, dim=1, op="avg"), None


class SumsEverywhere(Gather):
    @staticmethod
    def backward(ctx, grad):
        return piece(all_reduce(grad.clone(), ctx.axis), ctx.axis), None


class AlongTheBatch(Gather):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return all_gather(x, axis)


class OverTheWorld(Gather):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = world()
        return all_gather(x, world(), dim=1)


class AlwaysTheFirstPiece(Gather):
    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad.clone(), ctx.axis).chunk(ctx.axis.size, 1)[0].clone(), None


class NeverSums(Scatter):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return piece(x, axis)


class KeepsItsGradient(Scatter):
    @staticmethod
    def backward(ctx, grad):
        whole = grad.new_zeros(grad.shape[0], ctx.axis.size * grad.shape[1], grad.shape[2])
        whole.chunk(ctx.axis.size, 1)[ctx.axis.index].copy_(grad)
        return whole, None


class ReducesAndCuts(Scatter):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return piece(all_reduce(x.clone(), axis), axis)


# ---- 6.3 feed_forward(x, W1, W2, axis) ----


def inside(x_BSD, W1, W2):
    return F.linear(F.relu(F.linear(x_BSD, W1)), W2)


def both_bugs(x, W1, W2, axis):
    x_BSD = gather(x, axis).view(x.shape[0], -1, x.shape[2])
    return scatter_sum(x_BSD + inside(x_BSD, W1, W2), axis, dim=1)


def residual_inside_the_sum(x, W1, W2, axis):
    x_BSD = gather(x, axis, dim=1)
    return scatter_sum(x_BSD + inside(x_BSD, W1, W2), axis, dim=1)


def joined_along_the_batch(x, W1, W2, axis):
    x_BSD = gather(x, axis).view(x.shape[0], -1, x.shape[2])
    return x + scatter_sum(inside(x_BSD, W1, W2), axis, dim=1)


def no_residual(x, W1, W2, axis):
    return scatter_sum(inside(gather(x, axis, dim=1), W1, W2), axis, dim=1)


def gathers_without_history(x, W1, W2, axis):
    return x + scatter_sum(inside(all_gather(x, axis, dim=1), W1, W2), axis, dim=1)


WRONG_ANSWERS = (
    ("6.1", (OnlyCuts, Scatter), "the others have read it, too"),
    ("6.1", (Averages, Scatter), "the sum over the ranks, not their mean"),
    ("6.1", (SumsEverywhere, Scatter), "no rank needs the sum everywhere"),
    ("6.1", (AlongTheBatch, Scatter), "the sequence is dim 1"),
    ("6.1", (OverTheWorld, Scatter), "use only the axis"),
    ("6.1", (AlwaysTheFirstPiece, Scatter), "at this rank's positions"),
    ("6.1", (Gather, NeverSums), "add up the ranks' parts"),
    ("6.1", (Gather, KeepsItsGradient), "it has brought something to all others"),
    ("6.1", (Gather, ReducesAndCuts), "no rank needs the sum everywhere"),
    ("6.1", (gather, Scatter), "expected the class GatherSequence"),
    ("6.3", both_bugs, "and x is counted 2 times"),
    ("6.3", residual_inside_the_sum, "each rank brings all of it into the sum"),
    ("6.3", joined_along_the_batch, "though this rank's x is right"),
    ("6.3", no_residual, "where is x itself?"),
    ("6.3", gathers_without_history, "all_gather has no gradient"),
)
