"""Tasks in the format of lm-evaluation-harness, scored by the model in training.

Requests and metrics are those of `shardyard evaluate` with ``--context`` of ``data.seq_len``.
Ranks with samples of their own share the batches; ranks of one sample compute their part of each.

Shape suffixes: B = sequences of a batch, l = tokens of these that this rank computes, V =
vocabulary, v = its part of it, N = predicted tokens that it computes, R = requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.config.resolved import Resolved
from shardyard.data.eval_tasks.prompts import example_of_json
from shardyard.data.eval_tasks.scored_requests import Requests, Scored, result_of
from shardyard.data.eval_tasks.task import EvalTask
from shardyard.data.eval_tasks.token_requests import Continuation, TokenRequests
from shardyard.data.loader import MicroBatch
from shardyard.errors import RequestError, ShardyardError
from shardyard.io.files import read_json_object
from shardyard.parallel.collectives import gather_vocabulary
from shardyard.parallel.fsdp import reshard
from shardyard.parallel.mesh import Mesh
from shardyard.tasks.language import vocabulary
from shardyard.tasks.token_losses import LanguageModel
from shardyard.train.hooks import Heartbeat, WorkerPhase

_MOST_BYTES = 2**31
_SLICE_LOGITS = 2**27
"""Logits that are in fp32 at once."""


@dataclass(frozen=True, kw_only=True)
class EvalTasks:
    """Requests of all tasks of a recipe."""

    requests: tuple[Continuation, ...]
    scored: dict[str, Scored]
    """Examples of each task, by its name in ``data.eval_tasks``."""


def open_eval_tasks(resolved: Resolved, *, group: dist.ProcessGroup) -> EvalTasks | None:
    """Read the tasks of a recipe; None: it names none. All ranks call it.

    Rank 0 reads for all, so that no rank has other requests.

    Args:
        group: A gloo group of all ranks.

    Raises:
        RequestError: A task is wrong.
    """
    if not resolved.data.eval_tasks:
        return None
    found: list[EvalTasks | str] = [""]
    if dist.get_rank() == 0:
        try:
            found = [_read(resolved)]
        except (ShardyardError, OSError, ValueError) as error:
            found = [f"data.eval_tasks: {error}"]
    dist.broadcast_object_list(found, group=group, group_src=0)
    if isinstance(found[0], str):
        raise RequestError(found[0])
    return found[0]


def _read(resolved: Resolved) -> EvalTasks:
    from transformers import AutoTokenizer  # only when asked, and on one rank

    folder, seq_len = Path(resolved.data.dir), resolved.recipe.data.seq_len
    assert isinstance(seq_len, int)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise RequestError(
            f"data.eval_tasks: {folder} has no tokenizer that transformers reads ({error}). Leave "
            "the setting out, and use `shardyard evaluate` on checkpoints."
        ) from error
    requests = Requests(TokenRequests(tokenizer, seq_len))
    scored = {}
    for name, file in resolved.data.eval_tasks:
        content = read_json_object(folder / file, limit_bytes=_MOST_BYTES)
        examples = [example_of_json(each) for each in content["examples"]]
        scored[name] = requests.add_task(EvalTask.of_json(content["task"]), examples)
    continuations = tuple(each for each in requests.all if isinstance(each, Continuation))
    assert len(continuations) == len(requests.all)
    return EvalTasks(requests=continuations, scored=scored)


@torch.no_grad()
def score_tasks(
    tasks: EvalTasks,
    computation: LanguageModel,
    resolved: Resolved,
    *,
    mesh: Mesh,
    device: torch.device,
    heartbeat: Heartbeat,
) -> dict[str, dict[str, float]]:
    """Score all tasks; returns metrics by the name of the task. All ranks call it together."""
    recipe, layout = resolved.recipe, mesh.layout
    assert isinstance(recipe.optim.micro_batch, int) and isinstance(recipe.data.seq_len, int)
    # where ranks share a sample, or blocks are compiled, its length is that of training
    is_split = layout.world_size != layout.data_ranks or layout.ep > 1
    is_fixed = is_split or recipe.model.compile is True
    batches = _batches(tasks.requests, recipe.optim.micro_batch)
    totals_R2 = torch.zeros(len(tasks.requests), 2, dtype=torch.float64)
    computation.model.eval()
    for start in range(0, len(batches), layout.data_ranks):
        # each rank computes as many batches as the others: a forward pass gathers weights
        mine = batches[start : start + layout.data_ranks][mesh.data_rank :][:1]
        rows = mine[0] if mine else []
        inputs = [tasks.requests[row[0]].inputs for row in rows]
        length = recipe.data.seq_len if is_fixed else max(map(len, inputs), default=1)
        batch = _micro_batch(inputs, recipe.optim.micro_batch, length, device)
        with heartbeat.during(WorkerPhase.EVALUATE):
            logits_Blv = computation.output(batch)
            if logits_Blv is not None:
                aims_4N = _aims(rows, tasks.requests, computation.tokens_l)
                _add(logits_Blv, aims_4N, computation, vocabulary(resolved), totals_R2)
    computation.model.train()
    reshard(computation.roots)
    if mesh.tensor_rank != 0:
        totals_R2.zero_()  # the other ranks of tp have computed the same
    totals_R2 = totals_R2.to(device)
    dist.all_reduce(totals_R2)
    answers = {
        number: (likelihood, round(greedy) == len(tasks.requests[number].targets))
        for number, (likelihood, greedy) in enumerate(totals_R2.tolist())
    }
    return {name: _metrics(each, tasks, answers) for name, each in tasks.scored.items()}


def _metrics(
    scored: Scored, tasks: EvalTasks, answers: dict[int, tuple[float, bool]]
) -> dict[str, float]:
    found = result_of(scored, tasks.requests, answers)["metrics"]
    # a value beyond the largest float is null there
    return {
        each["metric"]: float("inf") if each["value"] is None else each["value"] for each in found
    }


def _batches(requests: Sequence[Continuation], size: int) -> list[list[list[int]]]:
    """Cut the sequences that the model reads into batches, the longest first.

    Each sequence is a list of the requests that it answers: choices of one token share theirs.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        rows.setdefault(request.inputs, []).append(number)
    ordered = [rows[inputs] for inputs in sorted(rows, key=lambda each: (-len(each), each))]
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _micro_batch(
    inputs: Sequence[Sequence[int]], size: int, length: int, device: torch.device
) -> MicroBatch:
    """A micro-batch of sequences, filled up by tokens that they do not see, and rows of padding."""
    tokens_BL = torch.zeros(size, length, dtype=torch.int64)
    for row, tokens in enumerate(inputs):
        tokens_BL[row, : len(tokens)] = torch.tensor(tokens)
    samples_B = torch.full((size,), -1, dtype=torch.int64)
    samples_B[: len(inputs)] = 0
    positions_BL = torch.arange(length).repeat(size, 1)
    return MicroBatch(
        fields={
            "tokens": tokens_BL.to(device), "targets": tokens_BL.to(device),
            "positions": positions_BL.to(device),
        },
        samples_B=samples_B.to(device),
        work=sum(map(len, inputs)),
    )  # fmt: skip


def _aims(
    rows: Sequence[Sequence[int]], requests: Sequence[Continuation], tokens_l: Tensor | None
) -> Tensor:
    """Row, this rank's index, target and request of each token that it predicts, (4, N)."""
    local = None if tokens_l is None else {int(t): at for at, t in enumerate(tokens_l.tolist())}
    found = []
    for row, numbers in enumerate(rows):
        for number in numbers:
            request = requests[number]
            first = len(request.inputs) - len(request.targets)
            for place, target in enumerate(request.targets, first):
                at = place if local is None else local.get(place)
                if at is not None:
                    found.append((row, at, target, number))
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 4).T


def _add(
    logits_Blv: Tensor, aims_4N: Tensor, computation: LanguageModel, vocab_size: int,
    totals_R2: Tensor,
) -> None:  # fmt: skip
    """Add log-likelihoods, and counts of tokens that are the model's first choice, by request."""
    at_once = max(1, _SLICE_LOGITS // vocab_size)
    for part_4n in torch.split(aims_4N, at_once, dim=1):
        rows_n, at_n, targets_n, _ = part_4n.to(logits_Blv.device)
        logits_nV = gather_vocabulary(
            logits_Blv[rows_n, at_n], computation.token_losses.group, size=vocab_size
        ).float()
        picked_n = torch.log_softmax(logits_nV, -1).gather(-1, targets_n[:, None])[:, 0]
        is_first_n = logits_nV.argmax(-1) == targets_n
        found_n2 = torch.stack([picked_n.double(), is_first_n.double()], 1).cpu()
        totals_R2.index_add_(0, part_4n[3], found_n2)
