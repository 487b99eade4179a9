"""From gradients to new weights: accumulate, clip, AdamW, and the learning rate's way up and down.

bfloat16 has 8 bits for the digits of a number: 256 + 1 is 256. What *adds up* must therefore be
wider than what is multiplied. Three things add up in training, and each is kept in float32
whatever the model computes in:

    gradients of the micro-batches   param.main_grad   else 256 + 1 = 256: small gradients are lost
    weights over the steps           master weights    else 1.0 − 0.001 = 1.0: training stands still
    moments over the steps           AdamW's m and v   (Micikevicius et al. 2017, arXiv 1710.03740)

                weights    gradients   master    moments    bytes per parameter
                bf16 2     fp32 4      fp32 4    fp32 8     18
                fp32 4     fp32 4      itself    fp32 8     16

(With a bf16 gradient kept beside the fp32 one it is 20, without fp32 gradients 16: the Playbook's
two columns. Here a bf16 gradient lives only until it is added: one parameter's at a time.)

Everything here reads a parameter's layout, so that the same code is right for whole and for cut
parameters. It knows nothing of ranks: where a sum over ranks is needed, the caller passes
`all_reduce`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from picotron_edu.layout import Axis, layout_of
from picotron_edu.presets import check_number
from picotron_edu.summed import refuse_summed

Param = Any  # an nn.Parameter that has main_grad, and maybe grad_home (see keep_main_grads)
AllReduce = Callable[[Tensor, Any, str], Any]  # all_reduce(x, axis, op), in place


def main_dtype(param: Tensor) -> torch.dtype:
    """float32, or the parameter's own type where that is wider."""
    return torch.promote_types(param.dtype, torch.float32)


def keep_main_grads(model: nn.Module) -> None:
    """From now on backward adds to a float32 `param.main_grad`, and frees `param.grad` at once.

    A technique may say where the main gradient shall lie: in `param.grad_home`.
    """
    param: Param
    for param in model.parameters():
        if param.requires_grad and not hasattr(param, "main_grad"):
            param.main_grad = None
            param.register_post_accumulate_grad_hook(add_to_main_grad)


def add_to_main_grad(param: Param) -> None:
    home = getattr(param, "grad_home", None)
    if param.main_grad is None and home is not None:
        param.main_grad = home.copy_(param.grad)
    elif param.main_grad is None:
        param.main_grad = param.grad.to(main_dtype(param))  # no copy where it is wide enough
    else:
        refuse_summed(param, param.main_grad)
        param.main_grad += param.grad
    param.grad = None  # else the next backward would add on top, and this one would count twice


def grad_of(param: Tensor) -> Tensor | None:
    """The accumulated gradient: the main one if there is one."""
    main = getattr(param, "main_grad", None)
    return param.grad if main is None else main


def zero_grads(params: Iterable[Tensor]) -> None:
    for param in params:
        param.grad = None
        if hasattr(param, "main_grad"):
            param.main_grad = None


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), in float32.

        m ← β₁ m + (1 − β₁) g        w ← w − lr · decay · w − lr · m̂ / (√v̂ + eps)
        v ← β₂ v + (1 − β₂) g²       m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ)

    Matrices decay; vectors (norms, biases) do not. The moments are made in the first step: that is
    why a run may survive one step and fail in the second one for lack of memory. Load weights
    before you make it: the float32 masters of bfloat16 weights are copied here, once.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        pairs = list(named_params)
        if not all(isinstance(pair, tuple) and isinstance(pair[0], str) for pair in pairs):
            raise ValueError("AdamW takes names and parameters: give it model.named_parameters()")
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("AdamW got two parameters of one name")
        for setting, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            check_number(setting, value, zero=True)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie from 0 up to below 1, got {betas}")
        self.params = dict(pairs)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.masters = {n: p.detach().to(main_dtype(p)) for n, p in self.params.items()}
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps = 0

    @torch.no_grad()
    def step(self, lr: float | None = None) -> None:
        lr = self.lr if lr is None else lr
        if all(grad_of(param) is None for param in self.params.values()):
            raise RuntimeError(
                "no parameter has a gradient: was AdamW made of the model that has run backward? "
                "With Zero it is AdamW(zero.named_parameters()), made after it"
            )
        (beta1, beta2), self.steps = self.betas, self.steps + 1
        for name, param in self.params.items():
            grad, w = grad_of(param), self.masters[name]
            if grad is None:  # took no part in this step
                continue
            if name not in self.moments:
                self.moments[name] = torch.zeros_like(w), torch.zeros_like(w)
            m, v = self.moments[name]
            m.lerp_(grad.to(w.dtype), 1 - beta1)
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            w.mul_(1 - lr * self.decay_of(param))
            root = v.sqrt().div_(math.sqrt(1 - beta2**self.steps)).add_(self.eps)
            w.addcdiv_(m, root, value=-lr / (1 - beta1**self.steps))
            if w.dtype != param.dtype:
                param.copy_(w)  # the model computes with the rounded master weight

    def decay_of(self, param: nn.Parameter) -> float:
        return self.weight_decay if len(layout_of(param).full_shape) >= 2 else 0.0

    def zero_grad(self) -> None:
        zero_grads(self.params.values())

    def state_bytes(self) -> int:
        """Bytes beside the model: moments, and master weights that are not the model's own."""
        masters = [w for n, w in self.masters.items() if w.dtype != self.params[n].dtype]
        moments = [x for pair in self.moments.values() for x in pair]
        return sum(x.nbytes for x in masters + moments)


class LossScaler:
    """Keeps float16's gradients between its smallest number and its largest (no need in bfloat16).

    Below 6·10⁻⁸ a float16 gradient is 0, above 65,504 it is inf. So the loss is multiplied by a
    large number, and the float32 gradients are divided by it. If that was too much, somewhere,
    the *global* norm is not finite, on all ranks alike: all skip the step and halve the scale.

        scaler.scaled(loss).backward()
        scaler.unscale(params)
        norm = clip_by_global_norm(params, 1.0, all_reduce)
        if scaler.update(norm):
            optimizer.step()

    Source: Micikevicius et al. 2017, arXiv 1710.03740, section 3.2.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        if not scale > 0 or growth_interval < 1:
            raise ValueError(
                f"scale={scale!r} must be above 0, growth_interval={growth_interval!r} at least 1"
            )
        self.scale, self.growth_interval, self.good_steps = scale, growth_interval, 0

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    @torch.no_grad()
    def unscale(self, params: Iterable[Tensor]) -> None:
        for grad in map(grad_of, params):
            if grad is not None:
                grad.div_(self.scale)

    def update(self, norm: Tensor) -> bool:
        """Whether to step. Doubles the scale after `growth_interval` good steps in a row."""
        if not norm.isfinite():
            self.scale, self.good_steps = self.scale / 2, 0
            return False
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0
        return True


def cosine_lr(step: int, peak: float, warmup: int, total: int, floor: float = 0.0) -> float:
    """Up in a line over `warmup` steps, then down half a cosine to `floor` at step `total`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2


def global_norm(
    params: Iterable[Tensor], all_reduce: AllReduce | None = None, order: float = 2.0
) -> Tensor:
    """The norm of the whole model's gradient: one number, the same on all ranks.

    Each logical parameter counts once. Pieces of a cut parameter are summed over the axes it is cut
    over; one that is whole on every rank is not summed again (0.8 on two ranks is 0.8, not 1.13).
    A rank joins each sum even if its pieces have no gradient, else the others would wait for ever.
    `order` is 2, or math.inf for the largest entry.
    """
    if order not in (2.0, math.inf):
        raise ValueError(f"order must be 2 or inf, got {order}")
    op, join = ("sum", torch.add) if order == 2.0 else ("max", torch.maximum)
    by_axes: dict[tuple[str, ...], tuple[tuple[Axis, ...], Tensor]] = {}
    for param in params:
        layout, grad = layout_of(param), grad_of(param)
        axes = tuple(axis for axis in layout.cut_axes if axis.size > 1)
        if axes and all_reduce is None:
            raise ValueError(
                f"{layout.name} is cut over {axes[0].name}: the norm needs all_reduce, got None"
            )
        part = param.new_zeros((), dtype=main_dtype(param))
        if grad is not None and grad.numel() > 0:
            part = torch.linalg.vector_norm(grad, order, dtype=part.dtype)
        names = tuple(sorted(axis.name for axis in axes))
        _, so_far = by_axes.get(names, (axes, torch.zeros_like(part)))
        by_axes[names] = axes, join(so_far, part**2 if order == 2.0 else part)
    total = torch.zeros(())
    for names in sorted(by_axes):  # the same order on every rank
        axes, part = by_axes[names]
        for axis in sorted(axes, key=lambda axis: axis.name):
            all_reduce(part, axis, op)  # type: ignore[misc]
        total = join(total.to(part), part)
    return total.sqrt() if order == 2.0 else total


@torch.no_grad()
def clip_by_global_norm(
    params: Iterable[Tensor], max_norm: float, all_reduce: AllReduce | None = None
) -> Tensor:
    """Shrink all gradients by one factor to a global norm of at most `max_norm`; -> norm before."""
    params = list(params)
    norm = global_norm(params, all_reduce)
    factor = (max_norm / norm).clamp(max=1.0)
    for grad in map(grad_of, params):
        if grad is not None:
            grad.mul_(factor)
    return norm
