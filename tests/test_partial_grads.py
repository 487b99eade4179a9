"""Each gradient is summed once over each axis on which it is partial, whatever is called when."""

from functools import partial

import pytest
import torch
from oracle import CONFIG, gathered, make_batches
from torch import nn

from picotron_edu import context_parallel, sequence_parallel, tensor_parallel
from picotron_edu.context_parallel import cut
from picotron_edu.data_parallel import DataParallel
from picotron_edu.layout import describe, layout_of
from picotron_edu.model import Llama
from picotron_edu.optim import AdamW, global_norm, grad_of, keep_main_grads
from picotron_edu.partial_grads import sum_partial_grads
from picotron_edu.ranks import Axis, Mesh, RankFailed, all_reduce, launch, world
from picotron_edu.summed import names_of
from picotron_edu.train import accumulate
from picotron_edu.zero import Zero

BATCH = make_batches(CONFIG, rows=4)[0]


def expected_norm() -> float:
    model = Llama(CONFIG, seed=1, dtype=torch.float64)
    describe(model)
    accumulate(model, BATCH, 4)
    return global_norm(model.parameters()).item()


def norm_after(calls: str, wrapper=DataParallel) -> float:
    """Sequence parallelism × data parallelism on four ranks; `calls`: in which order what is
    called after backward: f(inish), s(um), d: sum with `done`."""
    mesh = Mesh(dp=2, tp=2)
    model = Llama(CONFIG, seed=1, dtype=torch.float64)
    sequence_parallel.apply(model, mesh.tp)
    whole = wrapper(model, mesh.dp)
    mine = BATCH.rows(slice(2 * mesh.dp.index, 2 * mesh.dp.index + 2))
    loss_sum, _ = whole(mine.inputs_BS, None, mine.labels_BS)
    (loss_sum / BATCH.counted).backward()
    for call in calls:
        if call == "f":
            whole.finish()
        else:
            done = [mesh.dp] if call == "d" else []
            sum_partial_grads(whole.parameters(), all_reduce, done)
    return global_norm(whole.parameters(), all_reduce).item()


def all_orders() -> list[float]:
    norms = [norm_after(calls) for calls in ("fs", "fd", "fss")]
    return norms + [norm_after("fss", partial(Zero, stage=stage)) for stage in (1, 3)]


def test_what_is_summed_already_is_left_out():
    """Without `done`, and a second time: the gradient of one rank, not twice or four times it."""
    for norms in launch(all_orders, world_size=4, quiet=True):
        assert norms == pytest.approx([expected_norm()] * 5, rel=1e-10)


@pytest.mark.parametrize("wrapper", [DataParallel, partial(Zero, stage=1), partial(Zero, stage=2)])
def test_to_sum_before_the_wrapper_has_finished_is_refused(wrapper):
    """Its message may be under way, from and into the same memory."""
    with pytest.raises(RankFailed, match=r"has no sum yet: call finish\(\) before sum_partial_gra"):
        launch(norm_after, "s", wrapper, world_size=4, quiet=True)


def over_both_axes() -> float:
    mesh = Mesh(dp=2, cp=2)
    model = Llama(CONFIG, seed=1, dtype=torch.float64)
    context_parallel.apply(model, mesh.cp)
    whole = DataParallel(model, mesh.dp_cp)
    mine = cut(BATCH.rows(slice(2 * mesh.dp.index, 2 * mesh.dp.index + 2)), mesh.cp)
    accumulate(whole, mine, 2, lambda x: all_reduce(x, mesh.dp_cp))
    sum_partial_grads(whole.parameters(), all_reduce, done=[mesh.dp])
    return global_norm(whole.parameters(), all_reduce).item()


def test_a_joined_axis_stands_for_its_parts():
    for norm in launch(over_both_axes, world_size=4, quiet=True):
        assert norm == pytest.approx(expected_norm(), rel=1e-10)
    assert names_of(Axis("dp_cp", 1, 0, (0,))) == {"dp_cp", "dp", "cp"}
    assert names_of(Axis("expert_dp", 1, 0, (0,))) == {"expert_dp"}


def after_each_micro_batch() -> None:
    model = Llama(CONFIG, seed=1)
    keep_main_grads(model)
    sequence_parallel.apply(model, world())
    for row in range(2):
        loss_sum, _ = model(BATCH.inputs_BS[row : row + 1], None, BATCH.labels_BS[row : row + 1])
        loss_sum.backward()
        sum_partial_grads(model.parameters(), all_reduce)


def test_a_sum_is_not_added_to():
    with pytest.raises(RankFailed, match=r"norm\.weight still has the gradient of a finished step"):
        launch(after_each_micro_batch, world_size=2, quiet=True)


def frozen_under_context_parallelism() -> list:
    model = Llama(CONFIG, seed=1)
    model.model.embed_tokens.requires_grad_(False)
    keep_main_grads(model)
    context_parallel.apply(model, world())
    optimizer = AdamW(model.named_parameters(), lr=0.1)
    before = model.model.embed_tokens.weight.clone()
    accumulate(model, cut(BATCH, world()), 4, lambda x: all_reduce(x, world()))
    sum_partial_grads(model.parameters(), all_reduce)
    optimizer.step()
    return [
        grad_of(model.model.embed_tokens.weight),
        torch.equal(before, model.model.embed_tokens.weight),
    ]


def test_frozen_parameters_get_no_gradient_and_do_not_decay():
    assert (
        launch(frozen_under_context_parallelism, world_size=2, quiet=True).values
        == [[None, True]] * 2
    )


def context_then_sequence() -> list[torch.Tensor]:
    mesh = Mesh(cp=2, tp=2)
    model = Llama(CONFIG, seed=1, dtype=torch.float64)
    keep_main_grads(model)
    context_parallel.apply(model, mesh.cp)
    sequence_parallel.apply(model, mesh.tp)
    accumulate(model, cut(BATCH, mesh.cp), 4, lambda x: all_reduce(x, mesh.cp))
    sum_partial_grads(model.parameters(), all_reduce)
    return [gathered(p, grad_of(p)) for p in model.parameters()]


def test_techniques_keep_each_others_axes_in_either_order():
    alone = Llama(CONFIG, seed=1, dtype=torch.float64)
    accumulate(alone, BATCH, 4)
    for gradients in launch(context_then_sequence, world_size=4, quiet=True):
        for (name, param), gradient in zip(alone.named_parameters(), gradients):
            torch.testing.assert_close(gradient, param.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "apply", [tensor_parallel.apply, sequence_parallel.apply, context_parallel.apply]
)
@pytest.mark.parametrize("wrapper", [DataParallel, partial(Zero, stage=1), partial(Zero, stage=3)])
def test_a_wrapped_model_is_not_changed_any_more(apply, wrapper):
    whole = wrapper(Llama(CONFIG), world())
    with pytest.raises(ValueError, match=r"model is a (Zero|DataParallel): change the plain Llama"):
        apply(whole, world())
    with pytest.raises(ValueError, match="is in a data-parallel wrapper already: apply this to"):
        apply(whole.module, world())
    with pytest.raises(ValueError, match=r"must be an Axis, such as world\(\) or mesh\.tp"):
        apply(Llama(CONFIG), None)


@pytest.mark.parametrize("technique", [tensor_parallel, sequence_parallel, context_parallel])
def test_gradients_of_gradients_are_refused(technique):
    """Written by hand, they have no second derivative: it would be a part of the right one."""
    model = Llama(CONFIG, dtype=torch.float64)
    technique.apply(model, world())
    loss, _ = model(BATCH.inputs_BS, torch.arange(12), BATCH.labels_BS)
    weight = model.model.layers[0].self_attn.q_proj.weight
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


@pytest.mark.parametrize("technique", [tensor_parallel, sequence_parallel])
@pytest.mark.parametrize(("what", "number"), [("token", 12), ("token", -1), ("label", 12)])
def test_a_number_outside_of_the_vocabulary_is_refused(technique, what, number):
    model, batch = Llama(CONFIG), make_batches(CONFIG, rows=1)[0]
    technique.apply(model, world())
    (batch.inputs_BS if what == "token" else batch.labels_BS)[0, 3] = number
    with pytest.raises(RuntimeError, match=f"a {what} is not in the vocabulary of 12"):
        model(batch.inputs_BS, None, batch.labels_BS)


# AdamW that would train nothing


def test_an_optimizer_of_other_parameters_is_told():
    model = nn.Linear(2, 1)
    describe(model)
    optimizer = AdamW(model.named_parameters())
    zero = Zero(model, world(), stage=2)
    zero(torch.ones(1, 2)).sum().backward()
    zero.finish()
    with pytest.raises(RuntimeError, match=r"With Zero it is AdamW\(zero\.named_parameters\(\)\)"):
        optimizer.step()
    assert layout_of(model.weight).name == "weight"


def test_two_parameters_of_one_name_are_refused():
    """One of them would never be trained."""
    with pytest.raises(ValueError, match="AdamW got two parameters of one name"):
        AdamW([*nn.Linear(1, 1).named_parameters()] * 2)


def test_an_optimizer_of_nothing_does_not_step():
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        AdamW([]).step()
