"""Chapter 04, ZeRO: shards of states, gradients and weights, two bugs, and predictions."""

from __future__ import annotations

from picotron_edu.course.checking import exercise
from picotron_edu.course.checks import sharded, sharded_counts, sharded_layers

an_optimizer_in_shards = exercise("4.1")(sharded.shard_an_optimizer)
gradients_in_shards = exercise("4.2")(sharded.accumulate_in_shards)
weights_in_shards = exercise("4.3")(sharded_layers.gather_compute_free)
two_bugs = exercise("4.4")(sharded_layers.find_the_bugs)
llama_on_many_ranks = exercise("4.5")(sharded_counts.llama_on_many_ranks)
