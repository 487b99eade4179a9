"""Chapter 01, clipping over micro-batches: mistakes, and the words that must tell them."""

from __future__ import annotations

import torch
from torch import nn

from picotron_edu.model import token_loss_sum

# ---- 1.5 train_step(model, micro_batches, optimizer, max_norm) ----


def backward_each(model, micro_batches, after=lambda: None):
    """Forward and backward of all micro-batches, `after()` each; -> the loss."""
    counted, loss = sum(batch.counted for batch in micro_batches), torch.zeros(())
    for batch in micro_batches:
        loss_sum, _ = token_loss_sum(model(batch.inputs_BS), batch.labels_BS)
        (loss_sum / counted).backward()
        loss += loss_sum.detach() / counted
        after()
    return loss


def clip(model, max_norm):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def clips_in_the_loop(model, micro_batches, optimizer, max_norm):
    optimizer.zero_grad()
    norms = []
    loss = backward_each(model, micro_batches, lambda: norms.append(clip(model, max_norm)))
    optimizer.step()
    return loss, norms[-1]


def clips_each_part(model, micro_batches, optimizer, max_norm):
    optimizer.zero_grad()
    params, total = list(model.parameters()), {}

    def clip_and_move():
        clip(model, max_norm)
        for param in params:
            total[param] = total.get(param, 0) + param.grad
            param.grad = None

    loss = backward_each(model, micro_batches, clip_and_move)
    for param in params:
        param.grad = total[param]
    optimizer.step()
    return loss, clip(model, float("inf"))


def clips_to_a_share_in_the_loop(model, micro_batches, optimizer, max_norm):
    return clips_in_the_loop(model, micro_batches, optimizer, max_norm / len(micro_batches))


def clips_after_the_step(model, micro_batches, optimizer, max_norm):
    optimizer.zero_grad()
    loss = backward_each(model, micro_batches)
    optimizer.step()
    return loss, clip(model, max_norm)


def never_clips(model, micro_batches, optimizer, max_norm):
    optimizer.zero_grad()
    loss = backward_each(model, micro_batches)
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters()])
    optimizer.step()
    return loss, norm


def clips_each_parameter(model, micro_batches, optimizer, max_norm):
    optimizer.zero_grad()
    loss = backward_each(model, micro_batches)
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters()])
    for param in model.parameters():
        nn.utils.clip_grad_norm_(param, max_norm)
    optimizer.step()
    return loss, norm


def clips_values(model, micro_batches, optimizer, max_norm):
    optimizer.zero_grad()
    loss = backward_each(model, micro_batches)
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters()])
    nn.utils.clip_grad_value_(model.parameters(), max_norm)
    optimizer.step()
    return loss, norm


def steps_in_the_loop(model, micro_batches, optimizer, max_norm):
    optimizer.zero_grad()
    norms = []

    def clip_and_step():
        norms.append(clip(model, max_norm))
        optimizer.step()

    return backward_each(model, micro_batches, clip_and_step), norms[-1]


def zeroes_in_the_loop(model, micro_batches, optimizer, max_norm):
    for batch in micro_batches:
        optimizer.zero_grad()
        counted = sum(b.counted for b in micro_batches)
        loss_sum, _ = token_loss_sum(model(batch.inputs_BS), batch.labels_BS)
        (loss_sum / counted).backward()
    norm = clip(model, max_norm)
    optimizer.step()
    return loss_sum.detach() / counted, norm


def never_zeroes(model, micro_batches, optimizer, max_norm):
    loss = backward_each(model, micro_batches)
    norm = clip(model, max_norm)
    optimizer.step()
    return loss, norm


def norm_after_clipping(model, micro_batches, optimizer, max_norm):
    optimizer.zero_grad()
    loss = backward_each(model, micro_batches)
    clip(model, max_norm)
    norm = clip(model, max_norm)
    optimizer.step()
    return loss, norm


def forgets_the_norm(model, micro_batches, optimizer, max_norm):
    return never_zeroes(model, micro_batches, optimizer, max_norm)[0]


WRONG_ANSWERS = (
    ("1.5", clips_in_the_loop, "gradient in step 1, max_norm"),
    ("1.5", clips_in_the_loop, "Hint: what is clipped is not complete yet"),
    ("1.5", clips_each_part, "Hint: the norms of the parts say nothing"),
    ("1.5", clips_to_a_share_in_the_loop, "Hint: clip the complete gradient"),
    ("1.5", clips_after_the_step, "Hint: it is not clipped when optimizer.step() comes"),
    ("1.5", never_clips, "Hint: it is not clipped when optimizer.step() comes"),
    ("1.5", clips_each_parameter, "all parameters by one factor"),
    ("1.5", clips_values, "Hint: it is not clipped when optimizer.step() comes"),
    ("1.5", steps_in_the_loop, "expected 1 call of optimizer.step(), got 3"),
    ("1.5", zeroes_in_the_loop, "Hint: only the last micro-batch is left"),
    ("1.5", never_zeroes, "gradient in step 2, max_norm 1e+09"),
    ("1.5", never_zeroes, "2 times too large. Hint: what the step before has left is still there"),
    ("1.5", norm_after_clipping, "Hint: that is the norm after clipping"),
    ("1.5", forgets_the_norm, "expected a loss and a norm, got"),
)
