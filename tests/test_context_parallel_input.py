"""What context parallelism refuses, and what it must not care about."""

from dataclasses import replace

import pytest
import torch
from oracle import CONFIG, make_batches
from torch import Tensor

from picotron_edu import context_parallel
from picotron_edu.context_parallel import KINDS, cut, positions_of
from picotron_edu.data import Batch
from picotron_edu.model import Llama
from picotron_edu.ranks import Axis, all_gather, launch, world

TWO = Axis("cp", 2, 0, (0, 1))
BATCH = make_batches(CONFIG, rows=2)[0]


def test_a_batch_is_cut_once():
    """A second cut would take half of the half, and call it the beginning of the text."""
    with pytest.raises(ValueError, match="has positions already: cut a batch once"):
        cut(cut(BATCH, TWO), TWO)


def test_labels_must_be_as_long_as_the_inputs():
    longer = torch.zeros(2, 13, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must have one shape, got \(2, 12\) and \(2, 13\)"):
        cut(Batch(BATCH.inputs_BS, longer), TWO)


@pytest.mark.parametrize("order", [None, "zig-zag", "zigzag "])
def test_an_unknown_order_is_refused_by_both(order):
    with pytest.raises(
        ValueError, match=f"order must be one of 'zigzag', 'contiguous', got {order!r}"
    ):
        cut(BATCH, TWO, order)
    with pytest.raises(ValueError, match="order must be one of"):
        context_parallel.apply(Llama(CONFIG), TWO, order=order)


@pytest.mark.parametrize("causal", [None, "yes", 2])
def test_causal_is_yes_or_no(causal):
    with pytest.raises(ValueError, match="causal must be one of True, False, got"):
        context_parallel.apply(Llama(CONFIG), TWO, causal=causal)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_positions_of_another_place_are_refused(order):
    model, mine = Llama(CONFIG), cut(BATCH, TWO, order)
    context_parallel.apply(model, TWO, order=order)
    for wrong in (
        mine.positions_S + 1,
        torch.arange(6) if order == "zigzag" else mine.positions_S.flip(0),
    ):
        with pytest.raises(ValueError, match="positions_S are not those of rank 0 on cp=2"):
            model(mine.inputs_BS, wrong)


def logits_without_a_mask(kind: str) -> Tensor:
    model = Llama(CONFIG, dtype=torch.float64)
    context_parallel.apply(model, world(), kind, causal=False)
    mine = cut(BATCH, world())
    with torch.no_grad():
        parts = all_gather(model(mine.inputs_BS, mine.positions_S), world(), dim=1)
    places = torch.cat([positions_of(i, world().size, "zigzag", 12) for i in range(world().size)])
    return parts[:, places.argsort()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_a_mask_sees_all_tokens(kind):
    """Its logits are those of one rank that sees all, and not those of a causal model."""
    (one,) = launch(logits_without_a_mask, kind, world_size=1, quiet=True)
    for two in launch(logits_without_a_mask, kind, world_size=2, quiet=True):
        torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-12)
    causal = Llama(CONFIG, dtype=torch.float64)(BATCH.inputs_BS)
    assert (one - causal).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_strides_in_memory_do_not_matter(kind):
    """Keys whose heads lie innermost, as other models make them."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, H, 8, 4, generator=draw, dtype=torch.float64) for H in (4, 2, 2))

    def gradients(innermost: bool) -> list[Tensor]:
        leaves = [x.clone() for x in (q, k, v)]
        if innermost:
            leaves = [x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in leaves]
        leaves = [x.detach().requires_grad_() for x in leaves]
        alone = replace(TWO, size=1, ranks=(0,))
        KINDS[kind](alone, "zigzag", True, *leaves).square().sum().backward()
        return [x.grad for x in leaves]

    for plain, other in zip(gradients(False), gradients(True)):
        assert plain.abs().max() > 0
        torch.testing.assert_close(other, plain)
