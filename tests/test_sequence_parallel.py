"""Sequence parallelism trains like one rank, sends tensor parallelism's bytes, keeps less."""

from dataclasses import replace

import pytest
import torch
from oracle import CONFIG, Rank, assert_same_training

from picotron_edu import recompute, sequence_parallel, tensor_parallel
from picotron_edu.data_parallel import DataParallel
from picotron_edu.layout import layout_of
from picotron_edu.memory import measured_activation_bytes
from picotron_edu.model import Llama
from picotron_edu.partial_grads import sum_partial_grads
from picotron_edu.ranks import Mesh, all_reduce, launch, world
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
    assert_same_training(alone(), 2, config=replace(CONFIG, tie_word_embeddings=True))
    assert_same_training(alone(), 4, config=CONFIG)  # 2 key heads on 4 ranks
    assert_same_training(alone(), 2, dtype=torch.float32)


@pytest.mark.parametrize("chunks", [2, 3])
def test_the_loss_in_chunks_of_each_ranks_part(chunks):
    assert_same_training(alone(chunks), 2, rows=7)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_with_recompute(policy):
    assert_same_training(alone(policy=policy), 2)


@pytest.mark.parametrize("wrapper", ["data parallel", "zero-1", "zero-2", "zero-3"])
def test_with_data_parallelism(wrapper):
    def technique(model: Llama) -> Rank:
        mesh = Mesh(dp=2, tp=2)
        sequence_parallel.apply(model, mesh.tp)
        stage = int(wrapper[-1]) if wrapper.startswith("zero") else 0
        wrapped = Zero(model, mesh.dp, stage) if stage else DataParallel(model, mesh.dp)

        def finish() -> None:
            sum_partial_grads(wrapped.parameters(), all_reduce, done=[mesh.dp])

        place = mesh.dp.index, mesh.dp.size
        return Rank(wrapped, *place, lambda x: all_reduce(x, mesh.dp), finish)

    assert_same_training(technique, 4, rows=7)


def test_gradients_of_norms_are_parts_and_their_sum_is_needed():
    """Not the mean, and not what one rank happens to have: without the sum the oracle says no."""

    def forgotten(model: Llama) -> Rank:
        sequence_parallel.apply(model, world())
        return Rank(model)

    with pytest.raises(AssertionError, match=r"gradients of .*norm"):
        assert_same_training(forgotten, 2)

    def partial_names() -> set[str]:
        model = Llama(CONFIG)
        sequence_parallel.apply(model, world())
        return {layout_of(p).name for p in model.parameters() if layout_of(p).partial_over}

    norms = {name for name, _ in Llama(CONFIG).named_parameters() if "norm" in name}
    for names in launch(partial_names, world_size=2, quiet=True):
        assert names == norms


def trace_of(apply, **options):
    def step() -> None:
        model = Llama(replace(CONFIG, num_hidden_layers=4))
        apply(model, world(), **options)
        tokens_BS = torch.arange(24).view(2, 12) % 12
        model(tokens_BS, None, tokens_BS)[0].backward()

    return launch(step, world_size=2, quiet=True).trace


def test_the_bytes_are_those_of_tensor_parallelism():
    """An all-reduce is a reduce-scatter and an all-gather; gathering again is a quarter more."""
    tensor = trace_of(tensor_parallel.apply)
    kept = trace_of(sequence_parallel.apply, regather=False)
    again = trace_of(sequence_parallel.apply)
    piece = 2 * 12 * CONFIG.hidden_size * 4 * (2 - 1) / 2  # wire bytes of one all-gather
    # the embedding's output is scattered, the head's input gathered: together one all-reduce less
    # in forward, one more in backward
    assert kept.wire_bytes(rank=0) == tensor.wire_bytes(rank=0)
    assert again.wire_bytes(rank=0) - kept.wire_bytes(rank=0) == piece * (2 * 4 + 1)
    per_layer = 4 * 2 * piece
    assert len(kept.of(rank=0, name="all_gather")) == len(kept.of(rank=0, name="reduce_scatter"))
    assert kept.wire_bytes(rank=0) >= 4 * per_layer


def test_activations_are_a_fraction_and_gathered_ones_are_not_kept():
    def kept_bytes(kind: str) -> int:
        model = Llama(replace(FOUR_KV, num_hidden_layers=4))
        if kind == "tensor":
            tensor_parallel.apply(model, world())
        elif kind != "plain":
            sequence_parallel.apply(model, world(), regather=kind == "regather")
        tokens_BS = torch.zeros(2, 16, dtype=torch.int64)
        return measured_activation_bytes(model, lambda: model(tokens_BS, None, tokens_BS)[0])

    def all_kinds() -> dict[str, int]:
        return {kind: kept_bytes(kind) for kind in ("plain", "tensor", "keep", "regather")}

    for kept in launch(all_kinds, world_size=4, quiet=True):
        assert kept["plain"] > kept["tensor"] > kept["keep"] > kept["regather"]
        assert kept["regather"] < 1.3 * kept["plain"] / 4  # cosines and token numbers stay whole


def test_a_sequence_that_does_not_divide_is_refused_with_both_numbers():
    def refused() -> str:
        model = Llama(CONFIG)
        sequence_parallel.apply(model, world())
        with pytest.raises(ValueError) as error:
            model(torch.zeros(1, 5, dtype=torch.int64))
        return str(error.value)

    run = launch(refused, world_size=2, quiet=True)
    assert set(run) == {"a sequence of 5 tokens is not divisible by world=2"}
    assert not len(run.trace), "something was sent before the refusal"
