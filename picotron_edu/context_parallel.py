"""Context parallelism: the sequence is cut in the whole model; only attention has to talk.

Norms, projections and the feed-forward part treat each token alone, so each rank runs them on its
part of the sequence. In attention every query must meet every earlier key. In a *ring*, keys and
values travel from rank to rank while each rank computes with those it has:

    step     rank 0        rank 1        rank 2        rank 3         kv: the keys and values of
     0       kv 0          kv 1          kv 2          kv 3           one rank's tokens
     1       kv 3          kv 0          kv 1          kv 2           → sent on while the last
     2       kv 2          kv 3          kv 0          kv 1             ones are used
     3       kv 1          kv 2          kv 3          kv 0

Each step gives attention over *some* keys: an output, and the log of its sum of exponentials (lse).
Two of them are merged exactly: the lse says how much weight each had (online softmax). In backward
the keys go round again, and their gradients travel with them until they are home.

Causal attention makes early tokens cheap and late ones dear. Cut into n contiguous parts, the last
rank has n times the tiles of the first, and nearly 2n − 1 times the pairs of query and key. Cut
into 2n chunks, of which rank i gets the i-th and the i-th from the end (*zig-zag*), all have the
same:

    contiguous  0 0 1 1 2 2 3 3        zig-zag  0 1 2 3 3 2 1 0

Sent per layer, for kv = 2·B·K·(S/n)·d numbers:
    ring         forward (n−1)·kv          backward (n−1)·kv, and their gradients n·kv in float32
    all_gather   forward (n−1)·kv          backward (n−1)·kv: memory for all keys at once (Llama 3)
    ulysses      heads for sequence: (n−1)/n of a rank's q, k, v and output, in 4 messages; the
                 same in backward; heads must divide
Memory: all activations /n.

Source: Liu et al., "Ring Attention", 2310.01889; Milakov and Gimelshein, 1805.02867 (online
softmax); Llama team, 2407.21783, section 3.3.2; Jacobs et al., "DeepSpeed Ulysses", 2309.14509.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_edu.data import Batch
from picotron_edu.layout import attach, layout_of
from picotron_edu.model import Llama, LlamaConfig
from picotron_edu.plain import check_plain
from picotron_edu.presets import check_choice
from picotron_edu.ranks import Axis, exchange, gather
from picotron_edu.ring_attention import Order, chunks_of, ring_attention

Kind = Literal["ring", "all_gather", "ulysses"]


def positions_of(index: int, n: int, order: Order, length: int) -> Tensor:
    """Where in the text this rank's tokens stand. Raises ValueError if `length` does not divide."""
    count = 2 * n if order == "zigzag" else n
    if length % count:
        factor = "2·cp" if order == "zigzag" else "cp"
        raise ValueError(
            f"a sequence of {length} tokens is not divisible by {factor}={count} ({order})"
        )
    chunks = torch.arange(length).view(count, -1)
    return chunks[chunks_of(index, n, order)].flatten()


def cut(batch: Batch, axis: Axis, order: Order = "zigzag") -> Batch:
    """This rank's tokens, with their labels (the next token's, also at a border) and positions."""
    check_choice("order", order, get_args(Order))
    if batch.positions_S is not None:
        raise ValueError("the batch has positions already: cut a batch once, and before all else")
    if batch.labels_BS.shape != batch.inputs_BS.shape:
        shapes = f"{tuple(batch.inputs_BS.shape)} and {tuple(batch.labels_BS.shape)}"
        raise ValueError(f"inputs and labels must have one shape, got {shapes}")
    positions_S = positions_of(axis.index, axis.size, order, batch.inputs_BS.shape[1])
    here_S = positions_S.to(batch.inputs_BS.device)
    return replace(
        batch,
        inputs_BS=batch.inputs_BS[:, here_S],
        labels_BS=batch.labels_BS[:, here_S],
        positions_S=here_S,
    )


def in_text_order(x: Tensor, axis: Axis, order: Order, dim: int) -> Tensor:
    """What the ranks' parts make, one behind the other, put in the order of the text."""
    return x.index_select(dim, rank_order(axis, order, x.shape[dim]).argsort().to(x.device))


def rank_order(axis: Axis, order: Order, length: int) -> Tensor:
    """The positions of all ranks' tokens, rank by rank."""
    return torch.cat([positions_of(i, axis.size, order, length) for i in range(axis.size)])


def all_gather_keys(
    axis: Axis, order: Order, causal: bool, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """All keys and values on each rank; each chunk of queries looks at those up to its own end."""
    kv_2BKTd = in_text_order(gather(torch.stack([k, v]), axis, dim=3), axis, order, dim=3)
    chunks = chunks_of(axis.index, axis.size, order)
    length, outs = q.shape[2] // len(chunks), []
    for part, chunk in zip(q.split(length, dim=2), chunks):
        end = (chunk + 1) * length if causal else kv_2BKTd.shape[3]
        sees_ST = torch.ones(length, end, dtype=torch.bool, device=q.device)
        k_BKTd, v_BKTd = kv_2BKTd[:, :, :, :end]
        outs.append(
            F.scaled_dot_product_attention(
                part,
                k_BKTd,
                v_BKTd,
                attn_mask=sees_ST.tril(end - length) if causal else None,
                enable_gqa=k.shape[1] != q.shape[1],
            )
        )
    return torch.cat(outs, dim=2)


def ulysses(axis: Axis, order: Order, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads for sequence: during attention each rank has all tokens of a part of the heads."""
    n = axis.size

    def heads_for_sequence(x_BHsd: Tensor) -> Tensor:
        rows_HBsd = exchange(x_BHsd.transpose(0, 1), axis)  # from each rank, its tokens of my heads
        pieces_nHBsd = rows_HBsd.unflatten(0, (n, -1))  # H: of my heads
        x_BHSd = pieces_nHBsd.permute(2, 1, 0, 3, 4).flatten(2, 3)  # BHnsd, all tokens in a row
        return in_text_order(x_BHSd, axis, order, dim=2)

    q_BHSd, k_BKSd, v_BKSd = map(heads_for_sequence, (q, k, v))
    out_BHSd = F.scaled_dot_product_attention(
        q_BHSd, k_BKSd, v_BKSd, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1]
    )
    by_rank = rank_order(axis, order, out_BHSd.shape[2]).to(q.device)
    pieces_BHnsd = out_BHSd[:, :, by_rank].unflatten(2, (n, -1))  # the way back: n goes in front
    rows_HBsd = exchange(pieces_BHnsd.permute(2, 1, 0, 3, 4).flatten(0, 1), axis)
    return rows_HBsd.transpose(0, 1)


KINDS = {"ring": ring_attention, "all_gather": all_gather_keys, "ulysses": ulysses}


def apply(
    model: Llama, axis: Axis, kind: Kind = "ring", order: Order = "zigzag", causal: bool = True
) -> None:
    """From here on the model is to be given what `cut` makes of a batch, in the same order.

    Every gradient is a part of the sum over the axis, as in data parallelism: sum over both at
    once, with DataParallel(model, mesh.dp_cp). Raises ValueError before any message where heads
    (ulysses) or, in `cut`, the sequence do not divide.
    """
    check_choice("kind", kind, get_args(Kind))
    check_choice("order", order, get_args(Order))
    check_choice("causal", causal, (True, False))
    check_plain(model, axis)
    block: Any
    for block in model.model.layers if kind == "ulysses" else ():
        check_heads(model.config, axis, block.self_attn)
    for block in model.model.layers:
        block.self_attn.attend = partial(KINDS[kind], axis, order, causal)
    for param in model.parameters():
        layout = layout_of(param)
        attach(param, replace(layout, partial_over=(*layout.partial_over, axis)))
    model.model.register_forward_pre_hook(partial(check_positions, axis, order))


def check_heads(config: LlamaConfig, axis: Axis, attention: Any) -> None:
    """Ulysses spreads the heads of this rank, which under tensor parallelism are not all."""
    heads = {"num_attention_heads": attention.q_proj, "num_key_value_heads": attention.k_proj}
    for name, linear in heads.items():
        here, all_heads = linear.weight.shape[0] // config.size_of_head, getattr(config, name)
        if here % axis.size:
            cut_too = "" if here == all_heads else f" ({here} on this rank)"
            raise ValueError(
                f"{name}={all_heads}{cut_too} is not divisible by {axis.name}={axis.size}, "
                f"as kind='ulysses' needs"
            )


def check_positions(axis: Axis, order: Order, _module: nn.Module, inputs: tuple) -> None:
    """Positions 0, 1, 2, … on every rank would train a wrong model, silently."""
    tokens_BS, positions_S = inputs
    length = tokens_BS.shape[1] * axis.size
    right = positions_of(axis.index, axis.size, order, length).to(positions_S)
    if not torch.equal(positions_S, right):
        raise ValueError(
            f"positions_S are not those of rank {axis.index} on {axis.name}={axis.size} in "
            f"{order} order: give the model what context_parallel.cut(batch, axis, {order!r}) makes"
        )
