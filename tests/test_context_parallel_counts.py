"""Which rank has which tokens, how much it computes, and how many bytes it sends."""

import pytest
import torch

from picotron_edu.context_parallel import KINDS, positions_of
from picotron_edu.ranks import launch, span, world
from picotron_edu.ring_attention import blocks_of, chunks_of


def test_orders():
    assert [chunks_of(i, 4, "zigzag") for i in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert positions_of(1, 2, "zigzag", 8).tolist() == [2, 3, 4, 5]
    assert positions_of(0, 2, "zigzag", 8).tolist() == [0, 1, 6, 7]
    assert positions_of(1, 2, "contiguous", 8).tolist() == [4, 5, 6, 7]


def work_of(rank: int, n: int, order: str, length: int) -> int:
    """Pairs of query and key that a rank computes in all its steps."""
    mine = chunks_of(rank, n, order)
    size = length // (n * len(mine))
    pairs = 0
    for owner in range(n):
        for _, _, diagonal in blocks_of(mine, chunks_of(owner, n, order), size, causal=True):
            pairs += size * (size + 1) // 2 if diagonal else size * size
    return pairs


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_zigzag_shares_the_work_evenly(n):
    for order in ("zigzag", "contiguous"):
        pairs = [work_of(rank, n, order, 48 * n) for rank in range(n)]
        assert sum(pairs) == 48 * n * (48 * n + 1) // 2, "each visible pair once"
        assert (
            max(pairs) / min(pairs) <= 1.1 if order == "zigzag" else max(pairs) > 1.9 * min(pairs)
        )


def test_masked_blocks_are_left_out():
    assert blocks_of([0, 3], [1, 2], 5, causal=True) == [
        (slice(5, 10), slice(0, 5), False),
        (slice(5, 10), slice(5, 10), False),
    ]
    assert blocks_of([0], [1], 5, causal=True) == []
    assert len(blocks_of([0], [1], 5, causal=False)) == 1


def bytes_sent(n: int) -> dict[str, dict[str, float]]:
    """By kind and direction ("ring backward"), then by operation."""

    def layers() -> None:
        for kind, attend in KINDS.items():
            q, k, v = (
                torch.randn(2, heads, 24 // n, 4, dtype=torch.bfloat16, requires_grad=True)
                for heads in (8, 4, 4)
            )
            with span(f"{kind} forward"):
                out = attend(world(), "zigzag", True, q, k, v)
            with span(f"{kind} backward"):
                out.sum().backward()

    trace = launch(layers, world_size=n, quiet=True).trace
    spans = [e for e in trace.of(rank=0, lane="compute") if e.name.split()[0] in KINDS]
    inside = {whole.name: trace.inside(whole).of(lane="comm") for whole in spans}
    return {
        name: {operation: events.wire_bytes(0, operation) for operation in {e.name for e in events}}
        for name, events in inside.items()
    }


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_per_layer(n):
    """Keys and values travel with their own 4 heads, not with the 8 of the queries (case 76)."""
    kv, q = 2 * 2 * 4 * (24 // n) * 4, 2 * 8 * (24 // n) * 4  # numbers of one rank; output as q
    once = {"all_to_all": (n - 1) / n * (2 * q + kv) * 2}
    assert bytes_sent(n) == {
        "ring forward": {"send_recv": (n - 1) * kv * 2},
        "ring backward": {"send_recv": (n - 1) * kv * 2 + n * kv * 4},  # gradients: float32
        "all_gather forward": {"all_gather": (n - 1) * kv * 2},
        "all_gather backward": {"reduce_scatter": (n - 1) * kv * 2},
        "ulysses forward": once,
        "ulysses backward": once,
    }
