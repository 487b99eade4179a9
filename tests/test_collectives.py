"""Every message against plain local computation: all types, strides, sub-groups, empty parts."""

import sys
import time

import cloudpickle
import pytest
import torch
from expect import expect, the_axis
from torch import Tensor

from picotron_edu.ranks import (
    Axis,
    Mesh,
    RanksHung,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    copy_to,
    exchange,
    gather,
    launch,
    receive,
    reduce_from,
    reduce_scatter,
    scatter_sum,
    send,
    send_recv,
    split,
    world,
)
from picotron_edu.ranks.handle import Handle

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

AXES = [(2, "world"), (3, "world"), (4, "world"), (4, "tp"), (4, "dp")]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.uint8]
LAYOUTS = ["contiguous", "transposed", "column", "every second row"]
TYPES = (*FLOATS, *INTEGERS, torch.bool, *FP8)
CASES = {(torch.float32, layout) for layout in LAYOUTS} | set(zip(TYPES, LAYOUTS * 3))
OPS = {
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0),
}


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, another draw on each rank: exact in every type, also multiplied."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def laid_out(values: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor equal to `values`, the memory it is a view of, and the neighbours in there."""
    if layout == "contiguous" or not values.dim():
        memory = values.clone()
        return memory, memory, torch.zeros_like(memory, dtype=torch.bool)
    if layout == "transposed":
        memory = values.t().contiguous()
        return memory.t(), memory, torch.zeros_like(memory, dtype=torch.bool)
    if layout == "column":
        memory, at = values.new_ones(*values.shape, 3), (..., 1)
    else:
        memory, at = values.new_ones(2 * len(values), *values.shape[1:]), (slice(0, None, 2),)
    memory[at] = values
    neighbours = torch.ones_like(memory, dtype=torch.bool)
    neighbours[at] = False
    return memory[at], memory, neighbours


def reduced(values: list[Tensor], op: str) -> Tensor:
    return OPS[op](torch.stack([v.double() for v in values])).to(values[0].dtype)


def ops_for(dtype: torch.dtype) -> list[str]:
    if dtype in FP8:
        return []
    if dtype == torch.bool:
        return ["max", "min", "prod"]
    return list(OPS) if dtype.is_floating_point else ["sum", "max", "min", "prod"]


def try_every_wrapper(axis_name: str) -> int:
    """On one axis: each wrapper on each type and memory layout; returns the number of checks."""
    axis, checks = the_axis(axis_name), 0
    n, me, ranks = axis.size, axis.index, axis.ranks
    for dtype, layout in sorted(CASES, key=str):
        every = [numbers(r, (2 * n, n), dtype) for r in ranks]
        what = f"{dtype} {layout} on {axis.name} {ranks}"

        def fresh(every=every, layout=layout, what=what):
            x, memory, neighbours = laid_out(every[me], layout)
            expect(x, every[me], what)
            return x, memory[neighbours].double(), lambda: memory[neighbours].double()

        for op in ops_for(dtype):
            x, before, after = fresh()
            result = all_reduce(x, axis, op)
            expect(result is x, True, f"all_reduce returns x, {what}")
            expect(x, reduced(every, op), f"all_reduce {op} {what}")
            expect(after(), before, f"neighbours in memory, all_reduce {what}")
            for dim in (0, 1, -1, -2):
                if every[me].shape[dim] % n == 0:
                    x, _, _ = fresh()
                    wanted = reduced(every, op).chunk(n, dim)[me]
                    expect(reduce_scatter(x, axis, dim, op), wanted, f"reduce_scatter {what}")
                    expect(x, every[me], f"reduce_scatter leaves x alone, {what}")
                    checks += 1
        for src in (0, n - 1):
            x, before, after = fresh()
            expect(broadcast(x, axis, src) is x, True, "broadcast returns x")
            expect(x, every[src], f"broadcast from place {src} {what}")
            expect(after(), before, f"neighbours in memory, broadcast {what}")
        x, _, _ = fresh()
        for dim in (0, 1, -1, -2):
            joined = torch.cat([v.double() for v in every], dim).to(dtype)
            expect(all_gather(x, axis, dim), joined, f"all_gather dim={dim} {what}")
        parts = torch.cat([v.double().chunk(n)[me] for v in every]).to(dtype)
        expect(all_to_all(x, axis), parts, f"all_to_all {what}")
        expect(x, every[me], f"gather and all_to_all leave x alone, {what}")
        right, left = (me + 1) % n, (me - 1) % n
        x, _, _ = fresh()
        buffer, memory, neighbours = laid_out(torch.zeros_like(every[me]), layout)
        before = memory[neighbours].double()
        (filled,) = send_recv(axis, [(x, right)], [(buffer, left)])
        expect(filled is buffer, True, "send_recv returns the buffers")
        expect(buffer, every[left], f"send_recv round a ring {what}")
        expect(memory[neighbours].double(), before, f"neighbours in memory, send_recv {what}")
        buffer, memory, neighbours = laid_out(torch.zeros_like(every[me]), layout)
        if me == 0:
            send(x, axis, to=n - 1)
        elif me == n - 1:
            receive(buffer, axis, source=0)
            expect(buffer, every[0], f"send and receive {what}")
            expect(memory[neighbours].double(), before, f"neighbours, receive {what}")
        checks += 10
    barrier(axis)
    return checks


@pytest.mark.parametrize("world_size, axis", AXES)
def test_every_wrapper_on_every_type_and_stride(world_size, axis):
    run = launch(try_every_wrapper, axis, world_size=world_size, quiet=True)
    assert min(run.values) > 150


def try_odd_shapes(axis_name: str) -> list[Tensor]:
    """Single numbers, tensors without elements, uneven parts, a rank without rows."""
    axis = the_axis(axis_name)
    n, me, ranks = axis.size, axis.index, axis.ranks
    number = torch.tensor(float(ranks[me] + 1))
    total = torch.tensor(float(sum(r + 1 for r in ranks)))
    expect(all_reduce(number.clone(), axis), total, "all_reduce of a number")
    expect(broadcast(number.clone(), axis, n - 1), torch.tensor(ranks[-1] + 1.0), "broadcast")
    wanted = torch.tensor([r + 1.0 for r in ranks])
    for dim in (0, -1):
        expect(all_gather(number, axis, dim), wanted, "all_gather of numbers")
    as_bytes = all_gather(number.to(FP8[0]), axis)
    expect(as_bytes, wanted.to(FP8[0]), "all_gather of fp8 numbers")
    expect(number, torch.tensor(float(ranks[me] + 1)), "all_gather leaves its input alone")

    for shape in [(0,), (0, 3), (n, 0)]:
        empty = torch.empty(shape)
        expect(all_reduce(empty, axis), empty, "all_reduce of nothing")
        expect(broadcast(empty, axis, n - 1), empty, "broadcast of nothing")
        expect(
            [*all_gather(empty, axis).shape], [n * shape[0], *shape[1:]], "all_gather of nothing"
        )
        expect([*reduce_scatter(empty, axis).shape], [shape[0] // n, *shape[1:]], "reduce_scatter")
        expect([*all_to_all(empty, axis).shape], [*shape], "all_to_all of nothing")
        (buffer,) = send_recv(axis, [(empty, (me + 1) % n)], [(empty.clone(), (me - 1) % n)])
        expect(buffer, empty, "send_recv of nothing")
    expect(send_recv(axis), [], "send_recv without messages")

    def counts(i: int) -> list[int]:  # the last place has no rows at all, others send some 0
        return [0] * n if i == n - 1 else [(i + 2 * j) % 3 for j in range(n)]

    received = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, *FP8):
        sent = [numbers(r, (sum(counts(i)), 2), dtype) for i, r in enumerate(ranks)]
        x = sent[me].t().contiguous().t()  # strided as well
        came = all_to_all(x, axis, counts(me), [counts(i)[me] for i in range(n)])
        parts = [s.double().split(counts(i))[me] for i, s in enumerate(sent)]
        expect(came, torch.cat(parts).to(dtype), f"uneven all_to_all of {dtype}")
        received.append(came.double())
    nothing = all_to_all(torch.ones(0, 2), axis, [0] * n, [0] * n)
    expect(nothing, torch.ones(0, 2), "an all_to_all in which nobody has anything")
    rows = n if me == 0 else 0  # all rows come from place 0
    only = all_to_all(torch.arange(float(rows)), axis, [rows // n] * n, [1] + [0] * (n - 1))
    expect(only, torch.tensor([float(me)]), "rows from one place only")
    return received


@pytest.mark.parametrize("world_size, axis", AXES)
def test_numbers_empty_tensors_and_parts_without_rows(world_size, axis):
    run = launch(try_odd_shapes, axis, world_size=world_size, quiet=True)
    for rank in range(world_size):  # the same once more, from what came home
        ranks = {"world": list(range(world_size)), "tp": [rank // 2 * 2, rank // 2 * 2 + 1]}
        ranks["dp"] = [rank % 2, rank % 2 + 2]
        places, n = ranks[axis], len(ranks[axis])
        me, parts = places.index(rank), []
        for i, r in enumerate(places[:-1]):
            counts = [(i + 2 * j) % 3 for j in range(n)]
            parts.append(numbers(r, (sum(counts), 2), torch.float64).split(counts)[me])
        assert torch.equal(run[rank][0], torch.cat(parts))


def try_handles() -> None:
    axis = world()
    n, me = axis.size, axis.index
    mine = torch.arange(4.0 * n) * (me + 1)
    total = torch.arange(4.0 * n) * sum(range(1, n + 1))
    strided = torch.stack([mine, mine], 1)[:, 0]
    buffer = torch.zeros(4 * n)
    handles = {
        "all_reduce": all_reduce(mine.clone(), axis, async_op=True),
        "strided": all_reduce(strided, axis, "avg", async_op=True),
        "all_gather": all_gather(mine, axis, async_op=True),
        "reduce_scatter": reduce_scatter(mine, axis, async_op=True),
        "all_to_all": all_to_all(mine, axis, async_op=True),
        "broadcast": broadcast(mine.clone(), axis, n - 1, async_op=True),
        "empty": all_reduce(torch.empty(0), axis, async_op=True),
        "send_recv": send_recv(
            axis, [(mine, (me + 1) % n)], [(buffer, (me - 1) % n)], async_op=True
        ),
    }
    wanted = {
        "all_reduce": total,
        "strided": total / n,
        "all_gather": torch.cat([torch.arange(4.0 * n) * (i + 1) for i in range(n)]),
        "reduce_scatter": total.chunk(n)[me],
        "all_to_all": torch.cat([(torch.arange(4.0 * n) * (i + 1)).chunk(n)[me] for i in range(n)]),
        "broadcast": torch.arange(4.0 * n) * n,
        "empty": torch.empty(0),
        "send_recv": torch.arange(4.0 * n) * ((me - 1) % n + 1),
    }
    order = list(handles)[::-1] if me % 2 else list(handles)  # each rank waits in its own order
    for name in order:
        handle = handles[name]
        expect(isinstance(handle, Handle), True, f"{name} gives a Handle")
        first = handle.wait()
        expect(handle.wait() is first, True, f"a second wait on {name} gives the same")
        (first,) = first if name == "send_recv" else (first,)
        expect(first, wanted[name], f"{name}, waited for out of order")
    many = [all_reduce(torch.tensor([float(k)]), axis, async_op=True) for k in range(200)]
    for k, handle in enumerate(many):  # more than the board remembers
        expect(handle.wait(), torch.tensor([float(k * n)]), "one of 200 messages under way")
    alone = Axis("tp", 1, 0, (0,))
    handle = all_reduce(mine, alone, async_op=True)
    expect(handle.wait() is handle.wait() is mine, True, "nobody to talk to")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_handles_waited_for_out_of_order_and_twice(world_size):
    launch(try_handles, world_size=world_size, quiet=True)


def test_a_column_view_is_reduced_without_touching_its_neighbours():
    def work():
        memory = torch.tensor([[1.0, 99.0], [2.0, 99.0]]) * torch.tensor([world().index + 1.0, 1.0])
        all_reduce(memory[:, 0], world())
        return memory

    for memory in launch(work, world_size=2, quiet=True):
        assert memory.tolist() == [[3.0, 99.0], [6.0, 99.0]]


def test_a_source_is_a_place_on_the_axis_not_a_global_rank():
    def work():
        tp, rank = the_axis("tp"), world().index
        sent = broadcast(torch.tensor([10.0 * rank]), tp, src=0)
        buffer = torch.zeros(1)
        if tp.index == 0:
            send(torch.tensor([rank + 0.5]), tp, to=1)
        else:
            receive(buffer, tp, source=0)
        return sent.item(), buffer.item(), all_gather(torch.tensor([rank]), tp).tolist()

    run = launch(work, world_size=4, quiet=True)
    assert run[2] == (20.0, 0.0, [2, 3])
    assert run[3] == (20.0, 2.5, [2, 3])
    assert run[1] == (0.0, 0.5, [0, 1])


def test_a_message_leaves_no_trace_in_autograd():
    def work():
        x = torch.ones(2, requires_grad=True)
        gathered = all_gather(x, world())
        with torch.no_grad():
            all_reduce(x, world())
        return gathered.requires_grad, reduce_scatter(x, world()).requires_grad, x

    for gathered, scattered, x in launch(work, world_size=2, quiet=True):
        assert not gathered and not scattered
        assert x.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_shift_by_send_recv_at_every_size(world_size):
    def work():
        axis, sums = world(), []
        for size in (1, 1000, 2_000_000):  # 4 bytes to 8 MB
            right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
            to_right, to_left = torch.full((size,), axis.index * 1.0), torch.full((size,), -1.0)
            from_left, from_right = torch.empty(size), torch.empty(size)
            # at world size 2 left is right: the messages match in the order given
            send_recv(
                axis,
                [(to_right, right), (to_left * axis.index, left)],
                [(from_left, left), (from_right, right)],
            )
            sums.append((from_left.unique().tolist(), from_right.unique().tolist()))
        return sums

    run = launch(work, world_size=world_size, quiet=True)
    for rank, sums in enumerate(run):
        left, right = (rank - 1) % world_size, (rank + 1) % world_size
        assert sums == [([float(left)], [-float(right)])] * 3


def test_several_messages_between_one_pair_arrive_in_the_order_given():
    def work():
        axis, other = world(), 1 - world().index
        a, b, c = torch.tensor([1.0]), torch.tensor([2, 3]), torch.tensor([[4.0, 5.0]])
        buffers = [torch.zeros(1), torch.zeros(2, dtype=torch.int64), torch.zeros(1, 2)]
        filled = send_recv(
            axis, [(x, other) for x in (a, b, c)], [(buffer, other) for buffer in buffers]
        )
        return [x.tolist() for x in filled]

    run = launch(work, world_size=2, quiet=True)
    assert run.values == [[[1.0], [2, 3], [[4.0, 5.0]]]] * 2


# ---- wrong arguments: refused before anything is sent --------------------------------------------

TP = Axis("tp", 4, 1, (4, 5, 6, 7))  # without a process group: whoever sends fails otherwise
X = torch.ones(4, 3)

WRONG = [
    (lambda: all_reduce(X, TP, "mean"), "op='mean': must be one of sum, avg, max, min, prod"),
    (lambda: reduce_scatter(X, TP, op="add"), "op='add': must be one of sum"),
    (lambda: all_reduce(X.to(FP8[0]), TP), "float8_e4m3fn cannot be .* op='sum': convert to bf"),
    (lambda: reduce_scatter(X.to(FP8[1]), TP), "float8_e5m2 cannot be .*: convert to bfloat16 or"),
    (lambda: all_reduce(X.to(torch.int16), TP), "int16 cannot be combined .* convert to int32"),
    (lambda: all_reduce(X.long(), TP, "avg"), "op='avg' on torch.int64: .* use 'sum'"),
    (lambda: all_reduce(X.bool(), TP), "op='sum' on bool: use 'max' for any, 'min' for all"),
    (lambda: all_reduce(X.cfloat(), TP, "max"), "op='max' on torch.complex64"),
    (lambda: all_reduce(torch.ones(1).expand(3), TP), r"x: a .* shape \[3\] that was expanded"),
    (lambda: broadcast(torch.ones(1).expand(3), TP), r"x: a .* shape \[3\] that was expanded"),
    (lambda: broadcast(X, TP, src=4), r"src=4: axis 'tp' has places 0 to 3 .*\(4, 5, 6, 7\)"),
    (lambda: broadcast(X, TP, src=-1), "src=-1: axis 'tp' has places 0 to 3"),
    (lambda: broadcast(X, TP, src=0.0), "src=0.0: axis 'tp' has places 0 to 3"),
    (lambda: all_gather(X, TP, dim=2), r"dim=2: a tensor of shape \[4, 3\] has dims -2 to 1"),
    (lambda: all_gather(torch.tensor(1), TP, dim=1), r"dim=1: .* shape \[\] has dims -1 to 0"),
    (lambda: reduce_scatter(X, TP, dim=-3), r"dim=-3: .* has dims -2 to 1"),
    (lambda: reduce_scatter(X, TP, dim=1), r"cuts dim=1 of shape \[4, 3\] into axis.size=4 equal"),
    (lambda: reduce_scatter(torch.tensor(1.0), TP), r"cuts dim=0 of shape \[\] into axis.size=4"),
    (lambda: all_to_all(X[:3], TP), r"cuts dim 0 of shape \[3, 3\] into axis.size=4 .* send_count"),
    (lambda: all_to_all(torch.tensor(1.0), TP), r"cuts dim 0 of shape \[\]"),
    (lambda: all_to_all(X, TP, [1, 1, 1, 1]), r"receive_counts=None: give both"),
    (lambda: all_to_all(X, TP, [2, 2], [1] * 4), r"send_counts=\[2, 2\]: must be 4 whole num"),
    (lambda: all_to_all(X, TP, [5, -1, 0, 0], [1] * 4), r"send_counts=\[5, -1, 0, 0\]: must be 4"),
    (lambda: all_to_all(X, TP, [1] * 4, [1] * 5), r"receive_counts=\[1, 1, 1, 1, 1\]: must be 4"),
    (lambda: all_to_all(X, TP, [2] * 4, [2] * 4), r"\[2, 2, 2, 2\] must sum to .* \[4, 3\]"),
    (lambda: all_to_all(X, TP, [1] * 4, [1, 2, 1, 1]), "differ at place 1, this rank itself"),
    (lambda: send(X, TP, to=1), "to=1 is this rank itself"),
    (lambda: send(X, TP, to=4), "to=4: axis 'tp' has places 0 to 3"),
    (lambda: receive(X, TP, source=1), "source=1 is this rank itself"),
    (lambda: send_recv(TP, [(X, 0)], [(X, 9)]), "source=9: axis 'tp' has places 0 to 3"),
    (lambda: receive(torch.ones(1).expand(3), TP, 0), "buffer: a tensor .* use buffer.contiguous"),
    (lambda: all_reduce(X, TP, ["sum"]), r"op=\['sum'\]: must be one of sum, avg"),
    (lambda: all_to_all(X, TP, [1.0] * 4, [1] * 4), r"send_counts=\[1.0, .*: must be 4 whole num"),
    (lambda: all_to_all(X, TP, [1] * 4, 1), "receive_counts=1: must be 4 whole numbers, none neg"),
    (lambda: send_recv(TP, (X, 0)), "sends=.*: sends must be a list of .tensor, place"),
    (lambda: send_recv(TP, [], (X, 0)), "receives=.*: receives must be a list of .tensor, place"),
    (lambda: send_recv(TP, [(3.0, 0)]), r"sends=\[\(3.0, 0\)\]: sends must be a list of"),
    (lambda: send_recv(TP, [(X.to_sparse(), 0)]), "sends: a tensor of torch.sparse_coo cannot"),
]

ONE_TENSOR = [
    all_reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    all_to_all,
    lambda x, axis: send(x, axis, 0),
    copy_to,
    reduce_from,
    gather,
    scatter_sum,
    split,
    exchange,
]
WRONG += [
    (lambda call=call, x=x, axis=axis: call(x, axis), message)
    for call in ONE_TENSOR
    for x, axis, message in (
        (3.0, TP, "x=3.0: must be a tensor"),
        ([1.0, 2.0], TP, r"x=\[1.0, 2.0\]: must be a tensor"),
        (X.to("meta"), TP, "x: a tensor on device 'meta' has no numbers"),
        (X.to_sparse(), TP, r"x: a tensor of torch.sparse_coo .*use x.to_dense\(\)"),
        (X, "tp", r"axis='tp': must be an Axis, such as world\(\) or mesh.tp"),
        (X, world, "axis=<function world .*: must be an Axis"),
        (X, Mesh(), "axis=Mesh.* rank 0 of 1: must be an Axis"),
        (X, torch.distributed.group.WORLD, "axis=.*: must be an Axis"),
    )
]
WRONG += [
    (lambda: receive(3.0, TP, 0), "buffer=3.0: must be a tensor"),
    (lambda: receive(X, world, 0), "axis=<function world .*: must be an Axis"),
    (lambda: send_recv("tp"), "axis='tp': must be an Axis"),
    (lambda: barrier(world), "axis=<function world .*: must be an Axis"),
]


@pytest.mark.parametrize("call, message", WRONG)
def test_a_wrong_argument_is_named_before_anything_is_sent(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_same_checks_hold_on_an_axis_of_one_rank():
    alone = Axis("tp", 1, 0, (0,))
    for call in (
        lambda: all_reduce(X, alone, "mean"),
        lambda: broadcast(X, alone, src=1),
        lambda: all_gather(X, alone, dim=2),
        lambda: all_to_all(X, alone, [4], [3]),
        lambda: send(X, alone, to=0),
    ):
        with pytest.raises(ValueError):
            call()
    assert all_gather(torch.tensor(2.0), alone).tolist() == [2.0]
    assert all_gather(X.to(FP8[0]), alone).dtype == FP8[0]


# ---- ranks that do not agree: found at once, both calls named ------------------------------------

SEND_4 = "send float32[4] to rank 1"
DISAGREE = {
    "shape": (
        lambda a: all_reduce(torch.ones(3 - a.index), a),
        ["all_reduce(float32[3], sum)", "all_reduce(float32[2], sum)"],
    ),
    "empty on one": (
        lambda a: all_reduce(torch.ones(2 * a.index), a),
        ["all_reduce(float32[0], sum)", "all_reduce(float32[2], sum)"],
    ),
    "dtype": (
        lambda a: all_gather(torch.ones(2).to([torch.float32, torch.bfloat16][a.index]), a),
        ["all_gather(float32[2], dim=0)", "all_gather(bfloat16[2], dim=0)"],
    ),
    "op": (
        lambda a: all_reduce(torch.ones(2), a, ["sum", "max"][a.index]),
        ["all_reduce(float32[2], sum)", "all_reduce(float32[2], max)"],
    ),
    "dim": (
        lambda a: reduce_scatter(torch.ones(2, 2), a, a.index),
        ["dim=0, sum)", "dim=1, sum)"],
    ),
    "operation": (
        lambda a: barrier(a) if a.index else all_reduce(torch.ones(2), a),
        ["all_reduce(float32[2], sum)", "barrier"],
    ),
    "src": (
        lambda a: broadcast(torch.ones(2), a, src=a.index),
        ["broadcast(float32[2], src=0)", "broadcast(float32[2], src=1)"],
    ),
    "all_to_all counts": (
        lambda a: all_to_all(
            torch.ones(3), a, [[1, 2], [1, 2]][a.index], [[1, 2], [2, 2]][a.index]
        ),
        ["[1, 2] rows sent, [1, 2] rows received", "[1, 2] rows sent, [2, 2] rows received"],
    ),
    "all_to_all row shape": (
        lambda a: all_to_all(torch.ones(2, 2 + a.index), a),
        ["all_to_all(rows of float32[2])", "all_to_all(rows of float32[3])"],
    ),
    "larger buffer": (
        lambda a: receive(torch.ones(8), a, 0) if a.index else send(torch.ones(4), a, 1),
        [SEND_4, "receive float32[8] from rank 0"],
    ),
    "smaller buffer": (
        lambda a: receive(torch.ones(2), a, 0) if a.index else send(torch.ones(4), a, 1),
        [SEND_4, "receive float32[2] from rank 0"],
    ),
    "dtype of buffer": (
        lambda a: receive(torch.ones(4).int(), a, 0) if a.index else send(torch.ones(4), a, 1),
        [SEND_4, "receive int32[4] from rank 0"],
    ),
    "send_recv": (
        lambda a: send_recv(a, [(torch.ones(2 + a.index), 1 - a.index)], [(X[:2, 0], 1 - a.index)]),
        ["send float32[2] to rank 1, receive float32[2]", "send float32[3] to rank 0, receive"],
    ),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_ranks_that_disagree_are_told_at_once_and_both_calls_are_named(case):
    call, named = DISAGREE[case]

    def work():
        axis = world()
        all_reduce(torch.ones(1), axis)
        call(axis)

    began = time.monotonic()
    with pytest.raises(RanksHung) as caught:
        launch(work, world_size=2, timeout=60, quiet=True)
    assert time.monotonic() - began < 10
    assert "do not agree" in str(caught.value)
    for rank, text in enumerate(named):
        assert text in caught.value.waits[rank].what
        assert "test_collectives.py" in caught.value.waits[rank].line


@pytest.mark.parametrize("size", [1, 2_000_000], ids=["4 bytes", "8 MB"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_sending_first_is_a_deadlock_at_every_size(world_size, size):
    def work():
        axis, buffer = world(), torch.empty(size)
        send(torch.ones(size), axis, to=(axis.index + 1) % axis.size)
        receive(buffer, axis, source=(axis.index - 1) % axis.size)

    began = time.monotonic()
    with pytest.raises(RanksHung, match="wait for each other for ever") as caught:
        launch(work, world_size=world_size, timeout=60, quiet=True)
    assert time.monotonic() - began < 10
    for rank, wait in enumerate(caught.value.waits):
        assert f"send float32[{size}] to rank {(rank + 1) % world_size}" in wait.what
        assert wait.blocked and "test_collectives.py" in wait.line


def test_taking_turns_is_no_deadlock():
    def work():
        axis, buffer = world(), torch.zeros(1)
        mine = torch.tensor([float(axis.index)])
        right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
        if axis.index == 0:
            receive(buffer, axis, left)
            send(mine, axis, right)
        else:
            send(mine, axis, right)
            receive(buffer, axis, left)
        return buffer.item()

    assert launch(work, world_size=3, quiet=True).values == [2.0, 0.0, 1.0]
