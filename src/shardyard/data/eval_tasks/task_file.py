"""Read an evaluation task: a YAML file in the format of lm-evaluation-harness 0.4.

A file is data: templates run in Jinja's sandbox, and ``!function`` is rejected. A key whose effect
is not implemented is an error, so that a score always means what the file says.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from shardyard.data.eval_tasks.task import EvalTask, OutputType, Shots, Template, TextFilter
from shardyard.errors import RequestError, StorageError
from shardyard.io.digests import digest_file
from shardyard.io.files import read_plain
from shardyard.io.yaml import read_yaml

METRICS: dict[OutputType, tuple[str, ...]] = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes"),
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",),
}
"""Type of a task -> its metrics."""
_NO_DEFAULT = ("acc_bytes",)
AGGREGATIONS = {
    "perplexity": "perplexity",
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
    "bits_per_byte": "bits_per_byte",
}
"""Metric -> how it is made of the scores of examples; others are means."""
FILTERS = {
    "regex": ("regex_pattern", "group_select", "fallback"),
    "remove_whitespace": (),
    "lowercase": (),
    "uppercase": (),
    "take_first": (),
}
"""Filter of generated text -> its options."""
_MATCH_OPTIONS = ("regexes_to_ignore", "ignore_case", "ignore_punctuation", "ignore_numbers")
_BUILDERS = ("json", "csv", "parquet", "arrow")

_USED = {
    "task", "dataset_path", "dataset_kwargs", "training_split", "validation_split", "test_split",
    "fewshot_split", "fewshot_config", "num_fewshot", "output_type", "doc_to_text",
    "doc_to_target", "doc_to_choice", "description", "target_delimiter", "fewshot_delimiter",
    "metric_list", "generation_kwargs", "filter_list",
}  # fmt: skip
_WITHOUT_EFFECT = {"tag", "task_alias", "metadata", "group_alias"}
"""Keys that change no score."""
_ONLY = {"repeats": 1, "should_decontaminate": False, "unsafe_code": False}
"""Keys that may be there with this value."""
_WHY_NOT = {
    "process_docs": "it names Python code. Write the processed rows into the data file",
    "process_results": "it names Python code. Use the metrics of the output_type",
    "custom_dataset": "it names Python code. Write its rows into a .jsonl file",
    "class": "it names Python code. Describe the task by its templates",
    "use_prompt": "prompts of promptsource are not supported. Write doc_to_text and doc_to_target",
    "group": "groups are not supported. Give each task's file with --task",
    "dataset_name": "datasets of the hub are not downloaded. Save its split as .jsonl or .parquet",
    "doc_to_image": "only text is supported",
    "doc_to_audio": "only text is supported",
    "gen_prefix": "it is not supported. Write the prefix at the end of doc_to_text",
}


def read_task(path: Path) -> EvalTask:
    """Read a task file.

    Raises:
        RequestError: It cannot be read, runs code, or has a key or value that is not supported; all
            of these are named.
    """
    files: list[Path] = []
    content = _merged(path, files)
    reader = _Reader(content, str(path))
    task = reader.task(path, "".join(digest_file(each).sha256 for each in files))
    if reader.problems:
        lines = "".join(f"\n  {problem}" for problem in reader.problems)
        raise RequestError(f"{path} cannot be evaluated:{lines}")
    assert task is not None
    return task


_MOST_BYTES, _DEEPEST = 2**20, 8


def _merged(path: Path, files: list[Path]) -> dict[str, Any]:
    """Content of a file over that of the files it includes."""
    try:
        text = read_plain(path, limit_bytes=_MOST_BYTES).decode()
    except FileNotFoundError as error:
        raise RequestError(f"{path} does not exist. Give a task's YAML file.") from error
    except (StorageError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not a task file: {error}") from error
    _reject_functions(text, path)
    content = read_yaml(text, source=str(path))
    if not isinstance(content, dict):
        raise RequestError(f"{path} is no task: it must be a mapping with output_type, ...")
    files.append(path)
    included = content.pop("include", None)
    if included is None:
        return content
    if not isinstance(included, str) or len(files) > _DEEPEST:
        raise RequestError(f"{path}: include={included!r} must be one file, without a cycle.")
    return {**_merged(path.parent / included, files), **content}


def _reject_functions(text: str, path: Path) -> None:
    try:
        tokens = list(yaml.scan(text, yaml.SafeLoader))
    except yaml.YAMLError:
        return  # read_yaml reports it with its place
    for token in tokens:
        if isinstance(token, yaml.TagToken) and token.value[1] == "function":
            raise RequestError(
                f"{path}, line {token.start_mark.line + 1}: !function names Python code of the "
                "task's folder, and `evaluate` runs no code of a task. Use a Jinja template, or "
                "write the processed rows into the data file."
            )


class _Reader:
    """Takes fields of a file and collects what is wrong with them."""

    def __init__(self, content: Mapping[str, Any], path: str) -> None:
        self.content, self.path = content, path
        self.problems: list[str] = []

    def task(self, path: Path, sha256: str) -> EvalTask | None:
        self._check_keys()
        kind = self.content.get("output_type", "generate_until")
        if kind not in METRICS:
            known = ", ".join(get_args(OutputType))
            self.problems.append(f"output_type={kind!r} is not one of {known}")
            return None
        splits = {
            name: self._text(f"{name}_split", None) for name in ("training", "validation", "test")
        }
        data_files = self._data_files()
        shots = self._shots()
        used = (*splits.values(), None if shots.samples else shots.split)
        for split in used:
            if split is not None and data_files and split not in data_files:
                known = ", ".join(data_files)
                self.problems.append(f"split {split!r} is not in data_files, which has {known}")
        if splits["validation"] is None and splits["test"] is None:
            self.problems.append("test_split or validation_split is missing: it names the split")
        metrics, match = self._metrics(kind)
        until, max_tokens = self._generation(kind)
        fewshot_delimiter = self._text("fewshot_delimiter", "\n\n")
        choices = self._template("doc_to_choice", needed=kind == "multiple_choice")
        return EvalTask(
            name=str(self.content.get("task") or path.stem),
            path=str(path),
            sha256=sha256,
            output_type=kind,
            data_files=data_files,
            folder=path.parent,
            training_split=splits["training"],
            validation_split=splits["validation"],
            test_split=splits["test"],
            doc_to_text=self._template("doc_to_text", needed=kind != "loglikelihood_rolling"),
            doc_to_target=self._template("doc_to_target", needed=True),
            doc_to_choice=choices or None,
            description=self._text("description", "") or "",
            target_delimiter=self._text("target_delimiter", " ") or "",
            fewshot_delimiter=fewshot_delimiter or "",
            shots=shots,
            metrics=metrics,
            match=match,
            until=until if until is not None else (fewshot_delimiter or "",),
            max_tokens=max_tokens,
            filters=self._filters(kind),
        )

    def _check_keys(self) -> None:
        for key, value in self.content.items():
            if key in _USED or key in _WITHOUT_EFFECT or value is None:
                continue
            if key in _ONLY:
                if value != _ONLY[key]:
                    self.problems.append(f"{key}={value!r}: only {_ONLY[key]} is supported")
            elif key in _WHY_NOT:
                self.problems.append(f"{key}: {_WHY_NOT[key]}")
            else:
                near = difflib.get_close_matches(key, _USED, n=1)
                hint = f". Did you mean {near[0]}?" if near else ""
                self.problems.append(f"{key}: no such key of a task{hint}")

    def _text(self, key: str, default: str | None) -> str | None:
        value = self.content.get(key, default)
        if value is not None and not isinstance(value, str):
            self.problems.append(f"{key}={value!r} must be a text")
            return default
        return value

    def _template(self, key: str, *, needed: bool) -> Template:
        value = self.content.get(key)
        if value is None:
            if needed:
                self.problems.append(f"{key} is missing: give a template or the name of a column")
            return ""
        if not isinstance(value, str | int | list | dict):
            self.problems.append(f"{key}={value!r} must be a template or the name of a column")
            return ""
        return value

    def _data_files(self) -> dict[str, tuple[str, ...]]:
        builder = self.content.get("dataset_path")
        if builder not in _BUILDERS:
            self.problems.append(
                f"dataset_path={builder!r}: only local files are read. Save the dataset's splits, "
                "then set dataset_path: json (or csv, parquet, arrow) and "
                "dataset_kwargs: {data_files: {test: FILE}}"
            )
            return {}
        options = self.content.get("dataset_kwargs")
        files = options.get("data_files") if isinstance(options, dict) else None
        others = sorted(options.keys() - {"data_files"}) if isinstance(options, dict) else []
        if others:
            self.problems.append(f"dataset_kwargs: {', '.join(others)} not supported")
        named = files if isinstance(files, dict) else {"train": files}
        found: dict[str, tuple[str, ...]] = {}
        for split, paths in named.items():
            listed = [paths] if isinstance(paths, str) else paths
            if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
                self.problems.append(
                    f"dataset_kwargs.data_files={files!r} must be a file, a list of files, or a "
                    "mapping from split to files"
                )
                return {}
            found[split] = tuple(listed)
        return found

    def _shots(self) -> Shots:
        number = self.content.get("num_fewshot") or 0
        config = self.content.get("fewshot_config") or {}
        if not isinstance(number, int) or number < 0:
            self.problems.append(f"num_fewshot={number!r} must be a whole number")
            number = 0
        if not isinstance(config, dict):
            self.problems.append(f"fewshot_config={config!r} must be a mapping")
            config = {}
        others = sorted(config.keys() - {"sampler", "split", "samples"})
        if others:
            self.problems.append(f"fewshot_config: {', '.join(others)} not supported")
        sampler = config.get("sampler", "default")
        if sampler not in ("default", "first_n"):
            self.problems.append(f"fewshot_config.sampler={sampler!r} is not default or first_n")
        split = config.get("split", self.content.get("fewshot_split"))
        samples = config.get("samples") or []
        if not isinstance(samples, list) or not all(isinstance(each, dict) for each in samples):
            self.problems.append("fewshot_config.samples must be a list of rows")
            samples = []
        return Shots(
            number=number,
            sampler=sampler,
            split=split,
            samples=() if split is not None else tuple(samples),
        )

    def _metrics(self, kind: OutputType) -> tuple[tuple[str, ...], dict[str, Any]]:
        listed = self.content.get("metric_list")
        if listed is None:
            return tuple(each for each in METRICS[kind] if each not in _NO_DEFAULT), {}
        names: list[str] = []
        match: dict[str, Any] = {}
        for entry in listed if isinstance(listed, list) else [listed]:
            name = entry.get("metric") if isinstance(entry, dict) else entry
            if name not in METRICS[kind]:
                known = ", ".join(METRICS[kind])
                self.problems.append(f"metric {name!r}: {kind} has {known}")
                continue
            names.append(name)
            options = dict(entry) if isinstance(entry, dict) else {"metric": entry}
            aggregation = options.get("aggregation", AGGREGATIONS.get(name, "mean"))
            if aggregation != AGGREGATIONS.get(name, "mean"):
                self.problems.append(f"metric {name}: aggregation {aggregation!r} not supported")
            allowed = {"metric", "aggregation", "higher_is_better", "hf_evaluate"}
            if name == "exact_match":
                match = {key: options[key] for key in _MATCH_OPTIONS if key in options}
                allowed |= set(_MATCH_OPTIONS)
            others = sorted(options.keys() - allowed)
            if others:
                self.problems.append(f"metric {name}: {', '.join(others)} not supported")
        return tuple(names), match

    def _generation(self, kind: OutputType) -> tuple[tuple[str, ...] | None, int]:
        options = dict(self.content.get("generation_kwargs") or {})
        if options and kind != "generate_until":
            self.problems.append(f"generation_kwargs has no effect on output_type={kind}")
        until = options.pop("until", None)
        if isinstance(until, str):
            until = [until]
        if until is not None and not (
            isinstance(until, list) and all(isinstance(each, str) for each in until)
        ):
            self.problems.append(f"generation_kwargs.until={until!r} must be texts")
            until = None
        aliases = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        given = [options.pop(alias) for alias in aliases if alias in options]
        max_tokens = given[0] if given else 256
        if not isinstance(max_tokens, int) or max_tokens < 1:
            self.problems.append(
                f"generation_kwargs.max_gen_toks={max_tokens!r} must be at least 1"
            )
            max_tokens = 1
        if options.pop("do_sample", False) or float(options.pop("temperature", 0) or 0) > 0:
            self.problems.append(
                "generation_kwargs samples (do_sample, temperature): only greedy decoding is "
                "supported. Set do_sample: false and temperature: 0"
            )
        if options:
            self.problems.append(f"generation_kwargs: {', '.join(sorted(options))} not supported")
        return None if until is None else tuple(until), max_tokens

    def _filters(self, kind: OutputType) -> tuple[TextFilter, ...]:
        listed = self.content.get("filter_list")
        if listed is None:
            return (TextFilter(name="none", steps=()),)
        if kind != "generate_until":
            self.problems.append(f"filter_list has no effect on output_type={kind}")
            return ()
        found: list[TextFilter] = []
        for entry in listed if isinstance(listed, list) else [listed]:
            steps = entry.get("filter") if isinstance(entry, dict) else None
            if not isinstance(steps, list) or "name" not in entry:
                self.problems.append(
                    f"filter_list: {entry!r} needs name, and filter with its steps"
                )
                continue
            for step in steps:
                self._check_step(step)
            found.append(TextFilter(name=str(entry["name"]), steps=tuple(steps)))
        return tuple(found)

    def _check_step(self, step: Any) -> None:
        function = step.get("function") if isinstance(step, dict) else step
        if not isinstance(step, dict) or function not in FILTERS:
            self.problems.append(f"filter {function!r} is not one of {', '.join(FILTERS)}")
            return
        others = sorted(step.keys() - {"function", *FILTERS[function]})
        if others:
            self.problems.append(f"filter {function}: {', '.join(others)} not supported")


QUESTIONS = Path(__file__).parents[2] / "evaluation" / "questions"
"""Folder of the tasks that come with Shardyard."""


def builtin_tasks() -> dict[str, Path]:
    """Return the tasks that come with Shardyard by name."""
    return {path.stem: path for path in sorted(QUESTIONS.glob("*.yaml"))}


def find_tasks(words: Sequence[str]) -> list[EvalTask]:
    """Read the tasks that words name: files, or tasks that come with Shardyard.

    Raises:
        RequestError: One is neither, or cannot be evaluated.
    """
    return [find_task(word, given=f"--task {word}") for word in words]


def find_task(word: str, *, given: str) -> EvalTask:
    """Read the task that a word names: a file, or a task that comes with Shardyard.

    Args:
        given: Option or setting with its value, for an error.

    Raises:
        RequestError: It is neither, or cannot be evaluated.
    """
    known = builtin_tasks()
    if word not in known and not Path(word).exists():
        near = difflib.get_close_matches(word, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise RequestError(
            f"{given}: no such file, and no task that comes with Shardyard "
            f"({', '.join(known)}).{hint} Give a YAML file of lm-evaluation-harness."
        )
    return read_task(known.get(word, Path(word)))
