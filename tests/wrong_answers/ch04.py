"""Chapter 04, ZeRO by hand: the mistakes people make, and the words that must tell them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from picotron_edu.ranks import all_gather, all_reduce, reduce_scatter, world

# ---- 4.1 ShardedAdam(weights, axis, lr).step(grad) ----


def adam(w, g, m, v, steps, lr):
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    w.addcdiv_(m / (1 - 0.9**steps), (v / (1 - 0.999**steps)).sqrt() + 0.01, value=-lr)


class Right:
    """Right, but for what a subclass does otherwise."""

    def __init__(self, weights, axis, lr):
        self.weights, self.axis, self.lr, self.steps = weights, axis, lr, 0
        self.length = math.ceil(len(weights) / axis.size)
        self.padding = (0, axis.size * self.length - len(weights))
        self.moments = self.zeros()

    def zeros(self):
        return torch.zeros(2, self.length)

    def summed(self, grad):
        return reduce_scatter(F.pad(grad, self.padding), self.axis)

    def first(self):
        return self.axis.index * self.length

    def step(self, grad):
        self.steps += 1
        summed, first = self.summed(grad), self.first()
        shard = F.pad(self.weights, self.padding)[first : first + self.length].clone()
        adam(shard, summed, *self.moments, self.steps, self.lr)
        self.gathered(all_gather(shard, self.axis))

    def gathered(self, whole):
        self.weights.copy_(whole[: len(self.weights)])


class PlainAdam(Right):
    """The optimizer of data parallelism: all states on all ranks."""

    def zeros(self):
        return torch.zeros(2, len(self.weights))

    def step(self, grad):
        self.steps += 1
        summed = all_gather(self.summed(grad), self.axis)[: len(grad)]
        adam(self.weights, summed, *self.moments, self.steps, self.lr)


class KeepsTheGradientToo(Right):
    def summed(self, grad):
        self.grad = super().summed(grad)
        return self.grad


class AllReduces(Right):
    def summed(self, grad):
        whole = F.pad(all_reduce(grad, self.axis), self.padding)
        return whole[self.first() : self.first() + self.length]


class Averages(Right):
    def summed(self, grad):
        return super().summed(grad) / self.axis.size


class NeverGathers(Right):
    def gathered(self, whole):
        pass


class ForgetsToSum(Right):
    def summed(self, grad):
        return F.pad(grad, self.padding)[self.first() : self.first() + self.length]


class AsksTheWorld(Right):
    def first(self):
        return world().index * self.length


class ShiftedShards(Right):
    def first(self):
        return self.axis.index * len(self.weights) // self.axis.size


# ---- 4.2 accumulate_in_shards(backwards, axis) ----


def only_the_last(backwards, axis):
    for backward in backwards:
        shard = reduce_scatter(backward().float(), axis)
    return shard


def only_the_first(backwards, axis):
    shard = reduce_scatter(backwards[0]().float(), axis)
    for backward in backwards[1:]:
        backward()
    return shard


def in_bfloat16(backwards, axis):
    shard = 0
    for backward in backwards:
        shard = shard + reduce_scatter(backward(), axis)
    return shard


def sums_in_bfloat16(backwards, axis):
    shard = 0
    for backward in backwards:
        shard = shard + reduce_scatter(backward(), axis).float()
    return shard


def keeps_all_gradients(backwards, axis):
    gradients = [backward() for backward in backwards]
    return sum(reduce_scatter(gradient.float(), axis) for gradient in gradients)


def keeps_them_in_float32(backwards, axis):
    gradients = [backward().float() for backward in backwards]
    return sum(reduce_scatter(gradient, axis) for gradient in gradients)


def adds_up_and_reduces_once(backwards, axis):
    """Stage 1: a whole gradient stays from one micro-batch to the next."""
    whole = 0
    for backward in backwards:
        whole = whole + backward().float()
    return reduce_scatter(whole, axis)


def means(backwards, axis):
    return sum(reduce_scatter(b().float(), axis, op="avg") for b in backwards)


def all_reduces(backwards, axis):
    whole = sum(all_reduce(backward().float(), axis) for backward in backwards)
    return whole.chunk(axis.size)[axis.index].clone()


# ---- 4.3 forward_backward(shards, x, grad, axis) ----


def by_hand(shards, x, grad, axis, keep=None, reduce=reduce_scatter, transpose=True):
    D, inputs, y = x.shape[1], [], x
    for shard in shards:
        inputs.append(y)
        W = all_gather(shard, axis).view(D, D)
        if keep is not None:
            keep.append(W)
        y = y @ W
    gradients = []
    for i in reversed(range(len(shards))):
        gradients.append(reduce((inputs[i].T @ grad).flatten(), axis))
        W = all_gather(shards[i], axis).view(D, D) if keep is None else keep[i]
        grad = grad @ (W.T if transpose else W)
    return y, gradients[::-1]


def keeps_the_matrices(shards, x, grad, axis):
    return by_hand(shards, x, grad, axis, keep=[])


def keeps_whole_gradients(shards, x, grad, axis):
    return by_hand(shards, x, grad, axis, reduce=all_reduce)


def forgets_to_transpose(shards, x, grad, axis):
    return by_hand(shards, x, grad, axis, transpose=False)


def from_the_last_to_the_first(shards, x, grad, axis):
    y, gradients = by_hand(shards, x, grad, axis)
    return y, gradients[::-1]


# ---- 4.4 Zero2 ----


class AsPlanted(Right):
    def __init__(self, weights, axis, lr, momentum):
        super().__init__(weights, axis, lr)
        self.momentum, self.velocity, self.grad = momentum, torch.zeros(self.length), None

    def add(self, grad):
        self.grad = self.summed(grad)

    def first(self):
        return self.axis.index * len(self.weights) // self.axis.size

    def step(self):
        self.velocity = self.momentum * self.velocity + self.grad
        first = self.first()
        shard = F.pad(self.weights, self.padding)[first : first + self.length]
        self.gathered(all_gather(shard - self.lr * self.velocity, self.axis))


class BordersMended(AsPlanted):
    first = Right.first


class AddsForEver(BordersMended):
    def add(self, grad):
        self.grad = self.summed(grad) + (0 if self.grad is None else self.grad)


class Zero2AsksTheWorld(AddsForEver):
    def __init__(self, weights, axis, lr, momentum):
        super().__init__(weights, world(), lr, momentum)

    def step(self):
        super().step()
        self.grad = None


# ---- 4.5 held_by(N, stage, n), gigabytes_sent ----


def right(N, stage, n):
    return N * (
        2 / (n if stage == 3 else 1) + 4 / (n if stage > 1 else 1) + 12 / (n if stage else 1)
    )


def in_gigabytes(N, stage, n):
    return right(N, stage, n) / 1e9


def bfloat16_gradients(N, stage, n):
    return right(N, stage, n) - N * 2 / (n if stage > 1 else 1)


def gradients_cut_in_stage_1(N, stage, n):
    return right(N, max(stage, 2) if stage else 0, n)


WRONG_ANSWERS = (
    ("4.1", PlainAdam, "only for the shard that this rank owns"),
    ("4.1", KeepsTheGradientToo, "all that stays between steps"),
    ("4.1", AllReduces, "the sum of its own shard only: reduce_scatter"),
    ("4.1", Averages, "summed over the ranks, not averaged"),
    ("4.1", NeverGathers, "write into them in place"),
    ("4.1", ForgetsToSum, "each rank steps with its own gradient"),
    ("4.1", AsksTheWorld, "use only the axis"),
    ("4.1", ShiftedShards, "put them where they belong"),
    ("4.2", only_the_last, "only the last micro-batch is left"),
    ("4.2", only_the_first, "only the first micro-batch was reduced"),
    ("4.2", in_bfloat16, "expected torch.float32"),
    ("4.2", sums_in_bfloat16, "256 + 1 is 256"),
    ("4.2", keeps_all_gradients, "1 whole gradient in memory"),
    ("4.2", keeps_them_in_float32, "1 whole gradient in memory at one time, and what is sent"),
    ("4.2", adds_up_and_reduces_once, "each micro-batch is reduced at once"),
    ("4.2", means, "sums, not means"),
    ("4.2", all_reduces, "reduce_scatter sends half as much"),
    ("4.3", keeps_the_matrices, "forget W after forward"),
    ("4.3", keeps_whole_gradients, "that is the whole gradient"),
    ("4.3", forgets_to_transpose, "g·Wᵀ"),
    ("4.3", from_the_last_to_the_first, "gradient of layer 0"),
    ("4.4", AsPlanted, "the same borders"),
    ("4.4", BordersMended, "only the last micro-batch of a step is left"),
    ("4.4", Zero2AsksTheWorld, "use only the axis"),
    ("4.4", AddsForEver, "what the step before has left"),
    ("4.5", (in_gigabytes, 253), "bytes, not GB"),
    ("4.5", (bfloat16_gradients, 253), "gradients are summed in float32"),
    ("4.5", (gradients_cut_in_stage_1, 253), "stage 1 cuts only the optimizer states"),
    ("4.5", (right, 63.2), "each of the 4 micro-batches"),
    ("4.5", (right, 257), "its own shard already"),
)
