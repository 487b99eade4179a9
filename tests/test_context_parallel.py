"""Context parallelism is exact attention on a cut sequence, for each kind and order.

What people met in practice (wrong positions, late labels, stale keys, …) is in
test_context_parallel_cases.py; work and bytes are counted in test_context_parallel_counts.py.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from oracle import CONFIG, Rank, assert_same_training

from picotron_edu import context_parallel, recompute, sequence_parallel, tensor_parallel
from picotron_edu.context_parallel import KINDS, cut, positions_of
from picotron_edu.data_parallel import DataParallel
from picotron_edu.model import Llama
from picotron_edu.partial_grads import sum_partial_grads
from picotron_edu.ranks import Mesh, all_gather, all_reduce, launch, world
from picotron_edu.ring_attention import merge
from picotron_edu.zero import Zero

CONFIGS = {
    2: CONFIG,
    3: replace(CONFIG, num_attention_heads=6, num_key_value_heads=3, hidden_size=24),
    4: replace(CONFIG, num_key_value_heads=4),
}
ALL = [(kind, order) for kind in KINDS for order in ("zigzag", "contiguous")]


def alone(kind: str, order: str, policy: str = "none"):
    def technique(model: Llama) -> Rank:
        axis = world()
        context_parallel.apply(model, axis, kind, order)
        recompute.apply(model, policy)
        return Rank(
            model,
            total=lambda x: all_reduce(x, axis),
            finish=lambda: sum_partial_grads(model.parameters(), all_reduce),
            cut=lambda batch: cut(batch, axis, order),
        )

    return technique


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(("kind", "order"), ALL)
def test_context_parallel_trains_like_one_rank(kind, order, n):
    """Each rank has another number of counted labels, and the labels were shifted before the cut:
    also the last token of a chunk predicts the first of the next one. With dp = 1.
    """
    sequence = 24 if n == 4 else 12
    assert_same_training(alone(kind, order), n, rows=5, config=CONFIGS[n], sequence=sequence)


def test_in_float32_and_with_one_key_head():
    assert_same_training(alone("ring", "zigzag"), 2, dtype=torch.float32)
    config = replace(CONFIG, num_key_value_heads=1)
    assert_same_training(alone("ring", "zigzag"), 2, config=config)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("ring", "selective"), ("ring", "full"), ("all_gather", "selective"), ("ulysses", "full")],
)
def test_with_recompute(kind, policy):
    assert_same_training(alone(kind, "zigzag", policy), 2)


def wrapped(kind: str, wrapper: str, tensor=None):
    def technique(model: Llama) -> Rank:
        mesh = Mesh(dp=1 if tensor else 2, cp=2, tp=2 if tensor else 1)
        if tensor:
            tensor.apply(model, mesh.tp)
        context_parallel.apply(model, mesh.cp, kind)
        axis = mesh.dp_cp
        stage = int(wrapper[-1]) if wrapper.startswith("zero") else 0
        whole = Zero(model, axis, stage) if stage else DataParallel(model, axis)

        def finish() -> None:
            sum_partial_grads(whole.parameters(), all_reduce, done=[axis])

        return Rank(
            whole,
            mesh.dp.index,
            mesh.dp.size,
            lambda x: all_reduce(x, axis),
            finish,
            lambda batch: cut(batch, mesh.cp),
        )

    return technique


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [
        *(("ring", wrapper) for wrapper in ("data parallel", "zero-1", "zero-2", "zero-3")),
        ("all_gather", "zero-2"),
        ("ulysses", "data parallel"),
    ],
)
def test_with_data_parallelism_over_both_axes(kind, wrapper):
    """The context axis of the second replica is ranks 2 and 3: a place on it is not a rank."""
    assert_same_training(wrapped(kind, wrapper), 4, rows=7)


@pytest.mark.parametrize("tensor", [tensor_parallel, sequence_parallel])
@pytest.mark.parametrize("kind", ["ring", "all_gather", "ulysses"])
def test_with_tensor_and_sequence_parallelism(kind, tensor):
    config = CONFIGS[4] if kind == "ulysses" else CONFIG  # each tp rank needs 2 key heads to share
    assert_same_training(wrapped(kind, "data parallel", tensor), 4, rows=7, config=config)


# attention alone


def attention_on_ranks(kind, order, causal, dtype, scale=1.0, S=24, H=4, K=2):
    """Output and gradients of q, k, v, gathered in the order of the text, and full attention's."""

    def work():
        axis = world()
        draw = torch.Generator().manual_seed(0)
        q, k, v, grad = (
            torch.randn(2, heads, S, 8, generator=draw, dtype=torch.float64)
            for heads in (H, K, K, H)
        )
        q, k = q * scale, k * scale
        here = positions_of(axis.index, axis.size, order, S)
        mine = [x[:, :, here].to(dtype).requires_grad_() for x in (q, k, v)]
        out = KINDS[kind](axis, order, causal, *mine)
        out.backward(grad[:, :, here].to(dtype))
        back = torch.cat([positions_of(i, axis.size, order, S) for i in range(axis.size)]).argsort()
        got = [
            all_gather(x.detach().double(), axis, dim=2)[:, :, back]
            for x in (out, *(x.grad for x in mine))
        ]
        full = [x.requires_grad_() for x in (q, k, v)]
        expected = F.scaled_dot_product_attention(*full, is_causal=causal, enable_gqa=K != H)
        expected.backward(grad)
        return got, [x.detach() for x in (expected, *(x.grad for x in full))]

    return work


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_ring_attention_is_exact(order, n, causal):
    """The gradients, too, of a weighted loss: keys must be those of the step (case 40)."""
    work = attention_on_ranks("ring", order, causal, torch.float64, S=24)
    for got, expected in launch(work, world_size=n, quiet=True):
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, msg=f"{name} on {n} ranks")


@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_the_other_kinds_are_exact_without_a_mask(kind):
    work = attention_on_ranks(kind, "zigzag", False, torch.float64)
    for got, expected in launch(work, world_size=2, quiet=True):
        for a, b in zip(got, expected):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_huge_logits_give_no_nan():
    work = attention_on_ranks("ring", "zigzag", True, torch.float32, scale=10.0)  # logits × 100
    for got, _ in launch(work, world_size=4, quiet=True):
        assert all(x.isfinite().all() for x in got)


def sdpa_errors(S: int) -> list[float]:
    """Mean errors of out, dq, dk, dv of torch's attention in bfloat16, on the inputs above."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, heads, S, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2, 4)
    )
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        out.backward(grad.to(dtype))
        results.append([x.detach().double() for x in (out, *(x.grad for x in inputs))])
    return [(a - b).abs().mean().item() for a, b in zip(*results)]


def test_the_error_in_bfloat16_does_not_grow_with_the_ring():
    """Sums, lse and gradients are float32 until the end: at most 1.5 × one rank's (case 44)."""
    one_rank_errors = sdpa_errors(S=64)
    errors = {}
    for n in (2, 4):
        work = attention_on_ranks("ring", "zigzag", True, torch.bfloat16, S=64)
        got, expected = launch(work, world_size=n, quiet=True)[0]
        errors[n] = [(a - b).abs().mean().item() for a, b in zip(got, expected)]
    for n in (2, 4):
        for ours, one in zip(errors[n], one_rank_errors):
            assert ours <= 1.5 * one
    for four, two in zip(errors[4], errors[2]):
        assert four <= 1.2 * two


def test_merging_partial_softmaxes_is_exact():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 6, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    scores = q @ k.mT / 2
    parts = []
    for keys in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = scores[..., keys]
        parts.append((part.softmax(-1) @ v[:, :, keys], part.logsumexp(-1)))
    (out, lse), *rest = parts
    for more in rest:
        merge(out, lse, *more)
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
