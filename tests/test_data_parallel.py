"""Data parallelism: n ranks train like one, whatever the model holds and however steps are cut."""

import dataclasses
import math
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
from oracle import CONFIG, Rank, assert_same_training
from torch import nn
from toys import Toy

from picotron_edu import recompute
from picotron_edu.data import Batch
from picotron_edu.data_parallel import DataParallel, fill_buckets
from picotron_edu.layout import layout_of
from picotron_edu.model import Llama, token_loss_sum
from picotron_edu.optim import AdamW, clip_by_global_norm, grad_of, zero_grads
from picotron_edu.ranks import Axis, Link, Mesh, RankFailed, all_reduce, launch, span, world
from picotron_edu.train import Diverged, TrainConfig, evaluate, train, train_step

MODES = ["naive", "overlap", "bucketed"]
SMALL_MB = 0.004  # of the oracle's model: several buckets, and some of several parameters


def total(x):
    return all_reduce(x, world())


def on_ranks(fn, *args, n=2, **settings):
    return launch(fn, *args, world_size=n, quiet=True, timeout=20, **settings)


def data_parallel(model, mode="bucketed", bucket_mb=SMALL_MB, policy="none", **kwargs):
    recompute.apply(model, policy)
    parallel = DataParallel(model, world(), mode, bucket_mb, **kwargs)
    return Rank(parallel, world().index, world().size, total)


# The oracle: n ranks train like one


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_n_ranks_train_like_one(mode, n):
    """Micro-batches of 2 of 7 rows: ranks have several, unequal ones, and rows that never count."""
    assert_same_training(partial(data_parallel, mode=mode), world_size=n, rows=7)


@pytest.mark.parametrize("mode", MODES)
def test_n_ranks_train_like_one_in_float32(mode):
    assert_same_training(partial(data_parallel, mode=mode), world_size=2, dtype=torch.float32)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_tied_weights_and_recomputation_change_nothing(tied, policy):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    technique = partial(data_parallel, policy=policy)
    assert_same_training(technique, world_size=2, rows=7, micro_batch_size=1, config=config)


# What ranks share from the start, and the scale of the sum


def one_weight(dtype=torch.float64):
    return nn.Linear(1, 1, bias=False).to(dtype)


def column(*numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype)[:, None]


def token_weighted_gradient(mode):
    x = [column(1, 1, 1), column(4)][world().index]
    model = DataParallel(one_weight(), world(), mode)
    (model(x).sum() / total(torch.tensor(len(x)))).backward()
    model.finish()
    return grad_of(model.module.weight).item()


@pytest.mark.parametrize("mode", MODES)
def test_tokens_weigh_the_same_on_all_ranks(mode):
    """3 tokens of gradient 1 and 1 token of gradient 4: 1.75; a mean of means makes 2.5."""
    assert on_ranks(token_weighted_gradient, mode).values == [1.75, 1.75]


def weights_after_wrapping():
    torch.manual_seed(world().index)
    model = Toy(a=nn.Linear(3, 2), norm=nn.BatchNorm1d(2))
    model.norm.running_mean += world().index
    DataParallel(model, world())
    return [x.tolist() for x in (*model.parameters(), *model.buffers())]


def test_ranks_start_with_the_weights_and_buffers_of_rank_0():
    first, second = on_ranks(weights_after_wrapping)
    assert first == second


def buffers_over_time():
    model = DataParallel(nn.BatchNorm1d(2, dtype=torch.float64), world())
    seen = []
    for _ in range(3):
        model(torch.randn(4, 2, dtype=torch.float64)).sum().backward()  # other numbers on each rank
        model.finish()
        zero_grads(model.parameters())
        seen.append(model.module.running_mean.tolist())
    model.eval()
    model(torch.zeros(1, 2, dtype=torch.float64))
    return seen, model.module.running_mean.tolist()


def test_each_forward_begins_with_the_buffers_of_rank_0():
    (seen, last), (_, other) = on_ranks(buffers_over_time)
    assert other == last == seen[-1]


# no_sync: one sum a step


def micro_batches(mode, synced):
    """Gradients 1, 3 on rank 0 and 3, 4 on rank 1, halved; backward number i syncs if synced[i]."""
    model = DataParallel(one_weight(), world(), mode)
    for value, sync in zip([(1, 3), (3, 4)][world().index], synced):
        loss = model(column(value)).sum() / 2
        if sync:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
    model.finish()
    return grad_of(model.module.weight).item()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("synced", [(False, True), (False, False)], ids=["full", "cut short"])
def test_all_micro_batches_are_in_the_sum(mode, synced):
    """Also of a window that the end of the data cuts short, before the backward that would sync."""
    assert on_ranks(micro_batches, mode, synced).values == [5.5, 5.5]


@pytest.mark.parametrize("mode", ["overlap", "bucketed"])
@pytest.mark.parametrize("synced", [(True, False), (True, True)], ids=["the first", "each"])
def test_a_sync_before_the_last_micro_batch_is_refused_by_name(mode, synced):
    """Else 5.0 and 6.0: the second gradient stays on its rank, or races with the message."""
    with pytest.raises(RankFailed, match=r"weight got a gradient after its sum over world had"):
        on_ranks(micro_batches, mode, synced)


def messages_of(mode, accumulation, bucket_mb=SMALL_MB):
    model = Llama(CONFIG, dtype=torch.float32)
    parallel = DataParallel(model, world(), mode, bucket_mb)
    tokens_BS = torch.ones(accumulation, 4, dtype=torch.int64)
    for step in range(2):
        if step:  # buckets are in order by now
            world().runtime.recorder.events.clear()
        for i in range(accumulation):
            with parallel.no_sync() if i < accumulation - 1 else span("last"), span("backward"):
                parallel(tokens_BS).sum().backward()
        parallel.finish()
        zero_grads(model.parameters())
    sizes = [[p.numel() * 4 for p in b.params] for b in parallel.buckets]
    return sum(p.numel() for p in model.parameters()), sizes


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_messages_and_bytes_of_a_step(mode, n, accumulation):
    """2(n−1)/n · 4 bytes a parameter, once a step; a message a parameter, or a bucket."""
    run = on_ranks(messages_of, mode, accumulation, n=n)
    params, buckets = run[0]
    sent = run.trace.of(rank=0, lane="comm")
    assert {e.name for e in sent} == {"all_reduce"}
    assert sum(e.wire_bytes for e in sent) == pytest.approx(2 * (n - 1) / n * 4 * params)
    assert len(sent) == len(buckets) == (21 if mode != "bucketed" else 5)
    limit = SMALL_MB * 1e6
    assert all(sum(b) <= limit or len(b) == 1 for b in buckets)
    if mode == "bucketed":  # as full as they can be
        assert all(sum(a) + b[0] > limit for a, b in pairwise(buckets))


@pytest.mark.parametrize("mode", MODES)
def test_only_overlap_and_buckets_send_during_backward(mode):
    run = on_ranks(messages_of, mode, 1, 0.002)
    backward = run.trace.of(rank=0, name="backward")[0]
    early = [e for e in run.trace.of(rank=0, name="all_reduce") if e.start < backward.end]
    assert not early if mode == "naive" else len(early) > 5


def exposed_seconds(mode):
    model = Toy(layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(10)))
    parallel = DataParallel(model, world(), mode)

    def use(model, x):
        for layer in model.layers:
            x = layer(x)
        return x.sum()

    parallel(use, torch.ones(1, 8)).backward()
    parallel.finish()
    zero_grads(model.parameters())
    parallel(use, torch.ones(1, 8)).backward()
    with span("exposed"):
        parallel.finish()


def test_buckets_save_latencies():
    """20 messages a step on a link of 10 ms a hop, 2 hops each; or one message."""
    link = Link(latency_us=10_000, gbps=10)
    seconds = {}
    for mode in ("naive", "bucketed"):
        (event,) = on_ranks(exposed_seconds, mode, link=link).trace.of(rank=0, name="exposed")
        seconds[mode] = event.end - event.start
    assert seconds["naive"] > 0.39
    assert seconds["bucketed"] < 0.2


# The models that people have


def gradients_of(use, parts, mode):
    """{name: gradient} after three steps; rank r's data are all ones times r + 1.

    In the second step buckets are laid anew: only the third finds what an earlier one has left.
    """
    torch.manual_seed(0)
    model = Toy(**parts()).double()
    parallel = DataParallel(model, world(), mode, bucket_mb=1e-4)
    for _ in range(3):
        zero_grads(model.parameters())
        x = torch.full((2, 2), world().index + 1.0, dtype=torch.float64)
        parallel(use[world().index] if isinstance(use, list) else use, x).sum().backward()
        parallel.finish()
    return {name: grad_of(p).tolist() for name, p in model.named_parameters() if p.requires_grad}


def expected_gradients(uses, parts):
    """The same of one process: the ranks' losses, added up."""
    torch.manual_seed(0)
    model = Toy(**parts()).double()
    for rank, use in enumerate(uses):
        use(model, torch.full((2, 2), rank + 1.0, dtype=torch.float64)).sum().backward()
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).tolist()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def two_layers():
    return {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}


def only_a(model, x):
    return model.a(x)


def only_b(model, x):
    return model.b(x) * 2


def a_twice(model, x):
    return model.b(model.a(model.a(x)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "uses",
    [[only_a, only_a], [only_a, only_b], [a_twice, a_twice], [a_twice, only_b]],
    ids=["b unused", "a on rank 0, b on rank 1", "a twice", "a twice on rank 0, b on rank 1"],
)
def test_what_each_rank_uses_is_its_own_affair(uses, mode):
    """A parameter that took no part counts as zero, and no rank waits for it for ever."""
    for got in on_ranks(gradients_of, uses, two_layers, mode):
        expected = expected_gradients(uses, two_layers)
        assert got.keys() == expected.keys()
        for name, grad in got.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=0)


def frozen_b():
    parts = two_layers()
    parts["b"].requires_grad_(False)
    return parts


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_are_not_sent(mode):
    def both(model, x):
        return model.a(model.b(x))

    run = on_ranks(gradients_of, both, frozen_b, mode)
    assert run[0] == run[1] == expected_gradients([both, both], frozen_b)
    assert all(e.payload_bytes <= 6 * 8 for e in run.trace.of(name="all_reduce"))


def changes_its_mind(first, then):
    model = Toy(**two_layers())
    model.b.weight.requires_grad_(first)
    parallel = DataParallel(model, world())
    model.b.weight.requires_grad_(then)
    parallel(a_twice, torch.ones(1, 2)).sum().backward()
    parallel.finish()


@pytest.mark.parametrize(("first", "then", "was"), [(0, 1, "frozen"), (1, 0, "trainable")])
def test_freezing_after_wrapping_is_refused_by_name(first, then, was):
    with pytest.raises(RankFailed, match=rf"b\.weight was {was} when the model was wrapped"):
        on_ranks(changes_its_mind, bool(first), bool(then))


def messages_of_a_layer_used_twice():
    parallel = DataParallel(Toy(**two_layers()), world(), "overlap")
    parallel(a_twice, torch.ones(1, 2)).sum().backward()
    parallel.finish()


def test_a_hook_fires_once_a_parameter_however_often_it_is_used():
    run = on_ranks(messages_of_a_layer_used_twice)
    assert len(run.trace.of(rank=0, name="all_reduce")) == 4


def order_of_buckets():
    """Used in the order in which they are declared, backward meets them in reverse; here not."""
    parts = {name: nn.Linear(2, 2, bias=False) for name in ("last", "first", "middle", "unused")}
    model = Toy(**parts)
    parallel = DataParallel(model, world(), "overlap")
    orders = []
    for _ in range(3):
        parallel(lambda m, x: m.last(m.middle(m.first(x))), torch.ones(1, 2)).sum().backward()
        parallel.finish()
        zero_grads(model.parameters())
        orders.append([layout_of(p).name.split(".")[0] for p in parallel.params])
    return orders


def test_from_the_second_step_on_buckets_leave_in_the_order_of_readiness():
    for guess, *learned in on_ranks(order_of_buckets):
        assert guess == ["unused", "middle", "first", "last"]
        assert learned == [["last", "middle", "first", "unused"]] * 2


def test_old_buckets_are_freed_before_new_ones_are_made(monkeypatch):
    """Else the second step needs more memory than any other."""
    alive = []

    def fill(*args):
        alive.append(old() is not None)
        return fill_buckets(*args)

    parallel = DataParallel(nn.Linear(2, 2), world())
    old = weakref.ref(parallel.buckets[0].flat.untyped_storage())
    monkeypatch.setattr("picotron_edu.data_parallel.fill_buckets", fill)
    for _ in range(3):
        parallel(torch.ones(1, 2)).sum().backward()
        parallel.finish()
        zero_grads(parallel.parameters())
    assert alive == [False]


def along_one_axis():
    model = DataParallel(one_weight(), Mesh(dp=2, tp=2).dp)
    (model(column(1.0 + world().index))).sum().backward()
    model.finish()
    return grad_of(model.module.weight).item()


def test_only_the_ranks_of_the_axis_share_gradients():
    run = on_ranks(along_one_axis, n=4)
    assert run.values == [4.0, 6.0, 4.0, 6.0]
    assert {e.axis for e in run.trace.of(lane="comm")} == {"dp"}


# Precision, norm, overflow, memory


def summed_in(reduce_dtype, values):
    """`values[rank]`: this rank's micro-gradients, all of which bfloat16 can hold."""
    model = DataParallel(one_weight(torch.bfloat16), world(), reduce_dtype=reduce_dtype)
    *firsts, last = values[world().index]
    with model.no_sync():
        for value in firsts:
            model(column(value, dtype=torch.bfloat16)).sum().backward()
    model(column(last, dtype=torch.bfloat16)).sum().backward()
    model.finish()
    weight = model.module.weight
    return weight.main_grad.item(), weight.main_grad.dtype, weight.grad


@pytest.mark.parametrize(
    ("values", "reduce_dtype", "right"),
    [
        ([(256, 1), (0, 0)], None, 257),  # over the micro-batches
        ([(256,), (1,)], None, 257),  # over the ranks
        ([(1,) * 512] * 2, None, 1024),
        ([(256,), (1,)], torch.bfloat16, 256),  # what is lost if you ask for it
    ],
)
def test_gradients_add_up_in_float32_unless_told_otherwise(values, reduce_dtype, right):
    for got, dtype, leftover in on_ranks(summed_in, reduce_dtype, values):
        assert dtype == torch.float32 and leftover is None
        assert got == right


def bytes_sent_in(reduce_dtype):
    model = DataParallel(nn.Linear(10, 10), world(), reduce_dtype=reduce_dtype)
    model(torch.ones(1, 10)).sum().backward()
    model.finish()


def test_a_narrower_message_is_half_as_many_bytes():
    sent = [
        on_ranks(bytes_sent_in, dtype).trace.wire_bytes(rank=0, operation="all_reduce")
        for dtype in (None, torch.bfloat16)
    ]
    assert sent == [440, 220]


def norm_and_gradient():
    model = DataParallel(one_weight(), world())
    (model(column(0.4))).sum().backward()
    model.finish()
    norm = clip_by_global_norm(model.parameters(), 1.0, all_reduce)
    return norm.item(), grad_of(model.module.weight).item()


def test_the_norm_counts_a_parameter_once_not_once_a_rank():
    """0.8 on both ranks is 0.8 and not clipped; counted twice it were 1.131371."""
    for norm, grad in on_ranks(norm_and_gradient):
        assert norm == pytest.approx(0.8) and grad == pytest.approx(0.8)


class Infinite(nn.Module):
    """A model that overflows on rank 1, and nowhere else."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(1, 4)

    def forward(self, tokens_BS, _, labels_BS):
        logits_BSV = self.scale(tokens_BS[..., None].float())
        return token_loss_sum(logits_BSV * (float("inf") if world().index == 1 else 1.0), labels_BS)


def a_step_that_overflows():
    model = Infinite()
    parallel = DataParallel(model, world())
    before = [p.tolist() for p in model.parameters()]
    tokens_BS = torch.ones(1, 3, dtype=torch.int64)
    try:
        optimizer = AdamW(model.named_parameters())
        train_step(parallel, Batch(tokens_BS, tokens_BS), optimizer, 1, 1e-3, 1.0, total)
    except Diverged:
        return before == [p.tolist() for p in model.parameters()]
    return "went on"


def test_an_overflow_on_one_rank_stops_the_step_on_all():
    """Four ranks, two numbers in the model; the weights stay as they were, everywhere."""
    assert on_ranks(a_step_that_overflows, n=4).values == [True] * 4


def bytes_of_states():
    model = Llama(CONFIG, dtype=torch.bfloat16)
    parallel = DataParallel(model, world())
    optimizer = AdamW(model.named_parameters())
    parallel(torch.ones(1, 4, dtype=torch.int64)).sum().backward()
    parallel.finish()
    optimizer.step()
    params = list(model.parameters())
    grads = sum(p.main_grad.nbytes for p in params)
    assert grads == sum(bucket.flat.nbytes for bucket in parallel.buckets)  # the same memory
    weights = sum(p.nbytes for p in params)
    return (weights + grads + optimizer.state_bytes()) / sum(p.numel() for p in params)


def test_each_rank_holds_18_bytes_a_parameter():
    assert on_ranks(bytes_of_states).values == [18, 18]


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fast"}, "mode must be one of 'naive', 'overlap', 'bucketed', got 'fast'"),
        ({"bucket_mb": 0}, "bucket_mb must be a number above 0 and finite, got 0"),
        ({"bucket_mb": math.nan}, "bucket_mb must be a number above 0 and finite, got nan"),
        ({"bucket_mb": "25"}, "bucket_mb must be a number above 0 and finite, got '25'"),
        ({"bucket_mb": None}, "bucket_mb must be a number above 0 and finite, got None"),
        ({"reduce_dtype": "bfloat16"}, "reduce_dtype must be a type such as torch.bfloat16, or No"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        DataParallel(nn.Linear(1, 1), world(), **arguments)


def test_a_model_is_wrapped_once():
    parallel = DataParallel(nn.Linear(1, 1), world())
    with pytest.raises(ValueError, match="weight is in a data-parallel wrapper already"):
        DataParallel(parallel.module, world())
    with pytest.raises(ValueError, match=r"over two axes by their joined one, such as mesh\.dp_cp"):
        DataParallel(parallel, Axis("cp", 1, 0, (0,)))  # dp outside, cp inside: half of the sum


def torchs_optimizer_on(wrapped):
    """Two steps of torch's SGD; each rank's x is its place, so that a step subtracts 1 + 2."""
    parallel = DataParallel(one_weight(), world()) if wrapped else one_weight()
    nn.init.zeros_(parallel.weight if not wrapped else parallel.module.weight)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
    for set_to_none in (True, False):
        loss = parallel(column(*([world().index + 1.0] if wrapped else [1.0, 2.0]))).sum()
        optimizer.zero_grad(set_to_none)  # between forward and backward, as some do
        loss.backward()
        if wrapped:
            parallel.finish()
        optimizer.step()
    return next(parallel.parameters()).item()


def test_torchs_optimizers_find_the_sums():
    assert (
        on_ranks(torchs_optimizer_on, True).values == [torchs_optimizer_on(False)] * 2 == [-6] * 2
    )


def without_zeroing(again):
    parallel = DataParallel(one_weight(), world())
    parallel(column(1.0)).sum().backward()
    parallel.finish()
    with pytest.raises(RuntimeError, match=r"still has the gradient of a finished step: zero") as e:
        again(parallel)
    assert ".main_grad" not in str(e.value)
    return grad_of(parallel.module.weight).item()


@pytest.mark.parametrize(
    "again",
    [
        lambda parallel: parallel.finish(),
        lambda parallel: parallel(column(1.0)).sum().backward(),
    ],
    ids=["finish", "backward"],
)
def test_a_finished_gradient_is_not_summed_again(again):
    assert on_ranks(without_zeroing, again).values == [2.0, 2.0]


def torchs_optimizer_on_bfloat16():
    parallel = DataParallel(one_weight(torch.bfloat16), world())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        parallel(column(1.0, dtype=torch.bfloat16)).sum().backward()
        parallel.finish()
        optimizer.step()


def test_torchs_optimizer_that_sees_no_gradient_is_told():
    with pytest.raises(RankFailed, match=r"torch\.bfloat16 weights use picotron_edu\.optim\.AdamW"):
        on_ranks(torchs_optimizer_on_bfloat16)


def test_zero_grad_clears_the_main_gradients_too():
    parallel = DataParallel(nn.Linear(1, 1, bias=False), world())
    for _ in range(3):
        parallel(torch.full((1, 1), 2.0)).sum().backward()
        parallel.finish()
        assert grad_of(parallel.module.weight).item() == 2
        parallel.zero_grad()


# The trainer


RUN = TrainConfig(
    num_hidden_layers=1,
    hidden_size=32,
    intermediate_size=48,
    sequence_length=32,
    micro_batch_size=2,
    steps=4,
    warmup=1,
    device="cpu",
)


def train_shared(config):
    history = train(config, progress=False, dp=world())
    flat = torch.cat([p.detach().flatten() for p in history.model.parameters()])
    lowest, highest = (all_reduce(flat.clone(), world(), op) for op in ("min", "max"))
    return history.records, torch.equal(lowest, highest), history.peak


@pytest.mark.parametrize("mode", MODES)
def test_ranks_times_accumulation_is_all_that_counts(mode):
    """4 micro-batches on 1 rank, or 2 on each of 2, or 1 on each of 4; also the gradient norm."""
    config = dataclasses.replace(RUN, data_parallel=mode)
    alone = train(dataclasses.replace(config, accumulation=4), progress=False)
    for n in (2, 4):
        run = on_ranks(train_shared, dataclasses.replace(config, accumulation=4 // n), n=n)
        sent = [e.payload_bytes for e in run.trace.of(rank=0, name="all_reduce")]
        params = sum(p.numel() for p in alone.model.parameters())
        in_steps = [size for size in sent[:-2] if size > 8]  # without counts, losses; and min, max
        assert sum(in_steps) == 4 * 4 * params, "once a step, however many micro-batches"
        for records, equal, _ in run:
            assert equal, "the replicas differ"
            for mine, his in zip(records, alone, strict=True):
                assert mine.loss == pytest.approx(his.loss, rel=1e-5)
                assert mine.grad_norm == pytest.approx(his.grad_norm, rel=1e-4)
                assert mine.tokens == his.tokens == 4 * 2 * 32


def test_speed_and_mfu_are_of_all_ranks_together():
    run = on_ranks(train_shared, RUN, n=2)
    alone = train(dataclasses.replace(RUN, accumulation=2), progress=False)
    work = alone[0].mfu * alone[0].seconds * alone.peak.flops
    for records, _, peak in run:
        for record in records:
            assert record.tokens_per_second == pytest.approx(128 / record.seconds)
            assert record.mfu == pytest.approx(work / record.seconds / (2 * peak.flops))


def test_without_an_axis_each_rank_trains_for_itself():
    records = [record.loss for record in train(RUN, progress=False)]
    run = on_ranks(lambda: [record.loss for record in train(RUN, progress=False)])
    assert run.values == [records, records]
    assert not run.trace.of(lane="comm")


def validation_loss():
    data = dataclasses.replace(RUN, sequence_length=64).text("validation", replicas=world().size)
    data.samples = 7  # not divisible by 2 or 3 ranks, nor by rows
    model = Llama(RUN.shape(256), dtype=torch.float64)
    batches = data.validation_batches(world().index, world().size)
    return evaluate(model, batches, torch.device("cpu"), total)


@pytest.mark.parametrize("n", [2, 3])
def test_validation_counts_each_sample_once_on_any_number_of_ranks(n):
    alone = validation_loss()
    for loss in on_ranks(validation_loss, n=n):
        assert loss == pytest.approx(alone, rel=1e-10)
