"""Faults that people met with context parallelism, each as the right behaviour in small."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from oracle import CONFIG
from test_context_parallel import CONFIGS, attention_on_ranks

from picotron_edu import context_parallel, ring_attention, tensor_parallel
from picotron_edu.context_parallel import KINDS, cut, in_text_order, positions_of
from picotron_edu.data import Batch, TextData
from picotron_edu.model import Llama
from picotron_edu.ranks import Axis, Mesh, all_gather, all_reduce, launch, world
from picotron_edu.train import accumulate


def part(index: int, n: int, batch: Batch, order: str = "zigzag") -> Batch:
    return cut(batch, Axis("cp", n, index, tuple(range(n))), order)


def test_labels_are_shifted_before_the_cut():
    """Tokens 0 to 7 on two ranks: 7 labels count, at the borders of chunks as well (case 39)."""
    tokens = torch.arange(8)[None]
    labels = torch.cat([tokens[:, 1:], torch.tensor([[-100]])], dim=1)
    parts = [part(rank, 2, Batch(tokens, labels)) for rank in range(2)]
    assert [p.inputs_BS[0].tolist() for p in parts] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [p.labels_BS[0].tolist() for p in parts] == [[1, 2, 7, -100], [3, 4, 5, 6]]
    assert sum(int(p.counted) for p in parts) == 7


@pytest.mark.parametrize("n", [2, 3])
def test_rotary_positions_are_those_of_the_text(n):
    """Logits, put back in order, are one rank's: local positions would turn every key (case 38)."""
    tokens_BS = torch.randint(CONFIG.vocab_size, (2, 12), generator=torch.Generator())

    def logits(order: str) -> torch.Tensor:
        model = Llama(CONFIGS[n], dtype=torch.float64)
        context_parallel.apply(model, world(), order=order)
        mine = cut(Batch(tokens_BS, tokens_BS), world(), order)
        with torch.no_grad():
            parts = all_gather(model(mine.inputs_BS, mine.positions_S), world(), dim=1)
        return in_text_order(parts, world(), order, dim=1)

    def both() -> list[torch.Tensor]:
        return [logits("zigzag"), logits("contiguous")]

    with torch.no_grad():
        expected = Llama(CONFIGS[n], dtype=torch.float64)(tokens_BS)
    for rank in launch(both, world_size=n, quiet=True):
        for got in rank:
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def weights_on_ranks() -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """Attention weights of this rank's queries; and again, when the last two tokens have changed.

    The values are the rows of the identity: what comes out is the weights.
    """
    axis, S = world(), 24
    q, k = torch.randn(2, 1, 4, S, S, generator=torch.Generator(), dtype=torch.float64)
    other = k.clone()
    other[:, :, -2:] += 1
    eye = torch.eye(S, dtype=torch.float64).expand(1, 4, S, S)
    found = {}
    for kind in ("ring", "all_gather"):
        for order in ("zigzag", "contiguous"):
            here = positions_of(axis.index, axis.size, order, S)
            found[kind, order] = tuple(
                KINDS[kind](axis, order, True, *(x[:, :, here] for x in (q, keys, eye)))
                for keys in (k, other)
            )
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_block_is_masked_by_its_place(n):
    """Whole, triangular or left out: weights that are 0 exactly where the future is (case 41)."""
    for rank, found in enumerate(launch(weights_on_ranks, world_size=n, quiet=True)):
        for (_, order), (weights, changed) in found.items():
            here = positions_of(rank, n, order, 24)
            visible = here[:, None] >= torch.arange(24)
            assert torch.equal(weights > 0, visible.expand_as(weights))
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
            early = here < 22
            assert torch.equal(weights[:, :, early], changed[:, :, early]), "a later token was seen"


def test_no_send_relies_on_a_buffer():
    """Each hop is one call for send and receive, so it may block: also on three ranks (case 48)."""
    work = attention_on_ranks("ring", "zigzag", True, torch.float64)

    def blocking() -> object:
        def waits(axis, x, pass_on=ring_attention.pass_on):
            message = pass_on(axis, x)
            message.wait()
            return message

        with patch.object(ring_attention, "pass_on", waits):
            return work()

    for n in (2, 3):
        run = launch(blocking, world_size=n, quiet=True, timeout=30)
        hops = [e for e in run.trace.of(rank=0) if e.name == "send_recv"]
        assert len(hops) == (n - 1) + (n - 1) + n
        for got, expected in run:
            for a, b in zip(got, expected):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def gradients_of_the_first_token() -> dict[str, list[torch.Tensor]]:
    axis, found = world(), {}
    for kind, attend in KINDS.items():
        here = positions_of(axis.index, axis.size, "contiguous", 16)
        inputs = torch.randn(3, 1, 4, 16, 8, generator=torch.Generator(), dtype=torch.float64)
        mine = [x[:, :, here].clone().requires_grad_() for x in inputs]
        out = attend(axis, "contiguous", True, *mine)
        out.backward((here == 0).to(out)[:, None].expand_as(out))
        found[kind] = [out.detach(), *(x.grad for x in mine)]
    return found


def test_keys_that_nobody_sees_leave_zeros_and_no_nan():
    """Rank 0 sees nothing of what comes by in three of four steps (case 62)."""
    for rank, found in enumerate(launch(gradients_of_the_first_token, world_size=4, quiet=True)):
        for out, dq, dk, dv in found.values():
            assert all(x.isfinite().all() for x in (out, dq, dk, dv))
            assert max(dq.abs().max(), dk.abs().max()) < 1e-14  # the only weight is 1
            assert (dv[:, :, :1] == 1).all() == (rank == 0)
            assert not dv[:, :, 1:].any()


def losses_of_a_step() -> list[float]:
    """With all labels; with none on rank 1; with none at all."""
    tokens_BS = torch.randint(CONFIG.vocab_size, (2, 8), generator=torch.Generator())
    model = Llama(CONFIG, dtype=torch.float64)
    context_parallel.apply(model, world())
    losses = []
    for masked in ([], [2, 3, 4, 5], range(8)):
        labels_BS = tokens_BS.clone()
        labels_BS[:, list(masked)] = -100
        batch = cut(Batch(tokens_BS, labels_BS), world())
        losses.append(accumulate(model, batch, 1, lambda x: all_reduce(x, world())).item())
    return losses


def test_the_loss_is_the_same_on_all_ranks_also_without_counted_labels():
    """A rank whose part counts nothing knows the others' loss; none at all is 0 (case 7)."""
    tokens_BS = torch.randint(CONFIG.vocab_size, (2, 8), generator=torch.Generator())
    logits_BSV = Llama(CONFIG, dtype=torch.float64)(tokens_BS).detach()
    right = torch.nn.functional.cross_entropy(logits_BSV.mT, tokens_BS, reduction="none")
    expected = [right.mean().item(), right[:, [0, 1, 6, 7]].mean().item(), 0.0]
    for losses in launch(losses_of_a_step, world_size=2, quiet=True):
        assert losses == pytest.approx(expected, rel=1e-10)


def rows_read() -> tuple[int, list, list]:
    mesh = Mesh(dp=2, cp=2)
    data = TextData("manual", sequence_length=16, global_batch_size=4)
    batch = data.batch(3, mesh.dp.index, mesh.dp.size)
    return mesh.dp.index, batch.inputs_BS.tolist(), cut(batch, mesh.cp).inputs_BS.tolist()


def test_ranks_of_a_context_axis_read_the_same_rows():
    """And take different parts of them; other replicas read other rows (case 14)."""
    ranks = launch(rows_read, world_size=4, quiet=True).values
    assert [dp for dp, _, _ in ranks] == [0, 0, 1, 1]
    assert ranks[0][1] == ranks[1][1] != ranks[2][1] == ranks[3][1]
    for first, second in (ranks[:2], ranks[2:]):
        whole, (early, late) = first[1], (first[2], second[2])
        assert [a[:4] + b + a[4:] for a, b in zip(early, late)] == whole


def test_ulysses_counts_the_heads_that_tensor_parallelism_has_left():
    def refused() -> str:
        mesh, model = Mesh(cp=2, tp=2), Llama(CONFIG)
        tensor_parallel.apply(model, mesh.tp)
        with pytest.raises(ValueError) as error:
            context_parallel.apply(model, mesh.cp, "ulysses")
        return str(error.value)

    for text in launch(refused, world_size=4, quiet=True):
        assert text == (
            "num_key_value_heads=2 (1 on this rank) is not divisible by cp=2, "
            "as kind='ulysses' needs"
        )


# bad input


@pytest.mark.parametrize(
    ("order", "length", "message"),
    [
        ("zigzag", 6, "a sequence of 6 tokens is not divisible by 2·cp=4 (zigzag)"),
        ("contiguous", 7, "a sequence of 7 tokens is not divisible by cp=2 (contiguous)"),
    ],
)
def test_lengths_that_do_not_divide_are_refused(order, length, message):
    """With the numbers, and before anything is sent (case 43)."""
    with pytest.raises(ValueError) as error:
        positions_of(0, 2, order, length)
    assert str(error.value) == message


def test_wrong_kinds_heads_and_positions_are_refused():
    def refused() -> list[str]:
        axis, texts = world(), []
        tokens_BS = torch.zeros(1, 8, dtype=torch.int64)
        model = Llama(CONFIG)
        context_parallel.apply(model, axis)
        batch = cut(Batch(tokens_BS, tokens_BS), axis, "contiguous")
        one_key = Llama(replace(CONFIG, num_key_value_heads=1))
        for wrong in (
            lambda: context_parallel.apply(model, axis, "rings"),
            lambda: context_parallel.apply(model, axis, "ring", "zig-zag"),
            lambda: context_parallel.apply(one_key, axis, "ulysses"),
            lambda: model(batch.inputs_BS),
            lambda: model(batch.inputs_BS, batch.positions_S),
        ):
            with pytest.raises(ValueError) as error:
                wrong()
            texts.append(str(error.value))
        return texts

    for texts in launch(refused, world_size=2, quiet=True):
        for text, words in zip(
            texts,
            ("kind", "order", "num_key_value_heads=1", "positions_S are not", "zigzag order"),
            strict=True,
        ):
            assert words in text
