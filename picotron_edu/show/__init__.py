"""Pictures and tables, drawn from measured things: traces, tensors of a run, byte counts.

    from picotron_edu import show

    show.source(obj)                     the code itself
    show.timeline(run.trace)             who computed, sent and waited, in milliseconds
    show.ledger(run.trace)               bytes by operation and axis;  show.compare(rows)
    show.mesh(grid)                      the grid of ranks;  show.cuts(rows): who holds which part
    show.collective(name, before, after) what an operation did to the data;  show.ring(steps)
    show.mask_tiles(orders)              who computes which part of the attention mask, and when
    show.alpha_beta(sizes, seconds)      latency and bandwidth
    show.memory_steps(records)           memory through a step;  show.activations, show.treemap
    show.memory_breakdown(config, …)     bytes for the treemap;  show.memory_widget() with sliders
    show.bars(values)  show.loss(history)

Every picture has a caption, appears once, and takes its colours from `palette.py`.
"""

from picotron_edu.show.bars import bars, loss
from picotron_edu.show.breakdown import memory_breakdown
from picotron_edu.show.collectives import collective
from picotron_edu.show.cost import alpha_beta, fit_alpha_beta
from picotron_edu.show.cuts import cuts
from picotron_edu.show.ledger import Row, compare, ledger
from picotron_edu.show.mask_stepper import mask_stepper
from picotron_edu.show.mask_tiles import mask_tiles
from picotron_edu.show.memory import activations, memory_steps
from picotron_edu.show.mesh import mesh
from picotron_edu.show.ring import ring
from picotron_edu.show.source import source
from picotron_edu.show.timeline import timeline
from picotron_edu.show.treemap import treemap
from picotron_edu.show.widget import memory_widget

__all__ = [
    "Row",
    "activations",
    "alpha_beta",
    "bars",
    "collective",
    "compare",
    "cuts",
    "fit_alpha_beta",
    "ledger",
    "loss",
    "mask_stepper",
    "mask_tiles",
    "memory_breakdown",
    "memory_steps",
    "memory_widget",
    "mesh",
    "ring",
    "source",
    "timeline",
    "treemap",
]
