"""Autograd through messages: each backward against finite differences over all ranks together."""

import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from expect import expect, the_axis
from torch import Tensor

from picotron_edu.ranks import (
    Axis,
    all_gather,
    all_reduce,
    broadcast,
    copy_to,
    exchange,
    gather,
    launch,
    reduce_from,
    scatter_sum,
    split,
    world,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

AXES = [(2, "world"), (3, "world"), (4, "world"), (4, "tp")]


def rows(i: int, j: int, n: int) -> int:
    """How many rows place i sends to place j: some 0, and the last place sends nothing at all."""
    return 0 if i == n - 1 else (2 * i + j) % 3


def sends(i: int, n: int) -> list[int]:
    return [rows(i, j, n) for j in range(n)]


def receives(j: int, n: int) -> list[int]:
    return [rows(i, j, n) for i in range(n)]


def uneven(x: Tensor, axis: Axis) -> Tensor:
    return exchange(x, axis, sends(axis.index, axis.size), receives(axis.index, axis.size))


# name: the operation, and the shape of its input at place i of n. All are linear, and transposes
# for the sum of all ranks' losses.
PAIRS: dict[str, tuple[Callable, Callable]] = {
    "gather dim 0": (lambda x, a: gather(x, a), lambda i, n: (2, 3)),
    "gather dim 1": (lambda x, a: gather(x, a, 1), lambda i, n: (2, 1)),
    "gather dim -1": (lambda x, a: gather(x, a, -1), lambda i, n: (1, 2, 1)),
    "gather numbers": (lambda x, a: gather(x, a), lambda i, n: ()),
    "scatter_sum dim 0": (lambda x, a: scatter_sum(x, a), lambda i, n: (n, 2)),
    "scatter_sum dim 1": (lambda x, a: scatter_sum(x, a, 1), lambda i, n: (1, n)),
    "scatter_sum dim -2": (lambda x, a: scatter_sum(x, a, -2), lambda i, n: (n, 1)),
    "exchange even": (lambda x, a: exchange(x, a), lambda i, n: (n, 2)),
    "exchange uneven": (uneven, lambda i, n: (sum(sends(i, n)), 2)),
}


def draw(shape: tuple[int, ...], *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(s * 1000**i for i, s in enumerate(seed)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def total(x: Tensor, axis: Axis) -> float:
    """The sum over the ranks of a number each has computed."""
    return all_reduce(x.detach().clone(), axis).item()


def differences(f: Callable[[Tensor], Tensor], x: Tensor, axis: Axis, together: bool) -> Tensor:
    """d(sum of the ranks' f) / dx by central differences: run again on all ranks for each element.

    together: x is one logical tensor, equal on all ranks, and is moved on all of them at once.
    """
    step, values, places = 1e-4, [], range(1 if together else axis.size)
    sizes = all_gather(torch.tensor(x.numel()), axis).tolist()
    for place in places:
        for k in range(sizes[place]):
            for sign in (1, -1):
                moved = x.detach().clone()
                if together or place == axis.index:
                    moved.view(-1)[k] += sign * step
                values.append(f(moved).detach())
    up, down = all_reduce(torch.stack(values), axis).view(-1, 2).unbind(1)
    derivatives = ((up - down) / (2 * step)).split(sizes[: len(places)])
    return derivatives[0 if together else axis.index].view(x.shape)


def close(got: Tensor | None, wanted: Tensor, what: str) -> None:
    if got is None or got.shape != wanted.shape or not torch.allclose(got, wanted, atol=1e-8):
        raise AssertionError(f"{what}:\n got    {got}\n wanted {wanted}")


def try_pairs(axis_name: str) -> int:
    """Gradients of a smooth function through each pair, and <A x, y> = <x, A' y>, on this rank."""
    axis, checks = the_axis(axis_name), 0
    n, me = axis.size, axis.index
    for k, (name, (operation, shape)) in enumerate(PAIRS.items()):
        what = f"{name} at place {me} of {axis.name} {axis.ranks}"
        x = draw(shape(me, n), k, me).requires_grad_()
        out = operation(x, axis)
        weight = draw(tuple(out.shape), k, me, 1)  # other weights on each rank and element

        def loss(x: Tensor, operation=operation, weight=weight) -> Tensor:
            return (torch.sin(operation(x * x, axis)) * weight).sum()

        loss(x).backward()
        close(x.grad, differences(loss, x, axis, together=False), f"gradient of {what}")
        # the transpose, exactly: backward applied to y against forward applied to x
        (back,) = torch.autograd.grad(out, x, weight)
        forward, backward = (out * weight).sum(), (x * back).sum()
        wanted, got = total(forward, axis), total(backward, axis)
        if abs(got - wanted) > 1e-12 * (1 + abs(wanted)):
            raise AssertionError(f"<Ax, y> = {wanted} but <x, A'y> = {got}: {what}")
        checks += x.numel()
    return checks


@pytest.mark.parametrize("world_size, axis", AXES)
def test_each_backward_is_the_transpose(world_size, axis):
    run = launch(try_pairs, axis, world_size=world_size, quiet=True)
    assert all(checks >= 2 * 3 + 2 + 2 + 1 for checks in run)


def try_region(axis_name: str) -> None:
    """A parallel region: enter by copy_to or split, leave by reduce_from or gather."""
    axis = the_axis(axis_name)
    n, me = axis.size, axis.index
    x = draw((n, 2), 1).requires_grad_()  # one logical tensor, equal on all ranks
    mine, out = draw((n, 2), 2, me), draw((n, 2), 3)

    def copied(x: Tensor) -> Tensor:  # Megatron's f, another branch on each rank, Megatron's g
        return (torch.sin(reduce_from(torch.cos(copy_to(x, axis) * mine), axis)) * out).sum()

    copied(x).backward()
    # one loss, computed alike by every rank, counts once: the sum of the ranks' losses is n of them
    close(x.grad, differences(copied, x, axis, together=True) / n, f"copy_to, reduce_from {me}")

    def ended(x: Tensor) -> Tensor:  # without reduce_from: each rank's own loss, all count
        return (torch.sin(copy_to(x, axis)) * mine).sum()

    (grad,) = torch.autograd.grad(ended(x), x)
    close(grad, differences(ended, x, axis, together=True), "copy_to alone")

    part = draw((n, 2), 4, me).requires_grad_()

    def left(part: Tensor) -> Tensor:  # reduce_from alone: parts differ, the loss is one
        return (torch.sin(reduce_from(part * part, axis)) * out).sum()

    left(part).backward()
    close(part.grad, differences(left, part, axis, together=False) / n, "reduce_from alone")

    for dim in (0, -2):

        def cut(x: Tensor, dim: int = dim) -> Tensor:  # each rank its piece, all losses count
            piece = split(x, axis, dim)
            return (torch.sin(piece) * mine[: len(piece)]).sum()

        (grad,) = torch.autograd.grad(cut(x), x)
        close(grad, differences(cut, x, axis, together=True), f"split dim={dim}")
    y = draw((2, n), 5).requires_grad_()
    expect(split(y, axis, 1), y.detach().chunk(n, 1)[me], "split keeps this rank's piece")
    (grad,) = torch.autograd.grad(gather(split(y, axis, 1), axis, 1).sum(), y)
    close(grad, torch.full((2, n), float(n), dtype=torch.float64), "gather undoes split")

    # <A x, y> = <x, A' y> with the convention: x and the result of reduce_from are one tensor each
    (back,) = torch.autograd.grad(copy_to(x, axis), x, mine)
    ahead = total((x * mine).sum(), axis)
    close((x * back).sum(), torch.tensor(ahead, dtype=torch.float64), "transpose of copy_to")
    summed = reduce_from(part, axis)
    (back,) = torch.autograd.grad(summed, part, out)
    behind = torch.tensor(total((part * back).sum(), axis), dtype=torch.float64)
    close((summed * out).sum(), behind, "transpose of reduce_from")
    (back,) = torch.autograd.grad(piece := split(x, axis), x, mine[:1])
    ahead = total((piece * mine[:1]).sum(), axis)
    close((x * back).sum(), torch.tensor(ahead, dtype=torch.float64), "transpose of split")


@pytest.mark.parametrize("world_size, axis", AXES)
def test_a_parallel_region_has_the_gradient_of_the_joint_function(world_size, axis):
    launch(try_region, axis, world_size=world_size, quiet=True)


def test_plain_gather_has_no_gradient_and_autograd_gather_the_sum_of_all_losses():
    def work():
        p = torch.tensor([1.0], requires_grad=True)
        z = p * (world().index + 1)
        gather(z, world()).sum().backward()
        return all_gather(z, world()).requires_grad, p.grad.item()

    assert launch(work, world_size=2, quiet=True).values == [(False, 2.0), (False, 4.0)]


def test_backward_is_right_in_groups_without_rank_0():
    def work():
        tp, rank = the_axis("tp"), world().index
        p = torch.tensor([1.0], requires_grad=True)
        (gather(p * (rank + 1), tp) * (rank + 1)).sum().backward()
        start = broadcast(torch.tensor([float(rank)]), tp, src=0)
        return p.grad.item(), start.item()

    run = launch(work, world_size=4, quiet=True)
    # (rank + 1) times the sum of the group's weights: 1 + 2 and 3 + 4
    assert run.values == [(3.0, 0.0), (6.0, 0.0), (21.0, 2.0), (28.0, 2.0)]


def test_gradients_that_are_strided_or_expanded_travel():
    def work():
        axis, grads = world(), []
        for operation in (copy_to, reduce_from, gather, scatter_sum, split, exchange):
            for use in (lambda y: y.sum(), lambda y: (y.t() @ torch.ones(len(y))).sum()):
                x = torch.ones(2, 2, requires_grad=True)
                use(operation(x, axis)).backward()
                grads.append(x.grad.tolist())
        return grads

    ones, twos = [[1.0, 1.0]] * 2, [[2.0, 2.0]] * 2
    wanted = [twos, ones, twos, ones, ones, ones]
    for grads in launch(work, world_size=2, quiet=True):
        assert grads == [grad for grad in wanted for _ in range(2)]


def test_an_axis_of_one_rank_changes_nothing():
    alone = Axis("tp", 1, 0, (0,))
    for operation in (copy_to, reduce_from, gather, scatter_sum, split, exchange):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = operation(x, alone)
        (y * y).sum().backward()
        assert y.tolist() == [1.0, 2.0] and x.grad.tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, a: split(x, a, 0), r"split cuts dim=0 of shape \[3, 2\] into axis.size=2"),
        (lambda x, a: split(x, a, 2), r"dim=2: a tensor of shape \[3, 2\] has dims -2 to 1"),
        (lambda x, a: scatter_sum(x, a), r"cuts dim=0 of shape \[3, 2\] into axis.size=2"),
        (lambda x, a: gather(x, a, 5), "dim=5"),
        (lambda x, a: exchange(x, a), r"all_to_all cuts dim 0 of shape \[3, 2\]"),
        (lambda x, a: exchange(x, a, [1, 1], [1, 1]), r"send_counts=\[1, 1\] must sum to"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_sent(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(3, 2, requires_grad=True), Axis("tp", 2, 0, (0, 1)))
