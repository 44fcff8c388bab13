"""Scores of `shardyard evaluate` and of lm-evaluation-harness, on the same models and tasks.

Two tiny models that read 96 tokens, with and without a first token, score the tasks of
``tests/evaluation/tasks``. The tests compare with the harness's numbers in the result file.

    pip install lm_eval==0.4.13
    python -m benchmarks.lm_eval_scores
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from benchmarks.record import write_result
from shardyard.control.evaluate import evaluate_model

TASKS = Path(__file__).parents[1] / "tests" / "evaluation" / "tasks"
MODELS = {"plain": False, "first_token": True}
"""Name -> whether its tokenizer begins each text with a token."""
END, BEGIN = "<|end|>", "<|begin|>"
_MERGES = "h e|Ġ t|Ġt he|i n|e r|Ġ a|n d|o n|Ġ w|Ġ s|r e|Ġ b|a s|in g|Ġa nd|Ġw as|o r|Ġ i|e n|e s"
_HIDDEN, _INNER, _LAYERS, _HEADS = 32, 64, 2, 4
_SCALE = 0.15
"""Deviation of weights: large enough that choices differ."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Score by both; 1 if a number differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the result file")
    asked = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, begins in MODELS.items():
            model = write_model(Path(folder) / name, begins=begins)
            theirs, ours = harness_scores(model), our_scores(model)
            assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
            found[name] = {"harness": theirs, "shardyard": ours}
            for key, value in theirs.items():
                difference = abs(value - ours[key]) / max(1.0, abs(value))
                print(f"{name} {key}: {value:.9g} {ours[key]:.9g} {difference:.1g}")
                largest = max(largest, difference if "perplexity_stderr" not in key else 0.0)
    content = {"lm_eval": version("lm_eval"), "largest_difference": largest, "models": found}
    write_result("lm-eval-scores", content, asked.out)
    return int(largest > 1e-6)


def task_files() -> list[Path]:
    """The tasks that both score."""
    return sorted(TASKS.glob("*.yaml"))


def our_scores(folder: Path, *, processes: int = 1) -> dict[str, float]:
    """Scores by "task metric filter"; standard errors by "task metric_stderr filter"."""
    result = evaluate_model(folder, tasks=task_files(), processes=processes)
    return scores_of(result)


def scores_of(result: dict[str, Any]) -> dict[str, float]:
    """Scores in a result of ``evaluate_model``."""
    scores = {}
    for each in result["results"]:
        for row in each["metrics"]:
            scores[f"{each['name']} {row['metric']} {row['filter']}"] = row["value"]
            if row["stderr"] is not None:
                scores[f"{each['name']} {row['metric']}_stderr {row['filter']}"] = row["stderr"]
    return scores


def harness_scores(folder: Path) -> dict[str, float]:
    """The same by the harness, whose data files are found from the current folder."""
    import lm_eval  # only where it is installed
    from lm_eval.tasks import TaskManager

    here = Path.cwd()
    os.chdir(TASKS)
    try:
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=[each.stem for each in task_files()],
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            device="cpu",
            batch_size=1,
            bootstrap_iters=10_000,
        )
    finally:
        os.chdir(here)
    scores = {}
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, comma, name = key.partition(",")
            if comma and isinstance(value, float | int):
                scores[f"{task} {metric} {name}"] = float(value)
    return scores


def write_model(folder: Path, *, begins: bool, seed: int = 0) -> Path:
    """Write a tiny Llama with its tokenizer; the same arguments give the same files.

    Args:
        begins: Whether its tokenizer begins each text with a token.
    """
    folder.mkdir(parents=True)
    vocabulary = _write_tokenizer(folder, begins=begins)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary,
        "hidden_size": _HIDDEN, "intermediate_size": _INNER, "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS,
        "max_position_embeddings": 96, "hidden_act": "silu", "tie_word_embeddings": False,
        "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(seed)
    weights = {
        name: (np.ones(size) if len(size) == 1 else draw.normal(0, _SCALE, size)).astype(np.float32)
        for name, size in _sizes(vocabulary).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_tokenizer(folder: Path, *, begins: bool) -> int:
    """Bytes and a few merges; returns the number of tokens."""
    pairs = [each.partition(" ") for each in _MERGES.split("|")]
    merges = [(first, second) for first, _, second in pairs]
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(one + two for one, two in merges)]
    names += [END, BEGIN]
    model = models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, BEGIN])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, names.index(BEGIN))]
        )
        config["bos_token"] = BEGIN
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(names)


def _sizes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, _HIDDEN)}
    for number in range(_LAYERS):
        block = f"model.layers.{number}."
        sizes |= {f"{block}{norm}.weight": (_HIDDEN,)
                  for norm in ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
        sizes |= {f"{block}self_attn.{each}_proj.weight": (_HIDDEN, _HIDDEN) for each in "qkvo"}
        sizes |= {f"{block}mlp.{each}_proj.weight": (_INNER, _HIDDEN) for each in ("gate", "up")}
        sizes |= {f"{block}mlp.down_proj.weight": (_HIDDEN, _INNER)}
    return sizes | {"model.norm.weight": (_HIDDEN,), "lm_head.weight": (vocabulary, _HIDDEN)}


if __name__ == "__main__":
    sys.exit(main())
