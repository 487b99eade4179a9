"""What the ranks did, byte by byte and moment by moment, and the emulated network between them."""

import doctest
import importlib
import json
import pkgutil
import sys
import time

import cloudpickle
import jsonschema
import pytest
import torch

from picotron_edu import ranks
from picotron_edu.ranks import (
    Event,
    Link,
    Mesh,
    Trace,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    launch,
    receive,
    reduce_scatter,
    send,
    send_recv,
    span,
    wire_bytes,
    world,
)
from picotron_edu.ranks.handle import Handle
from picotron_edu.ranks.trace import MAX_EVENTS, Recorder, side_by_side

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest


# ---- bytes ---------------------------------------------------------------------------------------


def say_everything() -> None:
    axis = world()
    n, me = axis.size, axis.index
    x = torch.ones(12 * n, 2)  # 96 n bytes
    all_reduce(x, axis)
    all_gather(x, axis)
    reduce_scatter(x, axis)
    all_to_all(x, axis)
    broadcast(x, axis, n - 1)
    barrier(axis)
    send_recv(axis, [(x, (me + 1) % n)], [(torch.empty_like(x), (me - 1) % n)])
    if me == 0:
        send(x[:3].bfloat16(), axis, 1)  # 12 bytes
    if me == 1:
        receive(torch.empty(3, 2).bfloat16(), axis, 0)
    all_gather(x[:5].to(torch.float8_e4m3fn), axis)  # 10 bytes a rank
    sent = [[i + 2 * j for j in range(n)] for i in range(n)]
    if n > 2:
        sent[2] = [0] * n
    received = [sent[i][me] for i in range(n)]
    all_to_all(torch.ones(sum(sent[me]), 3), axis, sent[me], received)  # 12 bytes a row
    all_reduce(torch.empty(0), axis)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes_equal_the_ring_formulas_exactly(n):
    trace = launch(say_everything, world_size=n, quiet=True).trace
    size, share = 96 * n, (n - 1) / n
    for rank in range(n):
        mine = trace.of(rank=rank, lane="comm")
        expected = [
            ("all_reduce", size, 2 * share * size),
            ("all_gather", n * size, share * n * size),
            ("reduce_scatter", size, share * size),
            ("all_to_all", size, share * size),
            ("broadcast", size, share * size),
            ("barrier", 0, 0),
            ("send_recv", size, size),
            *([("send", 12, 12)] if rank == 0 else []),
            *([("receive", 12, 0)] if rank == 1 else []),
            ("all_gather", 10 * n, share * 10 * n),
        ]
        rows = [0 if rank == 2 else rank + 2 * j for j in range(n)]
        leaves = 12 * (sum(rows) - rows[rank])  # what stays here is not sent
        expected += [("all_to_all", 12 * sum(rows), leaves), ("all_reduce", 0, 0)]
        got = [(e.name, e.payload_bytes, e.wire_bytes) for e in mine]
        assert [name for name, *_ in got] == [name for name, *_ in expected]
        for (name, *numbers), (_, *wanted) in zip(got, expected):
            assert numbers == pytest.approx(wanted, rel=1e-12), name
        assert trace.wire_bytes(rank=rank) == pytest.approx(sum(w for *_, w in expected))
    total = sum(trace.wire_bytes(rank=rank) for rank in range(n))
    assert trace.wire_bytes() == pytest.approx(total)
    assert trace.wire_bytes(operation="all_reduce") == pytest.approx(n * 2 * share * size)
    ledger = trace.ledger()
    assert ledger.wire_bytes == pytest.approx(total / n)
    assert sum(row.calls for row in ledger.rows) == pytest.approx(len(trace) / n)


def test_a_rank_that_only_receives_sends_nothing():
    def work():
        if world().index == 0:
            send_recv(world(), sends=[(torch.ones(10), 1), (torch.ones(5), 1)])
        else:
            send_recv(world(), receives=[(torch.ones(10), 0), (torch.ones(5), 0)])

    trace = launch(work, world_size=2, quiet=True).trace
    assert [(e.rank, e.payload_bytes, e.wire_bytes) for e in sorted(trace)] == [
        (0, 60, 60.0),
        (1, 0, 0.0),
    ]


def test_an_axis_of_one_rank_leaves_no_event():
    run = launch(lambda: all_reduce(torch.ones(3), Mesh(dp=2).tp), world_size=2, quiet=True)
    assert len(run.trace) == 0 and run.trace.ledger().rows == []


def test_the_formulas_by_hand():
    assert wire_bytes("all_reduce", 1200, 4) == 2 * 3 / 4 * 1200
    assert wire_bytes("all_gather", 1200, 3) == wire_bytes("reduce_scatter", 1200, 3) == 800
    assert wire_bytes("all_to_all", 1200, 2) == wire_bytes("broadcast", 1200, 2) == 600
    assert (wire_bytes("send", 7, 2), wire_bytes("receive", 7, 2)) == (7, 0)
    assert wire_bytes("barrier", 0, 4) == 0


def comm(rank, name, axis, payload, wire, start=0.0, end=1.0):
    return Event(rank, "comm", name, start, end, payload, wire, axis)


LEDGER = """\
operation   axis  calls  payload bytes  bytes on the wire
---------------------------------------------------------
all_gather  tp        1      1,234,567         617,283.50
all_reduce  dp        2          2,000              2,000
send        pp     0.50            512                512"""


def test_the_ledger_is_a_table_of_means_over_the_ranks():
    events = [comm(r, "all_reduce", "dp", 1000, 1000.0) for r in (0, 1) for _ in range(2)]
    events += [comm(r, "all_gather", "tp", 1_234_567, 617_283.5) for r in (0, 1)]
    events += [comm(0, "send", "pp", 1024, 1024.0), Event(1, "compute", "forward", 0.0, 1.0)]
    ledger = Trace(events).ledger()
    assert str(ledger) == repr(ledger) == LEDGER
    assert [(row.operation, row.axis, row.calls) for row in ledger.rows] == [
        ("all_gather", "tp", 1),
        ("all_reduce", "dp", 2),
        ("send", "pp", 0.5),
    ]
    assert ledger.wire_bytes == 617_283.5 + 2000 + 512


# ---- moments -------------------------------------------------------------------------------------


def test_events_are_ordered_and_spans_enclose_what_they_enclose():
    def work():
        with span("step"):
            with span("forward"):
                time.sleep(0.002)
            all_reduce(torch.ones(4), world())

    trace = launch(work, world_size=3, quiet=True).trace
    assert [e.start for e in trace] == sorted(e.start for e in trace)
    assert trace[0].start == 0.0
    for rank in range(3):
        step, forward, message = (
            trace.of(rank=rank, name=name)[0] for name in ("step", "forward", "all_reduce")
        )
        assert step.start <= forward.start < forward.end <= message.start < message.end <= step.end
        assert forward.end - forward.start >= 0.002
        assert (step.lane, step.payload_bytes, step.axis) == ("compute", 0, "")
        assert message.where.startswith(__file__ + ":")
    assert len(trace.of(lane="compute")) == 6 and len(trace.of(axis="world")) == 3
    assert len(trace[:2]) == 2 and repr(trace) == "Trace(9 events of 3 ranks)"


def test_a_span_that_raises_is_still_recorded():
    recorder = Recorder(0)
    with pytest.raises(KeyError), recorder.span("broken"):
        raise KeyError
    assert [e.name for e in recorder.events] == ["broken"]


def test_without_trace_nothing_is_recorded():
    def work():
        with span("step"):
            return all_reduce(torch.ones(1), world()).item()

    run = launch(work, world_size=2, trace=False, quiet=True)
    assert run.values == [2.0, 2.0] and len(run.trace) == 0


def test_a_recorder_that_is_full_says_so(monkeypatch):
    assert MAX_EVENTS >= 100_000
    monkeypatch.setattr("picotron_edu.ranks.trace.MAX_EVENTS", 2)
    recorder = Recorder(0)
    for k in range(3):
        recorder.add(comm(0, f"message {k}", "dp", 0, 0.0))
    assert len(recorder.events) == 2 and recorder.truncated


@pytest.mark.parametrize("straggler", [0, 2])
def test_the_rank_that_comes_last_is_named(straggler):
    def work():
        axis = world()
        barrier(axis)
        if axis.index == straggler:
            time.sleep(0.1)
        all_reduce(torch.ones(1), axis)
        if axis.index == 0:
            time.sleep(0.1)
            send(torch.ones(2), axis, 1)
        elif axis.index == 1:
            receive(torch.ones(2), axis, 0)

    trace = launch(work, world_size=3, quiet=True).trace
    assert [e.waits_for for e in trace.of(name="all_reduce")] == [straggler] * 3
    waited = {e.rank: e.end - e.start for e in trace.of(name="all_reduce")}
    assert min(waited[r] for r in waited if r != straggler) > 0.08
    assert [e.waits_for for e in trace.of(name="receive")] == [0]


def test_an_asynchronous_message_ends_when_it_arrives_not_when_it_is_waited_for():
    def work():
        axis = world()
        barrier(axis)
        handle = all_reduce(torch.ones(4), axis, async_op=True)
        time.sleep(0.25)
        handle.wait()

    for event in launch(work, world_size=2, quiet=True).trace.of(name="all_reduce"):
        assert event.end - event.start < 0.2


def test_what_a_span_encloses_and_when_its_messages_are_on_the_link():
    link = Link(latency_us=1000, gbps=1)  # an all-reduce of two ranks: 2 hops, 2/2 of the bytes
    whole = Event(0, "compute", "step", 0.0, 0.1)
    backward = Event(0, "compute", "backward", 0.01, 0.02)
    queued = [comm(0, "all_reduce", "world", 125_000, 125_000, 0.015, end) for end in (0.02, 0.023)]
    others = [Event(1, "compute", "backward", 0.01, 0.02), Event(0, "compute", "next", 0.09, 0.11)]
    inside = Trace([whole, backward, *queued, *others]).inside(whole)
    assert [*inside] == [backward, *queued]
    on_link = inside.on_link(link, n=2)
    assert [*on_link.of(lane="compute")] == [backward]
    starts_ends = [(e.start, e.end) for e in on_link.of(lane="comm")]
    assert starts_ends == [(0.017, 0.02), (0.02, 0.023)]


# ---- the file for Perfetto -----------------------------------------------------------------------

NUMBER = {"type": "integer", "minimum": 0}
METADATA = {
    "properties": {
        "ph": {"const": "M"},
        "name": {"enum": ["process_name", "thread_name"]},
        "pid": NUMBER,
        "tid": NUMBER,
        "args": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["ph", "name", "pid", "tid", "args"],
    "additionalProperties": False,
}
COMPLETE = {
    "properties": {
        "ph": {"const": "X"},
        "name": {"type": "string", "minLength": 1},
        "cat": {"enum": ["compute", "comm"]},
        "pid": NUMBER,
        "tid": NUMBER,
        "ts": {"type": "number", "minimum": 0},
        "dur": {"type": "number", "minimum": 0},
        "args": {"type": "object"},
    },
    "required": ["ph", "name", "cat", "pid", "tid", "ts", "dur"],
    "additionalProperties": False,
}
TRACE_FORMAT = {  # the "JSON object format" of Chrome's Trace Event Format, as far as used here
    "type": "object",
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {"type": "object", "oneOf": [METADATA, COMPLETE]},
        },
        "displayTimeUnit": {"enum": ["ms", "ns"]},
    },
    "required": ["traceEvents"],
    "additionalProperties": False,
}


def test_the_saved_file_keeps_to_the_trace_event_format(tmp_path):
    def work():
        axis = world()
        with span("forward"):
            handles = [all_reduce(torch.ones(4), axis, async_op=True) for _ in range(3)]
            time.sleep(0.002)
        for handle in handles[::-1]:
            handle.wait()

    run = launch(work, world_size=2, link=Link(1000, 1), quiet=True)
    path = run.trace.save(tmp_path / "run.json")
    content = json.loads(path.read_text())
    jsonschema.validate(content, TRACE_FORMAT)
    slices = [e for e in content["traceEvents"] if e["ph"] == "X"]
    named = {(e["pid"], e["tid"]) for e in content["traceEvents"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices} <= named
    assert len(slices) == len(run.trace) == 8
    message = next(e for e in slices if e["cat"] == "comm")
    assert message["name"] == "all_reduce world"
    assert message["args"].keys() == {"axis", "payload_bytes", "wire_bytes", "waits_for", "where"}
    for e, event in zip(
        sorted((e for e in slices if e["pid"] == 0), key=lambda e: e["ts"]), run.trace.of(rank=0)
    ):
        assert e["ts"] == pytest.approx(event.start * 1e6)
        assert e["dur"] == pytest.approx((event.end - event.start) * 1e6)


def test_messages_that_overlap_get_rows_of_their_own():
    a, b, c = (comm(0, "send", "pp", 1, 1.0, start, start + 2) for start in (0.0, 1.0, 2.0))
    assert side_by_side([a, b, c]) == [[a, c], [b]]
    assert side_by_side([]) == []


def test_an_empty_trace_can_be_saved(tmp_path):
    content = json.loads(Trace([]).save(tmp_path / "empty.json").read_text())
    jsonschema.validate(content, TRACE_FORMAT)
    assert content["traceEvents"] == []


# ---- the emulated network ------------------------------------------------------------------------

MB = 250_000  # this many float32 are a megabyte
SLOW = Link(latency_us=0, gbps=0.2)  # 25 kB a millisecond


def test_the_time_of_a_message_is_steps_times_latency_plus_bytes_over_rate():
    link = Link(latency_us=100, gbps=8)  # 1 ns a byte
    assert link.seconds("send", 1_000_000, 2) == pytest.approx(100e-6 + 1e-3)
    assert link.seconds("receive", 1_000_000, 2) == pytest.approx(100e-6 + 1e-3)
    assert link.seconds("all_reduce", 1_000_000, 4) == pytest.approx(6 * 100e-6 + 1.5e-3)
    assert link.seconds("all_gather", 1_000_000, 4) == pytest.approx(3 * 100e-6 + 0.75e-3)
    assert link.seconds("barrier", 0, 4) == pytest.approx(4 * 100e-6)
    # the whole of a broadcast must pass each link, though the last rank sends nothing
    assert link.seconds("broadcast", 1_000_000, 2) == pytest.approx(100e-6 + 1e-3)


@pytest.mark.parametrize(
    "values, message",
    [
        ((-1, 10), "latency_us=-1: must be 0 or more microseconds"),
        ((float("nan"), 10), "latency_us=nan"),
        ((float("inf"), 10), "latency_us=inf"),
        ((1, 0), "gbps=0: must be more than 0 gigabits per second"),
        ((1, -5), "gbps=-5"),
        ((1, float("nan")), "gbps=nan"),
        (("5", 1), "latency_us='5': must be a number"),
        ((5, None), "gbps=None: must be a number"),
    ],
)
def test_a_link_that_cannot_be_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Link(*values)
    with pytest.raises(ValueError, match="link='fast': must be a Link, or a dict of them"):
        launch(print, link="fast")


def timed(axis, call) -> float:
    barrier(axis)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@pytest.mark.parametrize("n", [2, 3, 4])
def test_messages_take_the_time_of_the_formula(n):
    def work():
        axis = world()
        me, x = axis.index, torch.ones(12 * 10_000)  # 480 kB: 19.2 ms a pass
        calls = {
            "all_reduce": lambda: all_reduce(x, axis),
            "all_gather": lambda: all_gather(x[:60_000], axis),
            "reduce_scatter": lambda: reduce_scatter(x, axis),
            "all_to_all": lambda: all_to_all(x, axis),
            "broadcast": lambda: broadcast(x, axis),
            "send_recv": lambda: send_recv(
                axis, [(x, (me + 1) % axis.size)], [(x.clone(), (me - 1) % axis.size)]
            ),
        }
        # the quicker of two: other processes can only make it slower
        return {name: min(timed(axis, call) for _ in range(2)) for name, call in calls.items()}

    run = launch(work, world_size=n, link=Link(latency_us=0, gbps=0.2), quiet=True)
    share, x = (n - 1) / n, 480_000 / 25e6
    formula = {
        "all_reduce": 2 * share * x,
        "all_gather": share * n * x / 2,
        "reduce_scatter": share * x,
        "all_to_all": share * x,
        "broadcast": x,
        "send_recv": x,
    }
    for name, wanted in formula.items():
        measured = [times[name] for times in run]
        # a rank that enters first waits longer, one that enters last not; none waits less
        assert min(measured) > 0.7 * wanted, name
        assert min(measured) < 1.3 * wanted + 0.05, name
        for event in run.trace.of(name=name):
            assert event.end - event.start >= wanted * 0.999, name


def test_a_message_overlaps_with_computation_only_if_it_is_asynchronous():
    def work():
        axis, x, compute = world(), torch.ones(MB), 0.25  # 1 MB: 200 ms on 2 ranks
        barrier(axis)
        began = time.perf_counter()
        handle = all_reduce(x, axis, async_op=True)
        with span("backward"):
            time.sleep(compute)
        handle.wait()
        overlapped = time.perf_counter() - began
        barrier(axis)
        began = time.perf_counter()
        all_reduce(x, axis)
        time.sleep(compute)
        return overlapped, time.perf_counter() - began

    run = launch(work, world_size=2, link=Link(0, 0.04), quiet=True)
    for overlapped, one_after_the_other in run:
        assert one_after_the_other >= 0.45
        assert 0.25 <= overlapped < one_after_the_other - 0.08
    message, computing = run.trace.of(rank=0, name="all_reduce"), run.trace.of(lane="compute")
    assert message[0].end < computing[0].end  # hidden: it was through before the computation


def test_more_communication_than_computation_takes_the_time_of_the_communication():
    def work():
        axis, x = world(), torch.ones(MB)
        barrier(axis)
        began = time.perf_counter()
        handle = all_reduce(x, axis, async_op=True)
        time.sleep(0.15)
        handle.wait()
        return time.perf_counter() - began

    for seconds in launch(work, world_size=2, link=Link(0, 0.04), quiet=True):  # 200 ms
        assert 0.2 * 0.95 <= seconds < 0.32


def test_waiting_for_a_link_burns_no_cpu():
    def work():
        axis, x = world(), torch.ones(100)
        all_reduce(x, axis)
        before = time.process_time()
        all_reduce(x, axis)
        return time.process_time() - before

    run = launch(work, world_size=2, link=Link(latency_us=200_000, gbps=10), quiet=True)
    assert [e.end - e.start >= 0.4 for e in run.trace] == [True] * 4
    assert max(run) < 0.08  # of 0.4 seconds


def test_messages_on_one_link_queue_those_on_two_links_do_not():
    def work():
        mesh, x = Mesh(dp=2, tp=2), torch.ones(MB)
        axes = {"one": (mesh.dp, mesh.dp), "two": (mesh.dp, mesh.tp)}
        times = {}
        for name, pair in axes.items():
            barrier(mesh.world)
            began = time.perf_counter()
            handles = [all_reduce(x, axis, async_op=True) for axis in pair]
            for handle in handles[::-1]:  # waited for in another order
                handle.wait()
            times[name] = time.perf_counter() - began
        return times

    link = Link(0, 0.05)  # 160 ms each
    run = launch(work, world_size=4, link={"dp": link, "tp": link}, quiet=True)
    for times in run:
        assert times["one"] >= 0.316
        assert 0.158 <= times["two"] < times["one"] - 0.06
    first, second, *_ = run.trace.of(rank=0, axis="dp")
    assert second.end - first.end == pytest.approx(0.16, abs=1e-3)  # in the order they began


def test_a_message_that_nobody_answers_yet_keeps_no_other_waiting():
    def work():
        axis, x, small = world(), torch.ones(MB), torch.ones(2500)
        barrier(axis)
        began = time.perf_counter()
        if axis.index == 0:
            early = send(x, axis, 1, async_op=True)  # its receive comes much later
            send(small, axis, 1, async_op=True)
            all_reduce(small, axis)
            seconds = time.perf_counter() - began
            early.wait()
            return seconds
        all_reduce(small, axis)
        time.sleep(0.3)
        receive(x, axis, 0)
        receive(small, axis, 0)
        return 0.0

    assert launch(work, world_size=2, link=SLOW, quiet=True)[0] < 0.2


def test_a_receive_posted_early_still_waits_for_the_whole_message():
    def work():
        axis, x = world(), torch.ones(MB)
        barrier(axis)
        if axis.index == 0:
            time.sleep(0.1)
            began = time.perf_counter()
            send(x, axis, 1)
            return began, time.perf_counter()
        receive(x, axis, 0)
        return time.perf_counter()

    run = launch(work, world_size=2, link=SLOW, quiet=True)
    began, sent = run[0]
    assert sent - began >= 0.04 and run[1] - began >= 0.039  # 1 MB: 40 ms from when it was sent


def test_both_directions_of_a_link_are_used_at_once():
    def work():
        axis, x = world(), torch.ones(MB)
        barrier(axis)
        began = time.perf_counter()
        sent = send(x, axis, 1 - axis.index, async_op=True)
        receive(x.clone(), axis, 1 - axis.index)
        sent.wait()
        return time.perf_counter() - began

    for seconds in launch(work, world_size=2, link=Link(0, 0.05), quiet=True):  # 160 ms each way
        assert 0.16 * 0.95 <= seconds < 0.28


def test_an_uneven_all_to_all_takes_as_long_as_its_busiest_rank():
    def work():
        axis = world()  # place 0 sends everything to place 1
        x = torch.ones(MB if axis.index == 0 else 0)
        sent = [[0, MB, 0], [0, 0, 0], [0, 0, 0]][axis.index]
        received = [[0, 0, 0], [MB, 0, 0], [0, 0, 0]][axis.index]
        return timed(axis, lambda: all_to_all(x, axis, sent, received))

    run = launch(work, world_size=3, link=Link(0, 0.08), quiet=True)  # 100 ms
    assert run[0] >= 0.095 and run[1] >= 0.095
    assert run[2] < 0.095
    assert [e.wire_bytes for e in sorted(run.trace.of(name="all_to_all"))] == [4.0 * MB, 0, 0]


def test_a_link_by_axis_name_slows_that_axis_alone():
    def work():
        mesh, x = Mesh(dp=2, tp=2), torch.ones(1000)
        return {
            axis.name: min(timed(mesh.world, lambda a=axis: all_reduce(x, a)) for _ in range(3))
            for axis in (mesh.dp, mesh.tp)
        }

    link = {"dp": Link(latency_us=50_000, gbps=10)}
    for times in launch(work, world_size=4, link=link, quiet=True):
        assert times["dp"] >= 0.1 * 0.95 and times["tp"] < 0.05


# ---- cost ----------------------------------------------------------------------------------------


def test_recording_costs_less_than_a_fiftieth_of_a_step():
    def work():
        axis, layers = world(), 4
        weights = [torch.randn(256, 256) for _ in range(layers)]

        def step() -> None:  # of a tiny model: a gradient message a layer
            with span("forward"):
                x = torch.randn(256, 256)
                for weight in weights:
                    x = torch.relu(x @ weight) @ weight.t() / 256
            with span("backward"):
                for weight in weights:
                    x = (x @ weight.t() @ weight @ weight.t()) / 256
                    all_reduce(weight.clone(), axis, "avg")
            with span("optimizer"):
                for weight in weights:
                    weight.mul_(0.999).add_(weight.sign(), alpha=1e-4)

        recorder = axis.runtime.recorder
        steps = []
        for _ in range(20):
            barrier(axis)
            recorder.events.clear()
            began = time.perf_counter()
            step()
            steps.append(time.perf_counter() - began)
        events = len(recorder.events)

        def message(recorder: Recorder | None, n: int = 100) -> float:
            axis.runtime.recorder = recorder
            began = time.thread_time()
            for _ in range(n):  # all that a message costs here, but for torch's part
                Handle(axis, "all_reduce", "nothing", 0, list, lambda: None).wait()
            return (time.thread_time() - began) / n

        costs = [message(Recorder(0)) - message(None) for _ in range(20)]
        axis.runtime.recorder = Recorder(0)
        return sorted(steps)[len(steps) // 2], events, sorted(costs)[len(costs) // 2]

    for step, events, cost in launch(work, world_size=2, quiet=True):
        assert events == 7
        assert 0 < cost * events < 0.02 * step, f"{cost * 1e6:.1f} us an event, {step * 1e3} ms"


def test_examples_in_docstrings_hold():
    tried = 0
    for module in pkgutil.iter_modules(ranks.__path__):
        if module.name not in ("spawned", "server"):  # these start work when imported
            loaded = importlib.import_module(f"picotron_edu.ranks.{module.name}")
            result = doctest.testmod(loaded)
            assert result.failed == 0, module.name
            tried += result.attempted
    assert tried >= 2
