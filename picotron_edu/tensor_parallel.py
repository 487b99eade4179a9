"""Tensor parallelism: every matrix is cut, and the ranks compute each layer together.

    columns first, rows second: between the two nobody has to talk

                    ┌ gate₀, up₀ (columns) ─ silu·up ─ down₀ (rows) ┐
    x on each rank ─┤                                               (+) all-reduce ─ y on each rank
                    └ gate₁, up₁           ─ silu·up ─ down₁        ┘
                      half of the channels, alone      half of a sum

Attention is the same, with heads for channels: q, k and v by columns, the output projection by
rows. Each block needs one all-reduce in forward. In backward, the gradient of `x` is the sum of
what all column pieces give: one all-reduce too, and only one, though q, k and v all read `x`. It
travels while the weight gradients are computed, which do not need it.

    embedding    rows of the vocabulary: each rank looks up the tokens it has, then the sum
    head, loss   each rank has the logits of its part of the vocabulary, and keeps them: the softmax
                 needs only the largest logit, the sum of exponentials, and the label's logit

Sent per layer: 2 all-reduces forward, 2 backward, of B·S·D numbers each: 4·2(n−1)/n·B·S·D in all.
Memory: weights, gradients and optimizer states /n (norms stay whole); activations inside the blocks
/n, those between them (the residual stream, norms) whole on every rank: chapter 06 cuts them too.

Source: Shoeybi et al., "Megatron-LM", 1909.08053, section 3; Korthikanti et al., 2205.05198, 4.2.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from picotron_edu.layout import Cut, attach, layout_of, piece_of, slice_of
from picotron_edu.model import Llama, LlamaConfig
from picotron_edu.plain import check_plain, check_tokens
from picotron_edu.presets import check_count
from picotron_edu.ranks import Axis, all_reduce, divided, reduce_from, span


def cut(param: nn.Parameter, axis: Axis, dim: int) -> None:
    """Keep this rank's piece of `param` along `dim`, in the same parameter."""
    layout, part = layout_of(param), piece_of(param.shape[dim], axis.size, axis.index)
    piece = param.data.narrow(dim, part.start, part.stop - part.start)
    param.data = piece.clone()  # a view would keep the whole weight in memory
    attach(param, replace(layout, cuts=(*layout.cuts, Cut(dim, axis))))


class ColumnLinears(Function):
    """Several linears of the same x, each cut by columns: y_i = x · W_iᵀ, with no message.

    In backward the ranks' gradients of x are summed, in one message for all of them, beside the
    weight gradients.
    """

    @staticmethod
    def forward(ctx: Any, axis: Axis, x_BSD: Tensor, *weights_FD: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.save_for_backward(x_BSD, *weights_FD)
        return tuple(F.linear(x_BSD, weight_FD) for weight_FD in weights_FD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BSF: Tensor) -> tuple[Tensor | None, ...]:
        x_BSD, *weights_FD = ctx.saved_tensors
        x_TD, grads_TF = x_BSD.flatten(0, -2), [grad.flatten(0, -2) for grad in grads_BSF]
        message = None
        if ctx.needs_input_grad[1]:
            grad_TD = grads_TF[0] @ weights_FD[0]
            for grad_TF, weight_FD in zip(grads_TF[1:], weights_FD[1:]):
                grad_TD.addmm_(grad_TF, weight_FD)
            message = all_reduce(grad_TD, ctx.axis, async_op=True)  # …and meanwhile:
        wanted = ctx.needs_input_grad[2:]
        with span("weight gradient"):
            grads_FD = [grad.T @ x_TD if want else None for grad, want in zip(grads_TF, wanted)]
        return None, message.wait().view(x_BSD.shape) if message else None, *grads_FD


def column_linears(axis: Axis, x_BSD: Tensor, *linears: nn.Linear) -> list[Tensor]:
    """Each rank has some of the output features of each linear, and their biases."""
    outs = ColumnLinears.apply(axis, x_BSD, *(linear.weight for linear in linears))
    return [y if lin.bias is None else y + lin.bias for y, lin in zip(outs, linears)]


def row_linear(axis: Axis, linear: nn.Linear, x_BSF: Tensor) -> Tensor:
    """Each rank has some of the *input* features: partial products, summed over the ranks.

    The bias is added once, after the sum; inside it would count axis.size times.
    """
    y_BSD = reduce_from(F.linear(x_BSF, linear.weight), axis)
    return y_BSD if linear.bias is None else y_BSD + linear.bias


def own_rows(first: int, embedding: nn.Embedding, tokens_BS: Tensor) -> Tensor:
    """This rank knows the tokens from `first` on; the rows of the others are zero."""
    local_BS = tokens_BS - first
    here_BS = (local_BS >= 0) & (local_BS < len(embedding.weight))
    x_BSD = F.embedding(local_BS.where(here_BS, 0), embedding.weight)
    return x_BSD * here_BS.unsqueeze(-1)


def look_up(axis: Axis, first: int, embedding: nn.Embedding, tokens_BS: Tensor) -> Tensor:
    return reduce_from(own_rows(first, embedding, tokens_BS), axis)


class VocabularyLoss(Function):
    """Sum of −log softmax(logits)[label] over the counted labels; the logits are never gathered.

    Each rank has the columns of the vocabulary from `first` on. Two small messages of one or two
    numbers a token: the largest logit; and the sum of exponentials with the label's own logit.
    """

    @staticmethod
    def forward(ctx: Any, axis: Axis, first: int, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        exact = torch.promote_types(logits_TV.dtype, torch.float32)
        counted_T = labels_T != -100
        local_T = labels_T - first
        here_T = counted_T & (local_T >= 0) & (local_T < logits_TV.shape[1])
        local_T1 = local_T.where(here_T, 0)[:, None]
        top_T = all_reduce(logits_TV.amax(dim=1).to(exact), axis, "max")
        shifted_TV = logits_TV.to(exact) - top_T[:, None]
        own_T = shifted_TV.gather(1, local_T1)[:, 0].where(here_T, 0)  # the label's, if it is here
        sums_2T = torch.stack([shifted_TV.exp().sum(dim=1), own_T])
        all_reduce(sums_2T, axis)
        log_sum_T = sums_2T[0].log()
        log_softmax_TV = shifted_TV.sub_(log_sum_T[:, None])
        ctx.logits_dtype = logits_TV.dtype
        ctx.save_for_backward(log_softmax_TV, local_T1, here_T, counted_T)
        return (log_sum_T - sums_2T[1]).where(counted_T, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:
        log_softmax_TV, local_T1, here_T, counted_T = ctx.saved_tensors
        grad_TV = log_softmax_TV.exp()  # softmax, minus 1 at the label:
        grad_TV.scatter_add_(1, local_T1, -here_T[:, None].to(grad_TV.dtype))
        grad_TV *= (grad * counted_T)[:, None]
        return None, None, grad_TV.to(ctx.logits_dtype), None


def head_loss(
    axis: Axis, first: int, chunks: int, head: nn.Module, x_BSD: Tensor, labels_BS: Tensor
) -> tuple[Tensor, Tensor]:
    """As `model.token_loss_sum`. With several chunks of the sequence, only one chunk's logits are
    in memory: they are made again in backward.
    """
    parts = zip(x_BSD.tensor_split(chunks, 1), labels_BS.tensor_split(chunks, 1))
    return sum_of_chunks(axis, first, head, list(parts)), (labels_BS != -100).sum()


def sum_of_chunks(
    axis: Axis, first: int, head: nn.Module, parts: list[tuple[Tensor, Tensor]]
) -> Tensor:
    def loss_of(x_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        logits_TV = head(x_BSD).flatten(0, 1)
        return VocabularyLoss.apply(axis, first, logits_TV, labels_BS.flatten())

    if len(parts) == 1:
        return loss_of(*parts[0])
    losses = [checkpoint(loss_of, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum()


def rank_shape(config: LlamaConfig, n: int) -> LlamaConfig:
    """What one of n ranks holds is a Llama too: as deep, as wide between the blocks, with fewer
    heads, channels and rows of the vocabulary. Formulas for parameters and activations hold for it.
    """
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // n,
        num_key_value_heads=max(1, config.num_key_value_heads // n),
        head_dim=config.size_of_head,
        intermediate_size=config.intermediate_size // n,
        vocab_size=-(-config.vocab_size // n),
    )


def check_divisible(model: Llama, axis: Axis) -> None:
    """Heads and channels must be shared out evenly; the vocabulary need not."""
    config, n = model.config, axis.size
    for name in ("num_attention_heads", "intermediate_size"):
        if getattr(config, name) % n:
            raise ValueError(f"{name}={getattr(config, name)} is not divisible by {axis.name}={n}")
    K = config.num_key_value_heads
    if K % n and n % K:
        raise ValueError(
            f"num_key_value_heads={K} and {axis.name}={n}: one must divide the other, so that each "
            f"rank has equally many key heads, or equally many ranks share one"
        )
    if config.vocab_size < n:
        raise ValueError(f"vocab_size={config.vocab_size} is below {axis.name}={n}")


def cut_linear(linear: Any, axis: Axis, dim: int) -> None:
    """dim 0: output features, with their biases; dim 1: input features, and the bias whole."""
    cut(linear.weight, axis, dim)
    if linear.bias is not None and dim == 0:
        cut(linear.bias, axis, 0)


def cut_key_heads(linears: list[Any], heads: int, axis: Axis) -> None:
    """Key and value projections. With fewer heads than ranks, neighbours hold the same head: each
    has the gradient from its own query heads, a part of the sum, and its layout says so.
    """
    sharers: tuple[Axis, ...] = ()
    if heads < axis.size:
        axis, replicas = divided(axis, axis.size // heads)
        sharers = (replicas,)
    for linear in linears:
        cut_linear(linear, axis, dim=0)
        for param in linear.parameters():
            layout = layout_of(param)
            attach(param, replace(layout, partial_over=(*layout.partial_over, *sharers)))


def apply(model: Llama, axis: Axis, loss_chunks: int = 1) -> None:
    """Cut a plain Llama over `axis`: from here on each rank computes its part of every layer.

    All ranks of the axis must be given the same tokens. loss_chunks: parts of the sequence whose
    logits are in memory one after the other. Raises ValueError before any message.
    """
    check_count("loss_chunks", loss_chunks)
    check_plain(model, axis, whole=True)
    check_divisible(model, axis)
    column = partial(column_linears, axis)
    block: Any
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        cut_linear(attention.q_proj, axis, dim=0)
        key_value = [attention.k_proj, attention.v_proj]
        cut_key_heads(key_value, model.config.num_key_value_heads, axis)
        for linear in (mlp.gate_proj, mlp.up_proj):
            cut_linear(linear, axis, dim=0)
        attention.project = mlp.project = column
        for linear in (attention.o_proj, mlp.down_proj):
            cut_linear(linear, axis, dim=1)
            linear.forward = partial(row_linear, axis, linear)
    embedding: Any = model.model.embed_tokens
    head: Any = model.lm_head
    cut(embedding.weight, axis, dim=0)
    if head.weight is not embedding.weight:
        cut(head.weight, axis, dim=0)
    first = slice_of(layout_of(embedding.weight))[0].start
    embedding.forward = partial(look_up, axis, first, embedding)
    head.forward = lambda x_BSD: column(x_BSD, head)[0]
    model.head_loss = partial(head_loss, axis, first, loss_chunks)
    model.register_forward_pre_hook(partial(check_tokens, model.config.vocab_size))
