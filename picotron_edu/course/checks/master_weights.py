"""Check of an optimizer that keeps float32 master weights beside bfloat16 parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from picotron_edu.course.comparing import assert_close, brief, fail

Rule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # v, w, gradient -> new v, w


def weights_that_move(MasterSGD: Callable[..., Any]) -> str:
    one = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MasterSGD([one], lr=0.001, momentum=0.0)
    for _ in range(100):
        one.grad = torch.ones_like(one)
        optimizer.step()
    if one.dtype != torch.bfloat16:
        fail(
            f"expected the parameter to stay bfloat16, got {one.dtype}",
            "copy the master into it, which rounds: param.copy_(w)",
        )
    first(optimizer, "velocities")
    moved = not torch.equal(torch.as_tensor(first(optimizer, "masters")).double(), torch.ones(3))
    still = "1 - 0.001 is 1 in bfloat16: what adds up is a float32 weight that lives on"
    assert_close(
        torch.full((3,), 0.9),
        one,
        what="a bfloat16 weight of 1 after 100 steps down of 0.001",
        mistakes={"the model still holds old weights" if moved else still: torch.ones(3)},
        hint="w ← w − lr · v",
        rtol=2**-8,  # bfloat16
    )

    draw = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(6, generator=draw).to(dtype))
        for dtype in (torch.bfloat16, torch.float32)
    ]
    starts = [param.detach().double() for param in params]
    grads = [[torch.randn(6, generator=draw).to(param.dtype) for _ in range(5)] for param in params]
    optimizer = MasterSGD(params, lr=0.01, momentum=0.9)
    for i in range(5):
        for param, own in zip(params, grads):
            param.grad = own[i].clone()
        optimizer.step()
    for param, start, own, got in zip(
        params, starts, grads, (first(optimizer, "masters"), params[1])
    ):
        assert_close(
            after(start, own, right),
            got,
            what=f"{'float32 parameter' if param is got else 'masters[0]'}, after 5 steps",
            mistakes={hint: after(start, own, wrong) for hint, wrong in WRONG.items()},
            hint="v ← momentum · v + gradient, then w ← w − lr · v, all in float32",
        )
    if not torch.equal(params[0], first(optimizer, "masters").to(torch.bfloat16)):
        fail(
            "the parameter, after 5 steps: "
            f"expected {brief(first(optimizer, 'masters').bfloat16())}, got {brief(params[0])}",
            "after a step the parameter is the master weight, rounded to bfloat16",
        )
    state = state_bytes(optimizer, params)
    if state != 6 * 8 + 6 * 4:
        fail(
            f"expected 72 bytes of state for 6 bfloat16 and 6 float32 weights, got {state}",
            "a float32 weight is its own master: no copy"
            if state == 96
            else "a master and a velocity, each in float32; a float32 weight is its own master",
        )

    frozen, trained = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = MasterSGD([frozen, trained], lr=0.5, momentum=0.9)
    trained.grad = torch.ones_like(trained)
    optimizer.step()
    assert_close([1, 1], frozen, what="weight without a gradient", hint="leave it as it is")
    assert_close(
        [0.5, 0.5], trained, what="weight after one without a gradient", hint="go on with the next"
    )
    return "100 steps of 0.001 make 0.1, with 8 bytes of state a bfloat16 weight"


def first(optimizer: Any, name: str) -> Tensor:
    """The first of `optimizer.masters` or `optimizer.velocities`, which must be float32."""
    tensors = getattr(optimizer, name, None)
    if not isinstance(tensors, (list, tuple)) or not isinstance(tensors[0], Tensor):
        hint = "one for each parameter, in their order"
        fail(f"expected a list of tensors in self.{name}, got {brief(tensors)}", hint)
    if tensors[0].dtype != torch.float32:
        hint = "what adds up is kept in float32: in bfloat16 1 - 0.001 is 1"
        fail(f"expected {name}[0] in torch.float32, got {tensors[0].dtype}", hint)
    return tensors[0]


def after(start: Tensor, grads: Iterable[Tensor], rule: Rule) -> Tensor:
    """The weight after a step of `rule` for each gradient, with lr = 0.01 and momentum = 0.9."""
    w, v = start, torch.zeros_like(start)
    for grad in grads:
        v, w = rule(v, w, grad.double())
    return w


def right(v: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    v = 0.9 * v + grad
    return v, w - 0.01 * v


def rounded(x: Tensor) -> Tensor:
    """As bfloat16 would have it."""
    return x.bfloat16().double()


def rounded_update(v: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    v = 0.9 * v + grad
    return v, w - rounded(0.01 * v)


def rounded_master(v: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    v, w = right(v, w, grad)
    return v, rounded(w)


def dampened(v: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    v = 0.9 * v + 0.1 * grad
    return v, w - 0.01 * v


def forgotten_velocity(v: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return v, w - 0.01 * grad


WRONG: Mapping[str, Rule] = MappingProxyType(
    {
        "lr · v was rounded to bfloat16: compute it in float32": rounded_update,
        "the master must never be rounded: only the parameter is": rounded_master,
        "v ← momentum · v + gradient: all of the gradient": dampened,
        "v must live on from step to step": forgotten_velocity,
    }
)


def state_bytes(optimizer: Any, params: list[nn.Parameter]) -> int:
    """Bytes of all tensors that the optimizer holds beside parameters and gradients."""
    theirs = {x.untyped_storage().data_ptr() for p in params for x in (p, p.grad) if x is not None}
    found: dict[int, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, torch.optim.Optimizer):
            look(value.state)
        elif isinstance(value, dict):
            look(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                look(item)

    look(vars(optimizer))
    return sum(nbytes for place, nbytes in found.items() if place not in theirs)
