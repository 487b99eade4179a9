"""Random numbers on many ranks: the common stream, one stream a rank, and recomputation of both."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_edu.ranks import Mesh, launch, world
from picotron_edu.recompute import checkpoint
from picotron_edu.sharded_random import sharded_random


def mask(n: int = 1000) -> Tensor:
    return F.dropout(torch.ones(n)) != 0


def test_masks_are_equal_on_whole_activations_and_different_on_cut_ones():
    def masks() -> list[Tensor]:
        torch.manual_seed(7)  # the same on all ranks
        first = mask()
        with sharded_random(world()):
            mine = mask(), mask()
        with sharded_random(world()):
            again = mask()
        return [first, mask(), *mine, again]

    ranks = list(launch(masks, world_size=3, quiet=True))
    for common in (0, 1):
        assert all(torch.equal(rank[common], ranks[0][common]) for rank in ranks)
    of_all = [own for rank in ranks for own in rank[2:]] + ranks[0][:2]
    for i, one in enumerate(of_all):
        for other in of_all[:i]:
            assert 350 < (one != other).sum() < 650, "half of 1000 coins agree by chance"


@pytest.mark.parametrize("draws", [0, 1, 50])
def test_the_common_stream_goes_on_as_if_nobody_knew_how_much_was_drawn_inside(draws):
    def after() -> Tensor:
        torch.manual_seed(7)
        with sharded_random(world()):
            torch.rand(draws * (1 + world().index))
        return torch.rand(4)

    torch.manual_seed(7)
    torch.randint(2**31, ())
    expected = torch.rand(4)
    assert all(torch.equal(got, expected) for got in launch(after, world_size=2, quiet=True))


def test_ranks_of_one_model_agree_and_replicas_do_not():
    """On a grid: tp shares a model, dp has models of its own."""

    def common_and_own() -> tuple[float, float]:
        mesh = Mesh(dp=2, tp=2)
        torch.manual_seed(mesh.dp.index)
        with sharded_random(mesh.tp):
            own = torch.rand(()).item()
        return torch.rand(()).item(), own

    common, own = zip(*launch(common_and_own, world_size=4, quiet=True))
    assert common[0] == common[1] and common[2] == common[3] and common[0] != common[2]
    assert len(set(own)) == 4


def test_recomputation_draws_the_same_masks_from_both_streams_and_leaves_no_trace():
    """No place where the output is 0 and the gradient is not, or the other way round; the number
    that is drawn after the block, and after backward, is as without recomputation.
    """

    def run(call) -> tuple[int, float, float]:
        torch.manual_seed(7)
        x = torch.ones(1000, requires_grad=True)

        def part(x: Tensor) -> Tensor:
            x = F.dropout(x.sin())
            with sharded_random(world()):
                return F.dropout(x.sin())

        y = call(part, x)
        after = torch.rand(()).item()
        y.sum().backward()
        return int(((y != 0) != (x.grad != 0)).sum()), after, torch.rand(()).item()

    def both() -> bool:
        plain, again = run(lambda fn, x: fn(x)), run(checkpoint)
        return plain == again and plain[0] == 0

    assert launch(both, world_size=2, quiet=True).values == [True, True]


def test_an_error_inside_leaves_the_common_stream_as_it_would_be():
    torch.manual_seed(7)
    with pytest.raises(KeyError), sharded_random(world()):
        raise KeyError
    after = torch.rand(())
    torch.manual_seed(7)
    with sharded_random(world()):
        pass
    assert torch.equal(after, torch.rand(()))
