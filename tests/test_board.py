"""The notice board alone: who can never go on, and who means something else. No ranks needed."""

import time

import pytest

from picotron_edu.ranks.board import FAILED, RETURNED, WORKING, Board, Mismatch
from picotron_edu.ranks.slots import AXES, HISTORY


class Table:
    """All ranks of a pretended run, with one board each over the same file."""

    def __init__(self, folder, n: int) -> None:
        self.parent = Board(folder / "board", n)
        self.ranks = [Board(folder / "board", n, rank) for rank in range(n)]
        self.world = tuple(range(n))
        for board in self.ranks:
            board.set_state(WORKING)

    def call(self, rank, what="all_reduce", axis="world", ranks=None, wait=True):
        """`rank` makes a collective call, and waits for it; returns what unblocks it."""
        ranks = self.world if ranks is None else ranks
        self.ranks[rank].note(what, axis, f"train.py:{rank + 1}")
        group = self.ranks[rank].enter(axis, ranks, what)
        if wait:
            self.ranks[rank].block(group, [])
        return group

    def message(self, rank, kind, peer, what="float32[4]", wait=True):
        """`rank` sends to or receives from `peer`."""
        self.ranks[rank].note(f"{kind} {what}", "world", f"train.py:{rank + 1}")
        posted = [self.ranks[rank].post(peer, kind, what)]
        if wait:
            self.ranks[rank].block(None, posted)
        return posted

    @property
    def stuck(self) -> list[int]:
        return [rank for rank, _ in self.parent.deadlock()]


@pytest.fixture
def table(tmp_path):
    return lambda n: Table(tmp_path, n)


# ---- can this wait ever end? ---------------------------------------------------------------------


def test_two_that_both_send_first_are_stuck(table):
    t = table(3)
    t.message(0, "send", 1)
    assert t.stuck == []  # rank 1 is at work and may still receive
    t.message(1, "send", 0)
    assert t.stuck == [0, 1]


def test_two_that_both_receive_first_are_stuck(table):
    t = table(2)
    t.message(0, "receive", 1)
    t.message(1, "receive", 0)
    assert t.stuck == [0, 1]


@pytest.mark.parametrize("n", [3, 4, 8])
def test_a_ring_of_sends_is_stuck_once_it_is_closed(table, n):
    t = table(n)
    for rank in range(n):
        assert t.stuck == []
        t.message(rank, "send", (rank + 1) % n)
    assert t.stuck == list(range(n))


def test_a_send_and_its_receive_free_each_other(table):
    t = table(2)
    t.message(0, "send", 1)
    t.message(1, "receive", 0)
    assert t.stuck == []


def test_who_waits_behind_a_deadlock_is_stuck_too(table):
    t = table(4)
    t.message(0, "send", 1)
    t.message(1, "send", 0)
    t.message(2, "receive", 0)
    assert t.stuck == [0, 1, 2]  # rank 3 is at work


def test_who_waits_for_a_rank_that_has_returned_is_stuck(table):
    t = table(3)
    t.call(0)
    t.call(1)
    assert t.stuck == []
    t.ranks[2].set_state(RETURNED)
    assert t.stuck == [0, 1]
    assert t.parent.blockers(0) == {2}


def test_who_waits_for_a_failed_rank_is_stuck(table):
    t = table(2)
    t.message(0, "receive", 1)
    t.ranks[1].set_state(FAILED)
    assert t.stuck == [0]


def test_a_rank_that_returned_after_its_call_keeps_nobody(table):
    t = table(2)
    group = t.call(1)
    t.call(0)
    t.ranks[1].unblock(group, [])
    t.ranks[1].set_state(RETURNED)
    assert t.stuck == [] and t.parent.blockers(0) == set()


def test_a_rank_at_work_may_still_come(table):
    t = table(4)
    for rank in range(3):
        t.call(rank)
    assert t.stuck == []
    assert t.parent.blockers(0) == {3}


def test_a_satisfied_wait_is_no_deadlock(table):
    t = table(2)
    groups = [t.call(rank) for rank in range(2)]
    assert t.stuck == []  # both have come: they are about to go on
    for rank in range(2):
        t.ranks[rank].unblock(groups[rank], [])
    t.call(0)
    assert t.stuck == []


def test_a_collective_against_a_send_is_stuck(table):
    t = table(2)
    t.call(0)
    t.message(1, "send", 0)
    assert t.stuck == [0, 1]


def test_two_axes_taken_in_another_order_are_stuck(table):
    t = table(4)  # a grid of 2 × 2: rank 0 does rows first, its neighbours columns first
    t.call(0, axis="tp", ranks=(0, 1))
    t.call(1, axis="dp", ranks=(1, 3))
    t.call(3, axis="tp", ranks=(2, 3))
    assert t.stuck == []
    t.call(2, axis="dp", ranks=(0, 2))
    assert t.stuck == [0, 1, 2, 3]


def test_two_axes_taken_in_the_same_order_are_not(table):
    t = table(4)
    for rank, row in enumerate([(0, 1), (0, 1), (2, 3), (2, 3)]):
        group = t.call(rank, axis="tp", ranks=row)
        if rank % 2:
            for member, place in ((rank - 1, 0), (rank, group[0])):
                t.ranks[member].unblock((place, 1), [])
    for rank in range(3):
        t.call(rank, axis="dp", ranks=(rank % 2, rank % 2 + 2))
    assert t.stuck == []
    t.call(3, axis="dp", ranks=(1, 3))
    assert t.stuck == []


def test_two_axes_of_the_same_ranks_do_not_stand_for_each_other(table):
    t = table(2)
    t.call(0, axis="dp")
    t.call(1, axis="tp")
    assert t.stuck == [0, 1]


def test_calls_under_way_count_from_when_they_began_not_from_the_wait(table):
    t = table(2)
    first = t.call(0, wait=False)
    t.call(0, wait=False)
    assert t.stuck == []
    t.ranks[0].block(first, [])  # late
    assert t.parent.blockers(0) == {1}
    t.call(1, wait=False)
    assert t.parent.blockers(0) == set()
    second = t.call(1)  # rank 1 waits for its second call: rank 0 has made it long ago
    assert second[1] == 2 and t.parent.blockers(1) == set() and t.stuck == []


def test_messages_under_way_free_each_other_in_any_order_of_waits(table):
    t = table(2)
    posted = {r: t.message(r, "send", 1 - r, wait=False) for r in range(2)}
    for rank in range(2):
        posted[rank] += t.message(rank, "receive", 1 - rank, wait=False)
    for rank in range(2):
        t.ranks[rank].block(None, posted[rank][::-1])
    assert t.stuck == []


def test_the_second_message_needs_a_second_receive(table):
    t = table(2)
    t.message(0, "send", 1, wait=False)
    t.message(1, "receive", 0)
    assert t.stuck == []
    t.message(0, "send", 1)
    assert t.parent.blockers(0) == {1}
    t.ranks[1].set_state(RETURNED)
    assert t.stuck == [0]


def test_a_deadlock_is_proven_by_versions_that_stand_still(table):
    t = table(2)
    t.message(0, "send", 1)
    t.message(1, "send", 0)
    before = t.parent.deadlock()
    assert before == t.parent.deadlock()
    t.ranks[0].set_state(WORKING)
    t.message(0, "send", 1)
    assert t.parent.deadlock() != before


# ---- do we all mean the same? --------------------------------------------------------------------


def test_who_comes_second_finds_that_the_calls_differ(table):
    t = table(3)
    t.call(0, "all_reduce(float32[2], sum)")
    t.call(1, "all_reduce(float32[2], sum)")
    with pytest.raises(Mismatch, match=r"rank 0 makes another call than barrier over axis 'world'"):
        t.call(2, "barrier")


def test_calls_are_compared_by_their_number_not_by_the_moment(table):
    t = table(2)
    for what in ("a", "b", "c"):
        t.call(0, what, wait=False)
    t.call(1, "a")  # rank 0 is two calls ahead
    t.call(1, "b")
    with pytest.raises(Mismatch):
        t.call(1, "d")


def test_calls_on_other_axes_are_not_compared(table):
    t = table(4)
    t.call(0, "a", "tp", (0, 1))
    t.call(2, "b", "tp", (2, 3))  # the same name, another line of the grid
    t.call(1, "c", "dp", (1, 3))
    t.call(1, "a", "tp", (0, 1))
    t.call(3, "b", "tp", (2, 3))
    with pytest.raises(Mismatch):
        t.call(3, "a", "dp", (1, 3))


def test_messages_are_compared_by_their_number_whoever_comes_first(table):
    t = table(2)
    t.message(0, "send", 1, "float32[2]", wait=False)
    t.message(0, "send", 1, "int64[3]", wait=False)
    t.message(1, "receive", 0, "float32[2]", wait=False)
    t.message(1, "receive", 0, "int64[3]", wait=False)
    t.message(1, "receive", 0, "float32[8]", wait=False)
    with pytest.raises(Mismatch, match=r"rank 0 sends float32\[4\], rank 1 receives something"):
        t.message(0, "send", 1, "float32[4]")


def test_the_parts_of_an_all_to_all_do_not_count_as_messages(table):
    t = table(2)
    t.message(0, "send", 1, "float32[2]", wait=False)  # still under way when both exchange rows
    t.ranks[0].post(1, "give", "3 rows")
    t.ranks[1].post(0, "take", "3 rows")
    t.message(1, "receive", 0, "float32[2]")
    assert t.stuck == []
    t.ranks[0].post(1, "give", "3 rows")
    with pytest.raises(Mismatch, match="rank 1 takes 4 rows, rank 0 gives something else"):
        t.ranks[1].post(0, "take", "4 rows")


def test_one_that_runs_far_ahead_is_not_compared_with_what_is_forgotten(table):
    t = table(2)
    for k in range(2 * HISTORY):
        t.call(0, f"call {k}", wait=False)
        t.message(0, "send", 1, f"message {k}", wait=False)
    for k in range(2 * HISTORY):
        t.call(1, f"call {k}", wait=False)
        t.message(1, "receive", 0, f"message {k}", wait=False)
    assert t.ranks[1].entries(t.world, (0, 1), [])[0] == 0.0
    with pytest.raises(Mismatch):
        t.call(0, "call", wait=False)
        t.call(1, "another call", wait=False)


def test_more_axes_than_the_board_holds(table):
    t = table(2)
    for k in range(AXES):
        t.call(0, axis=f"axis {k}")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"rank 0 talks over more than {AXES} axes"):
            t.call(0, axis="one more")
    t.call(0, axis="axis 3")  # those it has still work


# ---- who came last, and the report ---------------------------------------------------------------


def test_who_came_last_to_a_call_and_when(table):
    t = table(3)
    moments = []
    for rank in (2, 0, 1):
        group = t.call(rank)
        moments.append(time.perf_counter())
        time.sleep(0.002)
    entries = t.ranks[0].entries(t.world, group, [])
    assert max(entries, key=entries.get) == 1
    assert moments[1] < entries[1] <= moments[2]
    t.call(0, wait=False)
    assert t.ranks[0].entries(t.world, (0, 2), [])[1] is None


def test_who_came_last_to_a_message(table):
    t = table(2)
    posted = t.message(0, "receive", 1)
    assert t.ranks[0].entries(t.world, None, posted)[1] is None
    time.sleep(0.002)
    t.message(1, "send", 0)
    entries = t.ranks[0].entries(t.world, None, posted)
    assert entries[1] > entries[0]


def test_the_report_tells_of_every_rank(table):
    t = table(4)
    t.call(0, "barrier", "dp", (0, 1))
    t.message(1, "receive", 0)
    t.ranks[2].set_state(RETURNED)
    t.ranks[3].note("all_reduce(float32[2], sum)", "tp", "train.py:7")
    t.ranks[3].set_state(FAILED)
    report = t.parent.report()
    assert str(report[0]) == "  rank 0 waits in barrier over axis 'dp' at train.py:1"
    assert str(report[1]) == "  rank 1 waits in receive float32[4] over axis 'world' at train.py:2"
    assert "rank 2 has returned: it will not join" in str(report[2])
    assert "calls all_reduce(float32[2], sum) over axis 'tp' at train.py:7" in str(report[3])
    assert [wait.blocked for wait in report] == [True, True, False, False]


def test_a_text_longer_than_its_field_is_cut_not_broken(table):
    t = table(2)
    for before in ("", "x"):  # the cut may fall inside a letter of two bytes
        t.ranks[0].note(before + "é" * 200, before + "ä" * 50, "ö" * 200 + f"/train{before}.py:3")
        t.ranks[0].block(None, [])
        wait = t.parent.report()[0]
        assert wait.what.startswith(f"waits in {before}ééé")
        assert wait.line.endswith(f"/train{before}.py:3")


def test_the_board_can_be_read_while_it_is_written(table):
    import threading

    t = table(2)
    done = threading.Event()

    def write():
        while not done.is_set():
            group = t.call(0)
            t.ranks[0].unblock(group, [])
            group = t.call(1)
            t.ranks[1].unblock(group, [])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            assert t.stuck == [] and len(t.parent.report()) == 2
    finally:
        done.set()
        writer.join()
