"""Sequence parallelism: where tensor parallelism leaves x whole on every rank, cut the sequence.

    tensor parallel     │ norm ──────│ f: nothing    │ q, k, v ‥ o │ all-reduce      │ norm ‥
                          x_BSD whole                   heads/n         x_BSD whole
    sequence parallel   │ norm ──────│ g: all-gather │ q, k, v ‥ o │ reduce-scatter  │ norm ‥
                          x_BsD, s = S/n                heads/n         x_BsD

An all-reduce *is* a reduce-scatter followed by an all-gather, so the bytes are the same. But
between the two halves the norms, the residual stream and the embedding's output now live as n-ths,
and no rank computes what another one computes too. In backward each becomes its transpose: where
forward gathers, gradients are reduce-scattered, and the other way round.

What is different for the weights: a rank's norm sees only its part of the sequence, so the gradient
of the norm's weight is a *part* of the sum. Its layout says so (`partial_over`), and it is summed
over the axis with all others of its kind, in one message a step (`partial_grads.py`).

Sent per layer: forward 2 all-gathers and 2 reduce-scatters of B·S·D numbers, backward the same: as
tensor parallelism's 4 all-reduces. The gathered x is not kept for the weight gradients but gathered
once more in backward, beside the computation: 2 more all-gathers a layer (`regather=False` keeps
it). Memory: *all* activations of a layer /n.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
2205.05198, section 4.2.2.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from picotron_edu import tensor_parallel
from picotron_edu.layout import attach, layout_of, slice_of
from picotron_edu.memory import Kept, activations
from picotron_edu.model import Llama, LlamaConfig
from picotron_edu.ranks import Axis, all_gather, reduce_scatter, scatter_sum, span
from picotron_edu.tensor_parallel import rank_shape, sum_of_chunks


class GatherColumnLinears(Function):
    """All-gather x along the sequence, then several linears of it, each cut by columns.

    In backward the gradient of x leaves (reduce-scatter), and x comes back (all-gather), beside the
    matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, regather: bool, x_BsD: Tensor, *weights_FD: Tensor
    ) -> tuple[Tensor, ...]:
        x_BSD = all_gather(x_BsD, axis, dim=1)
        ctx.axis, ctx.regather = axis, regather
        ctx.save_for_backward(x_BsD if regather else x_BSD, *weights_FD)
        return tuple(F.linear(x_BSD, weight_FD) for weight_FD in weights_FD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BSF: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights_FD = ctx.saved_tensors
        x_BSD = all_gather(x, ctx.axis, dim=1, async_op=True) if ctx.regather else x
        grads_TF = [grad.flatten(0, 1) for grad in grads_BSF]
        grad_TD = grads_TF[0] @ weights_FD[0]
        for grad_TF, weight_FD in zip(grads_TF[1:], weights_FD[1:]):
            grad_TD.addmm_(grad_TF, weight_FD)
        grad_BSD = grad_TD.unflatten(0, grads_BSF[0].shape[:2])
        message = reduce_scatter(grad_BSD, ctx.axis, dim=1, async_op=True)  # …and meanwhile:
        x_TD = (x_BSD.wait() if ctx.regather else x_BSD).flatten(0, 1)
        wanted = ctx.needs_input_grad[3:]
        with span("weight gradient"):
            grads_FD = [grad.T @ x_TD if want else None for grad, want in zip(grads_TF, wanted)]
        return None, None, message.wait(), *grads_FD


def column_linears(axis: Axis, regather: bool, x_BsD: Tensor, *linears: nn.Linear) -> list[Tensor]:
    """Each rank has some of the output features of each linear, of the whole sequence."""
    weights = (linear.weight for linear in linears)
    outs = GatherColumnLinears.apply(axis, regather, x_BsD, *weights)
    return [y if lin.bias is None else y + lin.bias for y, lin in zip(outs, linears)]


def row_linear(axis: Axis, linear: nn.Linear, x_BSF: Tensor) -> Tensor:
    """Partial products of the whole sequence, summed; each rank keeps its part of the sequence."""
    y_BsD = scatter_sum(F.linear(x_BSF, linear.weight), axis, dim=1)
    return y_BsD if linear.bias is None else y_BsD + linear.bias


def look_up(axis: Axis, first: int, embedding: nn.Embedding, tokens_BS: Tensor) -> Tensor:
    """As tensor parallelism's, and each rank keeps its part of the sequence."""
    S = tokens_BS.shape[1]
    if S % axis.size:
        raise ValueError(f"a sequence of {S} tokens is not divisible by {axis.name}={axis.size}")
    return scatter_sum(tensor_parallel.own_rows(first, embedding, tokens_BS), axis, dim=1)


def head_loss(
    axis: Axis, first: int, chunks: int, head: nn.Module, x_BsD: Tensor, labels_BS: Tensor
) -> tuple[Tensor, Tensor]:
    """As tensor parallelism's. Chunk i is the i-th part of *each rank's* piece of the sequence."""
    labels_BnS = labels_BS.unflatten(1, (axis.size, -1)).tensor_split(chunks, 2)
    parts = zip(x_BsD.tensor_split(chunks, 1), [labels.flatten(1) for labels in labels_BnS])
    return sum_of_chunks(axis, first, head, list(parts)), (labels_BS != -100).sum()


def rank_activations(
    config: LlamaConfig,
    n: int,
    batch: int,
    sequence: int,
    regather: bool = True,
    loss_chunks: int = 1,
    **options: Any,
) -> list[Kept]:
    """What each of n ranks keeps for backward: that of tensor parallelism's thinner Llama, and of
    what lies between its blocks an n-th. options: as for `memory.activations`.

    Token numbers, labels and the angles of the positions are not cut. A norm's output is the x that
    columns read: without regather they keep it as gathered, and nobody keeps the piece. In chunks
    the head runs once more in backward: it keeps its piece of x in any case, and no logits.
    """
    kept = activations(rank_shape(config, n), batch, sequence, **options)
    between = {"normalised input", "norm input", "norm scale", "norm output", "block input"}
    found = []
    for k in kept:
        part = replace(k, bytes=k.bytes // n)
        if k.name == "norm output" and not regather:
            gathered = k.count - (loss_chunks > 1)  # all but the head's
            found += [replace(k, count=gathered), replace(part, count=k.count - gathered)]
        elif k.name != "log-probabilities" or loss_chunks == 1:
            found.append(part if k.name in between else k)
    return [k for k in found if k.count]


def apply(model: Llama, axis: Axis, loss_chunks: int = 1, regather: bool = True) -> None:
    """Tensor parallelism over `axis`, and the sequence cut over it everywhere else.

    All ranks of the axis must be given the same whole sequences. After the last backward of a step
    call `sum_partial_grads`. loss_chunks: parts of each rank's piece of the sequence of which the
    logits are in memory one after the other. regather: gather x once more in backward, in place of
    keeping it. Raises ValueError, before any message, where heads or channels do not divide, and in
    forward where the sequence does not.
    """
    tensor_parallel.apply(model, axis, loss_chunks)
    column = partial(column_linears, axis, regather)
    block: Any
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        attention.project = mlp.project = column
        for linear in (attention.o_proj, mlp.down_proj):
            linear.forward = partial(row_linear, axis, linear)
    embedding: Any = model.model.embed_tokens
    head: Any = model.lm_head
    first = slice_of(layout_of(embedding.weight))[0].start
    embedding.forward = partial(look_up, axis, first, embedding)
    head.forward = lambda x_BsD: column(x_BsD, head)[0]
    model.head_loss = partial(head_loss, axis, first, loss_chunks)
    for param in model.parameters():
        layout = layout_of(param)
        if not layout.cuts:  # whole on every rank, and used on a part of the sequence
            attach(param, replace(layout, partial_over=(*layout.partial_over, axis)))
