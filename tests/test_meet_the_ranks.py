"""Chapter 00: the ring equals all_reduce and sends what it says; its breaks explain themselves;
its script runs alone, on ranks of its own and under torchrun.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from picotron_edu.ranks import (
    Mesh,
    RankFailed,
    RanksHung,
    all_gather,
    all_reduce,
    launch,
    reduce_scatter,
    send_recv,
    world,
)
from picotron_edu.ranks import ring as ring_file
from picotron_edu.ranks.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from picotron_edu.show.prediction import prediction

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "notebooks/00_meet_the_ranks.py"


def mine(*shape, dtype=torch.float64):
    """Whole numbers, small and different on every rank: sums are exact in every dtype."""
    start = 3 * world().index + 1
    return (torch.arange(torch.Size(shape).numel()) % 5 + start).reshape(shape).to(dtype)


def unequal():
    """Every case on one set of ranks: (case, what the ring made, what all_reduce made)."""
    axis, results = world(), []
    shapes = [(1,), (2,), (5,), (12,), (7, 3), (0,), (), (2, 0)]
    for shape in shapes:
        results.append((shape, ring_all_reduce(mine(*shape), axis), all_reduce(mine(*shape), axis)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x = mine(11, dtype=dtype)
        results.append((dtype, ring_all_reduce(x.clone(), axis), all_reduce(x, axis)))
    return results


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ring_equals_all_reduce_for_any_shape_and_dtype(n):
    for values in launch(unequal, world_size=n, quiet=True):
        for case, ours, expected in values:
            assert ours.dtype == expected.dtype and ours.shape == expected.shape, case
            assert torch.equal(ours, expected), case


def strided():
    table = mine(3, 4)
    column = table[:, 1]
    returned = ring_all_reduce(column, world())
    turned = mine(3, 4).t()
    ring_all_reduce(turned, world())
    return returned is column, table, turned, all_reduce(mine(3, 4), world())


@pytest.mark.parametrize("n", [2, 3])
def test_ring_works_in_place_on_a_column_and_leaves_its_neighbours_alone(n):
    run = launch(strided, world_size=n, quiet=True)
    for rank, (same, table, turned, total) in enumerate(run):
        assert same
        assert torch.equal(table[:, 1], total[:, 1])
        untouched = (torch.arange(12) % 5 + 3 * rank + 1).reshape(3, 4).double()
        assert torch.equal(table[:, [0, 2, 3]], untouched[:, [0, 2, 3]])
        assert torch.equal(turned, total.t())


def on_both_axes():
    mesh = Mesh(dp=2, tp=2)
    return [
        ring_all_reduce(torch.tensor([10.0**mesh.rank]), axis).item()
        for axis in (mesh.tp, mesh.dp, mesh.pp)
    ]


def test_ring_stays_in_its_group_also_where_rank_0_is_not_in_it():
    assert launch(on_both_axes, quiet=True).values == [
        [11, 101, 1],
        [11, 1010, 10],
        [1100, 101, 100],
        [1100, 1010, 1000],
    ]


def a_parameter():
    x = mine(6).requires_grad_()
    return ring_all_reduce(x, world()) is x, x.requires_grad, x


def test_ring_sums_a_parameter_outside_of_its_graph():
    for same, kept, x in launch(a_parameter, world_size=2, quiet=True):
        assert same and kept
        assert x.tolist() == [5, 7, 9, 11, 13, 5]


def rounding():
    return ring_all_reduce(torch.randn(1001), world())


def test_all_ranks_hold_the_same_bits_after_the_ring():
    first, *others = launch(rounding, quiet=True)
    assert first.std() > 1
    for other in others:
        assert torch.equal(first, other)


def halves():
    axis, n = world(), world().size
    x = mine(2 * n, 3)
    pairs = [
        (ring_reduce_scatter(x, axis), reduce_scatter(x, axis)),
        (ring_reduce_scatter(mine(3, n).t(), axis), reduce_scatter(mine(3, n).t(), axis)),
        (ring_all_gather(x, axis), all_gather(x, axis)),
        (ring_all_gather(mine(0, 2), axis), all_gather(mine(0, 2), axis)),
    ]
    return pairs, torch.equal(x, mine(2 * n, 3))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_two_halves_equal_their_collectives_and_leave_the_input_alone(n):
    for pairs, untouched in launch(halves, world_size=n, quiet=True):
        assert untouched
        for ours, expected in pairs:
            assert torch.equal(ours, expected)


def test_reduce_scatter_says_which_numbers_do_not_fit():
    with pytest.raises(RankFailed, match=r"shape \[5\] into axis.size=2 equal pieces"):
        launch(lambda: ring_reduce_scatter(torch.ones(5), world()), world_size=2, quiet=True)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("numel", [12, 13])
def test_ring_sends_the_bytes_and_steps_of_the_formula(n, numel):
    run = launch(lambda: ring_all_reduce(mine(numel), world()), world_size=n, quiet=True)
    (row,) = run.trace.ledger().rows
    assert row.operation == "send_recv"
    assert row.calls == 2 * (n - 1)
    assert row.wire_bytes * n == pytest.approx(2 * (n - 1) * 8 * numel, abs=1e-9)
    if numel % n == 0:
        sent = {run.trace.wire_bytes(rank=r) for r in range(n)}
        assert sent == {2 * (n - 1) / n * 8 * numel}
        assert {e.payload_bytes for e in run.trace} == {8 * numel / n}


@pytest.mark.parametrize("half", [ring_reduce_scatter, ring_all_gather])
def test_each_half_sends_half(half):
    def work():
        half(torch.ones(12 if half is ring_reduce_scatter else 4), world())

    trace = launch(work, world_size=3, quiet=True).trace
    assert trace.wire_bytes(rank=1) == 2 / 3 * 48
    assert len(trace.of(rank=1)) == 2


def test_the_ring_all_reduce_is_at_most_25_lines_of_code():
    code = set()
    for function in (ring_file.once_round, ring_file.ring_all_reduce):
        (tree,) = ast.parse(inspect.getsource(function)).body
        assert isinstance(tree, ast.FunctionDef)
        tree.body = tree.body[1:]  # the docstring
        code |= {(function, line) for line in ast.unparse(tree).splitlines()}
    assert len(code) <= 25


# ---- breaks ------------------------------------------------------------------------------------


def reversed_on_rank_2():
    axis = world()
    step = -1 if axis.index == 2 else 1
    right, left = (axis.index + step) % axis.size, (axis.index - step) % axis.size
    buffer = torch.empty(1)
    send_recv(axis, [(torch.ones(1), right)], [(buffer, left)])


def test_a_rank_that_turns_the_ring_the_other_way_is_found_waiting():
    with pytest.raises(RanksHung, match="wait for each other for ever") as caught:
        launch(reversed_on_rank_2, quiet=True)
    assert "send float32[1] to rank 1, receive float32[1] from rank 3" in caught.value.waits[2].what


def test_a_rank_that_skips_the_ring_is_named():
    def work():
        if world().index != 1:
            ring_all_reduce(torch.ones(4), world())

    with pytest.raises(RanksHung) as caught:
        launch(work, world_size=2, quiet=True)
    assert "has returned" in caught.value.waits[1].what
    assert Path(caught.value.waits[0].line.split(",")[0]).name == Path(__file__).name


def test_unequal_sizes_are_a_disagreement_not_wrong_numbers():
    def work():
        ring_all_reduce(torch.ones(4 + 4 * world().index), world())

    with pytest.raises(RanksHung, match="do not agree"):
        launch(work, world_size=2, quiet=True)


# ---- the script --------------------------------------------------------------------------------

QUICK = ["--max-bytes", "4096", "--repeats", "1"]


def run_script(*command):
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("n", [1, 2, 4])
def test_script_under_torchrun(n):
    text = run_script(
        "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", SCRIPT, *QUICK
    )
    expect_report(text, n)


@pytest.mark.parametrize("n", [1, 4])
def test_script_alone(n):
    expect_report(run_script(SCRIPT, *QUICK, "--nproc", str(n)), n)


def expect_report(text, n):
    assert f"{n} rank{'s' * (n > 1)} on c" in text
    assert text.count("the ring sums like all_reduce") == 1, "only rank 0 prints"
    rows = [line.split() for line in text.splitlines() if "µs" in line and "alpha" not in line]
    if n == 1:
        assert rows == [] and "--nproc 2" in text
        return
    sent = {int(row[0].replace(",", "")): int(row[1].replace(",", "")) for row in rows}
    assert sent == {size: 2 * (n - 1) * size / n for size in (64, 256, 1024, 4096)}
    assert text.count("alpha") == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-bytes", "12"], "--max-bytes=12: must be from 256 to 1073741824"),
        (["--repeats", "0"], "--repeats=0: must be 1 or more"),
        (["--repeats", "ten"], "'ten' is not a whole number"),
    ],
)
def test_script_refuses_a_wrong_flag_before_any_rank_starts(flags, message):
    command = [sys.executable, SCRIPT, "--nproc", "2", *flags]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""


# ---- prediction --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((96, 96, "bytes"), "you said 96 bytes, it is 96 bytes: exactly right\n"),
        ((64, 96, "bytes"), "you said 64 bytes, it is 96 bytes: 1.5 times too low\n"),
        ((3000, 2, ""), "you said 3,000, it is 2: 1,500 times too high\n"),
        ((1e-3, 1.05e-3, "seconds"), "you said 1 ms, it is 1.05 ms: close, within 5 %\n"),
        ((0, 96, "bytes"), "you said 0 bytes, it is 96 bytes: 96 off\n"),
    ],
)
def test_a_prediction_is_told_how_far_off_it_is(capsys, arguments, text):
    prediction(*arguments)
    assert capsys.readouterr().out == text


def test_a_prediction_left_open_asks_for_a_number():
    with pytest.raises(TypeError, match=r"your guess is still \.\.\.: put a number in place"):
        prediction(..., 3)
