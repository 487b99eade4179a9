"""The grid of ranks: who talks to whom.

A run on 8 GPUs with dp=2, pp=2, tp=2 is a cube of ranks. Each technique talks along one *axis*:

    Mesh(pp=2, dp=2, tp=2)           tp 0  tp 1
                         pp 0  dp 0    0     1      neighbours on tp are neighbours in a node:
                               dp 1    2     3      tp talks most, so it varies fastest
                         pp 1  dp 0    4     5
                               dp 1    6     7

An `Axis` is one line of the grid through this rank: its size, this rank's place on it, and the
process group for its messages. Experts are spread *inside* the data-parallel ranks: `ep` divides
dp·cp, and `expert_dp` is what is left of it. Joined axes go by name: `mesh.dp_cp` reduces gradients
over both.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2104.04473, section 3; torch.distributed.device_mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .runtime import Runtime, current

ORDER = ("pp", "dp", "cp", "tp")  # slowest to fastest


@dataclass(frozen=True)
class Axis:
    """One line of ranks that talk to each other.

    name: "tp"; size: number of ranks on it; index: this rank's place, 0 … size−1; ranks: their
    global ranks in order; group: torch's process group, None when size is 1 (nobody to talk to);
    runtime: this rank's, where a message finds its board, recorder and link.
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    runtime: Runtime = field(default_factory=Runtime, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size or len(self.ranks) != self.size:
            raise ValueError(
                f"axis '{self.name}': index={self.index} and ranks={self.ranks} do not fit "
                f"size={self.size}"
            )


def world() -> Axis:
    """The axis of all ranks of this run."""
    if not dist.is_initialized():
        return Axis("world", 1, 0, (0,), None, current())
    size, rank = dist.get_world_size(), dist.get_rank()
    return Axis("world", size, rank, tuple(range(size)), dist.group.WORLD, current())


def divided(axis: Axis, size: int) -> tuple[Axis, Axis]:
    """An axis of n ranks as a grid of n/size rows: this rank's column, and its row of neighbours.

        tp of 4 by 2:   0 1     rank 2: column "tp_outer" (0, 2), row "tp_inner" (2, 3)
                        2 3

    All ranks of the axis must call this: new process groups are made.
    """
    if size < 1 or axis.size % size:
        raise ValueError(f"size={size} does not divide {axis.name}={axis.size}")
    row, column = divmod(axis.index, size)
    places = {
        "outer": range(column, axis.size, size),
        "inner": range(row * size, (row + 1) * size),
    }
    parts = []
    for name, line in places.items():
        ranks = tuple(axis.ranks[place] for place in line)
        group = axis.group if len(line) == axis.size else None
        if 1 < len(line) < axis.size:
            group = dist.new_group(list(ranks), use_local_synchronization=True)
        index = line.index(axis.index)
        parts.append(Axis(f"{axis.name}_{name}", len(line), index, ranks, group, axis.runtime))
    return parts[0], parts[1]


def lines_along(grid: np.ndarray, name: str, ep: int = 1) -> np.ndarray:
    """All lines of ranks along the axis `name`, shape (lines, size): its process groups.

    grid: from `Mesh.grid`. name: "tp", joined ones such as "dp_cp", or "ep" and "expert_dp": for
    them the dp·cp ranks of one pp and tp are laid out anew as (expert_dp, ep), ep fastest.
    """
    if name in ("ep", "expert_dp"):
        pp, dp, cp, tp = grid.shape
        grid, along = grid.reshape(pp, dp * cp // ep, ep, tp), [1 if name == "expert_dp" else 2]
    else:
        along = [ORDER.index(part) for part in name.split("_")]
    rest = [dim for dim in range(4) if dim not in along]
    size = int(np.prod([grid.shape[dim] for dim in along]))
    return grid.transpose(rest + along).reshape(-1, size)


class Mesh:
    """`Mesh(pp=1, dp=1, cp=1, tp=1, ep=1)`; the product of pp, dp, cp, tp must be the world size.

    Every rank must build the same meshes, and ask for joined axes, in the same order: creating a
    process group is itself a conversation between the ranks.
    """

    def __init__(self, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1) -> None:
        self.sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep}
        self._grid = self.grid(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
        self.world = world()
        self.rank, self.world_size = self.world.index, self.world.size
        if self._grid.size != self.world_size:
            raise ValueError(
                f"pp·dp·cp·tp = {pp}·{dp}·{cp}·{tp} = {self._grid.size}, "
                f"but world_size is {self.world_size}: they must be equal"
            )
        self._device_mesh: DeviceMesh | None = None
        if self.world_size > 1:
            used = {name: size for name in ORDER if (size := self.sizes[name]) > 1}
            kind, shape, names = self.world.runtime.device.type, (*used.values(),), (*used,)

            def make() -> DeviceMesh:
                return init_device_mesh(kind, shape, mesh_dim_names=names)

            what = f"making the process groups of Mesh({self._inside()})"
            # along one axis torch takes the group of all ranks, and nobody waits
            self._device_mesh = self._together(what, make) if len(used) > 1 else make()
        self._axes = {name: self._axis(name) for name in (*ORDER, "ep", "expert_dp")}

    @staticmethod
    def grid(pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1) -> np.ndarray:
        """The ranks as an array of shape (pp, dp, cp, tp); needs no process group."""
        for name, size in {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep}.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"{name}={size!r}: an axis has 1 rank or more, a whole number")
        if (dp * cp) % ep:
            raise ValueError(f"ep={ep} must divide dp·cp = {dp}·{cp} = {dp * cp}")
        return np.arange(pp * dp * cp * tp).reshape(pp, dp, cp, tp)

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's own mesh of the axes larger than 1, for comparing with torch's own techniques."""
        if self._device_mesh is None:
            raise ValueError("a mesh of one rank has no torch DeviceMesh")
        return self._device_mesh

    def __getattr__(self, name: str) -> Axis:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._axes:
            parts = name.split("_")
            if not set(parts) <= set(ORDER) or parts != [p for p in ORDER if p in parts]:
                raise AttributeError(
                    f"no axis '{name}': there are {', '.join(ORDER)}, ep, expert_dp, world, and "
                    f"joined ones in the order of the grid, such as dp_cp or pp_dp"
                )
            self._axes[name] = self._axis(name)
        return self._axes[name]

    def _axis(self, name: str) -> Axis:
        lines = lines_along(self._grid, name, self.sizes["ep"])
        (line,) = (row for row in lines.tolist() if self.rank in row)
        group = None
        if len(line) == self.world_size > 1:
            group = self.world.group
        elif len(line) > 1 and name in ORDER:
            group = self.device_mesh.get_group(name)
        elif len(line) > 1:  # torch's mesh does not know joined axes, ep and expert_dp
            group, _ = self._together(
                f"making the process groups of mesh.{name}",
                lambda: dist.new_subgroups_by_enumeration(lines.tolist()),
            )
        runtime = self.world.runtime
        return Axis(name, len(line), line.index(self.rank), tuple(line), group, runtime)

    def _together(self, what: str, make: Callable[[], Any]) -> Any:
        """`make()`, in which all ranks must join: noted on the board, where a missing one shows."""
        from .handle import caller  # imports this module itself

        board = self.world.runtime.board
        if board is None:
            return make()
        board.note(what, "world", caller())
        call = board.enter("world", self.world.ranks, what)
        board.block(call, [])
        try:
            return make()
        finally:
            board.unblock(call, [])

    def draw(self) -> str:
        """The grid as text, this rank in brackets."""
        used = [name for name in ORDER if self.sizes[name] > 1] or ["tp"]
        *rows, last = used
        grid = self._grid.reshape([self.sizes[name] for name in used])
        labels = [
            " ".join(f"{n} {i}" for n, i in zip(rows, at)) for at in np.ndindex(grid.shape[:-1])
        ]
        left, width = max(map(len, labels)), max(len(f"{last} {grid.shape[-1] - 1}"), 6)
        lines = [" " * left + "".join(f"{last} {i}".rjust(width) for i in range(grid.shape[-1]))]
        for label, row in zip(labels, grid.reshape(-1, grid.shape[-1]).tolist()):
            cells = (f"[{r}]" if r == self.rank else f"{r} " for r in row)
            lines.append((label.ljust(left) + "".join(c.rjust(width) for c in cells)).rstrip())
        return "\n".join(lines)

    def _inside(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1)

    def __repr__(self) -> str:
        return f"Mesh({self._inside()}) rank {self.rank} of {self.world_size}"

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self.world.runtime.device
