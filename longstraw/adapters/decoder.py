"""One block of tokens through a whole GPTModel: embedding, positions, decoder, and what follows it.

The model is driven part by part, since `GPTModel.forward` starts every sequence at position 0 and lays it out in
zigzag. Rotary tables come from `get_emb` with the block's own offset (its `forward` caches and slices by zigzag).

B batch, C tokens of the block (all ranks), R rows of this rank, M tokens of the block that this rank owns.
"""

from functools import partial

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)

from longstraw.adapters.base import EndOfCapture
from longstraw.attention.dual import apply_linear
from longstraw.attention.layout import BlockLayout
from longstraw.objectives.logprobs import compute_logprobs


def run_decoder(model: GPTModel, tokens: torch.Tensor, layout: BlockLayout) -> torch.Tensor | None:
    """tokens [B, C], equal on every rank -> hidden states after the final norm [rows of this rank, B, hidden].

    None where the last layer stopped once its state was captured. The layers' runs must be bound.
    """
    rotary = rotary_rows(model, layout)
    hidden = model.embedding(input_ids=layout.take_rows(tokens), position_ids=None)
    try:
        return model.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)
    except EndOfCapture:
        return None


def rotary_rows(model: GPTModel, layout: BlockLayout) -> torch.Tensor | None:
    """The rotary angles of this rank's rows [R, 1, 1, rotary dim], at their absolute positions.

    None for latent attention, whose modules have rotary tables of their own.
    """
    if model.config.multi_latent_attention:
        return None
    return model.rotary_pos_emb.get_emb(layout.rows, offset=layout.row_position)


def output_weight(model: GPTModel) -> torch.Tensor:
    """The vocabulary projection [V / tp, hidden], shared with the embedding or the output layer's own."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def own_output_weight(model: GPTModel, vocab_size: int) -> torch.Tensor:
    """The rows [v, hidden] of the vocabulary projection that this rank has of the real vocabulary; v may be 0."""
    weight, tp = output_weight(model), model.pg_collection.tp
    return weight.detach()[: max(0, min(len(weight), vocab_size - tp.rank() * len(weight)))]


def hidden_of_own_rows(model: GPTModel, hidden: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Hidden states [M, B, hidden] of the tokens that this rank owns, from `run_decoder`, equal over TP."""
    tp = model.pg_collection.tp
    if model.config.sequence_parallel:
        gather = partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=True, group=tp)
        hidden = apply_linear(gather, hidden)
    return hidden[: layout.mine]


def token_logprobs(
    model: GPTModel, hidden: torch.Tensor, targets: torch.Tensor, layout: BlockLayout, *, temperature: float,
    chunk_tokens: int, vocab_size: int,
) -> torch.Tensor:
    """Log-probabilities [B, M] of this rank's targets; targets [B, C], equal on every rank; hidden from `run_decoder`.

    In chunks of `chunk_tokens` of the vocabulary projection, vocab-parallel over TP, with padding of the vocabulary
    beyond `vocab_size` excluded.
    """
    tp = model.pg_collection.tp
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp)
    mine = hidden[: layout.mine].transpose(0, 1)
    batch, tokens, width = mine.shape
    own_targets = layout.take_rows(targets)[:, : layout.mine]
    weight = output_weight(model)
    logprobs = compute_logprobs(
        mine.reshape(batch * tokens, width), weight, own_targets.reshape(-1), tp_group=tp, chunk_tokens=chunk_tokens,
        temperature=temperature, sum_hidden_grad_over_tp=not model.config.sequence_parallel,
        vocab_start=tp.rank() * weight.shape[0], vocab_size=vocab_size,
    )
    return logprobs.view(batch, tokens)


@torch.no_grad()
def last_token_logits(model: GPTModel, hidden: torch.Tensor, layout: BlockLayout, vocab_size: int) -> torch.Tensor:
    """Logits [B, V] (float32 or wider) after the block's last token, equal on every rank of TP and CP."""
    tp, cp = model.pg_collection.tp, model.pg_collection.cp
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tp)
    row = (layout.length - 1) % layout.rows
    logits = hidden[row] @ output_weight(model).t()
    logits = gather_from_tensor_model_parallel_region(logits, group=tp)[:, :vocab_size]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()
    if cp.size() > 1:
        dist.broadcast(logits, group_src=layout.owner(layout.length - 1), group=cp)
    return logits
