"""Pictures and tables, drawn from measured things: traces, tensors of a run, byte counts."""

from picotron_edu.show.collectives import collective
from picotron_edu.show.ledger import Row, compare, ledger
from picotron_edu.show.mesh import mesh
from picotron_edu.show.ring import ring
from picotron_edu.show.source import source
from picotron_edu.show.timeline import timeline

__all__ = ["Row", "collective", "compare", "ledger", "mesh", "ring", "source", "timeline"]
