"""Documents of a sample do not see each other in models of no family here, or are refused."""

import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardyard.config.rules.custom_module import KEEP_DOCUMENTS_APART, MODULE
from shardyard.errors import RequestError
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_steps
from shardyard.tasks.causal_lm import CausalLM
from shardyard.train.custom_model import (
    check_documents_separated,
    logits_of_separate_documents,
    loss_of_logits,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import make_run, prepare_corpus, train_here

pytestmark = pytest.mark.heavy

GEMMA = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "num_key_value_heads",
)  # fmt: skip
SOME = ("cohere2", "gemma", "opt")
"""With a window, by positions, by a mask."""
SIZES: dict[str, Any] = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "word_embed_proj_dim": 32, "head_dim": 8,
    "kv_channels": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "rotary_dim": 4, "intermediate_size": 48, "n_inner": 48,
    "ffn_dim": 48, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "num_attention_heads": 4,
    "num_heads": 4, "n_head": 4, "attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "n_positions": 64, "sliding_window": 6, "window_size": 6,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
ROWS = [(11, 1, 9, 7), (5, 23)]


def tiny(kind: str) -> Any:
    """A model of a type, with weights so large that every leak shows."""
    made = type(AutoConfig.for_model(kind))
    known = {*made().to_dict(), *inspect.signature(made.__init__).parameters}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if kind.startswith("deepseek"):
        del sizes["head_dim"]
        sizes["num_key_value_heads"] = 4
    if kind == "gpt_neo":
        sizes["attention_types"] = [[["global", "local"], 1]]
    if made().to_dict().get("layer_types"):
        kinds = dict.fromkeys(made().layer_types)  # one block of each
        sizes |= {"layer_types": [*kinds, *kinds][:2]}
    config = made(**sizes, vocab_size=128)
    config.pad_token_id = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in SOME else pytest.mark.slow)
        for kind in KEEP_DOCUMENTS_APART
    ],
)
def test_a_document_has_the_loss_that_transformers_gives_it_alone(kind: str) -> None:
    model = tiny(kind)
    check_documents_separated(model, "data.pack=whole")
    tokens = torch.randint(5, 128, (2, 28), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, dims=1)
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in ROWS])
    batch = {"tokens": tokens, "targets": targets, "positions": positions}
    with torch.no_grad():
        loss, count = loss_of_logits(logits_of_separate_documents(model, batch), batch)
        alone = torch.cat(
            [
                model(input_ids=document[None], use_cache=False).logits[0]
                for row, sizes in zip(tokens, ROWS, strict=True)
                for document in row.split(sizes)
            ]
        )
    wanted = torch.nn.functional.cross_entropy(alone, targets.flatten(), reduction="sum")
    assert int(count) == 56
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("kind", ["mamba", "bloom"])
def test_a_model_that_mixes_documents_is_refused_before_it_trains(kind: str) -> None:
    with pytest.raises(RequestError, match=r"data.pack=whole: documents .* Set data.pack=stream"):
        check_documents_separated(tiny(kind), "data.pack=whole")


@pytest.mark.parametrize(
    "apart", [{"pack": "whole", "too_long": "cut"}, {"attend_across_documents": False}]
)
def test_a_step_has_the_loss_and_norm_of_each_document_alone(
    apart: dict[str, Any], tmp_path: Path
) -> None:
    corpus = prepare_corpus(tmp_path)
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma", **{k: SIZES[k] for k in SIZES if k in GEMMA})
    config.vocab_size, config.max_position_embeddings, config.pad_token_id = 512, 1024, None
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    model = {"preset": None, "path": str(tmp_path / "model"), "module": MODULE, "weights": "load"}
    runs = {
        ranks: make_run(
            tmp_path / str(ranks),
            corpus,
            {
                "run": {"steps": 1},
                "model": model,
                "data": {"seq_len": 1024, **apart},
                "optim": {"name": "sgd", "global_batch": 2, "grad_clip": None},
                "parallel": {"dp_shard": ranks},
                "cluster": {"devices": ranks},
            },
        )
        for ranks in (1, 2)
    }
    batch = CausalLM.open_data(read_resolved(runs[1].resolved(0))).train.micro_batch(range(2), 2)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loss = torch.zeros(())
    for tokens, targets, positions in zip(
        batch["tokens"], batch["targets"], batch["positions"], strict=True
    ):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        assert len(starts) > 2, "several documents in a sample"
        for start, end in pairwise(starts):
            logits = theirs(input_ids=tokens[None, start:end], use_cache=False).logits[0]
            loss = loss + torch.nn.functional.cross_entropy(
                logits, targets[start:end], reduction="sum"
            )
    loss = loss / (batch["targets"] != -100).sum()
    torch.autograd.backward(loss)
    norm = torch.stack([param.grad.norm() for param in theirs.parameters()]).norm()
    for ranks, run_dir in runs.items():
        assert run_on_ranks(train_here, ranks, run_dir) == ["finished"] * ranks
        (line,) = read_steps(run_dir.metrics)
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-6), ranks
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-5), ranks
