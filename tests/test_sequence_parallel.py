"""Sequence parallelism trains like one rank, sends tensor parallelism's bytes, keeps less."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from oracle import CONFIG, Rank, assert_same_training
from torch import nn

from picotron_edu import recompute, sequence_parallel, tensor_parallel
from picotron_edu.data_parallel import DataParallel
from picotron_edu.layout import Cut, Layout, attach, describe, layout_of, slice_of
from picotron_edu.memory import measured_activation_bytes
from picotron_edu.model import Llama
from picotron_edu.optim import global_norm
from picotron_edu.partial_grads import sum_partial_grads
from picotron_edu.ranks import Mesh, all_reduce, launch, world
from picotron_edu.sequence_parallel import rank_activations
from picotron_edu.zero import Zero

FOUR_KV = replace(CONFIG, num_key_value_heads=4)
BY_THREE = replace(
    CONFIG, num_attention_heads=6, num_key_value_heads=3, hidden_size=24, vocab_size=13
)


def alone(chunks: int = 1, regather: bool = True, policy: str = "none"):
    def technique(model: Llama) -> Rank:
        sequence_parallel.apply(model, world(), chunks, regather)
        recompute.apply(model, policy)
        return Rank(model, finish=lambda: sum_partial_grads(model.parameters(), all_reduce))

    return technique


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize(("n", "config"), [(1, CONFIG), (2, CONFIG), (3, BY_THREE), (4, FOUR_KV)])
def test_sequence_parallel_trains_like_one_rank(n, config, regather):
    assert_same_training(alone(regather=regather), n, rows=7, config=config)


def test_tied_embeddings_replicated_key_heads_and_float32():
    """2 key heads on 4 ranks are summed over those that share one, norms over all (case 30)."""
    assert_same_training(alone(), 2, config=replace(CONFIG, tie_word_embeddings=True))
    assert_same_training(alone(), 4, config=CONFIG)  # 2 key heads on 4 ranks
    assert_same_training(alone(), 2, dtype=torch.float32)


@pytest.mark.parametrize("vocab_size", [11, 5])
def test_a_vocabulary_that_does_not_divide(vocab_size):
    """Rows are not made up, so none can enter the softmax of the gathered positions (case 32)."""
    assert_same_training(alone(), 2, config=replace(CONFIG, vocab_size=vocab_size))


@pytest.mark.parametrize("chunks", [2, 3])
def test_the_loss_in_chunks_of_each_ranks_part(chunks):
    assert_same_training(alone(chunks), 2, rows=7)


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_with_recompute(policy, regather):
    assert_same_training(alone(policy=policy, regather=regather), 2)


@pytest.mark.parametrize("wrapper", ["data parallel", "zero-1", "zero-2", "zero-3"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_with_data_parallelism_and_recompute(wrapper, policy):
    """Loss, gradients and their norm do not move with the layout, on 2·2 ranks as on 1·2 and 1·1
    above, though each part of a sequence has another number of counted tokens (case 5). Of one tp
    axis the ranks are 2 and 3, where a place on the axis is not the global rank (case 72).
    """

    def technique(model: Llama) -> Rank:
        mesh = Mesh(dp=2, tp=2)
        sequence_parallel.apply(model, mesh.tp)
        recompute.apply(model, policy)
        stage = int(wrapper[-1]) if wrapper.startswith("zero") else 0
        wrapped = Zero(model, mesh.dp, stage) if stage else DataParallel(model, mesh.dp)

        def finish() -> None:
            sum_partial_grads(wrapped.parameters(), all_reduce, done=[mesh.dp])

        place = mesh.dp.index, mesh.dp.size
        return Rank(wrapped, *place, lambda x: all_reduce(x, mesh.dp), finish)

    assert_same_training(technique, 4, rows=7)


# partial gradients


@pytest.mark.parametrize("op", ["none", "avg"])
def test_gradients_of_norms_are_parts_and_their_sum_is_needed(op):
    """Not the mean, and not what one rank happens to have: there the oracle says no (case 29)."""

    def wrong(model: Llama) -> Rank:
        sequence_parallel.apply(model, world())

        def finish() -> None:
            if op == "avg":
                sum_partial_grads(model.parameters(), lambda x, axis, _: all_reduce(x, axis, op))

        return Rank(model, finish=finish)

    with pytest.raises(AssertionError, match=r"gradients of .*norm"):
        assert_same_training(wrong, 2)


def test_which_gradients_are_parts():

    def partial_names() -> set[str]:
        model = Llama(CONFIG)
        sequence_parallel.apply(model, world())
        return {layout_of(p).name for p in model.parameters() if layout_of(p).partial_over}

    norms = {name for name, _ in Llama(CONFIG).named_parameters() if "norm" in name}
    for names in launch(partial_names, world_size=2, quiet=True):
        assert names == norms


def sums_of_four_numbers() -> tuple[float, ...]:
    """On a rank of two: a norm weight of 1 with positions 1, 2 | 3, 4; a bias of 10 behind rows."""
    axis = world()
    weight, row, shard = nn.Parameter(torch.ones(1)), nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    attach(weight, Layout("norm", (1,), partial_over=(axis,)))
    (weight * torch.tensor([[1.0, 2], [3, 4]])[axis.index]).sum().backward()
    describe(row)
    with torch.no_grad():
        row.weight.copy_(torch.tensor([[1.0, 2]]))
        row.bias.fill_(10.0)
    tensor_parallel.cut_linear(row, axis, dim=1)
    attach(row.bias, replace(layout_of(row.bias), partial_over=(axis,)))
    y_BsF = sequence_parallel.row_linear(axis, row, torch.ones(1, 6, 1))
    assert y_BsF.shape == (1, 3, 1)
    y_BsF.sum().backward()
    attach(shard, Layout("shard", (2,), (Cut(0, axis),)))
    shard.grad = torch.tensor([[3.0], [4.0]])[axis.index]
    parts = weight.grad.item(), row.bias.grad.item()
    sum_partial_grads([weight, row.bias], all_reduce)
    norm = global_norm([shard, weight], all_reduce).item()
    return *parts, weight.grad.item(), row.bias.grad.item(), y_BsF[0, 0].item(), norm


def test_parts_in_numbers():
    """Norm: 3 and 7 make 10, not the mean 5 (case 29). Row bias: y is 13, not 23, and its gradient
    over six positions is 6, of which each rank has 3 (case 28). In the global norm the 10 counts
    once beside shards 3 and 4: √125, where twice would be 15 (case 16).
    """
    one, other = launch(sums_of_four_numbers, world_size=2, quiet=True)
    assert one[:2] == (3.0, 3.0) and other[:2] == (7.0, 3.0)
    assert one[2:] == other[2:] == pytest.approx((10.0, 6.0, 13.0, 125**0.5))


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_gradient_at_the_input_of_the_head_is_complete_at_each_ranks_positions(chunks):
    """A part of the sum would not be seen in the loss (case 34)."""

    def gradients() -> tuple[torch.Tensor, torch.Tensor]:
        axis, config = world(), replace(CONFIG, vocab_size=6)
        plain, model = (Llama(config, seed=1, dtype=torch.float64) for _ in range(2))
        sequence_parallel.apply(model, axis, chunks)
        torch.manual_seed(0)
        x_BSD = torch.randn(2, 4, config.hidden_size, dtype=torch.float64)
        labels_BS = torch.tensor([[0, 2, 3, 5], [1, -100, 4, 2]])
        grads = []
        for each, x in ((plain, x_BSD), (model, x_BSD.chunk(2, 1)[axis.index])):
            leaf = x.clone().requires_grad_()
            each.head_loss(each.lm_head, leaf, labels_BS)[0].backward()
            grads.append(leaf.grad)
        return grads[0].chunk(2, 1)[axis.index], grads[1]

    for whole, mine in launch(gradients, world_size=2, quiet=True):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-14)


def test_weights_are_slices_of_those_that_one_rank_would_have():
    """As for tensor parallelism: q, k, v, gate and up each cut for itself (case 36), no piece a
    weight of its own, and what is whole equal on all ranks (case 35).
    """

    def pieces() -> dict[str, tuple]:
        model = Llama(FOUR_KV, seed=3)
        sequence_parallel.apply(model, world())
        return {layout_of(p).name: (slice_of(layout_of(p)), p.detach()) for p in model.parameters()}

    whole = dict(Llama(FOUR_KV, seed=3).named_parameters())
    for rank in launch(pieces, world_size=4, quiet=True):
        assert rank.keys() == whole.keys()
        for name, (where, piece) in rank.items():
            assert torch.equal(piece, whole[name][where]), name


# what is sent, and what is kept


def trace_of(apply, **options):
    def step() -> None:
        model = Llama(replace(CONFIG, num_hidden_layers=4))
        apply(model, world(), **options)
        tokens_BS = torch.arange(24).view(2, 12) % 12
        model(tokens_BS, None, tokens_BS)[0].backward()
        sum_partial_grads(model.parameters(), all_reduce)

    return launch(step, world_size=2, quiet=True).trace


def test_the_bytes_are_those_of_tensor_parallelism():
    """An all-reduce is a reduce-scatter and an all-gather; gathering again is a quarter more. The
    norms' gradients come on top, once a step.
    """
    L, D = 4, CONFIG.hidden_size
    tensor = trace_of(tensor_parallel.apply)
    kept = trace_of(sequence_parallel.apply, regather=False)
    again = trace_of(sequence_parallel.apply)
    piece = 2 * 12 * D * 4 * (2 - 1) / 2  # wire bytes of one all-gather
    norms = 2 * (2 - 1) / 2 * (2 * L + 1) * D * 4
    # the embedding's output is scattered, the head's input gathered: together one all-reduce less
    # in forward, one more in backward
    assert kept.wire_bytes(rank=0) == tensor.wire_bytes(rank=0) + norms
    assert again.wire_bytes(rank=0) == kept.wire_bytes(rank=0) + piece * (2 * L + 1)
    for trace, gathers in ((kept, 2), (again, 3)):
        assert len(trace.of(rank=0, name="all_gather")) == gathers * (2 * L + 1)
        assert len(trace.of(rank=0, name="reduce_scatter")) == 2 * (2 * L + 1)
        assert len(trace.of(rank=0, name="all_reduce")) == 3  # two of the loss, one of the norms


@pytest.mark.parametrize(
    ("n", "config"),
    [(2, CONFIG), (4, CONFIG), (4, replace(CONFIG, num_attention_heads=8, hidden_size=32))],
    ids=["2 ranks", "a head each", "4 ranks"],
)
def test_what_a_rank_keeps_is_what_the_formula_says(n, config):
    """To the byte, also with 2 key heads on 4 ranks, and with one query head on each. The loss adds
    masks, 3 bytes a token (in chunks 1), and needs no weight of the labels.
    """
    B, S = 2, 12
    ways = [
        (regather, chunks, policy, dtype)
        for regather in (True, False)
        for chunks in (1, 3)
        for policy in ("none", "selective", "full")
        for dtype in (torch.float32, torch.bfloat16)
    ]

    def kept_bytes() -> list[int]:
        counts = []
        for regather, chunks, policy, dtype in ways:
            model, tokens_BS = Llama(config, dtype=dtype), torch.zeros(B, S, dtype=torch.int64)
            sequence_parallel.apply(model, world(), chunks, regather)
            recompute.apply(model, policy)
            run = partial(model, tokens_BS, None, tokens_BS + 0)
            counts.append(measured_activation_bytes(model, lambda run=run: run()[0]))
        return counts

    formulas = []
    for regather, chunks, policy, dtype in ways:
        options = {"dtype": dtype, "recompute": policy}
        rows = rank_activations(config, n, B, S, regather, chunks, **options)
        masks = (3 if chunks == 1 else 1) * B * S
        formulas.append(sum(k.total for k in rows) - 4 + masks)
    assert launch(kept_bytes, world_size=n, quiet=True)[0] == formulas


def test_activations_are_a_fraction_and_gathered_ones_are_not_kept():
    """But for token numbers, labels and the angles of the positions: an n-th of one rank's."""
    config = replace(FOUR_KV, num_hidden_layers=4)
    table = {k.name: k for k in rank_activations(config, 4, 2, 16)}
    alone = {k.name: k for k in rank_activations(config, 1, 2, 16)}
    whole = {name for name, kept in table.items() if kept.total == alone[name].total}
    assert whole == {
        "token numbers",
        "cosine and sine of the positions",
        "labels",
        "weight of the labels",
    }
    assert all(4 * table[name].total == alone[name].total for name in table.keys() - whole)
    gathered = {k.name: k for k in rank_activations(config, 4, 2, 16, regather=False)}
    assert gathered["norm output"].total == alone["norm output"].total


# bad input


def test_a_sequence_that_does_not_divide_is_refused_with_both_numbers():
    """5 tokens on 2 ranks, before anything is sent (case 43)."""

    def refused() -> str:
        model = Llama(CONFIG)
        sequence_parallel.apply(model, world())
        with pytest.raises(ValueError) as error:
            model(torch.zeros(1, 5, dtype=torch.int64))
        return str(error.value)

    run = launch(refused, world_size=2, quiet=True)
    assert set(run) == {"a sequence of 5 tokens is not divisible by world=2"}
    assert not len(run.trace), "something was sent before the refusal"


@pytest.mark.parametrize(
    ("changes", "n", "options", "message"),
    [
        ({}, 3, {}, "num_attention_heads=4 is not divisible by world=3"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24},
            2,
            {},
            "num_key_value_heads=3 and world=2: one must divide the other",
        ),
        ({}, 2, {"loss_chunks": 0}, "loss_chunks must be at least 1, got 0"),
    ],
)
def test_what_tensor_parallelism_refuses_is_refused(changes, n, options, message):
    """With both numbers, before anything is sent (case 30)."""

    def refused() -> str:
        with pytest.raises(ValueError) as error:
            sequence_parallel.apply(Llama(replace(CONFIG, **changes)), world(), **options)
        return str(error.value)

    run = launch(refused, world_size=n, quiet=True)
    assert all(message in text for text in run) and not len(run.trace)
