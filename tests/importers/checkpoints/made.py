"""Small models, and their checkpoints as torch writes them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

TOKENS = torch.arange(16).view(1, 16)


def model(*, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=28, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _stepped(sharded: Any) -> torch.optim.Optimizer:
    """An optimizer with states, which has moved nothing."""
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in sharded.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def save_all(folder: Path) -> None:
    """On each rank: FSDP1's three kinds of state dicts, and FSDP2's."""
    rank = dist.get_rank()
    first = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = _stepped(first)
    fsdp = FullyShardedDataParallel
    fsdp.set_state_dict_type(
        first, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
    )
    whole = first.state_dict()
    if rank == 0:
        torch.save(whole, folder / "pytorch_model_fsdp.bin")
        torch.save({"model": whole, "step": 7}, folder / "full.pt")
    fsdp.set_state_dict_type(
        first, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(),
    )  # fmt: skip
    states = {"model": first.state_dict(), "optimizer": fsdp.optim_state_dict(first, optimizer)}
    save({**states, "step": 7}, checkpoint_id=folder / "sharded")
    fsdp.set_state_dict_type(first, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig())
    own = first.state_dict()
    if rank == 0:
        torch.save(own, folder / "local.pt")

    second = model()
    for block in second.model.layers:
        fully_shard(block)
    fully_shard(second)
    weights, states_of_optimizer = get_state_dict(second, _stepped(second))
    content = {"model": weights, "optimizer": states_of_optimizer, "step": torch.tensor(7)}
    save(content, checkpoint_id=folder / "fsdp2")
