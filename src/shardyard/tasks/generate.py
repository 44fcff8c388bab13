"""A sample of text from the model in training, to see what the loss does not say."""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.data.micro_batch import MicroBatch
from shardyard.models.counter_random import key_of
from shardyard.parallel.data import reshard
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.token_losses import LanguageModel


@torch.no_grad()
def generate(
    computation: LanguageModel, prompt: list[int], *, num_tokens: int, seq_len: int,
    vocab_size: int, seed: int, temperature: float, mesh: Mesh, device: torch.device,
    ends: Collection[int] = (), known: Collection[int] | None = None,
) -> list[int]:  # fmt: skip
    """Continue ``prompt`` by ``num_tokens`` tokens, or to one of ``ends``.

    Each is the likeliest, or at a temperature above 0 drawn by its probability.

    Args:
        known: Ids that the tokenizer has, which alone are drawn: a head may have more rows.

    All ranks call it together: each forward pass is a collective. There is no KV cache: a short
    text is quicker than the code for one would be long.
    """
    computation.model.eval()
    draw = torch.Generator().manual_seed(key_of(seed, "generate") % 2**63)
    tokens = list(prompt)
    # where ranks share a sample, its length is that of training; what follows is not attended to
    length = None if mesh.layout.world_size == mesh.layout.data_ranks else seq_len
    for _ in range(num_tokens):
        window = tokens[-seq_len:]
        batch = _batch(window, length or len(window), device)
        logits_V = _logits(computation, batch, len(window) - 1, mesh=mesh, vocab_size=vocab_size)
        tokens.append(_next_token(possible(logits_V.cpu(), known), temperature, draw))
        if tokens[-1] in ends:  # all ranks draw the same
            break
    computation.model.train()
    reshard(computation.roots)
    return tokens[len(prompt) :]


def possible(logits_V: Tensor, known: Collection[int] | None) -> Tensor:
    """Logits with those of ids that the tokenizer does not have at minus infinity."""
    if known is None:
        return logits_V
    ids = torch.tensor(sorted(known))
    return torch.full_like(logits_V, -torch.inf).index_copy(0, ids, logits_V[ids])


def _next_token(logits_V: Tensor, temperature: float, draw: torch.Generator) -> int:
    if not temperature:
        return int(logits_V.argmax())
    probabilities_V = torch.softmax(logits_V / temperature, dim=-1)
    return int(torch.multinomial(probabilities_V, 1, generator=draw))


def _logits(
    computation: LanguageModel, batch: MicroBatch, index: int, *, mesh: Mesh, vocab_size: int
) -> Tensor:
    """Logits (V) of the one token at ``index``, the same to the last bit on every rank."""
    logits_BlV = computation.output(batch)
    row = _row(computation, index)
    whole_V = torch.zeros(vocab_size, device=batch.samples_B.device)
    if mesh.data_rank == 0 and row is not None and logits_BlV is not None:
        first = computation.token_losses.first
        whole_V[first : first + logits_BlV.shape[-1]] = logits_BlV[0, row].float()
    dist.all_reduce(whole_V)
    return whole_V


def _row(computation: LanguageModel, index: int) -> int | None:
    """Where this rank holds a token of a sample, if it does."""
    if computation.tokens_l is None:
        return index
    held: list[int] = computation.tokens_l.tolist()
    return held.index(index) if index in held else None


def _batch(window: list[int], length: int, device: torch.device) -> MicroBatch:
    tokens_BL = torch.zeros(1, length, dtype=torch.int64, device=device)
    tokens_BL[0, : len(window)] = torch.tensor(window, device=device)
    positions_BL = torch.arange(length, device=device)[None]
    return MicroBatch(
        fields={"tokens": tokens_BL, "targets": tokens_BL, "positions": positions_BL},
        samples_B=torch.zeros(1, dtype=torch.int64, device=device),
        work=len(window),
    )
