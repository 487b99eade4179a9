"""Chapter 05, tensor parallelism: two linears, a loss, two bugs, and two predictions."""

from __future__ import annotations

from picotron_edu.course.checking import exercise
from picotron_edu.course.checks import tensor_counts, tensor_linears, vocabulary

a_column_and_a_row_linear = exercise("5.1")(tensor_linears.feed_forward_on_ranks)
a_loss_without_gathering = exercise("5.2")(vocabulary.loss_of_vocabulary_pieces)
two_bugs = exercise("5.3")(tensor_linears.find_the_bugs)
how_many_messages = exercise("5.4")(tensor_counts.messages_of_llama)
what_stays_whole = exercise("5.5")(tensor_counts.activations_of_a_layer)
