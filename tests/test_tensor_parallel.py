"""Tensor parallelism trains like one rank, alone and with others; its messages are counted."""

import math
from dataclasses import replace

import pytest
import torch
from oracle import CONFIG, Rank, assert_same_training, gathered
from torch import nn

from picotron_edu import recompute, tensor_parallel
from picotron_edu.data_parallel import DataParallel
from picotron_edu.layout import Cut, Layout, attach, describe, layout_of, slice_of
from picotron_edu.memory import activation_bytes, measured_activation_bytes
from picotron_edu.model import Llama, token_loss_sum
from picotron_edu.optim import global_norm
from picotron_edu.partial_grads import sum_partial_grads
from picotron_edu.ranks import Mesh, all_reduce, launch, world
from picotron_edu.zero import Zero

FOUR_KV = replace(CONFIG, num_key_value_heads=4)
BY_THREE = replace(
    CONFIG, num_attention_heads=6, num_key_value_heads=3, hidden_size=24, vocab_size=13
)


def cut(model: Llama, axis, chunks: int = 1):
    """Tensor parallelism over `axis`, and the sum of what is partial."""
    tensor_parallel.apply(model, axis, chunks)
    return lambda: sum_partial_grads(model.parameters(), all_reduce)


def alone(chunks: int = 1):
    def technique(model: Llama) -> Rank:
        finish = cut(model, world(), chunks)
        return Rank(model, finish=finish)

    return technique


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("n", "config"), [(1, CONFIG), (2, CONFIG), (3, BY_THREE), (4, FOUR_KV)])
def test_tensor_parallel_trains_like_one_rank(n, config, tied):
    assert_same_training(alone(), n, rows=7, config=replace(config, tie_word_embeddings=tied))


def test_in_float32():
    assert_same_training(alone(), 2, dtype=torch.float32)


def test_fewer_key_heads_than_ranks_are_replicated_and_count_once_in_the_norm():
    """2 key heads on 4 ranks, 1 on 2: gradients are summed over the ranks that share (case 30)."""
    assert_same_training(alone(), 4, config=CONFIG)
    assert_same_training(alone(), 2, config=replace(CONFIG, num_key_value_heads=1))


@pytest.mark.parametrize("vocab_size", [11, 5])
def test_a_vocabulary_that_does_not_divide(vocab_size):
    """No rows are made up, so none can enter the softmax (case 32)."""
    assert_same_training(alone(), 2, config=replace(CONFIG, vocab_size=vocab_size))


@pytest.mark.parametrize("chunks", [2, 5])
def test_the_loss_in_chunks_of_the_sequence(chunks):
    assert_same_training(alone(chunks), 2, rows=7, micro_batch_size=3)


# with other techniques


def with_data_parallel(wrap, policy: str = "none", dp: int = 2, tp: int = 2):
    def technique(model: Llama) -> Rank:
        mesh = Mesh(dp=dp, tp=tp)
        cut(model, mesh.tp)
        recompute.apply(model, policy)
        wrapped = wrap(model, mesh.dp)

        def both() -> None:
            sum_partial_grads(wrapped.parameters(), all_reduce, done=[mesh.dp])

        return Rank(
            wrapped, mesh.dp.index, mesh.dp.size, lambda x: all_reduce(x, mesh.dp), finish=both
        )

    return technique


WRAPPERS = {
    "bucketed": DataParallel,
    "naive": lambda model, axis: DataParallel(model, axis, "naive"),
    "zero-1": lambda model, axis: Zero(model, axis, 1),
    "zero-2": lambda model, axis: Zero(model, axis, 2),
    "zero-3": lambda model, axis: Zero(model, axis, 3),
}


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_with_data_parallelism_and_recompute(wrapper, policy):
    assert_same_training(with_data_parallel(WRAPPERS[wrapper], policy), 4, rows=7)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_the_gradient_norm_does_not_move_with_the_layout(dp, tp):
    """(dp, tp) as one rank, with other token counts in each row (case 5). With 2·2 ranks one tp
    axis is ranks 2 and 3, where a place on the axis is not the global rank (case 72).
    """
    assert_same_training(with_data_parallel(DataParallel, dp=dp, tp=tp), dp * tp, rows=7)


def test_replicated_key_heads_with_zero():
    config = replace(CONFIG, num_key_value_heads=1)
    assert_same_training(with_data_parallel(WRAPPERS["zero-3"]), 4, config=config)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_with_recompute(policy):
    def technique(model: Llama) -> Rank:
        cut(model, world())
        recompute.apply(model, policy)
        return Rank(model)

    assert_same_training(technique, 2)


# what is sent


def test_two_all_reduces_forward_and_two_backward_per_layer():
    """9 in backward for 4 layers and the head, not 21: q, k and v share one, of B·S·D numbers."""
    config = replace(CONFIG, num_hidden_layers=4)

    def step() -> None:
        model = Llama(config)
        tensor_parallel.apply(model, world())
        tokens_BS = torch.arange(24).view(2, 12) % 12
        loss, _ = model(tokens_BS, None, tokens_BS)
        all_reduce(torch.ones(1), world())  # a mark between forward and backward
        loss.backward()

    run = launch(step, world_size=2, quiet=True)
    events = list(run.trace.of(rank=0, name="all_reduce"))
    mark = next(i for i, e in enumerate(events) if e.payload_bytes == 4)
    large = 2 * 12 * CONFIG.hidden_size * 4
    forward = [e.payload_bytes for e in events[:mark]]
    backward = [e.payload_bytes for e in events[mark + 1 :]]
    assert forward == [large] * (1 + 2 * 4) + [24 * 4, 2 * 24 * 4]  # embedding, layers, loss
    assert backward == [large] * (1 + 2 * 4)  # head, layers; the embedding's input has none
    assert {e.name for e in run.trace.of(lane="comm")} == {"all_reduce"}, "logits were gathered"


@pytest.mark.parametrize(
    ("n", "config"),
    [(2, CONFIG), (4, replace(CONFIG, num_attention_heads=8, hidden_size=32)), (3, BY_THREE)],
    ids=["2", "4 share 2 key heads", "3"],
)
def test_what_a_rank_holds_is_a_thinner_llama(n, config):
    """Parameters and activations are those of `rank_shape`; the loss adds 3 bytes a token of masks
    and needs no weight of the labels. The first rank has the most of a vocabulary.
    """
    B, S = 2, 12

    def held() -> tuple[int, int]:
        model = Llama(config)
        tensor_parallel.apply(model, world())
        tokens_BS = torch.arange(B * S).view(B, S) % 12
        kept = measured_activation_bytes(model, lambda: model(tokens_BS, None, tokens_BS + 0)[0])
        return sum(p.numel() for p in model.parameters()), kept

    parameters, kept = launch(held, world_size=n, quiet=True)[0]
    shape = tensor_parallel.rank_shape(config, n)
    assert parameters == shape.num_parameters()
    assert kept == activation_bytes(shape, B, S) - 4 + 3 * B * S


def test_weights_per_rank_are_a_fraction():
    def count() -> tuple[int, int]:
        model = Llama(FOUR_KV)
        norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
        tensor_parallel.apply(model, world())
        return sum(p.numel() for p in model.parameters()), norms

    total = Llama(FOUR_KV).config.num_parameters()
    for mine, norms in launch(count, world_size=4, quiet=True):
        assert mine == (total - norms) / 4 + norms


# pieces


def test_cutting_and_gathering_is_the_identity_for_any_number_of_ranks():
    """Also for q, k, v and gate, up: cut by heads and channels, nothing is mixed up (case 36)."""

    def back_and_forth() -> dict[str, torch.Tensor]:
        model = Llama(FOUR_KV, seed=3)
        tensor_parallel.apply(model, world())
        return {layout_of(p).name: gathered(p, p.detach()) for p in model.parameters()}

    whole = dict(Llama(FOUR_KV, seed=3).named_parameters())
    for n in (2, 4):
        for pieces in launch(back_and_forth, world_size=n, quiet=True):
            assert pieces.keys() == whole.keys()
            for name, value in pieces.items():
                assert torch.equal(value, whole[name]), name


def test_a_piece_is_a_slice_of_the_weight_that_one_rank_would_have():
    """Not a weight of its own: no larger where only inputs are cut, no two alike (case 35)."""

    def pieces() -> dict[str, torch.Tensor]:
        model = Llama(FOUR_KV, seed=3)
        tensor_parallel.apply(model, world())
        return {layout_of(p).name: (slice_of(layout_of(p)), p.detach()) for p in model.parameters()}

    whole = dict(Llama(FOUR_KV, seed=3).named_parameters())
    ranks = list(launch(pieces, world_size=4, quiet=True))
    for name, weight in whole.items():
        for where, piece in (rank[name] for rank in ranks):
            assert torch.equal(piece, weight[where]), name
        some = [rank[name][1] for rank in ranks]
        alike = [torch.equal(a, b) for i, a in enumerate(some) for b in some[:i]]
        assert all(alike) if weight.dim() == 1 else not any(alike), name


def test_gate_and_up_are_cut_each_for_itself():
    """Filled with 1 and with 2, on each rank both (case 36)."""

    def fill() -> tuple[list[float], list[float]]:
        model = Llama(CONFIG)
        mlp = model.model.layers[0].mlp
        with torch.no_grad():
            mlp.gate_proj.weight.fill_(1)
            mlp.up_proj.weight.fill_(2)
        tensor_parallel.apply(model, world())
        return mlp.gate_proj.weight.unique().tolist(), mlp.up_proj.weight.unique().tolist()

    assert launch(fill, world_size=2, quiet=True).values == [([1.0], [2.0])] * 2


def linears(n_in: int, n_out: int) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)  # the same on all ranks
    linear = nn.Linear(n_in, n_out, dtype=torch.float64)
    for name, param in linear.named_parameters():
        attach(param, Layout(name, tuple(param.shape)))
    return linear, torch.randn(2, 3, n_in, dtype=torch.float64)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_bias_of_a_row_parallel_linear_counts_once(n):
    """It is added after the sum over the ranks, not inside it (case 28)."""

    def output_and_gradients():
        axis = world()
        linear, x = linears(12, 4)
        with torch.no_grad():
            expected = linear(x)
        tensor_parallel.cut_linear(linear, axis, dim=1)
        y = tensor_parallel.row_linear(axis, linear, x.chunk(n, -1)[axis.index])
        y.sum().backward()
        return y.detach(), expected, linear.bias.grad

    for y, expected, grad in launch(output_and_gradients, world_size=n, quiet=True):
        torch.testing.assert_close(y, expected)
        assert torch.equal(grad, torch.full_like(grad, 6.0))  # 2 · 3 tokens, on every rank


def test_the_bias_of_a_row_parallel_linear_in_two_numbers():
    """(1, 1)·(1, 2) + 10 = 13, not 23; its gradient over five rows is 5 on all ranks (case 28)."""

    def thirteen() -> tuple[list[float], float]:
        axis, linear = world(), nn.Linear(2, 1)
        describe(linear)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor([[1.0, 2.0]]))
            linear.bias.fill_(10.0)
        tensor_parallel.cut_linear(linear, axis, dim=1)
        y = tensor_parallel.row_linear(axis, linear, torch.ones(5, 1))
        y.sum().backward()
        return y.flatten().tolist(), linear.bias.grad.item()

    assert launch(thirteen, world_size=2, quiet=True).values == [([13.0] * 5, 5.0)] * 2


@pytest.mark.parametrize("n", [2, 3])
def test_column_parallel_linears_with_biases(n):
    def output_and_gradients():
        axis = world()
        linear, x = linears(5, 12)
        x.requires_grad_()
        (expected,) = torch.autograd.grad(linear(x).square().sum(), x)
        whole = linear(x).detach()
        tensor_parallel.cut_linear(linear, axis, dim=0)
        (y,) = tensor_parallel.column_linears(axis, x, linear)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        return y.detach(), whole, grad, expected

    parts = list(launch(output_and_gradients, world_size=n, quiet=True))
    torch.testing.assert_close(torch.cat([part[0] for part in parts], -1), parts[0][1])
    for _, _, grad, expected in parts:
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("n", [2, 3])
def test_vocabulary_parallel_loss_equals_the_plain_one(n):
    """Labels on the edges of the parts, labels that do not count, huge logits (× 1000): no NaN."""

    def losses():
        axis = world()
        torch.manual_seed(0)
        logits_TV = torch.randn(8, 7, dtype=torch.float64) * 1000
        labels_T = torch.tensor([0, 2, 3, 4, 6, -100, 5, -100])
        first = sum(len(p) for p in torch.arange(7).tensor_split(n)[: axis.index])
        mine = logits_TV.tensor_split(n, 1)[axis.index].clone().requires_grad_()
        loss = tensor_parallel.VocabularyLoss.apply(axis, first, mine, labels_T)
        loss.backward()
        whole = logits_TV.clone().requires_grad_()
        expected, _ = token_loss_sum(whole[None], labels_T[None])
        expected.backward()
        return loss.item(), expected.item(), mine.grad, whole.grad.tensor_split(n, 1)[axis.index]

    for loss, expected, grad, part in launch(losses, world_size=n, quiet=True):
        assert loss == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(grad, part)


@pytest.mark.parametrize("n", [2, 4])
def test_five_tokens_all_equally_likely_cost_ln_5(n):
    """Not ln 6 or ln 8, as with rows made up for even shares; the labels are the first and last
    token of each rank's part (case 32).
    """

    def loss() -> float:
        axis = world()
        parts = torch.arange(5).tensor_split(n)
        first, columns = int(parts[axis.index][0]), len(parts[axis.index])
        labels_T = torch.arange(5)
        logits_TV = torch.zeros(5, columns)
        return tensor_parallel.VocabularyLoss.apply(axis, first, logits_TV, labels_T).item()

    for value in launch(loss, world_size=n, quiet=True):
        assert value == pytest.approx(5 * math.log(5), rel=1e-6)


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_gradient_at_the_input_of_the_head_is_complete_on_every_rank(chunks):
    """A part of the sum would not be seen in the loss (case 34)."""

    def gradients() -> tuple[torch.Tensor, torch.Tensor]:
        config = replace(CONFIG, vocab_size=6)
        plain, model = (Llama(config, seed=1, dtype=torch.float64) for _ in range(2))
        tensor_parallel.apply(model, world(), chunks)
        torch.manual_seed(0)
        x_BSD = torch.randn(2, 4, config.hidden_size, dtype=torch.float64, requires_grad=True)
        labels_BS = torch.tensor([[0, 2, 3, 5], [1, -100, 4, 2]])
        losses = [each.head_loss(each.lm_head, x_BSD, labels_BS)[0] for each in (plain, model)]
        mine, whole = (torch.autograd.grad(loss, x_BSD)[0] for loss in losses)
        return mine, whole

    for mine, whole in launch(gradients, world_size=2, quiet=True):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-14)


def test_shards_of_norm_3_and_4_and_a_whole_12_have_the_norm_13():
    """What is whole on both ranks counts once: not 17.7 (case 16)."""

    def norm() -> float:
        axis = world()
        shard, whole = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        attach(shard, Layout("shard", (2,), (Cut(0, axis),)))
        attach(whole, Layout("whole", (1,)))
        shard.grad, whole.grad = torch.tensor([[3.0], [4.0]])[axis.index], torch.tensor([12.0])
        return global_norm([shard, whole], all_reduce).item()

    assert launch(norm, world_size=2, quiet=True).values == [13.0, 13.0]


# bad input


@pytest.mark.parametrize(
    ("changes", "n", "message"),
    [
        ({}, 3, "num_attention_heads=4 is not divisible by world=3"),
        ({"intermediate_size": 25}, 2, "intermediate_size=25 is not divisible by world=2"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 24},
            4,
            "num_key_value_heads=3 and world=4: one must divide the other",
        ),
        ({"vocab_size": 1}, 2, "vocab_size=1 is below world=2"),
        ({"intermediate_size": 3}, 2, "intermediate_size=3 is not divisible by world=2"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24},
            2,
            "num_key_value_heads=3 and world=2: one must divide the other",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24},
            4,
            "num_attention_heads=6 is not divisible by world=4",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers(changes, n, message):
    config = replace(CONFIG, **changes)

    def refused() -> str:
        model = Llama(config)
        describe(model)
        with pytest.raises(ValueError) as error:
            tensor_parallel.apply(model, world())
        return str(error.value)

    run = launch(refused, world_size=n, quiet=True)
    assert all(message in text for text in run)
    assert not len(run.trace), "something was sent before the refusal"


def test_a_second_cut_and_zero_chunks_are_refused():
    def messages() -> list[str]:
        model, said = Llama(CONFIG), []
        with pytest.raises(ValueError) as error:
            tensor_parallel.apply(model, world(), 0)
        said.append(str(error.value))
        tensor_parallel.apply(model, world())
        with pytest.raises(ValueError) as error:
            tensor_parallel.apply(model, world())
        return [*said, str(error.value)]

    for chunks, twice in launch(messages, world_size=2, quiet=True):
        assert chunks == "loss_chunks must be at least 1, got 0"
        assert twice.startswith("model.embed_tokens.weight is cut already: apply this once")
