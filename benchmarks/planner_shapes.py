"""The model of a table row: what the row says, and what is public about a model of that name.

Sizes in the row come first. What it leaves open is filled, in this order, from
``groundtruth/model_architectures.csv``, from our presets and from ``_PUBLIC`` below, by the
architecture's or the model's name; then by the rules of its kind (GPT: an MLP of four times the
hidden size, heads 128 wide). A model whose blocks cannot be told is left out with the reason.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.planner_table import Row
from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of
from shardyard.families.shape import ModelShape

_TABLE = Path(__file__).parent / "groundtruth" / "model_architectures.csv"

_HEAD_WIDTH = 128
"""Of GPTs from 13 B on (Brown et al. 2020, arXiv:2005.14165, table 2.1); used where no row says."""

_GPT2_VOCAB = 50257
"""Tokens of GPT-2's tokenizer, which Megatron's GPTs use."""

_LEAST_NAME = 7
"""Letters of a public name (``llama7b``) before a longer text may be said to contain it."""

_UNGATED = (
    r"\bgpt-?\d|gpt\b|^gpt|bloom|mpt|\bopt\b|falcon|megatron|turing|nemotron|pythia|phi-?[12]"
)
_NOT_MODELLED = (
    (r"deepseek[- ]?v4", "its sparse attention is not modelled"),
    (
        r"mamba|nemotron-?h|nemotron.3.(nano|super|ultra)|jamba|zamba",
        "its state-space blocks are not modelled",
    ),
    (r"maverick", "blocks of two kinds in turn are not modelled"),
    (r"\bt5\b|whisper|vit\b|clip|stable.?diffusion|flux", "it is no decoder and no BERT"),
)
_MOE = r"deepseek|kimi|moonlight|mixtral|moe|\d+x\d+b|-a\d+(\.\d+)?b|dbrx|gpt-?oss|llama-?4|scout"


def _open_shape(model_type: str, sizes: str, *, tied: bool = False, **more: Any) -> ModelShape:
    """``sizes``: vocabulary, hidden, inner, blocks, heads, KV heads; ``more``: other fields."""
    vocab, hidden, inner, blocks, heads, kv_heads = (int(size) for size in sizes.split())
    return ModelShape(
        model_type=model_type, vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=blocks, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=4096, tie_word_embeddings=tied, **more,
    )  # fmt: skip


# Public models that neither our presets nor the table of architectures hold. Sources: config.json
# of the model on Hugging Face; GPT-3: arXiv:2005.14165, table 2.1; Megatron: arXiv:2104.04473,
# table 1; Nemotron: arXiv:2402.16819, table 1, and arXiv:2406.11704, table 1; Nemotron-8B: card
# of nvidia/nemotron-3-8b-base-4k.
_PUBLIC: dict[str, ModelShape] = {
    "Llama-2-34b": _open_shape("llama", "32000 8192 22016 48 64 8"),
    "CodeLlama-34b": _open_shape("llama", "32000 8192 22016 48 64 8"),
    "Llama-7b": _open_shape("llama", "32000 4096 11008 32 32 32"),
    "Llama-13b": _open_shape("llama", "32000 5120 13824 40 40 40"),
    "Llama-30b": _open_shape("llama", "32000 6656 17920 60 52 52"),
    "Llama-65b": _open_shape("llama", "32000 8192 22016 80 64 64"),
    "Llama-3.3-70B": _open_shape("llama", "128256 8192 28672 80 64 8"),
    "Qwen2.5-1.5B": _open_shape("llama", "151936 1536 8960 28 12 2", tied=True),
    "Qwen2.5-3B": _open_shape("llama", "151936 2048 11008 36 16 2", tied=True),
    "Qwen2.5-14B": _open_shape("llama", "152064 5120 13824 48 40 8"),
    "Qwen2.5-72B": _open_shape("llama", "152064 8192 29568 80 64 8"),
    "Qwen3-0.6B": _open_shape("llama", "151936 1024 3072 28 16 8", tied=True, head_dim=128),
    "Qwen3-1.7B": _open_shape("llama", "151936 2048 6144 28 16 8", tied=True, head_dim=128),
    "Qwen3-4B": _open_shape("llama", "151936 2560 9728 36 32 8", tied=True, head_dim=128),
    "Qwen3-14B": _open_shape("llama", "151936 5120 17408 40 40 8", head_dim=128),
    "SmolLM-135M": _open_shape("llama", "49152 576 1536 30 9 3", tied=True),
    "SmolLM-360M": _open_shape("llama", "49152 960 2560 32 15 5", tied=True),
    "SmolLM-1.7B": _open_shape("llama", "49152 2048 8192 24 32 32", tied=True),
    "GPT-OSS-20B": _open_shape(
        "qwen3_moe", "201088 2880 2880 24 64 8",
        head_dim=64, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=2880,
    ),
    "GPT-OSS-120B": _open_shape(
        "qwen3_moe", "201088 2880 2880 36 64 8",
        head_dim=64, num_experts=128, num_experts_per_tok=4, moe_intermediate_size=2880,
    ),
    "Llama-4-Scout": _open_shape(
        "qwen3_moe", "202048 5120 8192 48 40 8",
        head_dim=128, num_experts=16, num_experts_per_tok=1, moe_intermediate_size=8192,
        shared_expert_intermediate_size=8192,
    ),
    "DeepSeek-R1": PRESETS["deepseek-v3"].shape,
    "Moonlight-16B": PRESETS["moonlight-16b-a3b"].shape,
    "GPT3-125M": _open_shape("gpt2", "50257 768 3072 12 12 12", tied=True),
    "GPT3-6.7B": _open_shape("gpt2", "50257 4096 16384 32 32 32", tied=True),
    "GPT3-13B": _open_shape("gpt2", "50257 5120 20480 40 40 40", tied=True),
    "Megatron-145B": _open_shape("gpt2", "51200 12288 49152 80 96 96", tied=True),
    "MT-NLG-530B": _open_shape("gpt2", "50257 20480 81920 105 128 128", tied=True),
    "Nemotron-8B": _open_shape("gpt2", "256000 4096 16384 32 32 32"),
    "Nemotron-4-15B": _open_shape("gpt2", "256000 6144 24576 32 48 8"),
    "Nemotron-4-340B": _open_shape("gpt2", "256000 18432 73728 96 96 8"),
}  # fmt: skip


@dataclass(frozen=True)
class Unknown:
    """Why a row's model cannot be told."""

    reason: str


def shape_of(row: Row, *, tp: int, pp: int, seq_len: int) -> ModelShape | Unknown:
    """The model of a row.

    Args:
        tp: Megatron pads the vocabulary to a multiple of 128 x tp.
        pp: Blocks that only a parameter count gives are a multiple of the stages.
        seq_len: Positions that a GPT learns.
    """
    name = f"{row.raw('model')} {row.raw('arch_key')}"
    for pattern, why in _NOT_MODELLED:
        if re.search(pattern, name, re.IGNORECASE):
            return Unknown(f"model not modelled: {why}")
    known = _known(row.raw("arch_key")) or _known(row.raw("model"))
    if re.search(_MOE, name, re.IGNORECASE) and (known is None or not known.num_experts):
        known = _experts_from_name(name, row)
        if known is None:
            return Unknown("experts not given")
    model_type = known.model_type if known else _kind(row, name)
    shape = _sizes(row, known, model_type=model_type, tp=tp, pp=pp)
    if isinstance(shape, Unknown):
        return shape
    vocab = shape.vocab_size
    if model_type == "gpt2":
        shape = replace(shape, max_position_embeddings=seq_len)
        if "megatron" in row.text("framework"):
            vocab = -(-vocab // (128 * tp)) * 128 * tp
    return replace(shape, vocab_size=vocab)


def _sizes(
    row: Row, known: ModelShape | None, *, model_type: str, tp: int, pp: int
) -> ModelShape | Unknown:
    """The row's sizes over the known model's over the rules of its kind."""
    hidden = row.count("hidden") or (known.hidden_size if known else None)
    ungated = not family_of(model_type).is_gated
    vocab = row.count("vocab") or (known.vocab_size if known else None)
    vocab = vocab or (_GPT2_VOCAB if ungated else None)
    if not hidden or not vocab:
        return Unknown(f"model shape incomplete: {'vocabulary' if hidden else 'hidden size'}")
    layers = row.count("layers") or (known.num_hidden_layers if known else None)
    if not layers and ungated:
        layers = _layers_from_parameters(row, hidden=hidden, vocab=vocab, pp=pp)
    if not layers:
        return Unknown("model shape incomplete: layers")
    heads = row.count("heads") or (known.num_attention_heads if known else None)
    heads = heads or _heads(hidden, tp)
    same_width = known is not None and (known.hidden_size, known.num_attention_heads) == (
        hidden, heads,
    )  # fmt: skip
    head_dim = known.head_dim if known and same_width else None
    if head_dim is None and hidden % heads:
        # as frameworks do that let the width of a head be set apart: rounded up
        head_dim = -(-hidden // heads)
    sizes = {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": row.count("ffn")
        or (known.intermediate_size if known else None)
        or (4 * hidden if ungated else -(-8 * hidden // 3 // 256) * 256),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": row.count("kv_heads")
        or (known.num_key_value_heads if known else heads),
        "head_dim": head_dim,
    }
    if known is not None:
        return replace(known, **sizes)  # type: ignore[arg-type]
    return ModelShape(
        max_position_embeddings=4096,
        tie_word_embeddings=ungated,
        **sizes,  # type: ignore[arg-type]
    )


def _kind(row: Row, name: str) -> str:
    if re.search(r"\bbert|roberta", name, re.IGNORECASE):
        return "bert"
    if re.search(_UNGATED, name, re.IGNORECASE):
        return "gpt2"
    hidden, ffn = row.count("hidden"), row.count("ffn")
    return "gpt2" if hidden and ffn == 4 * hidden else "llama"


def _layers_from_parameters(row: Row, *, hidden: int, vocab: int, pp: int) -> int | None:
    """Blocks of a GPT of so many parameters: 12 h^2 each beside the table; whole stages."""
    billions = row.quantity("params_b")
    printed = re.search(r"(\d+(?:\.\d+)?)\s*B\b", row.raw("model"), re.IGNORECASE)
    if billions is None and printed:
        billions = float(printed[1])
    if billions is None:
        return None
    blocks = (billions * 1e9 - vocab * hidden) / (12 * hidden * hidden)
    return max(1, round(blocks / pp)) * pp


def _heads(hidden: int, tp: int) -> int:
    """Heads about 128 wide that divide the hidden size and are divided by tp."""
    wanted = hidden / _HEAD_WIDTH
    fitting = [n for n in range(1, hidden // 16) if not hidden % n and not n % tp]
    return min(fitting or [1], key=lambda n: abs(n - wanted))


def _experts_from_name(name: str, row: Row) -> ModelShape | None:
    """``8x7B``: 8 experts, each token visits 2, as Mixtral's; the blocks from the row."""
    printed = re.search(r"(\d+)x\d+b", name, re.IGNORECASE)
    base = _known("Mixtral-8x7B-v0.1")
    if not printed or base is None or not (row.count("hidden") and row.count("layers")):
        return None
    return replace(base, model_type="mixtral", num_experts=int(printed[1]), num_experts_per_tok=2)


def _plain(name: str) -> str:
    """``Meta-Llama-3.1-8B-hf`` and ``Llama 3.1 8B`` are one name."""
    name = re.sub(r"[^a-z0-9]", "", name.lower().replace(".", "p"))  # 1.3B is not 13B
    return re.sub(r"^(meta|mistralai|nvidia)?(.*?)(hf|instruct|base|v0p1|chat)*$", r"\2", name)


def _known(name: str) -> ModelShape | None:
    """The public model of this name, or the longest one that the name contains."""
    plain = _plain(name)
    shapes = _by_name()
    if plain in shapes:
        return shapes[plain]
    inside = [known for known in shapes if len(known) >= _LEAST_NAME and known in plain]
    return shapes[max(inside, key=len)] if inside else None


@cache
def _by_name() -> Mapping[str, ModelShape]:
    """Every public shape by its plain name; the first to hold a name wins."""
    shapes = dict[str, ModelShape]()
    with _TABLE.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            shapes.setdefault(_plain(line["model"]), _from_architectures(line))
    named = {name: preset.shape for name, preset in PRESETS.items() if preset.shape.vocab_size}
    for name, shape in (named | _PUBLIC).items():
        shapes.setdefault(_plain(name), shape)
    return shapes


def _from_architectures(line: Mapping[str, str]) -> ModelShape:
    gated = line["mlp"] != "GptNeoxMLP"
    experts = int(line["n_expert"] or 0)
    dense = "llama" if gated else "gpt2"
    # tied tables: config.json of these models (tie_word_embeddings)
    tied = bool(re.match(r"gemma|falcon|llama-3\.2", line["model"], re.IGNORECASE))
    return ModelShape(
        model_type="qwen3_moe" if experts else dense,
        vocab_size=int(line["padded_vocab"]),
        hidden_size=int(line["hidden"]),
        intermediate_size=int(line["ffn"]),
        num_hidden_layers=int(line["layers"]),
        num_attention_heads=int(line["heads"]),
        num_key_value_heads=int(line["kv_groups"]),
        head_dim=int(line["head_size"]),
        max_position_embeddings=int(line["max_seq"]),
        tie_word_embeddings=tied,
        num_experts=experts,
        num_experts_per_tok=int(line["experts_per_token"] or 0),
        moe_intermediate_size=int(line["moe_ffn"]) if line["moe_ffn"] else None,
    )
