"""Stand-ins for a mesh axis, where no ranks are needed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FakeAxis:
    name: str
    size: int
    index: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))
