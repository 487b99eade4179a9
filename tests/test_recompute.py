"""Activation recomputation: neutral to the last bit, and as many bytes as the formulas say."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracle import CONFIG, Rank, assert_same_training
from test_memory import CONFIGS, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from picotron_edu import memory, recompute
from picotron_edu.layout import describe
from picotron_edu.memory_watch import MemoryWatch
from picotron_edu.model import Llama, token_loss_sum
from picotron_edu.optim import AdamW, grad_of
from picotron_edu.ranks import all_reduce, launch, span, world
from picotron_edu.recompute import checkpoint, scores_attention
from picotron_edu.train import TrainConfig, build_model

DRAW = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, CONFIG.vocab_size, (3, 10), generator=DRAW)
WAYS = [("selective", None), ("full", None), ("full", [1]), ("selective", [0])]


def trained(prepare, dtype=torch.float32, scores=False):
    """Loss and gradients of a model that `prepare` has changed."""
    model = Llama(CONFIG, dtype=dtype)
    if scores:
        for block in model.model.layers:
            block.self_attn.attend = scores_attention
    prepare(model)
    loss, _ = token_loss_sum(model(TOKENS), TOKENS.roll(-1, dims=1))
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


def same_bits(one, other):
    assert len(one) == len(other)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other))


# ---- the same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("scores", [False, True], ids=["fused", "scores"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("policy", "layers"), WAYS)
def test_loss_and_gradients_are_those_of_the_plain_model_to_the_last_bit(
    policy, layers, dtype, scores
):
    plain = trained(lambda model: None, dtype, scores)
    again = trained(lambda model: recompute.apply(model, policy, layers), dtype, scores)
    assert same_bits(plain, again)


def test_equal_to_torchs_own_checkpoint():
    def theirs(model):
        for block in model.model.layers:
            block.forward = partial(torch_checkpoint, block.forward, use_reentrant=False)

    assert same_bits(trained(theirs), trained(lambda model: recompute.apply(model, "full")))


def test_attention_with_scores_is_the_fused_one_up_to_rounding():
    fused = trained(lambda model: None, torch.float64)
    table = trained(lambda model: None, torch.float64, scores=True)
    for a, b in zip(fused, table):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("policy", "layers"), WAYS)
def test_training_equals_one_rank(policy, layers):
    def technique(model: Llama) -> Rank:
        recompute.apply(model, policy, layers)
        return Rank(model)

    assert_same_training(technique)


@pytest.mark.parametrize("size", [2, 4])
def test_training_on_ranks_that_share_the_batch_equals_one_rank(size):
    """Each rank's gradient is that of its rows; the sum over ranks is taken after backward."""

    def technique(model: Llama) -> Rank:
        recompute.apply(model, "full")

        def total(x):
            return all_reduce(x, world())

        def finish():
            for param in model.parameters():
                total(grad_of(param))

        return Rank(model, world().index, world().size, total, finish)

    assert_same_training(technique, world_size=size)


# ---- what a function reads besides its arguments -------------------------------------------------


def test_dropout_draws_the_same_mask_again():
    """Case 57: dropout 0.5 on 1000 ones; where the output is 0, and only there, the gradient is."""
    torch.manual_seed(0)
    x = torch.ones(1000, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5) * x, x)
    y.sum().backward()
    assert 400 < int((y == 0).sum()) < 600
    assert int(((x.grad != 0) != (y != 0)).sum()) == 0


def test_the_draws_after_a_block_and_after_backward_are_unchanged():
    def draws(call):
        torch.manual_seed(0)
        x = torch.ones(8, requires_grad=True)
        y = call(lambda x: F.dropout(x, 0.5) * x, x)
        after_block = torch.rand(4)
        y.sum().backward()
        return after_block, torch.rand(4), x.grad

    assert same_bits(draws(lambda fn, x: fn(x)), draws(checkpoint))


def test_autocast_is_as_it_was_in_forward():
    def step(call):
        torch.manual_seed(0)
        linear, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = call(lambda x: linear(x).sin(), x)
        y.float().sum().backward()  # outside: as it should be done
        return y.detach(), x.grad, linear.weight.grad

    plain = step(lambda fn, x: fn(x))
    assert plain[0].dtype == torch.bfloat16
    assert same_bits(plain, step(checkpoint))


def test_autocast_around_backward_alone_changes_nothing():
    def step(call):
        torch.manual_seed(0)
        linear, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        y = call(lambda x: linear(linear(x)).sin(), x)
        with torch.autocast("cpu", torch.bfloat16):
            y.backward(torch.ones_like(y))
        return x.grad, linear.weight.grad

    assert same_bits(step(lambda fn, x: fn(x)), step(checkpoint))


def test_a_part_without_gradients_inside_stays_without():
    def part(x):
        with torch.no_grad():
            scale = x.exp().sum()
        return x.sin() * scale

    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    part(x).sum().backward()
    checkpoint(part, y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_the_rank_is_known_where_backward_runs_and_the_trace_says_recompute():
    """On a GPU, autograd has threads of its own; here backward runs in one that we start."""

    def on_rank():
        from threading import Thread

        axis_names = []

        def fn(x):
            axis_names.append(world().size)
            return x.sin().sin()

        y = checkpoint(fn, torch.ones(3, requires_grad=True)).sum()
        with span("backward"):
            thread = Thread(target=y.backward)
            thread.start()
            thread.join()
        return axis_names

    run = launch(on_rank, world_size=2, quiet=True)
    assert run.values == [[2, 2], [2, 2]]
    for rank in range(2):
        spans = run.trace.of(rank=rank, lane="compute")
        assert [event.name for event in spans] == ["backward", "recompute"]
        assert spans[0].start <= spans[1].start <= spans[1].end <= spans[0].end


def test_a_context_variable_is_what_it_was_however_often_the_function_is_called():
    number: ContextVar[int] = ContextVar("number", default=0)
    seen = []

    def fn(x):
        seen.append(number.get())
        number.set(number.get() + 1)
        return x.sin().exp()

    y = checkpoint(fn, torch.ones(2, requires_grad=True)).sum()
    for _ in range(2):
        y.backward(retain_graph=True)
    assert seen == [0, 0, 0] and number.get() == 1


@pytest.mark.gpu
def test_on_a_gpu_masks_draws_and_autocast_are_the_same():
    """Its random numbers have a state of their own, and backward has a thread of its own."""

    def step(call):
        torch.manual_seed(0)
        linear = nn.Linear(256, 256, device="cuda")
        x = torch.ones(64, 256, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = call(lambda x: F.dropout(linear(x), 0.5) * x, x)
        after_block = torch.rand(4, device="cuda")
        y.float().sum().backward()
        return y.detach(), after_block, torch.rand(4, device="cuda"), x.grad, linear.weight.grad

    assert same_bits(step(lambda fn, x: fn(x)), step(checkpoint))


# ---- unusual calls -------------------------------------------------------------------------------


def test_no_input_needs_a_gradient():
    linear, x = nn.Linear(4, 4), torch.ones(2, 4)
    linear(x).sin().sum().backward()
    plain, linear.weight.grad = linear.weight.grad, None
    checkpoint(lambda x: linear(x).sin(), x).sum().backward()
    assert torch.equal(linear.weight.grad, plain)


def test_without_gradients_the_function_is_just_called():
    calls = []
    with torch.no_grad():
        y = checkpoint(lambda x: calls.append(x) or x.sin(), torch.ones(2, requires_grad=True))
    assert not y.requires_grad and len(calls) == 1


def test_arguments_may_be_anything_and_results_several():
    def fn(x, power, y, flag=None):
        assert flag is None and power == 3
        return x**power * y, {"sum": (x + y).sin()}

    x, y = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)
    product, rest = checkpoint(fn, x, 3, y)
    grads = torch.autograd.grad(product.sum() + rest["sum"].sum(), (x, y))
    plain_product, plain_rest = fn(x, 3, y)
    plain = torch.autograd.grad(plain_product.sum() + plain_rest["sum"].sum(), (x, y))
    assert same_bits(plain, grads)


def test_a_graph_may_be_used_again():
    x = torch.rand(4, requires_grad=True)
    y = checkpoint(lambda x: x.sin().exp(), x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_gradients_of_gradients():
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: checkpoint(lambda x: x.sin() * x.exp(), x), x)


def test_a_parameter_used_twice_gets_one_gradient_and_its_hook_fires_once():
    """What data parallelism waits for: one sign per parameter that its gradient is complete."""
    linear, fired = nn.Linear(4, 4), []
    linear.weight.register_post_accumulate_grad_hook(lambda param: fired.append(param.grad.clone()))
    checkpoint(lambda x: linear(linear(x).sin()), torch.ones(2, 4)).sum().backward()
    assert len(fired) == 1 and torch.equal(fired[0], linear.weight.grad)


def test_the_end_of_the_function_is_not_run_again():
    """The last operation has kept all it needs before it computes: a block's last matmul."""
    ran = []

    def fn(x):
        y = x.sin().exp()
        ran.append("end")
        return y + 1

    checkpoint(fn, torch.ones(2, requires_grad=True)).sum().backward()
    assert ran == ["end"]


def test_a_function_that_catches_exceptions_is_stopped_all_the_same():
    caught = []

    def fn(x):
        try:
            return x.sin()
        except Exception as error:
            caught.append(error)
            return x

    checkpoint(fn, torch.ones(2, requires_grad=True)).sum().backward()
    assert caught == []


# ---- nesting -------------------------------------------------------------------------------------


def chain(x, depth, call):
    """2**depth sines of x, halved again and again."""
    if depth == 0:
        return x.sin()
    half = partial(chain, depth=depth - 1, call=call)
    return call(half, call(half, x))


def test_nested_calls_give_the_same_bits():
    x, y = (torch.linspace(0, 1, 8, requires_grad=True) for _ in range(2))
    chain(x, 4, lambda fn, x: fn(x)).sum().backward()
    chain(y, 4, checkpoint).sum().backward()
    assert torch.equal(x.grad, y.grad)


def most_alive(fn, x):
    """Most bytes of activations at one moment of a step, those made again included."""
    model = nn.Linear(1, 1, bias=False)
    describe(model)
    with MemoryWatch(model, AdamW(model.named_parameters())) as watch:
        with span("forward"):
            y = fn(x).sum()
        with span("backward"):
            y.backward()
    return max(moment.activations for moment in watch)


def test_nesting_keeps_fewer_inputs():
    """64 steps in a row of calls keep 64 inputs. As 8 calls of 8 calls they keep 8, and 8 more
    while backward is in one of the outer calls."""

    def eight(x, call):
        for _ in range(8):
            x = call(lambda x: x.sin().sin(), x)
        return x

    def row(x):
        for _ in range(8):
            x = eight(x, checkpoint)
        return x

    def nested(x):
        for _ in range(8):
            x = checkpoint(partial(eight, call=checkpoint), x)
        return x

    tensor = 4 * 1000
    in_a_row, in_two_levels = (
        most_alive(fn, torch.zeros(1000, requires_grad=True)) for fn in (row, nested)
    )
    assert in_a_row == pytest.approx(64 * tensor, rel=0.1)
    assert in_two_levels <= (8 + 8 + 3) * tensor


def test_what_was_made_again_goes_as_backward_uses_it():
    def fn(x):
        for _ in range(8):
            x = x.sin()
        return x

    x, model = torch.ones(1000, requires_grad=True), nn.Linear(1, 1, bias=False)
    describe(model)
    with MemoryWatch(model, AdamW(model.named_parameters())) as watch:
        with span("forward"):
            y = checkpoint(fn, x)
        with span("backward"):
            y.sum().backward()
    backward = [m.activations for m in watch if m.event == "backward"]
    assert max(backward) == 8 * 4000
    assert backward[-1] <= 2 * 4000


# ---- a function that is not the same again -------------------------------------------------------


def test_a_function_that_keeps_fewer_tensors_the_second_time_is_named():
    calls = []

    def forgetful(x):
        calls.append(1)
        return x.sin().sin() if len(calls) == 1 else x.sin()

    y = checkpoint(forgetful, torch.ones(2, requires_grad=True))
    with pytest.raises(
        RuntimeError, match=r"forgetful kept 2 tensors for .* and 1 when called again\. "
    ):
        y.sum().backward()


def test_a_function_that_keeps_other_shapes_the_second_time_is_named():
    calls = []

    def growing(x):
        calls.append(1)
        return x.repeat(len(calls)).sin().sum()

    y = checkpoint(growing, torch.ones(2, requires_grad=True))
    with pytest.raises(
        RuntimeError, match=r"growing kept .* shape \(2,\) .* shape \(4,\) when called again"
    ):
        y.backward()


def test_a_weight_that_changed_between_forward_and_backward_is_noticed():
    """As without recomputation, where autograd notices it: else a wrong gradient, silently."""
    linear = nn.Linear(2, 2)
    y = checkpoint(lambda x: linear(x).sin(), torch.ones(1, 2, requires_grad=True))
    with torch.no_grad():
        linear.weight += 1
    with pytest.raises(
        RuntimeError, match=r"shape \(2, 2\) for backward, which was changed in place"
    ):
        y.sum().backward()


def test_a_change_in_place_that_spoils_a_gradient_is_noticed():
    def fn(x):
        y = x.exp()
        z = y.sin()
        y.add_(1)
        return (z * y).sin()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fn(torch.ones(2, requires_grad=True)).sum().backward()
    with pytest.raises(RuntimeError, match="which was changed in place since"):
        checkpoint(fn, torch.ones(2, requires_grad=True)).sum().backward()


# ---- apply ---------------------------------------------------------------------------------------


def counted_calls(model):
    """How often each block runs in forward and backward."""
    counts = [0] * len(model.model.layers)

    def count(i, *_):
        counts[i] += 1

    for i, block in enumerate(model.model.layers):
        block.input_layernorm.register_forward_pre_hook(partial(count, i))
    loss_of(model, 1, 8).backward()
    return counts


@pytest.mark.parametrize(
    ("layers", "counts"),
    [
        (None, [2, 2, 2]),
        ([0, 2], [2, 1, 2]),
        (range(0, 3, 2), [2, 1, 2]),
        (iter([0, 2]), [2, 1, 2]),
    ],
)
def test_only_the_layers_chosen_run_again(layers, counts):
    model = Llama(CONFIGS[1])
    recompute.apply(model, "full", layers)
    assert counted_calls(model) == counts


def test_a_second_choice_replaces_the_first():
    model = Llama(CONFIGS[1])
    recompute.apply(model, "full")
    recompute.apply(model, "full")
    assert counted_calls(model) == [2, 2, 2]
    recompute.apply(model, "selective", [1])
    assert counted_calls(model) == [1, 1, 1]
    attend = [block.self_attn.attend for block in model.model.layers]
    assert [isinstance(fn, partial) for fn in attend] == [False, True, False]
    recompute.apply(model, "none")
    measured = memory.measured_activation_bytes(model, lambda: loss_of(model, 1, 8))
    assert measured == memory.activation_bytes(CONFIGS[1], 1, 8)


def test_names_weights_and_copies_of_the_model_are_as_before():
    model = Llama(CONFIG)
    names = [name for name, _ in model.named_parameters()]
    recompute.apply(model, "full")
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert twin(TOKENS).abs().max() == 0 and model(TOKENS).abs().max() > 0


@pytest.mark.parametrize(
    ("policy", "layers", "message"),
    [
        ("some", None, "policy must be one of 'none', 'selective', 'full', got 'some'"),
        ("full", [0, 2], "layers must be from 0 to 1, got 2"),
        ("full", [-1], "layers must be from 0 to 1, got -1"),
    ],
)
def test_an_unknown_policy_or_layer_is_named(policy, layers, message):
    with pytest.raises(ValueError, match=message):
        recompute.apply(Llama(CONFIG), policy, layers)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="must hold blocks of a Llama, got Linear without"):
        recompute.apply(nn.Linear(2, 2), "full")


def test_the_trainer_applies_what_its_configuration_says():
    config = TrainConfig(recompute="full", num_hidden_layers=2)
    assert counted_calls(build_model(config, 256)) == [2, 2]
    with pytest.raises(ValueError, match="recompute must be one of 'none', 'selective', 'full'"):
        TrainConfig(recompute="half")


# ---- bytes ---------------------------------------------------------------------------------------


class Watch(MemoryWatch):
    """Notes how many bytes a recompute has left when it ends."""

    @contextmanager
    def phase(self, name):
        with super().phase(name):
            yield
        if name == "recompute":
            self.left = {*getattr(self, "left", set()), sum(self.made_again.values())}


@pytest.mark.parametrize("scores", [False, True], ids=["fused", "scores"])
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("batch", "sequence"), [(1, 8), (3, 32)])
@pytest.mark.parametrize("config", CONFIGS)
def test_bytes_that_wait_and_bytes_made_again_are_those_of_the_formulas(
    config, batch, sequence, dtype, policy, scores
):
    model, sizes = Llama(config, dtype=dtype), (config, batch, sequence, dtype, False)
    describe(model)
    if scores:
        for block in model.model.layers:
            block.self_attn.attend = scores_attention
    recompute.apply(model, policy)
    measured = memory.measured_activation_bytes(model, lambda: loss_of(model, batch, sequence))
    assert measured == memory.activation_bytes(*sizes, policy, scores)
    with Watch(model, AdamW(model.named_parameters())) as watch:
        with span("forward"):
            loss = loss_of(model, batch, sequence)
        with span("backward"):
            loss.backward()
    assert watch.last(0, "forward").activations == measured
    if policy != "none":
        again = sum(kept.total for kept in memory.made_again(*sizes, policy, scores))
        assert watch.left == {again}


def test_the_rows_of_a_gpt_block_add_up_to_the_published_formula():
    for hidden, heads, batch, sequence in [(12_288, 96, 1, 2048), (64, 4, 3, 10)]:
        rows = memory.gpt_block(hidden, heads, batch, sequence)
        whole = memory.korthikanti_bytes(hidden, heads, 1, batch, sequence)
        assert sum(kept.total for kept in rows) == whole
        scores = sum(kept.total for kept in rows if kept.shape == "BHSS")
        assert whole - scores == memory.korthikanti_bytes(
            hidden, heads, 1, batch, sequence, selective=True
        )


def test_a_real_gpt_block_keeps_what_the_rows_say():
    """Up to the means and scales of its two norms, which the published formula leaves out."""
    B, S, D, H = 2, 16, 32, 4
    mine = {"dtype": torch.bfloat16}
    norms = nn.ModuleList(nn.LayerNorm(D, **mine) for _ in range(2))
    qkv, out = nn.Linear(D, 3 * D, **mine), nn.Linear(D, D, **mine)
    up, down = nn.Linear(D, 4 * D, **mine), nn.Linear(4 * D, D, **mine)
    model = nn.ModuleList([norms, qkv, out, up, down])

    def dropout(x):
        return torch.native_dropout(x, 0.1, True)[0]  # a byte a number, as on a GPU

    def forward():
        x_BSD = torch.randn(B, S, D, **mine, requires_grad=True).clone()
        q, k, v = (
            part.reshape(B, S, H, D // H).transpose(1, 2).contiguous()
            for part in qkv(norms[0](x_BSD)).chunk(3, dim=-1)
        )
        weights_BHSS = dropout((q @ k.transpose(2, 3) / 8).softmax(-1))
        x_BSD = x_BSD + dropout(out((weights_BHSS @ v).transpose(1, 2).flatten(2)))
        return (x_BSD + dropout(down(F.gelu(up(norms[1](x_BSD)))))).sum()

    measured = memory.measured_activation_bytes(model, forward)
    rows = memory.gpt_block(D, H, B, S)
    statistics = measured - sum(kept.total for kept in rows)
    assert statistics in (2 * 2 * B * S * 2, 2 * 2 * B * S * 4)  # 2 norms, mean and scale
