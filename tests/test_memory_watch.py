"""MemoryWatch: each byte has one owner, is seen when it appears, and leaves when it is freed."""

import pytest
import torch
from oracle import CONFIG, make_batches

from picotron_edu.layout import describe
from picotron_edu.memory import STATES, activation_bytes
from picotron_edu.memory_watch import MemoryWatch
from picotron_edu.model import Llama
from picotron_edu.optim import AdamW, keep_main_grads
from picotron_edu.ranks import launch, span
from picotron_edu.train import train_step

N = CONFIG.num_parameters()


def new_model(dtype=torch.float32):
    model = Llama(CONFIG, dtype=dtype)
    describe(model)
    keep_main_grads(model)
    return model, AdamW(model.named_parameters())


def watched(micro_batch_size, dtype=torch.float32, steps=3):
    (model, optimizer), batch = new_model(dtype), make_batches(CONFIG, rows=4)[0]
    with MemoryWatch(model, optimizer) as watch:
        for _ in range(steps):
            train_step(model, batch, optimizer, micro_batch_size, lr=1e-3)
    return watch, batch.inputs_BS.shape[1]


@pytest.mark.parametrize(
    ("dtype", "state"),
    [(torch.float32, "float32"), (torch.bfloat16, "bfloat16, float32 gradients")],
)
def test_every_occupant_is_that_of_the_formula_to_the_byte(dtype, state):
    watch, sequence = watched(4, dtype)
    state = STATES[state]
    forward, backward = watch.last(1, "forward"), watch.last(1, "backward")
    assert forward.parameters == state.weights * N
    assert forward.optimizer_states == (state.master + state.moments) * N
    assert forward.activations == activation_bytes(CONFIG, 4, sequence, dtype)
    assert backward.gradients == state.gradients * N
    assert forward.gradients == backward.activations == 0


def test_the_optimizer_states_appear_in_the_first_step_so_its_peak_is_lower():
    watch, _ = watched(4)
    first, second, third = (max(m.total for m in watch if m.step == s) for s in range(3))
    assert watch.last(0, "backward").optimizer_states == 0
    assert watch.last(0, "optimizer").optimizer_states == 8 * N
    assert second - first == 8 * N
    assert second == third == watch.peak


def test_with_accumulation_gradients_stay_and_only_one_micro_batch_is_alive():
    watch, sequence = watched(1)
    last_forward = watch.last(1, "forward")
    rows = 8 * sequence * 3  # a slice keeps the storage of all four rows alive, twice
    assert last_forward.activations == activation_bytes(CONFIG, 1, sequence) + 2 * rows
    assert last_forward.gradients == 4 * N
    events = [m.event for m in watch if m.step == 1]
    changes = [b for a, b in zip(["", *events], events) if a != b]
    assert changes == ["forward", "backward"] * 4 + ["optimizer"]


def test_the_watch_changes_nothing_and_is_gone_afterwards():
    batch = make_batches(CONFIG, rows=4)[0]
    (watched_model, optimizer), (model, other) = new_model(), new_model()
    with MemoryWatch(watched_model, optimizer) as watch:
        train_step(watched_model, batch, optimizer, 2, lr=1e-3)
    train_step(model, batch, other, 2, lr=1e-3)
    for ours, plain in zip(watched_model.parameters(), model.parameters()):
        assert torch.equal(ours, plain)
    count = len(watch)
    train_step(watched_model, batch, optimizer, 2, lr=1e-3)
    assert len(watch) == count


def test_other_memory_counts_once_and_leaves_when_it_is_freed():
    model, optimizer = new_model()
    with MemoryWatch(model, optimizer) as watch, span("work"):
        x = torch.zeros(1000)
        halves = x[:500], x.view(10, 100), x.add_(1)  # all look at the same memory
        y = x * 2
        del x, halves
        z = y.to(torch.float64)
        del y
        torch.zeros(1)
    others = [moment.other for moment in watch]
    assert others == [4000, 8000, 4000 + 8000, 8000 + 4]
    assert z.nbytes == 8000


def test_an_error_inside_leaves_no_hook_behind():
    model, optimizer = new_model()
    watch = MemoryWatch(model, optimizer)
    with pytest.raises(RuntimeError, match="must match"), watch, span("forward"):
        torch.zeros(3) + torch.zeros(2)
    seen = len(watch)
    torch.zeros(3).requires_grad_().exp().sum().backward()
    assert len(watch) == seen == 2


def on_a_rank():
    watch, _ = watched(4, steps=1)
    return watch.peak


def test_on_a_rank_the_spans_are_in_the_trace_as_well():
    run = launch(on_a_rank, world_size=2, quiet=True)
    assert run[0] == run[1] == watched(4, steps=1)[0].peak
    assert [e.name for e in run.trace.of(rank=1, lane="compute")] == [
        "forward",
        "backward",
        "optimizer",
    ]


def test_a_phase_that_never_was_is_named_with_those_there_are():
    watch, _ = watched(4, steps=1)
    with pytest.raises(ValueError, match=r"step 2 has no phase 'forward'; there are \[\(0, 'back"):
        watch.last(2, "forward")
