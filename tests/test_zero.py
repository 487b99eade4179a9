"""ZeRO: n ranks that share the states train like one, whatever the model holds."""

import copy
import dataclasses
from functools import partial
from itertools import islice

import pytest
import torch
from oracle import CONFIG, Rank, assert_same_training, gathered, make_batches
from torch import nn
from toys import Toy

from picotron_edu import recompute
from picotron_edu.layout import describe
from picotron_edu.model import Llama, rope
from picotron_edu.optim import (
    AdamW,
    LossScaler,
    clip_by_global_norm,
    global_norm,
    grad_of,
    keep_main_grads,
    zero_grads,
)
from picotron_edu.ranks import RankFailed, RanksError, all_reduce, launch, span, world
from picotron_edu.train import TrainConfig, accumulate, evaluate, train
from picotron_edu.zero import Zero

STAGES = [1, 2, 3]


def total(x):
    return all_reduce(x, world())


def on_ranks(fn, *args, n=2, **settings):
    return launch(fn, *args, world_size=n, quiet=True, timeout=20, **settings)


def zero(model, stage, policy="none", **settings):
    recompute.apply(model, policy)
    return Rank(Zero(model, world(), stage, **settings), world().index, world().size, total)


# The oracle: n ranks train like one


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("n", "micro_batch_size"), [(1, 3), (2, 1), (3, 2), (4, 2)])
def test_n_ranks_train_like_one(stage, n, micro_batch_size):
    """7 rows, of unequal token counts; 1 to 4 micro-batches a rank."""
    assert_same_training(partial(zero, stage=stage), n, rows=7, micro_batch_size=micro_batch_size)


@pytest.mark.parametrize("stage", STAGES)
def test_tied_weights_and_float32(stage):
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    assert_same_training(partial(zero, stage=stage), 2, rows=7, config=tied)
    assert_same_training(partial(zero, stage=stage), 2, dtype=torch.float32)


def test_without_prefetch_the_numbers_are_the_same():
    assert_same_training(partial(zero, stage=3, prefetch=False), 2)


# With recomputation, in both nesting orders


def zero_then_recompute(model, stage, policy):
    rank = zero(model, stage)
    recompute.apply(model, policy)
    return rank


def checkpoint_outside(model, stage, blocks_at_once):
    """The checkpoint is around a function that calls whole blocks, hooks and all."""
    rank, decoder = zero(model, stage), model.model

    def run(first, x_BSD, *positions):
        for block in decoder.layers[first : first + blocks_at_once]:
            x_BSD = block(x_BSD, *positions)
        _ = x_BSD * x_BSD  # not used, so that a recomputation goes on after the last block
        return x_BSD

    def forward(tokens_BS, positions_S):
        x_BSD, positions = decoder.embed_tokens(tokens_BS), rope(decoder.config, positions_S)
        for first in range(0, len(decoder.layers), blocks_at_once):
            x_BSD = recompute.checkpoint(run, first, x_BSD, *positions)
        return decoder.norm(x_BSD)

    decoder.forward = forward
    return rank


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputation_before_and_after_wrapping(stage, policy):
    assert_same_training(partial(zero, stage=stage, policy=policy), 2, rows=7)
    assert_same_training(partial(zero_then_recompute, stage=stage, policy=policy), 2, rows=7)


@pytest.mark.parametrize("blocks_at_once", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_around_whole_blocks(stage, blocks_at_once):
    technique = partial(checkpoint_outside, stage=stage, blocks_at_once=blocks_at_once)
    assert_same_training(technique, 2, rows=7)


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1000))

    def forward(self, x):
        return nn.functional.dropout(x * self.w, 0.5).square()  # its gradient needs the mask


def dropout_twice(outside):
    layer, x = Dropout(), torch.ones(1000, requires_grad=True)
    if not outside:
        layer.forward = partial(recompute.checkpoint, layer.forward)
    model = Zero(layer, world(), stage=3)
    y = recompute.checkpoint(model, x) if outside else model(x)
    y.sum().backward()
    return ((x.grad == 0) != (y == 0)).sum().item(), (y == 0).sum().item()


@pytest.mark.parametrize("outside", [False, True])
def test_a_recomputation_in_stage_3_draws_the_same_dropout_mask(outside):
    """Places where only one of gradient and output is 0: none (case 57)."""
    for differ, dropped in on_ranks(dropout_twice, outside):
        assert differ == 0 and 400 < dropped < 600


# Any optimizer that treats elements alone


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def momentum_in_two_groups(model):
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if "norm" in name], "weight_decay": 0.0},
        {"params": [p for name, p in named.items() if "norm" not in name], "weight_decay": 0.3},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def our_adamw(model):
    return AdamW(model.named_parameters(), lr=0.1, weight_decay=0.3)  # matrices decay, norms do not


OPTIMIZERS = [adagrad, momentum_in_two_groups, our_adamw]


def train_with(make_optimizer, stage, dtype=torch.float64, micro_batch_size=2):
    """Weights after 3 steps; stage 0 is one rank, which cuts the batch as two ranks would."""
    model = Llama(CONFIG, seed=1, dtype=dtype)
    describe(model)
    trained = Zero(model, world(), stage) if stage else model
    if not stage and dtype != torch.float64:
        keep_main_grads(model)
    optimizer = make_optimizer(trained)
    for batch in make_batches(CONFIG, rows=4):
        rows = slice(2 * world().index, 2 * world().index + 2) if stage else slice(0, 4)
        accumulate(trained, batch.rows(rows), micro_batch_size, total)
        optimizer.step()
        optimizer.zero_grad()
    if not stage:
        return {name: weight.clone() for name, weight in model.state_dict().items()}
    with trained.whole() as whole:
        return {name: weight.clone() for name, weight in whole.state_dict().items()}


def train_with_each(optimizers):
    return {(o.__name__, stage): train_with(o, stage) for o in optimizers for stage in STAGES}


def test_optimizers_and_their_groups_do_what_they_do_on_one_rank():
    for trained in on_ranks(train_with_each, OPTIMIZERS):
        for make_optimizer in OPTIMIZERS:
            alone = train_with(make_optimizer, stage=0)
            for stage in STAGES:
                for name, weight in trained[make_optimizer.__name__, stage].items():
                    torch.testing.assert_close(weight, alone[name], rtol=1e-9, atol=1e-9)


def train_in_bfloat16():
    return [train_with(our_adamw, stage, torch.bfloat16) for stage in STAGES]


def test_bfloat16_weights_with_float32_masters_equal_one_rank_to_the_last_bit():
    """Each rank is one micro-batch of the rank alone: the same numbers, added in the same order."""
    alone = train_with(our_adamw, stage=0, dtype=torch.bfloat16)
    for by_stage in on_ranks(train_in_bfloat16):
        for trained in by_stage:
            assert trained.keys() == alone.keys()
            for name, weight in trained.items():
                assert weight.dtype == torch.bfloat16 and torch.equal(weight, alone[name]), name


# Small modules of every kind


def vector(*numbers):
    return nn.Parameter(torch.tensor(numbers, dtype=torch.float64))


class Scale(nn.Module):
    """x·w, so that the gradient of w is x."""

    def __init__(self, size=1, dtype=torch.float64):
        super().__init__()
        self.w = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x):
        return x * self.w


def gradients_of(model):
    return {name: gathered(p, grad_of(p)) for name, p in model.named_parameters()}


def weights_of(model):
    with model.whole() as whole:
        return {name: p.detach().clone() for name, p in whole.named_parameters()}


@torch.no_grad()
def descend(model, lr):
    for piece in model.parameters():
        piece -= lr * grad_of(piece)
    zero_grads(model.parameters())


def two_steps_of_three_micro_batches(stage):
    model, seen = Zero(Scale(), world(), stage), []
    for _ in range(2):
        for gradient in (1.0, 10.0):
            with model.no_sync():
                (model(gradient).sum() / 2).backward()
        (model(100.0).sum() / 2).backward()
        model.finish()
        seen.append(gradients_of(model)["w"].item())
        zero_grads(model.parameters())
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_no_micro_batch_is_lost_in_two_steps(stage):
    """1 + 10 + 100 = 111; 100 would be only the last one, 1 only the first (case 20)."""
    assert on_ranks(two_steps_of_three_micro_batches, stage).values == [[111, 111]] * 2


def window_cut_short(stage):
    model = Zero(Scale(), world(), stage)
    for gradient in (3.0, 5.0):
        with model.no_sync():
            (model(gradient + world().index).sum() / 2).backward()
    model.finish()  # the data ended: the last backward did not know that it was the last
    return gradients_of(model)["w"].item()


@pytest.mark.parametrize("stage", STAGES)
def test_a_window_cut_short_loses_nothing(stage):
    assert on_ranks(window_cut_short, stage).values == [9, 9]


def big_then_small(stage, grad_dtype):
    model = Zero(Scale(dtype=torch.bfloat16), world(), stage, grad_dtype)
    with model.no_sync():
        model(torch.tensor(256 * (1.0 - world().index), dtype=torch.bfloat16)).sum().backward()
    model(torch.tensor(1.0 - world().index, dtype=torch.bfloat16)).sum().backward()
    model.finish()
    return gradients_of(model)["w"].item()


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_add_up_in_float32_unless_told_otherwise(stage):
    assert on_ranks(big_then_small, stage, None).values == [257, 257]
    assert on_ranks(big_then_small, stage, torch.bfloat16).values == [256, 256]


def fill_new_memory_with_nan():
    """So that what is read without having been written is seen; ends with the launch."""
    torch.use_deterministic_algorithms(True)


def clipped(stage):
    fill_new_memory_with_nan()
    x = torch.tensor([3.0, 0, 0, 0, 0, 0, -4], dtype=torch.float64) / world().size
    model = Zero(Scale(7), world(), stage)
    model(x).sum().backward()
    model.finish()
    largest = global_norm(model.parameters(), all_reduce, order=float("inf"))
    norm = clip_by_global_norm(model.parameters(), 1.0, all_reduce)
    return norm.item(), largest.item(), gradients_of(model)["w"].tolist()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [2, 4])
def test_the_norm_is_that_of_all_shards_and_padding_adds_nothing(stage, n):
    """7 numbers on 2 or 4 ranks: 5 on all of them, by shard it would be 3 and 4 (case 15)."""
    for norm, largest, gradient in on_ranks(clipped, stage, n=n):
        assert norm == pytest.approx(5) and largest == 4
        assert gradient == pytest.approx([0.6, 0, 0, 0, 0, 0, -0.8])


def more_ranks_than_numbers(stage):
    layer = nn.Linear(1, 1).double()
    model = Zero(layer, world(), stage)
    start = weights_of(model)
    for _ in range(2):
        (model(torch.full((1, 1), 2.0, dtype=torch.float64)).sum() / world().size).backward()
        model.finish()
        descend(model, 0.5)
    after = weights_of(model)
    pieces = [p.numel() for p in model.parameters()]
    return pieces, [round((start[name] - after[name]).item(), 9) for name in ("weight", "bias")]


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_without_a_single_number(stage):
    """A layer of 2 numbers on 4 ranks (case 23): two steps of half the gradient, 2 and 1."""
    run = on_ranks(more_ranks_than_numbers, stage, n=4)
    assert [pieces for pieces, _ in run] == [[1, 0], [0, 1], [0, 0], [0, 0]]
    assert [moved for _, moved in run] == [[2, 1]] * 4


def use_all(toy, x):
    y = toy.first(x)
    y = toy.frozen(y) + toy.mixed(y)
    return toy.last(toy.last(y))  # a layer used twice


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.linspace(1, 2, 3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.linspace(1, 2, 3, dtype=torch.bfloat16))
        self.fixed = nn.Parameter(torch.linspace(2, 3, 3, dtype=torch.float64), False)
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))

    def forward(self, x):
        return x * self.wide * self.narrow * self.fixed + self.nothing.sum()


def every_kind():
    torch.manual_seed(5)
    toy = Toy(
        first=nn.Linear(3, 3).double(),
        frozen=nn.Linear(3, 3).double().requires_grad_(False),
        mixed=Mixed(),
        last=nn.Linear(3, 3, bias=False).double(),
    )
    rows = torch.randn(4, 3, dtype=torch.float64)
    return toy, rows


def kinds_on_ranks(stage):
    toy, rows = every_kind()
    model = Zero(toy, world(), stage)
    for _ in range(2):
        for row in rows[2 * world().index : 2 * world().index + 2]:
            with model.no_sync():
                model(use_all, row).square().sum().backward()
        model.finish()
        gradients = gradients_of(model)
        zero_grads(model.parameters())
    return {n: g for n, g in gradients.items() if g.numel()}


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_mixed_types_empty_ones_and_a_layer_used_twice(stage):
    toy, rows = every_kind()
    keep_main_grads(toy)
    for row in rows:
        use_all(toy, row).square().sum().backward()
    expected = {n: grad_of(p) for n, p in toy.named_parameters() if p.requires_grad and p.numel()}
    for gradients in on_ranks(kinds_on_ranks, stage):
        trained = {n: g for n, g in gradients.items() if n in expected}
        assert trained.keys() == expected.keys()
        for name, gradient in trained.items():
            torch.testing.assert_close(gradient, expected[name].to(gradient.dtype), msg=name)


# Parameters that take no part, ranks on different paths


def a_or_b(toy, x):
    return (toy.a if world().index == 0 else toy.b)(x)


def branches(stage):
    fill_new_memory_with_nan()
    model = Zero(Toy(a=Scale(), b=Scale(), never=Scale()), world(), stage)
    for _ in range(2):
        model(a_or_b, 2.0 + world().index).sum().backward()
        model.finish()
        descend(model, 1.0)
    return [weight.item() for weight in weights_of(model).values()]


@pytest.mark.parametrize("stage", [1, 2])
def test_in_stages_1_and_2_ranks_may_take_different_branches(stage):
    """Branch a on rank 0, b on rank 1, and one that nobody takes: 1 − 2·2, 1 − 2·3, 1 (case 9)."""
    assert on_ranks(branches, stage).values == [[-3, -5, 1]] * 2


def once_or_three_times(toy, x):
    x = toy.a(x)
    for _ in range(1 + 2 * world().index):
        x = toy.b(x)
    return x


def different_paths(use):
    model = Zero(Toy(a=Scale(4), b=Scale(4)), world(), stage=3)
    model(use, 1.0).sum().backward()
    model.finish()


def early_exit():
    model = Zero(Toy(a=Scale(4), b=Scale(5)), world(), stage=3)
    with torch.no_grad():
        model(lambda toy, x: toy.a(x) if world().index else toy.b(toy.a(x)).sum(), 1.0)
    model(lambda toy, x: toy.b(toy.a(x)[:1]), 1.0).sum().backward()


@pytest.mark.parametrize(
    ("work", "module"),
    [
        (partial(different_paths, a_or_b), "of b"),
        (partial(different_paths, once_or_three_times), "of b"),
        (early_exit, "of b"),
    ],
    ids=["other branch", "other number of times", "validation that ends early"],
)
def test_in_stage_3_different_paths_are_an_error_that_names_the_module(work, module):
    with pytest.raises(RanksError) as caught:
        on_ranks(work)
    assert "do not agree" in str(caught.value) and module in str(caught.value)


# What a reader may do with a model that is not there


def look_at(stage):
    model = Zero(Llama(CONFIG, seed=1), world(), stage)
    batch = make_batches(CONFIG, rows=4)[0]
    optimizer, losses = AdamW(model.named_parameters(), lr=0.1), []
    for _ in range(2):
        losses.append(evaluate(model, [batch], torch.device("cpu")))
        accumulate(model, batch.rows(slice(2 * world().index, 2 * world().index + 2)), 2, total)
        optimizer.step()
        optimizer.zero_grad()
    seen = [weight.shape[0] for weight in model.module.parameters()]
    with model.whole() as whole:
        return losses, seen, {name: w.clone() for name, w in whole.state_dict().items()}


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_between_steps_and_the_state_dict_are_those_of_one_rank(stage):
    model = Llama(CONFIG, seed=1)
    batch = make_batches(CONFIG, rows=4)[0]
    describe(model)
    keep_main_grads(model)
    optimizer, losses = AdamW(model.named_parameters(), lr=0.1), []
    for _ in range(2):
        losses.append(evaluate(model, [batch], torch.device("cpu")))
        accumulate(model, batch, 2)
        optimizer.step()
        optimizer.zero_grad()
    for got, seen, state in on_ranks(look_at, stage):
        assert got == pytest.approx(losses, rel=1e-5)
        assert all(rows == 0 for rows in seen) if stage == 3 else all(rows > 0 for rows in seen)
        assert state.keys() == model.state_dict().keys()
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(state[name], weight, rtol=1e-3, atol=1e-4)


def read_a_freed_weight():
    model = Zero(Toy(a=Scale(4)), world(), stage=3)
    with model.whole():
        inside = model.module.a.w.tolist()
    return inside, model.module.a.w.tolist(), (model.module.a.w.detach() * 2).sum().item()


def test_a_freed_weight_is_an_empty_tensor():
    assert on_ranks(read_a_freed_weight).values == [([1, 1, 1, 1], [], 0)] * 2


def weight_outside_its_module(stage, called):
    model = Zero(Toy(a=Scale(3), b=Scale(3)), world(), stage)
    model(lambda toy, x: toy.b(toy.a(x) if called else x) * toy.a.w, 1.0).sum().backward()
    model.finish()
    return [gradient.tolist() for gradient in gradients_of(model).values()]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_weight_that_is_used_outside_its_module_too_gets_its_whole_gradient(stage):
    assert on_ranks(weight_outside_its_module, stage, True).values == [[[4, 4, 4], [2, 2, 2]]] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_a_weight_whose_module_was_not_called_is_named(stage):
    with pytest.raises(RankFailed, match=r"RuntimeError: a\.w was used although a was not called"):
        on_ranks(weight_outside_its_module, stage, False)


class UsesIts(nn.Module):
    """Weights that the module uses without a call of the module they are in."""

    def __init__(self, what):
        super().__init__()
        torch.manual_seed(0)
        self.what = what
        if what == "list":
            self.weights = nn.ParameterList([torch.ones(3), torch.arange(3.0)])
        elif what == "inner":
            self.blocks = nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(3, 3)]))])
        elif what == "attention":
            self.attention = nn.MultiheadAttention(3, 1)
        else:
            self.child = nn.Linear(3, 3)

    def forward(self, x):
        if self.what == "list":
            return x * self.weights[0] + self.weights[1]
        if self.what == "inner":
            return self.blocks[0](x)
        if self.what == "attention":
            return self.attention(x, x, x)[0]
        return x @ self.child.weight


class Inner(nn.ModuleList):
    def forward(self, x):
        return self[0](x) * self[0].weight.sum()


def gradients_of_uses(what):
    module = UsesIts(what)
    if what == "inner":
        module.blocks[0][0] = Inner([nn.Linear(3, 3)])
    alone = copy.deepcopy(module)
    x = torch.arange(6.0).view(2, 3)
    alone(x).square().sum().backward()
    model = Zero(module, world(), stage=3)
    (model(x).square().sum() / world().size).backward()
    model.finish()
    for name, piece in gradients_of(model).items():
        torch.testing.assert_close(piece, dict(alone.named_parameters())[name].grad, msg=name)
    return True


@pytest.mark.parametrize("what", ["list", "inner", "attention"])
def test_weights_that_a_module_may_use_without_a_call_are_there_in_stage_3(what):
    assert on_ranks(gradients_of_uses, what).values == [True, True]


def test_a_weight_that_is_not_there_in_stage_3_is_told_with_the_module_that_was_not_called():
    with pytest.raises(RankFailed, match=r"used them\? Not called so far: child"):
        on_ranks(gradients_of_uses, "child")


# Gradients: zeroed between steps, given up, or of somebody else's making


def one_step(model, value=1.0):
    model(lambda toy, x: toy.b(toy.a(x)), value).sum().backward()
    model.finish()


def finished_twice(stage):
    model = Zero(Toy(a=Scale(2), b=Scale(2)), world(), stage)
    one_step(model)
    with pytest.raises(RuntimeError, match="still has the gradient of a finished step: zero the"):
        one_step(model)
    model.zero_grad()
    model.finish()  # the step that was refused
    model.zero_grad()
    one_step(model)
    return [gradient.tolist() for gradient in gradients_of(model).values()]


@pytest.mark.parametrize("stage", STAGES)
def test_a_finished_gradient_is_not_added_to(stage):
    assert on_ranks(finished_twice, stage).values == [[[2, 2], [2, 2]]] * 2


def given_up(stage):
    """A micro-batch, then the step is given up, as after an error in reading data."""
    model = Zero(Toy(a=Scale(), b=Scale()), world(), stage)
    with model.no_sync():
        model(lambda toy, x: toy.b(toy.a(x)), 100.0).sum().backward()
    torch.optim.SGD(model.parameters()).zero_grad()
    one_step(model)
    return [gradient.item() for gradient in gradients_of(model).values()]


@pytest.mark.parametrize("stage", [2, 3])
def test_zeroing_drops_what_a_step_that_was_given_up_has_left(stage):
    assert on_ranks(given_up, stage).values == [[2, 2]] * 2


def with_a_penalty(stage):
    """Some norm of the weights, which each rank adds for its own pieces."""
    model = Zero(Toy(a=Scale(), b=Scale()), world(), stage)
    (10 * sum(piece.sum() for piece in model.parameters())).backward()
    one_step(model)
    return [gradient.item() for gradient in gradients_of(model).values()]


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_reaches_the_pieces_directly_is_added(stage):
    assert on_ranks(with_a_penalty, stage).values == [[12, 12]] * 2


def bfloat16_and_torchs_optimizer(stage):
    model = Zero(nn.Linear(1, 1).bfloat16(), world(), stage)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        model.finish()
        optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_torchs_optimizer_that_sees_no_gradient_is_told(stage):
    with pytest.raises(RankFailed, match=r"torch\.bfloat16 weights use picotron_edu\.optim\.AdamW"):
        on_ranks(bfloat16_and_torchs_optimizer, stage)


def test_a_state_dict_that_would_be_out_of_date_is_refused():
    model = Zero(Scale(), world(), stage=1)
    with pytest.raises(RuntimeError, match=r"with model\.whole\(\) as module: module\.state_dict"):
        model.module.state_dict()
    with model.whole() as module:
        state = module.state_dict()
        with pytest.raises(RuntimeError, match=r"load weights into the plain model, before Zero"):
            module.load_state_dict(state)


def buffers_over_time(stage):
    torch.manual_seed(world().index)
    model = Zero(nn.BatchNorm1d(2, dtype=torch.float64), world(), stage)
    for _ in range(2):
        model(torch.randn(4, 2, dtype=torch.float64)).sum().backward()
        model.finish()
        model.zero_grad()
    model.module.eval()
    model(torch.zeros(1, 2, dtype=torch.float64))
    return model.module.running_mean.tolist()


def test_each_forward_begins_with_the_buffers_of_rank_0():
    first, second = on_ranks(buffers_over_time, 2)
    assert first == second


# Errors that say what to do


@pytest.mark.parametrize("stage", [0, 4, "3", 2.0, True, None])
def test_a_wrong_stage_is_named(stage):
    with pytest.raises(ValueError, match=f"stage={stage!r}: must be 1, 2 or 3"):
        Zero(Scale(), world(), stage)


def test_a_model_is_wrapped_once():
    model = Scale()
    Zero(model, world(), stage=3)
    with pytest.raises(ValueError, match="w is in a data-parallel wrapper already"):
        Zero(model, world(), stage=3)


class KeepsItsAuxiliaryLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        self.auxiliary = (self.w * x).square()
        return self.w * x


def test_a_tensor_of_the_graph_that_a_module_keeps_is_refused_in_stage_3():
    """Its backward may come before the module's weights are there."""
    with pytest.raises(TypeError, match="keeps a tensor of its graph as an attribute, 'auxiliary'"):
        Zero(KeepsItsAuxiliaryLoss(), world(), stage=3)(torch.ones(1))
    Zero(KeepsItsAuxiliaryLoss(), world(), stage=2)(torch.ones(1))


def test_to_freeze_later_is_refused():
    model = Zero(Toy(a=Scale(), b=Scale()), world(), stage=2)
    model.module.b.requires_grad_(False)
    model(lambda toy, x: toy.b(toy.a(x)), 1.0).sum().backward()
    with pytest.raises(ValueError, match=r"b\.w was trainable when the model was wrapped"):
        model.finish()


def without_finish(stage, n_backward=2):
    model = Zero(Toy(a=Scale(), b=Scale()), world(), stage)
    for _ in range(n_backward):
        model(lambda toy, x: toy.b(toy.a(x)), 1.0).sum().backward()


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_backward_without_finish_is_refused(stage):
    with pytest.raises(RankFailed, match=r"got a second gradient .*: call finish\(\) after each"):
        on_ranks(without_finish, stage)


@dataclasses.dataclass
class Output:
    x: torch.Tensor


class InABox(Scale):
    def forward(self, x):
        return Output(super().forward(x))


def test_an_output_that_hides_its_tensors_is_refused():
    model = Zero(Toy(a=InABox()), world(), stage=3)
    with pytest.raises(TypeError, match="a returned a Output, in which ZeRO finds no tensors"):
        model(lambda toy, x: toy.a(x).x, 1.0)


class Breaks(Scale):
    def __init__(self, when):
        super().__init__()
        self.when = when

    def forward(self, x):
        y = super().forward(x)
        if self.when == "forward" and world().index == 1:
            raise ValueError("out of luck in forward")
        y.register_hook(self.in_backward)
        return y

    def in_backward(self, grad):
        if self.when == "backward" and world().index == 1:
            raise ValueError("out of luck in backward")


def breaks(stage, when):
    model = Zero(Toy(a=Scale(), b=Breaks(when), c=Scale()), world(), stage)
    model(lambda toy, x: toy.c(toy.b(toy.a(x))), 1.0).sum().backward()
    model.finish()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_the_exception_of_one_rank_is_the_one_that_is_told(when):
    with pytest.raises(RankFailed, match=f"rank 1 failed first: ValueError: out of luck in {when}"):
        on_ranks(breaks, 3, when)


# Overflow: all ranks skip


def overflow(stage):
    model, scaler = Zero(Scale(4), world(), stage), LossScaler(scale=8.0, growth_interval=2)
    seen = []
    for step in range(4):
        scaler.scaled(model(1.0).sum() / 2).backward()
        model.finish()
        if step == 1 and world().index == 1:
            next(model.parameters()).grad[0] = float("inf")  # in one shard, on one rank
        scaler.unscale(model.parameters())
        norm = clip_by_global_norm(model.parameters(), 1.0, all_reduce)
        if scaler.update(norm):
            descend(model, 0.5)
        zero_grads(model.parameters())
        seen.append((scaler.scale, weights_of(model)["w"].tolist()))
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_makes_all_skip_and_halve_the_scale(stage):
    """A gradient of 1 each is clipped to ½. Step 1 is skipped; two good ones double (case 23)."""
    weights = [[0.75] * 4, [0.75] * 4, [0.5] * 4, [0.25] * 4]
    for seen in on_ranks(overflow, stage):
        assert [scale for scale, _ in seen] == [8, 4, 4, 8]
        assert [weight for _, weight in seen] == [pytest.approx(w) for w in weights]


def test_a_scale_saves_gradients_that_float16_would_round_to_zero():
    w = nn.Parameter(torch.ones((), dtype=torch.float16))
    keep_main_grads(nn.ParameterList([w]))
    (w * 2**-26).backward()
    lost, w.main_grad = w.main_grad.item(), None
    scaler = LossScaler()
    scaler.scaled((w * 2**-13).float() * 2**-13).backward()
    scaler.unscale([w])
    assert (lost, w.main_grad.item()) == (0, 2**-26)


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"growth_interval": 0}])
def test_a_scale_that_cannot_work_is_refused(wrong):
    with pytest.raises(ValueError, match="must be above 0"):
        LossScaler(**wrong)


# In the trainer


def trained_losses(stages):
    config = TrainConfig(
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=24,
        sequence_length=32,
        micro_batch_size=2,
        accumulation=2,
        steps=3,
        device="cpu",
        max_grad_norm=0.5,
    )
    losses = []
    for stage in stages:
        history = train(dataclasses.replace(config, zero=stage), False, dp=world())
        records = [(record.loss, record.grad_norm) for record in history]
        validation = islice(config.text("validation", 2).validation_batches(), 4)
        losses.append([*records, evaluate(history.trained, validation, torch.device("cpu"))])
    return losses


def test_the_trainer_trains_the_same_in_all_stages():
    for plain, *sharded in on_ranks(trained_losses, [0, *STAGES]):
        for records in sharded:
            assert records[-1] == pytest.approx(plain[-1], rel=1e-4)
            for got, expected in zip(records[:-1], plain[:-1]):
                assert got == pytest.approx(expected, rel=1e-4)


def test_the_trainer_wants_an_axis_to_share_states_over():
    with pytest.raises(ValueError, match="zero=2 needs dp: the axis"):
        train(TrainConfig(zero=2, steps=1, device="cpu"), False)
    with pytest.raises(ValueError, match="zero must be one of 0, 1, 2, 3, got 4"):
        TrainConfig(zero=4)


# Overlap: what is sent while a block computes


def forward_and_gathers(prefetch):
    model = Zero(
        Toy(blocks=nn.ModuleList(Scale(8) for _ in range(3))), world(), 3, prefetch=prefetch
    )

    def use(toy, x):
        for i, block in enumerate(toy.blocks):
            with span(f"block {i}"):
                x = block(x) * 1.0
        return x

    for _ in range(2):  # in the first one the order is not known yet
        model(use, 1.0).sum().backward()
        model.finish()
        model.zero_grad()


@pytest.mark.parametrize("prefetch", [False, True])
def test_prefetch_gathers_a_unit_before_the_one_ahead_of_it_has_computed(prefetch):
    trace = on_ranks(forward_and_gathers, prefetch).trace.of(rank=0)
    blocks = [trace.of(name=f"block {i}")[1] for i in range(3)]
    gathers = [e for e in trace.of(name="all_gather") if e.start > blocks[0].start][:3]
    for block, gather in zip(blocks, gathers[1:]):
        assert (gather.start < block.end) == prefetch
