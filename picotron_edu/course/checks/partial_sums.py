"""Check of the sums that sequence parallelism needs: partial gradients, and the global norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from picotron_edu.course.checks.small_models import one_thread
from picotron_edu.course.checks.tensor_linears import flat, random
from picotron_edu.course.comparing import (
    assert_close,
    assert_keeps_to_axis,
    assert_messages,
    fail,
    run_each,
)
from picotron_edu.layout import Cut, Layout, attach
from picotron_edu.ranks import Axis

NORM, BIAS, PIECE, ROUTER, OTHER = 3, 2, 4, 2, 2  # numbers in each parameter, on each rank


@dataclass(frozen=True)
class Elsewhere:
    """An axis over which something else is partial."""

    name: str = "cp"
    size: int = 2
    index: int = 0
    ranks: tuple[int, ...] = (0, 1)


def parameters(axis: Axis, n: int) -> dict[str, nn.Parameter]:
    """A norm and a bias that are partial over the axis, and a bias, a router and another norm that
    are not: names do not tell.
    """
    layouts = {
        "norm": Layout("layers.0.norm.weight", (NORM,), partial_over=(axis, Elsewhere("dp"))),
        "piece": Layout("layers.0.q_proj.bias", (n * PIECE,), cuts=(Cut(0, axis),)),
        "router": Layout("layers.0.router.weight", (ROUTER,)),
        "other": Layout("images.norm.weight", (OTHER,), partial_over=(Elsewhere(),)),
        "bias": Layout("layers.0.o_proj.bias", (BIAS,), partial_over=(Elsewhere(), axis)),
    }
    return {
        name: attach(nn.Parameter(torch.zeros(layout.local_shape, dtype=torch.float64)), layout)
        for name, layout in layouts.items()
    }


@one_thread()
def parts_and_the_norm(sum_parts: Callable[..., Any], gradient_norm: Callable[..., Any]) -> str:
    for name, answer in (("sum_parts", sum_parts), ("gradient_norm", gradient_norm)):
        if not callable(answer):
            fail(f"expected the function {name}, got {answer!r}", "give its name, without calling")

    def on_rank(*args: Any) -> Tensor:
        *grads, axis = args
        params = parameters(axis, axis.size)
        for param, grad in zip(params.values(), grads):
            param.grad = None if grad is None else grad.clone()
        given, turn = [*params.values()], axis.size // 2 - 1  # their order does not tell
        given = given[turn:] + given[:turn]
        sum_parts(list(given), axis)
        for name, param in params.items():
            if param.grad is None or param.grad.shape != param.shape:
                shape = None if param.grad is None else tuple(param.grad.shape)
                fail(
                    f"{name}: expected a gradient of shape {tuple(param.shape)}, got {shape}",
                    "where a rank has None, the sum of the others' is its gradient, too",
                )
        before = flat([param.grad for param in params.values()]).clone()  # type: ignore[misc]
        norm = gradient_norm(list(given), axis)
        if not isinstance(norm, Tensor | float) or torch.as_tensor(norm).numel() != 1:
            fail(f"gradient_norm: expected one number, got {norm!r}", "it returns the norm")
        after = flat([param.grad for param in params.values()])  # type: ignore[misc]
        if not torch.equal(before, after):
            fail("gradient_norm has changed gradients", "all_reduce works in place: on a sum only")
        return torch.cat([before, torch.as_tensor(norm, dtype=torch.float64).detach().view(1)])

    for n in (2, 4):
        grads: dict[str, list[Any]] = {
            name: [random(seed + rank, length) for rank in range(n)]
            for name, seed, length in (
                ("norm", 10, NORM),
                ("piece", 20, PIECE),
                ("router", 30, ROUTER),
                ("other", 40, OTHER),
                ("bias", 50, BIAS),
            )
        }
        for name in ("router", "other"):  # complete, and so the same on all ranks of this axis
            grads[name] = [grads[name][0]] * n
        grads["bias"][0] = None  # took no part on rank 0
        inputs = [tuple(each[rank] for each in grads.values()) for rank in range(n)]
        run = run_each(on_rank, inputs, "every rank sends, also one without a gradient")
        sums = {
            "norm": torch.stack(grads["norm"]).sum(0),
            "bias": torch.stack(grads["bias"][1:]).sum(0),
        }
        whole = [*sums.values(), grads["router"][0], grads["other"][0]]
        squares = flat(whole).square().sum()
        cut = flat(grads["piece"]).square().sum()
        for rank in range(n):
            right = {name: sums.get(name, each[rank]) for name, each in grads.items()}
            got = run[rank].split([*(value.numel() for value in right.values()), 1])
            hints: dict[str, dict[float, str]] = {
                "norm": {1 / n: "the loss is one sum over all positions: sum, do not average"},
                "piece": {},
                "router": {n: "it is whole and complete: its layout is partial over nothing"},
                "other": {n: "it is partial over another axis, cp: not over this one"},
                "bias": {1 / n: "the loss is one sum over all positions: sum, do not average"},
            }
            mistakes = {
                "norm": {"it is a part: sum it over the ranks": grads["norm"][rank]},
                "piece": {
                    "the pieces of a cut weight belong to different channels: never add them": (
                        torch.stack(grads["piece"]).sum(0)
                    )
                },
            }
            for (name, value), found in zip(right.items(), got):
                assert_close(
                    value,
                    found,
                    rank=rank,
                    what=f"gradient of {name} on {n} ranks",
                    hints=hints[name],
                    mistakes=mistakes.get(name, {}),
                    hint="sum what is partial over this axis, and nothing else",
                )
            own = grads["piece"][rank].square().sum()
            assert_close(
                (squares + cut).sqrt(),
                got[-1][0],
                rank=rank,
                what=f"gradient_norm on {n} ranks",
                mistakes={
                    f"what is whole on every rank is counted {n} times": (
                        (n * squares + cut).sqrt()
                    ),
                    "that is this rank's part: pieces of the others are missing": (
                        (squares + own).sqrt()
                    ),
                    "sum the squares over the ranks, then take the root": (
                        sum(g.square().sum().sqrt() for g in grads["piece"]) + squares.sqrt()
                    ),
                    "the root of the sum of squares: where is the root?": squares + cut,
                },
                hint="squares of the cut ones summed over the ranks, of the whole ones once",
            )
        assert_messages(
            run,
            {"all_reduce": 2},
            wire_bytes=2 * (n - 1) / n * 8 * (NORM + BIAS + 1),
            hints={
                "all_gather": "a sum over the ranks is an all_reduce",
                "reduce_scatter": "every rank needs the whole sum",
            },
            hint="one message for all partial gradients (torch.cat), and one number for the norm",
        )
        if n == 2:
            assert_keeps_to_axis(on_rank, inputs, run)
    return "parts are summed once, pieces never, and what is whole counts once in the norm"
