"""The grid of ranks: which ranks talk to each other on each axis."""

import sys
import time

import cloudpickle
import numpy as np
import pytest
import torch
from expect import expect

from picotron_edu.ranks import (
    Axis,
    Mesh,
    RankFailed,
    RanksHung,
    all_gather,
    all_reduce,
    launch,
    world,
)
from picotron_edu.ranks.mesh import ORDER, lines_along

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SHAPES = [
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
    {"dp": 4, "cp": 2, "tp": 2},
    {"pp": 3, "dp": 2, "tp": 2},
]
JOINED = ["pp_dp", "dp_cp", "cp_tp", "pp_tp", "dp_tp", "pp_dp_cp_tp"]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*ORDER, *JOINED])
def test_the_lines_of_an_axis_are_disjoint_and_cover_all_ranks(sizes, name):
    lines = lines_along(Mesh.grid(**sizes), name)
    assert sorted(lines.ravel().tolist()) == list(range(np.prod(list(sizes.values()))))
    assert lines.shape[1] == np.prod([sizes.get(part, 1) for part in name.split("_")])
    for line in lines.tolist():
        assert line == sorted(line)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_ranks_of_a_line_differ_in_their_place_on_that_axis_alone(sizes):
    grid = Mesh.grid(**sizes)
    for name in (*ORDER, *JOINED):
        moving = [ORDER.index(part) for part in name.split("_")]
        for line in lines_along(grid, name).tolist():
            places = np.array([np.argwhere(grid == rank)[0] for rank in line])
            for dim in set(range(4)) - set(moving):
                assert len(set(places[:, dim])) == 1


def test_tp_varies_fastest_then_cp_dp_and_pp():
    grid = Mesh.grid(pp=2, dp=2, cp=2, tp=2)
    assert lines_along(grid, "tp").tolist()[:3] == [[0, 1], [2, 3], [4, 5]]
    assert lines_along(grid, "cp").tolist()[0] == [0, 2]
    assert lines_along(grid, "dp").tolist()[0] == [0, 4]
    assert lines_along(grid, "pp").tolist()[0] == [0, 8]
    assert lines_along(grid, "dp_cp").tolist() == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [8, 10, 12, 14],
        [9, 11, 13, 15],
    ]


@pytest.mark.parametrize(
    "sizes, ep",
    [
        ({"dp": 4}, 2),
        ({"dp": 4, "tp": 2}, 4),
        ({"dp": 2, "cp": 2}, 4),
        ({"dp": 2, "cp": 2, "tp": 2}, 2),
        ({"pp": 2, "dp": 4, "tp": 2}, 2),
        ({"pp": 2, "dp": 2, "cp": 4}, 8),
    ],
    ids=str,
)
def test_experts_are_spread_inside_the_data_parallel_ranks(sizes, ep):
    grid = Mesh.grid(**sizes, ep=ep)
    data = {frozenset(line) for line in lines_along(grid, "dp_cp").tolist()}
    parts = lines_along(grid, "ep", ep).tolist()
    copies = lines_along(grid, "expert_dp", ep).tolist()
    assert all(len(line) == ep for line in parts)
    assert all(len(line) * ep == sizes.get("dp", 1) * sizes.get("cp", 1) for line in copies)
    for lines in (parts, copies):
        assert sorted(rank for line in lines for rank in line) == list(range(grid.size))
        assert all(any(set(line) <= whole for whole in data) for line in lines)
    # a copy of the experts meets every part exactly once
    assert all(len(set(a) & set(b)) <= 1 for a in parts for b in copies)


def test_ep_ranks_are_neighbours():
    assert lines_along(Mesh.grid(dp=4), "ep", 2).tolist() == [[0, 1], [2, 3]]
    assert lines_along(Mesh.grid(dp=4), "expert_dp", 2).tolist() == [[0, 2], [1, 3]]
    with_tp = lines_along(Mesh.grid(dp=4, tp=2), "ep", 2).tolist()
    assert sorted(with_tp) == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"dp": 0}, "dp=0: an axis has 1 rank or more, a whole number"),
        ({"tp": -2}, "tp=-2: an axis has 1 rank or more"),
        ({"pp": 2.0}, "pp=2.0: an axis has 1 rank or more, a whole number"),
        ({"cp": "2"}, "cp='2': an axis has"),
        ({"dp": True}, "dp=True: an axis has"),
        ({"ep": 0}, "ep=0: an axis has 1 rank or more"),
        ({"ep": -1}, "ep=-1: an axis has 1 rank or more"),
        ({"dp": 4, "ep": 3}, "ep=3 must divide dp·cp = 4·1 = 4"),
        ({"dp": 2, "cp": 3, "ep": 4}, "ep=4 must divide dp·cp = 2·3 = 6"),
        ({"dp": 2, "tp": 2}, "pp·dp·cp·tp = 1·2·1·2 = 4, but world_size is 1: they must be equal"),
    ],
)
def test_a_wrong_size_is_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        Mesh(**sizes)


def test_the_product_must_be_the_world_size_on_ranks_too():
    with pytest.raises(RankFailed, match=r"1·3·1·1 = 3, but world_size is 2: they must be equal"):
        launch(lambda: Mesh(dp=3), world_size=2, quiet=True)


def test_an_unknown_axis_is_an_attribute_error_that_lists_what_there_is():
    mesh = Mesh()
    for name in ("dq", "tp_dp", "dp_dp", "dp_ep", "dp_"):
        with pytest.raises(AttributeError, match=f"no axis '{name}': there are pp, dp, cp, tp, ep"):
            getattr(mesh, name)
    assert not hasattr(mesh, "dq") and hasattr(mesh, "dp_cp")


def test_a_mesh_of_one_rank_needs_no_process_group():
    mesh = Mesh()
    for axis in (mesh.pp, mesh.dp, mesh.tp, mesh.ep, mesh.expert_dp, mesh.dp_cp, mesh.world):
        assert (axis.size, axis.index, axis.ranks, axis.group) == (1, 0, (0,), None)
    with pytest.raises(ValueError, match="no torch DeviceMesh"):
        _ = mesh.device_mesh


def test_an_axis_that_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="axis 'tp': index=2 and ranks"):
        Axis("tp", 2, 2, (0, 1))
    with pytest.raises(ValueError, match="do not fit size=3"):
        Axis("tp", 3, 0, (0, 1))


# ---- on ranks ------------------------------------------------------------------------------------

ON_RANKS = [
    {"dp": 4},
    {"tp": 4},
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 2, "cp": 2},
    {"cp": 2, "tp": 2},
    {"dp": 4, "ep": 2},
    {"dp": 2, "cp": 2, "ep": 2},
    {"dp": 2, "cp": 2, "ep": 4},
    {"dp": 2, "tp": 2, "ep": 2},
]


def try_meshes(shapes: list[dict[str, int]]) -> list[dict[str, tuple]]:
    """Every axis of every mesh carries messages between exactly its ranks."""
    seen = []
    for sizes in shapes:
        mesh, axes = Mesh(**sizes), {}
        for name in (*ORDER, "ep", "expert_dp", "dp_cp", "pp_dp", "dp_tp", "pp_tp", "cp_tp"):
            axis = getattr(mesh, name)
            expect(axis is getattr(mesh, name), True, "an axis is made once")
            expect(axis.name, name, "its name")
            expect(axis.ranks[axis.index], mesh.rank, "its place")
            gathered = all_gather(torch.tensor([mesh.rank]), axis).tolist()
            expect(gathered, list(axis.ranks), f"all_gather over {name} of {sizes}")
            total = all_reduce(torch.tensor([1 << mesh.rank]), axis).item()
            expect(total, sum(1 << rank for rank in axis.ranks), f"all_reduce over {name}")
            axes[name] = axis.ranks
        for name in (n for n in ORDER if sizes.get(n, 1) > 1):
            theirs = mesh.device_mesh.get_group(name)
            ranks = torch.distributed.get_process_group_ranks(theirs)
            expect(ranks, list(getattr(mesh, name).ranks), f"torch's DeviceMesh, {name}")
            place = mesh.device_mesh.get_local_rank(name)
            expect(place, getattr(mesh, name).index, f"torch's place on {name}")
        expect(mesh.world.ranks, (0, 1, 2, 3), "the world")
        seen.append(axes)
    return seen


def test_messages_stay_on_every_axis_joined_ones_and_experts_too():
    run = launch(try_meshes, ON_RANKS, world_size=4, quiet=True)
    for i, sizes in enumerate(ON_RANKS):
        grid, ep = Mesh.grid(**sizes), sizes.get("ep", 1)
        for rank in range(4):
            for name, ranks in run[rank][i].items():
                assert list(ranks) in lines_along(grid, name, ep).tolist() and rank in ranks
    assert run[2][ON_RANKS.index({"dp": 2, "tp": 2})]["tp"] == (2, 3)
    assert run[3][ON_RANKS.index({"dp": 2, "cp": 2, "ep": 2})]["expert_dp"] == (1, 3)


def test_the_device_mesh_is_torchs_own_and_works_with_it():
    def work():
        mesh = Mesh(dp=2, tp=2)
        x = torch.tensor([mesh.rank])
        torch.distributed.all_reduce(x, group=mesh.device_mesh["tp"].get_group())
        names = mesh.device_mesh.mesh_dim_names
        return type(mesh.device_mesh).__module__, names, mesh.device_mesh.mesh.tolist(), x.item()

    for rank, (module, names, grid, total) in enumerate(launch(work, world_size=4, quiet=True)):
        assert module.startswith("torch.distributed")
        assert names == ("dp", "tp") and grid == [[0, 1], [2, 3]]
        assert total == [0 + 1, 2 + 3][rank // 2]


def test_three_ranks_and_the_picture_of_each():
    run = launch(lambda: (Mesh(tp=3).draw(), repr(Mesh(tp=3))), world_size=3, quiet=True)
    assert run[1] == ("  tp 0  tp 1  tp 2\n    0    [1]    2", "Mesh(tp=3) rank 1 of 3")


def fake_mesh(rank: int, **sizes: int) -> Mesh:
    """A mesh to draw, without ranks."""
    mesh = object.__new__(Mesh)
    mesh.sizes = dict.fromkeys((*ORDER, "ep"), 1) | sizes
    mesh._grid, mesh.rank = Mesh.grid(**sizes), rank
    mesh.world_size = mesh._grid.size
    return mesh


PICTURES = {
    "one rank": (
        fake_mesh(0),
        ["  tp 0", "   [0]"],
    ),
    "one axis": (
        fake_mesh(2, dp=4),
        ["  dp 0  dp 1  dp 2  dp 3", "    0     1    [2]    3"],
    ),
    "two axes": (
        fake_mesh(3, dp=2, tp=2),
        [
            "      tp 0  tp 1",
            "dp 0    0     1",
            "dp 1    2    [3]",
        ],
    ),
    "three axes": (
        fake_mesh(4, pp=2, dp=2, tp=2),
        [
            "           tp 0  tp 1",
            "pp 0 dp 0    0     1",
            "pp 0 dp 1    2     3",
            "pp 1 dp 0   [4]    5",
            "pp 1 dp 1    6     7",
        ],
    ),
    "four axes, two digits": (
        fake_mesh(15, pp=2, dp=2, cp=2, tp=2),
        [
            "                tp 0  tp 1",
            "pp 0 dp 0 cp 0    0     1",
            "pp 0 dp 0 cp 1    2     3",
            "pp 0 dp 1 cp 0    4     5",
            "pp 0 dp 1 cp 1    6     7",
            "pp 1 dp 0 cp 0    8     9",
            "pp 1 dp 0 cp 1   10    11",
            "pp 1 dp 1 cp 0   12    13",
            "pp 1 dp 1 cp 1   14   [15]",
        ],
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_of_a_mesh(name):
    mesh, lines = PICTURES[name]
    assert mesh.draw().split("\n") == lines


def test_the_picture_holds_as_many_columns_as_the_last_axis():
    lines = fake_mesh(11, pp=2, tp=12).draw().split("\n")
    assert lines[0].split() == [word for i in range(12) for word in ("tp", str(i))]
    assert lines[1].split() == ["pp", "0", *map(str, range(11)), "[11]"]
    for i, right in enumerate(range(10, 10 + 6 * 10, 6)):  # one under the other
        assert lines[0][right - 4 : right] == f"tp {i}"


def test_building_a_mesh_is_quick():
    def work():
        began = time.perf_counter()
        Mesh(dp=2, cp=2, ep=2)
        return time.perf_counter() - began

    assert min(min(launch(work, quiet=True).values) for _ in range(3)) < 1.0


def test_ranks_that_build_different_meshes_do_not_wait_in_silence():
    def work():
        Mesh(dp=2, tp=2) if world().index else Mesh(tp=4)

    with pytest.raises((RanksHung, RankFailed)):
        launch(work, timeout=3, quiet=True)


MADE_BY_SOME = {
    "Mesh(dp=2, tp=2)": lambda mesh: Mesh(dp=2, tp=2),
    "mesh.pp_dp": lambda mesh: mesh.pp_dp,
}


@pytest.mark.parametrize("what", MADE_BY_SOME)
def test_groups_that_only_some_ranks_make_are_a_deadlock_seen_at_once(what):
    def work():
        mesh = Mesh(dp=2, cp=2)
        if mesh.rank < 2:
            MADE_BY_SOME[what](mesh)

    began = time.monotonic()
    with pytest.raises(RanksHung, match="rank 3 has returned") as caught:
        launch(work, timeout=60, quiet=True)
    assert time.monotonic() - began < 20
    for wait in caught.value.waits[:2]:
        assert f"waits in making the process groups of {what}" in wait.what
        assert wait.blocked and "test_mesh.py" in wait.line


def test_groups_made_in_another_order_are_a_mismatch():
    def work():
        mesh = Mesh(dp=2, cp=2)
        getattr(mesh, "pp_cp" if mesh.rank else "dp_tp")

    with pytest.raises(RanksHung, match="do not agree") as caught:
        launch(work, timeout=60, quiet=True)
    assert "making the process groups of mesh.dp_tp" in caught.value.waits[0].what
