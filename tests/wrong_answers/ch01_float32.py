"""Chapter 01, gradients that add up in float32: mistakes, and the words that must tell them."""

from __future__ import annotations

import torch

from picotron_edu.model import token_loss_sum

# ---- 1.6 train_step(model, micro_batches, optimizer) ----


def step(model, micro_batches, optimizer, add, dtype=torch.float32, share=1):
    """The exercise's loop, with `add(param)` after each backward."""
    optimizer.zero_grad()
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param, dtype=dtype)
    counted, loss = sum(batch.counted for batch in micro_batches), torch.zeros(())
    for batch in micro_batches:
        loss_sum, _ = token_loss_sum(model(batch.inputs_BS), batch.labels_BS)
        (loss_sum / counted / share).backward()
        loss += loss_sum.detach() / counted
        for param in model.parameters():
            add(param)
    optimizer.step()
    return loss


def add_and_clear(param):
    param.main_grad += param.grad
    param.grad = None


def never_clears(model, micro_batches, optimizer):
    def add(param):
        param.main_grad += param.grad

    return step(model, micro_batches, optimizer, add)


def copies_the_bfloat16_sum(model, micro_batches, optimizer):
    def add(param):
        param.main_grad = param.grad.float()

    return step(model, micro_batches, optimizer, add)


def keeps_the_last(model, micro_batches, optimizer):
    def add(param):
        param.main_grad = param.grad.float()
        param.grad = None

    return step(model, micro_batches, optimizer, add)


def clears_everything(model, micro_batches, optimizer):
    def add(param):
        add_and_clear(param)
        if param is list(model.parameters())[-1]:
            optimizer.zero_grad()
            for other in model.parameters():
                other.main_grad = torch.zeros_like(other, dtype=torch.float32)

    return step(model, micro_batches, optimizer, add)


def adds_up_in_bfloat16(model, micro_batches, optimizer):
    return step(model, micro_batches, optimizer, add_and_clear, dtype=torch.bfloat16)


def divides_by_the_micro_batches(model, micro_batches, optimizer):
    return step(model, micro_batches, optimizer, add_and_clear, share=len(micro_batches))


def divides_what_it_added_too_often(model, micro_batches, optimizer):
    share = (len(micro_batches) + 1) / 2
    return step(model, micro_batches, optimizer, lambda p: p.main_grad.add_(p.grad / share))


def steps_too_often(model, micro_batches, optimizer):
    def add(param):
        add_and_clear(param)
        if param is list(model.parameters())[-1]:
            optimizer.step()

    return step(model, micro_batches, optimizer, add)


def starts_once(model, micro_batches, optimizer):
    counted, loss = sum(batch.counted for batch in micro_batches), torch.zeros(())
    for batch in micro_batches:
        loss_sum, _ = token_loss_sum(model(batch.inputs_BS), batch.labels_BS)
        (loss_sum / counted).backward()
        loss += loss_sum.detach() / counted
        for param in model.parameters():
            if not hasattr(param, "main_grad"):
                param.main_grad = torch.zeros_like(param, dtype=torch.float32)
            add_and_clear(param)
    optimizer.step()
    return loss


def changes_the_loss(model, micro_batches, optimizer):
    return step(model, micro_batches, optimizer, add_and_clear) / len(micro_batches)


def forgets_main_grad(model, micro_batches, optimizer):
    return step(model, micro_batches, optimizer, lambda param: None)


WRONG_ANSWERS = (
    ("1.6", never_clears, "main_grad in step 1, micro-batches of [9, 1, 4, 2] tokens: expected"),
    ("1.6", never_clears, "Hint: early micro-batches count more often than late ones"),
    ("1.6", copies_the_bfloat16_sum, "Hint: it was added up in bfloat16"),
    ("1.6", keeps_the_last, "Hint: only the last micro-batch is left"),
    ("1.6", clears_everything, "all zeros. Hint: nothing is in main_grad"),
    ("1.6", adds_up_in_bfloat16, "expected main_grad in torch.float32, got torch.bfloat16"),
    ("1.6", divides_by_the_micro_batches, "4 times too small. Hint: each micro-batch counts once"),
    (
        "1.6",
        divides_what_it_added_too_often,
        "Hint: each micro-batch counts once, added in float32",
    ),
    ("1.6", steps_too_often, "expected 1 call of optimizer.step(), got 2"),
    ("1.6", starts_once, "main_grad in step 2, micro-batches of [8] tokens: expected"),
    ("1.6", starts_once, "2 times too large. Hint: what the step before has left is still there"),
    ("1.6", changes_the_loss, "loss: expected"),
    ("1.6", forgets_main_grad, "all zeros. Hint: nothing is in main_grad"),
)
