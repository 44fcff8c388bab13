"""A causal language model of transformers in one process: log-likelihoods and greedy texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

from shardyard.config.weight_files import ADAPTER, has_weight_files, read_weight_files
from shardyard.data.eval_tasks.token_requests import Continuation, TextGeneration, TokenRequest
from shardyard.errors import JsonFileError, OutOfMemoryError, RequestError
from shardyard.families.config_json import CAUSAL_CLASSES
from shardyard.io.files import read_json_object
from shardyard.parallel.device import available_device, free_memory_bytes, select_device
from shardyard.units import format_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

BATCH_TOKENS = 16384
"""Tokens of a batch, padding included."""
_LOGITS_BYTES = 2**31
"""Size of the logits of a batch, unless one sequence has more."""
_SLICE_LOGITS = 2**27
"""Logits that are in fp32 at once."""

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class ScoredContinuation:
    """Answer to a ``Continuation``."""

    log_likelihood: float
    is_greedy: bool
    """Whether each token is the model's first choice."""


Answer = ScoredContinuation | str


def check_folder(folder: Path, *, verb: str = "evaluate") -> None:
    """Raise unless a folder holds a causal language model with its tokenizer.

    Args:
        verb: Verb of the command line that needs the model.

    Raises:
        RequestError: It does not; says what it holds.
    """
    if (folder / ADAPTER).is_file():
        raise RequestError(
            f"{folder} holds adapters, not a whole model. Merge them: of a run by `shardyard "
            "export RUN --to FOLDER --merged`, else by PEFT's merge_and_unload()."
        )
    try:
        config = read_json_object(folder / "config.json")
    except FileNotFoundError as error:
        raise RequestError(
            f"{folder} is neither a run nor a model: it has no config.json. Give a run, or the "
            "folder of a model as `shardyard export` writes it."
        ) from error
    except JsonFileError as error:
        raise RequestError(f"{error} Fetch the model again.") from error
    names = [str(each) for each in config.get("architectures") or ()]
    if not any(name.endswith(CAUSAL_CLASSES) for name in names):
        raise RequestError(
            f"{folder} is no causal language model: config.json names "
            f"{', '.join(names) or 'no architecture'}. `{verb}` takes models whose class ends "
            f"in {' or '.join(CAUSAL_CLASSES)}."
        )
    if not has_weight_files(folder):
        raise RequestError(
            f"{folder} has no weights in safetensors. Save them so: model.save_pretrained(FOLDER)."
        )


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model's folder.

    Raises:
        RequestError: There is none that can be read.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise RequestError(
            f"{folder} has no tokenizer that transformers reads ({first_line(error)}). Copy "
            "tokenizer.json and tokenizer_config.json of the model there."
        ) from error


def load_config(folder: Path) -> Any:
    """Load the config of a model's folder.

    Raises:
        RequestError: transformers does not know the model.
    """
    try:
        return AutoConfig.from_pretrained(folder, **_LOCAL)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise RequestError(
            f"{folder}: transformers {transformers.__version__} cannot open this model "
            f"({first_line(error)}). Code of a model folder is not run; update transformers if a "
            "newer one knows it."
        ) from error


def check_memory(folder: Path, dtype: str | None, processes: int) -> None:
    """Raise if the weights do not fit into the memory of a process.

    Raises:
        RequestError: They do not; says how much they need.
    """
    stored = read_weight_files(folder).values()
    sizes = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
    size = 0
    for each in stored:
        elements = torch.Size(each.shape).numel()
        size += elements * (DTYPES[dtype].itemsize if dtype else sizes.get(each.dtype, 1))
    device = torch.device(available_device())
    free, wanted = free_memory_bytes(device), size
    if device.type == "cpu":
        wanted = size * processes  # all processes share the memory of the host
    if free is not None and wanted > free:
        fewer = "--processes 1, " if device.type == "cpu" and processes > 1 else ""
        raise RequestError(
            f"{folder}: the weights need {format_bytes(wanted)} and {format_bytes(free)} are "
            f"free on {device.type}. Each process holds the whole model. Use {fewer}--dtype "
            "bfloat16, or a device with more memory."
        )


def load_model(folder: Path, dtype: str | None) -> Any:
    """Load a model into the memory of the host.

    Args:
        dtype: Dtype of the weights in memory; None: as saved.

    Raises:
        RequestError: The folder lacks weights of the model.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=DTYPES[dtype] if dtype else "auto",
        use_safetensors=True,
        output_loading_info=True,
        **_LOCAL,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise RequestError(
            f"{folder} lacks {len(missing)} tensors of the model, the first is {missing[0]}. "
            "Compare config.json with the weights: `shardyard doctor model.path=FOLDER`."
        )
    return model


class ScoringModel:
    """A model on this process's device."""

    def __init__(
        self, folder: Path, tokenizer: Any, *, dtype: str | None, rank: int, batch_tokens: int
    ) -> None:
        """Args:
            dtype: Dtype of the weights in memory; None: as saved.
            rank: Number of the process, and of its device.
            batch_tokens: Most tokens of a batch, padding included.

        Raises:
            RequestError: The folder lacks weights of the model.
        """
        self._tokenizer = tokenizer
        self._device = select_device(available_device(), rank)
        model = load_model(folder, dtype)
        self._model = model.to(self._device).eval()
        self.dtype = str(model.dtype).removeprefix("torch.")
        self._batch_tokens = batch_tokens

    @torch.inference_mode()
    def answer(self, batch: Sequence[TokenRequest]) -> list[Answer]:
        """Answer the requests of one batch, of one kind.

        Raises:
            OutOfMemoryError: The batch does not fit.
        """
        try:
            if isinstance(batch[0], TextGeneration):
                return list(
                    self._generate([each for each in batch if isinstance(each, TextGeneration)])
                )
            return list(self._score([each for each in batch if isinstance(each, Continuation)]))
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"a batch of {len(batch)} sequences does not fit on {self._device} "
                f"({first_line(error)}). Use --batch-tokens {self._batch_tokens // 4}, --context "
                "with fewer tokens, or --dtype bfloat16."
            ) from error

    def _score(self, batch: Sequence[Continuation]) -> Iterator[ScoredContinuation]:
        rows = list(dict.fromkeys(each.inputs for each in batch))
        longest = max(map(len, rows))
        # padding is on the right, where a causal model reads it after all that is scored
        ids_BL = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        logits_BLV = self._model(input_ids=ids_BL.to(self._device), use_cache=False).logits
        row_numbers = {row: number for number, row in enumerate(rows)}
        for each in batch:
            end = len(each.inputs)
            logits_TV = logits_BLV[row_numbers[each.inputs], end - len(each.targets) : end]
            yield _scored(logits_TV, torch.tensor(each.targets, device=self._device))

    def _generate(self, batch: Sequence[TextGeneration]) -> Iterator[str]:
        """Continue prompts of one length, which need no padding."""
        first = batch[0]
        ids_BL = torch.tensor([each.prompt for each in batch], device=self._device)
        pad = self._tokenizer.pad_token_id
        pad = self._tokenizer.eos_token_id if pad is None else pad
        output_BL = self._model.generate(
            input_ids=ids_BL,
            attention_mask=torch.ones_like(ids_BL),
            max_new_tokens=first.max_tokens,
            do_sample=False,
            pad_token_id=0 if pad is None else pad,
            stopping_criteria=[_Until(self._tokenizer, first.until, len(first.prompt))],
        )
        eos = self._tokenizer.eos_token
        for ids in output_BL[:, len(first.prompt) :].tolist():
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            for end in [*first.until, *([eos] if eos else [])]:
                text = text.split(end)[0] if end else text
            yield text


def _scored(logits_TV: Tensor, targets_T: Tensor) -> ScoredContinuation:
    at_once = max(1, _SLICE_LOGITS // logits_TV.shape[-1])
    total, is_greedy = 0.0, True
    for start in range(0, len(targets_T), at_once):
        part_TV, part_T = logits_TV[start : start + at_once], targets_T[start : start + at_once]
        log_TV = F.log_softmax(part_TV.float(), dim=-1)
        picked_T = log_TV.gather(-1, part_T[:, None])[:, 0]
        total += picked_T.double().sum().item()
        is_greedy &= bool((part_TV.argmax(dim=-1) == part_T).all())
    return ScoredContinuation(total, is_greedy)


class _Until(StoppingCriteria):  # type: ignore[misc]
    """Ends a sequence whose text has one of the ends in it."""

    def __init__(self, tokenizer: Any, ends: Sequence[str], prompt_tokens: int) -> None:
        self._tokenizer, self._prompt_tokens = tokenizer, prompt_tokens
        self._ends = [end for end in ends if end]

    def __call__(self, input_ids: Tensor, _scores: Tensor, **_: Any) -> Tensor:
        done = [
            any(end in self._tokenizer.decode(ids) for end in self._ends)
            for ids in input_ids[:, self._prompt_tokens :].tolist()
        ]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


def make_batches(
    requests: Sequence[TokenRequest], *, batch_tokens: int, vocab_size: int
) -> list[list[int]]:
    """Group requests into batches, the longest first; returns their indices.

    The batches do not depend on the number of processes, so neither do the numbers.
    """
    most = max(1, min(batch_tokens, _LOGITS_BYTES // (4 * vocab_size)))
    kinds: dict[Any, list[int]] = {}
    for index, request in enumerate(requests):
        kinds.setdefault(_kind(request), []).append(index)
    batches: list[list[int]] = []
    for indices in kinds.values():
        batches += _dealt(requests, sorted(indices, key=_order(requests)), most)
    return batches


def _kind(request: TokenRequest) -> Any:
    """Requests of one kind may share a batch."""
    if isinstance(request, Continuation):
        return None
    return (len(request.prompt), request.until, request.max_tokens)


def _order(requests: Sequence[TokenRequest]) -> Callable[[int], Any]:
    def key(index: int) -> Any:
        request = requests[index]
        tokens = request.inputs if isinstance(request, Continuation) else request.prompt
        return -len(tokens), tokens, index

    return key


def _dealt(
    requests: Sequence[TokenRequest], indices: Sequence[int], most: int
) -> Iterator[list[int]]:
    """Cut sorted requests into batches; equal inputs count once."""
    batch: list[int] = []
    rows: set[Any] = set()
    longest = 0
    for index in indices:
        request = requests[index]
        if isinstance(request, Continuation):
            row, length = (0, request.inputs), len(request.inputs)
        else:
            row, length = (index, request.prompt), len(request.prompt) + request.max_tokens
        if batch and (len(rows) + (row not in rows)) * max(length, longest) > most:
            yield batch
            batch, rows, longest = [], set(), 0
        batch.append(index)
        rows.add(row)
        longest = max(length, longest)
    if batch:
        yield batch


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
