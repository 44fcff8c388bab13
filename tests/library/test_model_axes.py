"""A script with two lines of ours on every axis, beside transformers' own model in one process.

Each rank reads samples of its own, as under DistributedDataParallel; the one process reads those of
all ranks.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import shardyard
from shardyard.errors import RequestError
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.heavy

STEPS, SIZE = 3, 61
_SIZES: dict[str, Any] = {
    "vocab_size": SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED)),
    "tied llama": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GROUPED, head_dim=8)),
    "olmo2": lambda: Olmo2ForCausalLM(
        Olmo2Config(**_GROUPED, eos_token_id=None, pad_token_id=None)
    ),
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(
            **_GROUPED,
            embedding_multiplier=6.0,
            attention_multiplier=0.2,
            residual_multiplier=0.5,
            logits_scaling=3.0,
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_GROUPED,
            head_dim=8,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            pad_token_id=None,
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_GROUPED, num_local_experts=4)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=SIZE,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    ),
    "bert": lambda: BertForMaskedLM(BertConfig(**_SIZES, **_NO_DROPOUT)),
}


def built(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With an eps at which rounding of the smallest gradients is no step of its own."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def wrapped(name: str, words: str) -> tuple[Any, Any]:
    os.environ["SHARDYARD_PARALLEL"] = words
    model = built(name)
    optimizer = adamw(model)
    return shardyard.wrap(model, optimizer)


def batch_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(0, SIZE, (2, 1), generator=generator)
    tokens = (first + torch.arange(16)) % SIZE  # there is something to learn
    return {"input_ids": tokens, "labels": tokens.clone()}


def of_all_ranks(step: int) -> dict[str, torch.Tensor]:
    batches = [batch_of(step, rank) for rank in range(dist.get_world_size())]
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def steps_of(
    model: Any, optimizer: Any, read: Callable[[int], dict[str, torch.Tensor]], passes: Any
) -> list[tuple[float, float]]:
    """Loss and norm of each step of a loop as scripts have it, of two micro-batches."""
    found = []
    for step in range(STEPS):
        total = torch.zeros(())
        for micro in range(2):
            total += passes(model, read(10 * step + micro)) / 2
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        found.append((float(total), float(norm)))
    return found


def backward(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def mean(losses: list[tuple[float, float]]) -> list[tuple[float, float]]:
    total = torch.tensor(losses)
    dist.all_reduce(total)
    return [(float(loss), float(norm)) for loss, norm in total / dist.get_world_size()]


def trained(cases: list[tuple[str, str]], folder: str) -> list[Any]:
    """Of each case: steps in one process, steps on all ranks, largest difference of a weight."""
    found = []
    for name, words in cases:
        alone = built(name)
        optimizer = adamw(alone)
        wanted = steps_of(alone, optimizer, of_all_ranks, backward)
        model, optimizer = wrapped(name, words)
        passes = shardyard.forward_backward if "pp" in words else backward
        steps = steps_of(model, optimizer, lambda step: batch_of(step, dist.get_rank()), passes)
        to = f"{folder}/{name}-{words}"
        shardyard.export(model, to)
        there = type(alone).from_pretrained(to).state_dict()
        here = alone.state_dict()
        assert there.keys() == here.keys()
        difference = max(float((there[key] - here[key]).abs().max()) for key in here)
        found.append(((name, words), wanted, mean(steps), difference))
    return found


ON_2 = [
    ("llama", "tp=2"), ("llama", "cp=2"), ("tied llama", "pp=2"), ("mixtral", "ep=2"),
    ("gpt2", "tp=2"), ("bert", "cp=2"), ("olmo2", "tp=2"),
    ("granite", "tp=2"),
]  # fmt: skip
ON_4 = [
    ("qwen3", "tp=2,dp_shard=2"), ("mixtral", "pp=2,ep=2,dp_shard=2"),
    ("bert", "tp=2,dp_replicate=2"),
]  # fmt: skip
MORE_ON_2 = [
    ("llama", "pp=2"), ("qwen3", "tp=2"), ("qwen3", "cp=2"), ("mixtral", "tp=2"),
    ("mixtral", "cp=2"), ("gpt2", "cp=2"), ("gpt2", "pp=2"), ("bert", "tp=2"),
    ("olmo2", "dp_shard=2,zero=3"), ("granite", "pp=2"), ("granite", "dp_shard=2,zero=3"),
    ("gemma3", "tp=2"), ("gemma3", "pp=2"), ("gemma3", "cp=2"), ("gemma3", "dp_shard=2,zero=3"),
]  # fmt: skip
MORE_ON_4 = [
    ("llama", "tp=2,dp_shard=2"), ("gpt2", "tp=2,cp=2"), ("gpt2", "tp=2,dp_shard=2"),
    ("bert", "tp=2,dp_shard=2,zero=2"), ("mixtral", "tp=2,ep=2,dp_shard=2"),
    ("mixtral", "cp=2,ep=4,dp_shard=2"), ("llama", "pp=2,tp=2"),
]  # fmt: skip
_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, ON_2, id="2 ranks"),
        pytest.param(4, ON_4, id="4 ranks"),
        pytest.param(2, MORE_ON_2, id="2 ranks, more", marks=_SLOW),
        pytest.param(4, MORE_ON_4, id="4 ranks, more", marks=_SLOW),
    ],
)
def test_a_script_trains_on_every_axis_as_one_process_does(
    ranks: int, cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    for case, wanted, steps, difference in run_on_ranks(trained, ranks, cases, str(tmp_path))[0]:
        assert wanted[-1][0] < wanted[0][0] - 0.1, "it learns"
        for (loss, norm), (wanted_loss, wanted_norm) in zip(steps, wanted, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-6), case
            assert norm == pytest.approx(wanted_norm, rel=2e-6), case
        assert difference < 2e-5, case


def asked_later(name: str, words: str, what: str) -> tuple[Any, Any, int]:
    """Steps in one process and on all ranks, and how often a norm was computed.

    Args:
        what: Asked of the model after wrap(): checkpointing or compile.
    """
    alone = built(name)
    wanted = steps_of(alone, adamw(alone), of_all_ranks, backward)
    model, optimizer = wrapped(name, words)
    model.train()
    calls = []
    called: Any = model
    if what == "checkpointing":
        model.gradient_checkpointing_enable()
        model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    else:
        called = torch.compile(model, backend="eager")

    def passes(_: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return backward(called, batch)

    steps = steps_of(model, optimizer, lambda step: batch_of(step, dist.get_rank()), passes)
    return wanted, mean(steps), len(calls)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize(
    ("name", "words", "what", "calls"),
    [
        ("llama", "tp=2", "checkpointing", 4 * STEPS),
        pytest.param("llama", "cp=2", "checkpointing", 4 * STEPS, marks=_SLOW),
        pytest.param("mixtral", "ep=2", "checkpointing", 4 * STEPS, marks=_SLOW),
        pytest.param("llama", "tp=2", "compile", 0, marks=_SLOW),
        pytest.param("bert", "cp=2", "compile", 0, marks=_SLOW),
        pytest.param("mixtral", "ep=2", "compile", 0, marks=_SLOW),
    ],
)
def test_checkpointing_and_compile_may_be_asked_for_after_wrap(
    name: str, words: str, what: str, calls: int
) -> None:
    for wanted, steps, found in run_on_ranks(asked_later, 2, name, words, what):
        for (loss, norm), (wanted_loss, wanted_norm) in zip(steps, wanted, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-6)
            assert norm == pytest.approx(wanted_norm, rel=2e-6)
        assert found == calls


def padded(rank: int, *, left: bool) -> dict[str, torch.Tensor]:
    """Unlike other ranks' in both sizes."""
    generator = torch.Generator().manual_seed(rank)
    length = 11 + 3 * rank
    tokens = torch.randint(1, SIZE, (2 + rank, length), generator=generator)
    missing = 1 + torch.arange(len(tokens))[:, None]
    place = torch.arange(length)
    is_text = place >= missing if left else place < length - missing
    return {"input_ids": tokens, "attention_mask": is_text.long()}


def used(name: str, words: str) -> dict[str, float]:
    """Largest differences from the model in one process of what a script does beside the loop."""
    model, _ = wrapped(name, words)
    alone = built(name)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for left in (False, True) if name == "llama" else (False,):
        batch = padded(rank, left=left)
        with torch.no_grad():
            here, there = model(**batch).logits, alone(**batch).logits
        assert here.shape == there.shape
        apart = (here - there).abs().amax(dim=-1)
        found[f"logits, padding on the {'left' if left else 'right'}"] = float(
            (apart * batch["attention_mask"]).max()
        )
    if name in ("llama", "gpt2"):  # two documents in a sample
        packed = batch_of(2, rank)
        packed["position_ids"] = (torch.arange(16) % 8).expand(2, -1)
        halves = [{"input_ids": half} for half in packed["input_ids"].chunk(2, dim=1)]
        with torch.no_grad():
            here = model(**packed).logits
            there = torch.cat([alone(**half).logits for half in halves], dim=1)
        found["packed samples"] = float((here - there).abs().max())
    batch = batch_of(0, rank)
    labels = batch.pop("labels").flatten()
    for each in (model, alone):
        loss: Any = F.cross_entropy(each(**batch).logits.flatten(0, 1), labels)
        loss.backward()
    of_one = {name: param.grad for name, param in alone.named_parameters()}
    for key, param in model.named_parameters():
        wanted = of_one.get(key)
        is_transposed = name == "gpt2" and param.dim() > 1  # transformers' Conv1D
        if wanted is not None and wanted.shape == param.shape and not is_transposed:
            dist.all_reduce(wanted)
            apart = (param.grad.full_tensor() - wanted / ranks).abs().max()
            found["gradient of a loss of one's own"] = max(
                found.get("gradient of a loss of one's own", 0.0), float(apart)
            )
    if name != "bert":
        settings = {"max_new_tokens": 4 + rank, "do_sample": False, "pad_token_id": 0}
        prompt = padded(rank, left=True)
        here, there = model.generate(**prompt, **settings), alone.generate(**prompt, **settings)
        found["generate"] = 0.0 if torch.equal(here, there) else 1.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [float(backward(each, batch_of(1, 0))) for each in (model, alone)]
    found["autocast / 1000"] = abs(losses[0] - losses[1]) / 1000
    return found


@pytest.mark.parametrize(
    ("name", "words"), [("llama", "tp=2"), ("gpt2", "cp=2"), ("mixtral", "ep=2"), ("bert", "tp=2")]
)
def test_logits_texts_and_padding_are_those_of_one_process(name: str, words: str) -> None:
    for found in run_on_ranks(used, 2, name, words):
        assert max(found.values()) < 5e-6, found


def resumed(folder: str, name: str, words: str) -> bool:
    model, optimizer = wrapped(name, words)
    for step in shardyard.steps(2, folder, model, optimizer, every=1):
        shardyard.forward_backward(model, batch_of(step, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
    again, optimizer = wrapped(name, words)
    left = list(shardyard.steps(2, folder, again, optimizer, every=1))
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    return not left and all(torch.equal(one.full_tensor(), two.full_tensor()) for one, two in pairs)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mixtral", "ep=2"),
        pytest.param("llama", "tp=2", marks=_SLOW),
        pytest.param("gpt2", "cp=2", marks=_SLOW),
        pytest.param("llama", "pp=2", marks=_SLOW),
    ],
)
def test_steps_go_on_from_a_checkpoint(name: str, words: str, tmp_path: Path) -> None:
    assert all(run_on_ranks(resumed, 2, str(tmp_path), name, words))


def refused() -> list[str]:
    """What wrong uses are told, on rank 0."""
    model, _ = wrapped("llama", "tp=2")
    batch = batch_of(0, dist.get_rank())
    with_cp, _ = wrapped("gpt2", "cp=2")
    piped, _ = wrapped("llama", "pp=2")
    shardyard.forward_backward(piped, batch)
    longer = {key: torch.cat([value, value], dim=1) for key, value in batch.items()}
    left = padded(dist.get_rank(), left=True)
    mixture, _ = wrapped("mixtral", "ep=2")
    backward(mixture, batch)
    some = list(mixture.parameters())[:3]
    os.environ["SHARDYARD_PARALLEL"] = "tp=2"
    plain = built("llama")
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    uses: list[Callable[[], Any]] = [
        lambda: model(**batch, output_hidden_states=True),
        lambda: model(**batch).logits,
        lambda: model(),
        lambda: model(input_ids=batch["input_ids"], labels=batch["labels"][:, 1:]),
        lambda: model.generate(batch["input_ids"], use_cache=True),
        lambda: model.save_pretrained("somewhere"),
        lambda: with_cp(**left),
        lambda: piped(**batch),
        lambda: shardyard.forward_backward(piped, longer),
        lambda: shardyard.forward_backward(piped, {"input_ids": batch["input_ids"]}),
        lambda: piped.generate(batch["input_ids"], max_new_tokens=2),
        lambda: torch.nn.utils.clip_grad_norm_(some, 1.0),
        lambda: shardyard.wrap(plain, sgd, gradients="exact"),
        lambda: shardyard.wrap(plain, sgd, blocks="model.layers"),
        lambda: shardyard.forward_backward(plain, batch),
    ]  # fmt: skip
    told = []
    for use in uses:
        with pytest.raises(RequestError) as raised:
            use()
        told.append(str(raised.value))
    return told


def test_what_an_axis_cannot_keep_is_named_with_the_line_to_write() -> None:
    words = [
        "called with output_hidden_states=True", "Leave labels out to get logits",
        "called with no input_ids", "All must be (samples, tokens)", "keep no keys and values",
        "shardyard.export(model, folder)", "Pad on the right", "shardyard.forward_backward(model",
        "give the largest batch first", "a loss needs labels", "logits are only on the last",
        "Clip all of them by norm 2", 'Leave gradients="mean"', "Leave blocks out",
        "is in no mesh yet",
    ]  # fmt: skip
    for told in run_on_ranks(refused, 2):
        for each, wanted in zip(told, words, strict=True):
            assert wanted in each


def _of_bf16() -> nn.Module:
    model: nn.Module = built("llama").to(torch.bfloat16)
    return model


def _with_router_loss() -> Any:
    model: Any = built("mixtral")
    model.config.output_router_logits = True
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_of_bf16, r"weights in torch.bfloat16.*Call model.float\(\)"),
        (_with_router_loss, r"output_router_logits=True.*Set it to False"),
        (lambda: nn.Linear(2, 2), r"and Linear is not one of them.*plan=.*experts="),
    ],
)
def test_a_model_that_no_axis_can_split_is_named_at_once(
    build: Callable[[], nn.Module], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDYARD_PARALLEL", "tp=2")
    with pytest.raises(RequestError, match=words):
        shardyard.wrap(build())
