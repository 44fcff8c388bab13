"""A sample of text from the model in training, to see what the loss does not say."""

import torch
import torch.distributed as dist

from shardyard.data.loader import MicroBatch
from shardyard.models.counter_random import key_of
from shardyard.parallel.data import reshard
from shardyard.tasks.causal_lm import CausalLM

_TEMPERATURE = 0.8


@torch.no_grad()
def generate(
    task: CausalLM, prompt: list[int], *, num_tokens: int, seq_len: int, seed: int,
    device: torch.device,
) -> list[int]:  # fmt: skip
    """Continue ``prompt`` by ``num_tokens`` tokens drawn at temperature 0.8.

    All ranks call it together: with sharded parameters each forward pass is a collective. There
    is no KV cache: a short text is quicker than the code for one would be long.
    """
    task.model.eval()
    draw = torch.Generator().manual_seed(key_of(seed, "generate") % 2**63)
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = tokens[-seq_len:]
        logits_V = task.logits(_batch(window, device))[0, -1].float().cpu()
        probabilities = torch.softmax(logits_V / _TEMPERATURE, dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=draw).to(device)
        dist.broadcast(drawn, src=0)  # the last bit of a logit may differ between ranks
        tokens.append(int(drawn))
    task.model.train()
    reshard(task.model)
    return tokens[len(prompt) :]


def _batch(window: list[int], device: torch.device) -> MicroBatch:
    tokens_BL = torch.tensor([window], device=device)
    return MicroBatch(
        tokens_BL=tokens_BL,
        targets_BL=tokens_BL,
        positions_BL=torch.arange(len(window), device=device)[None],
        samples_B=torch.zeros(1, dtype=torch.int64, device=device),
    )
