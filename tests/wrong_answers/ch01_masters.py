"""Chapter 01, master weights: the mistakes people make, and the words that must tell them."""

from __future__ import annotations

import torch
from torch import nn

# ---- 1.3 MasterSGD(params, lr, momentum) ----


class Right:
    def __init__(self, params, lr, momentum=0.9):
        self.params, self.lr, self.momentum = list(params), lr, momentum
        self.masters = [param.detach().float() for param in self.params]
        self.velocities = [torch.zeros_like(w) for w in self.masters]

    @torch.no_grad()
    def step(self):
        for i, param in enumerate(self.params):
            if param.grad is not None:
                self.update(param, self.masters[i], self.velocities[i])

    def update(self, param, w, v):
        v.mul_(self.momentum).add_(param.grad)
        w.sub_(self.lr * v)
        param.copy_(w)


class NoMasters(Right):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, lr, momentum)
        self.masters = self.params


class MastersInBfloat16(Right):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, lr, momentum)
        self.masters = [param.detach().clone() for param in self.params]


class NewMastersInEachStep(Right):
    def update(self, param, w, v):
        super().update(param, param.float(), v)


class NeverCopiesBack(Right):
    def update(self, param, w, v):
        v.mul_(self.momentum).add_(param.grad)
        w.sub_(self.lr * v)


class ReplacesTheParameter(Right):
    def update(self, param, w, v):
        super().update(w, w, v) if param is w else self.replace(param, w, v)

    def replace(self, param, w, v):
        v.mul_(self.momentum).add_(param.grad)
        w.sub_(self.lr * v)
        param.data = w.clone()
        param.grad = None


class VelocitiesInBfloat16(Right):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, lr, momentum)
        self.velocities = [torch.zeros_like(param) for param in self.params]


class RoundsTheUpdate(Right):
    def update(self, param, w, v):
        v.mul_(self.momentum).add_(param.grad)
        w.sub_((self.lr * v).to(param.dtype))
        param.copy_(w)


class RoundsTheMaster(Right):
    """Also stands still: 1 - 0.001 is 1."""

    def update(self, param, w, v):
        super().update(param, w, v)
        w.copy_(param)


class Dampens(Right):
    def update(self, param, w, v):
        v.lerp_(param.grad.float(), 1 - self.momentum)
        w.sub_(self.lr * v)
        param.copy_(w)


class ForgetsTheVelocity(Right):
    def update(self, param, w, v):
        super().update(param, w, torch.zeros_like(v))


class GoesUphill(Right):
    def update(self, param, w, v):
        v.mul_(self.momentum).add_(param.grad)
        w.add_(self.lr * v)
        param.copy_(w)


class CopiesFloat32Too(Right):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, lr, momentum)
        self.masters = [param.detach().clone().float() for param in self.params]


class KeepsGradients(Right):
    def update(self, param, w, v):
        self.gradients = getattr(self, "gradients", []) + [param.grad.float()]
        super().update(param, w, v)


class HandsOverToTorch(Right):
    """Right numbers, but its own velocities lie idle beside those of torch."""

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, lr, momentum)
        self.inner = torch.optim.SGD(self.masters, lr=lr, momentum=momentum)

    @torch.no_grad()
    def step(self):
        for param, w in zip(self.params, self.masters):
            w.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for param, w in zip(self.params, self.masters):
            param.copy_(w)


class StopsAtTheFirstWithoutAGradient(Right):
    @torch.no_grad()
    def step(self):
        for param, w, v in zip(self.params, self.masters, self.velocities):
            if param.grad is None:
                return
            self.update(param, w, v)


class NeedsEveryGradient(Right):
    @torch.no_grad()
    def step(self):
        for param, w, v in zip(self.params, self.masters, self.velocities):
            self.update(param, w, v)


class HidesItsMasters(Right):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, lr, momentum)
        self.weights = self.masters
        del self.masters

    @torch.no_grad()
    def step(self):
        for param, w, v in zip(self.params, self.weights, self.velocities):
            self.update(param, w, v)


class TruncatesIntoTheParameter(Right):
    """bfloat16 is the upper half of float32: cut off, where copy_ rounds to the nearest."""

    def update(self, param, w, v):
        super().update(param, w, v)
        if param.dtype == torch.bfloat16:
            param.copy_(w.view(torch.bfloat16)[1::2])


WRONG_ANSWERS = (
    ("1.3", NoMasters, "masters[0] in torch.float32, got torch.bfloat16"),
    ("1.3", MastersInBfloat16, "masters[0] in torch.float32, got torch.bfloat16"),
    ("1.3", NewMastersInEachStep, "expected [0.9, 0.9, 0.9], got [1, 1, 1]"),
    ("1.3", NewMastersInEachStep, "Hint: 1 - 0.001 is 1 in bfloat16"),
    ("1.3", NeverCopiesBack, "Hint: the model still holds old weights"),
    ("1.3", ReplacesTheParameter, "expected the parameter to stay bfloat16, got torch.float32"),
    ("1.3", VelocitiesInBfloat16, "expected velocities[0] in torch.float32, got torch.bfloat16"),
    ("1.3", RoundsTheUpdate, "Hint: lr · v was rounded to bfloat16"),
    ("1.3", RoundsTheMaster, "Hint: 1 - 0.001 is 1 in bfloat16"),
    ("1.3", Dampens, "Hint: v ← momentum · v + gradient: all of the gradient"),
    ("1.3", ForgetsTheVelocity, "Hint: v must live on from step to step"),
    ("1.3", GoesUphill, "expected [0.9, 0.9, 0.9], got [1.1"),
    ("1.3", CopiesFloat32Too, "expected 72 bytes of state"),
    ("1.3", CopiesFloat32Too, "got 96. Hint: a float32 weight is its own master: no copy"),
    ("1.3", KeepsGradients, "expected 72 bytes of state"),
    ("1.3", HandsOverToTorch, "expected 72 bytes of state"),
    ("1.3", StopsAtTheFirstWithoutAGradient, "weight after one without a gradient: expected"),
    ("1.3", NeedsEveryGradient, "your code raised TypeError"),
    ("1.3", HidesItsMasters, "expected a list of tensors in self.masters, got None"),
    ("1.3", TruncatesIntoTheParameter, "the parameter, after 5 steps: expected"),
    ("1.3", TruncatesIntoTheParameter, "Hint: after a step the parameter is the master weight"),
    ("1.3", nn.Linear, "your code raised TypeError"),
)
