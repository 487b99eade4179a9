"""Chapter 01, accumulation over micro-batches and ranks: mistakes, and the words that tell them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from picotron_edu.data import Batch
from picotron_edu.model import token_loss_sum
from picotron_edu.ranks import all_gather, all_reduce, world

# ---- 1.2 accumulate(model, micro_batches, axis) ----


def counted_on(axis, micro_batches):
    return all_reduce(sum(batch.counted for batch in micro_batches), axis)


def loss_sum_of(model, batch):
    return token_loss_sum(model(batch.inputs_BS), batch.labels_BS)[0]


def backward_each(model, micro_batches, divisor):
    """Backward of each micro-batch's loss over `divisor(batch)`; -> this rank's loss."""
    loss = torch.zeros(())
    for batch in micro_batches:
        part = loss_sum_of(model, batch) / divisor(batch)
        part.backward()
        loss += part.detach()
    return loss


def mean_of_means(model, micro_batches, axis):
    k = len(micro_batches)
    loss = backward_each(model, micro_batches, lambda batch: batch.counted * k)
    return all_reduce(loss, axis, op="avg")


def cross_entropy_mean_of_means(model, micro_batches, axis):
    loss = torch.zeros(())
    for batch in micro_batches:
        logits_NV, labels_N = model(batch.inputs_BS).flatten(0, 1), batch.labels_BS.flatten()
        part = F.cross_entropy(logits_NV, labels_N) / len(micro_batches)
        part.backward()
        loss += part.detach()
    return all_reduce(loss, axis, op="avg")


def each_by_its_own_count(model, micro_batches, axis):
    return all_reduce(backward_each(model, micro_batches, lambda batch: batch.counted), axis)


def counts_of_this_rank(model, micro_batches, axis):
    counted = sum(batch.counted for batch in micro_batches)
    return all_reduce(backward_each(model, micro_batches, lambda _: counted), axis, op="avg")


def mean_over_ranks(model, micro_batches, axis):
    counted = sum(batch.counted for batch in micro_batches) * axis.size
    return all_reduce(backward_each(model, micro_batches, lambda _: counted), axis)


def average_count(model, micro_batches, axis):
    counted = sum(batch.counted for batch in micro_batches).double()
    all_reduce(counted, axis, op="avg")
    return all_reduce(backward_each(model, micro_batches, lambda _: counted), axis, op="avg")


def divides_twice(model, micro_batches, axis):
    counted = counted_on(axis, micro_batches) * len(micro_batches)
    return all_reduce(backward_each(model, micro_batches, lambda _: counted), axis)


def never_divides(model, micro_batches, axis):
    counted = counted_on(axis, micro_batches)
    return all_reduce(backward_each(model, micro_batches, lambda _: 1), axis) / counted


def divides_by_all_labels(model, micro_batches, axis):
    labels = torch.tensor(sum(batch.labels_BS.numel() for batch in micro_batches))
    all_reduce(labels, axis)
    return all_reduce(backward_each(model, micro_batches, lambda _: labels), axis)


def zeroes_in_the_loop(model, micro_batches, axis):
    counted, loss = counted_on(axis, micro_batches), torch.zeros(())
    for batch in micro_batches:
        model.zero_grad()
        loss += backward_each(model, [batch], lambda _: counted)
    return all_reduce(loss, axis)


def never_goes_backward(model, micro_batches, axis):
    counted = counted_on(axis, micro_batches)
    loss = sum(loss_sum_of(model, batch).detach() for batch in micro_batches) / counted
    return all_reduce(loss, axis)


def counts_in_the_loop(model, micro_batches, axis):
    loss = torch.zeros(())
    for batch in micro_batches:
        counted = all_reduce(batch.counted, axis)
        loss += backward_each(model, [batch], lambda _, counted=counted: counted)
    return all_reduce(loss, axis)


def adds_up_losses_in_the_loop(model, micro_batches, axis):
    counted, loss = counted_on(axis, micro_batches), torch.zeros(())
    for batch in micro_batches:
        loss += all_reduce(backward_each(model, [batch], lambda _: counted), axis)
    return loss


def rank_without_tokens_stays_away(model, micro_batches, axis):
    if sum(batch.counted for batch in micro_batches) == 0:
        return torch.zeros(())
    return right(model, micro_batches, axis)


def gradients_travel(model, micro_batches, axis):
    loss = right(model, micro_batches, axis)
    for param in model.parameters():
        all_reduce(param.grad, axis)
    return loss


def right(model, micro_batches, axis):
    counted = counted_on(axis, micro_batches)
    return all_reduce(backward_each(model, micro_batches, lambda _: counted), axis)


def loss_of_this_rank(model, micro_batches, axis):
    counted = counted_on(axis, micro_batches)
    return backward_each(model, micro_batches, lambda _: counted)


def sum_of_losses(model, micro_batches, axis):
    return right(model, micro_batches, axis) * counted_on(axis, micro_batches)


def returns_nothing(model, micro_batches, axis):
    right(model, micro_batches, axis)


def three_messages(model, micro_batches, axis):
    return right(model, micro_batches, axis) + 0 * counted_on(axis, micro_batches)


def gathers_counts(model, micro_batches, axis):
    own = sum(batch.counted for batch in micro_batches).view(1)
    counted = all_gather(own, axis).sum()
    return all_reduce(backward_each(model, micro_batches, lambda _: counted), axis)


def asks_the_world(model, micro_batches, axis):
    return right(model, micro_batches, world())


def one_backward_for_all(model, micro_batches, axis):
    counted = counted_on(axis, micro_batches)
    loss = sum(loss_sum_of(model, batch) for batch in micro_batches) / counted
    loss.backward()
    return all_reduce(loss.detach(), axis)


def one_large_batch(model, micro_batches, axis):
    inputs_BS = torch.cat([batch.inputs_BS for batch in micro_batches])
    labels_BS = torch.cat([batch.labels_BS for batch in micro_batches])
    return right(model, [Batch(inputs_BS, labels_BS)], axis)


def keeps_the_graph(model, micro_batches, axis):
    counted, loss = counted_on(axis, micro_batches), torch.zeros(())
    for batch in micro_batches:
        part = loss_sum_of(model, batch) / counted
        part.backward(retain_graph=True)
        loss = loss + part
    return all_reduce(loss.detach(), axis)


WRONG_ANSWERS = (
    ("1.2", mean_of_means, "sum of the gradients of 1 rank: expected"),
    ("1.2", mean_of_means, "Hint: a mean of means: a token in a short micro-batch"),
    ("1.2", cross_entropy_mean_of_means, "Hint: a mean of means: a token in a short micro-batch"),
    ("1.2", each_by_its_own_count, "Hint: divide by the tokens of all micro-batches"),
    ("1.2", counts_of_this_rank, "sum of the gradients of 2 ranks: expected"),
    ("1.2", counts_of_this_rank, "Hint: divide by the counted tokens of all ranks"),
    ("1.2", mean_over_ranks, "Hint: a mean over ranks is a mean of means"),
    ("1.2", average_count, "2 times too large. Hint: the ranks' gradients are parts"),
    ("1.2", divides_twice, "3 times too small. Hint: did you divide by the micro-batches as well?"),
    ("1.2", never_divides, "18 times too large. Hint: that is the gradient of the sum"),
    ("1.2", divides_by_all_labels, "2 times too small. Hint: labels of −100 are not counted"),
    ("1.2", zeroes_in_the_loop, "Hint: only the last micro-batch is left"),
    ("1.2", never_goes_backward, "all zeros. Hint: call backward in the loop"),
    ("1.2", counts_in_the_loop, "Hint: divide by the tokens of all micro-batches"),
    ("1.2", adds_up_losses_in_the_loop, "Hint: ranks may have other numbers of micro-batches"),
    ("1.2", rank_without_tokens_stays_away, "on 4 ranks, the ranks wait for each other for ever"),
    ("1.2", rank_without_tokens_stays_away, "rank 2 has returned"),
    ("1.2", gradients_travel, "expected messages of one number, got all_reduce of"),
    ("1.2", loss_of_this_rank, "on rank 0. Hint: add up the losses of all ranks"),
    ("1.2", sum_of_losses, "loss: expected"),
    ("1.2", sum_of_losses, "on rank 0: 18 times too large. Hint: that is the sum"),
    ("1.2", returns_nothing, "got None on rank 0. Hint: does your function return its result?"),
    ("1.2", three_messages, "expected 2 × all_reduce, got 3 × all_reduce"),
    ("1.2", gathers_counts, "expected 2 × all_reduce, got 1 × all_gather, 1 × all_reduce"),
    ("1.2", asks_the_world, "expected messages over axis 'dp', got one over 'world'"),
    ("1.2", one_backward_for_all, "the activations of 1 micro-batch in memory at one time, got"),
    ("1.2", one_large_batch, "Hint: call backward for each micro-batch"),
    ("1.2", keeps_the_graph, "got those of 4. Hint: call backward for each micro-batch"),
)
