"""Samples split over ranks: attention, and with it every step, is that of one process."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.parallel.context import context_attention, context_share
from shardyard.parallel.recompute import selective_contexts
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.distributed.traffic import Traffic
from tests.distributed.whole import whole

TOLERANCE = 2e-5
"""Relative; measured 1.03e-5, in a gradient norm of the fourth step."""
BF16 = {"loss": 1e-3, "grad_norm": 1e-2}
"""Relative; measured 2e-4 and 3e-3."""
STEPS = 5
SEQ_LEN = 32

Setting = tuple[int, dict[str, Any], int, str]
"""Processes, parallel, micro_batch (of a global batch of 6), recompute."""

LAYOUTS: list[Setting] = [
    (2, {"cp": 2}, 2, "none"),
    (2, {"cp": 2, "cp_exchange": "heads"}, 4, "none"),  # a padded micro-batch
    (4, {"cp": 4}, 3, "full"),
    (4, {"cp": 4, "cp_exchange": "heads", "zero": 3}, 2, "selective"),
    (4, {"cp": 2, "dp_shard": 2}, 1, "none"),
    (4, {"cp": 2, "tp": 2, "cp_exchange": "heads", "zero": 2}, 3, "selective"),
]
MORE: list[Setting] = [
    (2, {"cp": 2, "zero": 1}, 3, "selective"),
    (2, {"cp": 2, "zero": 2, "cp_exchange": "heads"}, 2, "full"),
    (4, {"cp": 2, "dp_shard": 2, "zero": 1, "cp_exchange": "heads"}, 2, "none"),
    (4, {"cp": 2, "dp_replicate": 2, "dp_shard": 1, "zero": 3}, 2, "selective"),
    (4, {"cp": 2, "tp": 2}, 2, "full"),
]

EXCHANGES = ("keys_values", "heads")
HEADS = [(4, 4), (4, 2), (8, 1), (12, 3)]
"""Heads and KV heads; 1 and 3 are not multiples of 2 and 4 ranks, nor is 2 of 4."""

_HOOKS = Hooks(generation=0, drain_requested=lambda: False, events=None)


def _naive_attention(
    q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, *, may_attend_BLL: Tensor, scale: float,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    times = q_BHLE.shape[1] // k_BKLE.shape[1]
    k_BHLE, v_BHLE = (x.repeat_interleave(times, dim=1) for x in (k_BKLE, v_BKLE))
    scores_BHLL = scale * q_BHLE @ k_BHLE.mT
    if softcap is not None:
        scores_BHLL = softcap * torch.tanh(scores_BHLL / softcap)
    scores_BHLL = scores_BHLL.masked_fill(~may_attend_BLL[:, None], -torch.inf)
    out_BHLE: Tensor = scores_BHLL.softmax(dim=-1) @ v_BHLE
    return out_BHLE


def _may_attend(
    positions_BL: Tensor, *, is_causal: bool, attend_across: bool, window: int | None = None
) -> Tensor:
    """(B, L, L) by the words of the settings, one pair at a time."""
    samples, length = positions_BL.shape
    may_BLL = torch.zeros(samples, length, length, dtype=torch.bool)
    for sample, query, key in product(range(samples), range(length), range(length)):
        first, last = sorted((query, key))
        is_one_document = bool((positions_BL[sample, first + 1 : last + 1] != 0).all())
        may_BLL[sample, query, key] = (key <= query or not is_causal) and (
            attend_across or is_one_document
        )
        may_BLL[sample, query, key] &= window is None or query - key < window
    return may_BLL


WINDOWS_AND_CAPS = [(True, None, None), (False, None, None), (True, 5, None), (True, 11, 2.0)]
"""Causal or not, window, soft cap of the scores."""


def _worst_differences(exchanged: Any, gathers_again: bool) -> dict[str, float]:
    """Case -> largest difference from naive attention in values and gradients of this rank."""
    group = dist.group.WORLD
    assert group is not None
    length, width, scale = 8 * dist.get_world_size(), 6, 0.3
    starts = torch.tensor([[0, 5, 6, length // 2], [0, 1, length - 1, length - 1]])
    index_L = torch.arange(length)
    positions_BL = torch.stack(
        [index_L - row[torch.searchsorted(row, index_L, right=True) - 1] for row in starts]
    )
    found = {}
    for (heads, kv_heads), bent, across in product(HEADS, WINDOWS_AND_CAPS, (True, False)):
        is_causal, window, softcap = bent
        torch.manual_seed(0)  # the same on every rank
        q, k, v = (torch.randn(2, h, length, width) for h in (heads, kv_heads, kv_heads))
        weight = torch.randn_like(q)
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        may_BLL = _may_attend(
            positions_BL, is_causal=is_causal, attend_across=across, window=window
        )
        expected = _naive_attention(*whole, may_attend_BLL=may_BLL, scale=scale, softcap=softcap)
        expected_grads = torch.autograd.grad((expected * weight).sum(), whole)

        own_l = context_share(index_L, exchanged=exchanged, group=group)
        mine = [x[:, :, own_l].requires_grad_() for x in (q, k, v)]
        attend = context_attention(
            length, exchanged=exchanged, group=group, is_causal=is_causal, attend_across=across,
            regather_context_fn=selective_contexts if gathers_again else None, window=window,
        )  # fmt: skip
        out = attend(positions_BL, None)(*mine, scale=scale, window=window, softcap=softcap)
        grads = torch.autograd.grad((out * weight[:, :, own_l]).sum(), mine)
        pairs = zip([out, *grads], [expected, *expected_grads], strict=True)
        found[f"{heads}/{kv_heads} {bent} across={across}"] = max(
            float((got - want[:, :, own_l]).detach().abs().max()) for got, want in pairs
        )
    return found


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.system)])
@pytest.mark.parametrize("exchanged", EXCHANGES)
def test_attention_of_split_samples_is_that_of_whole_ones(cp: int, exchanged: str) -> None:
    for found in run_on_ranks(_worst_differences, cp, exchanged, cp == 2):
        wrong = {case: worst for case, worst in found.items() if not worst < TOLERANCE}
        assert len(found) == len(HEADS) * len(WINDOWS_AND_CAPS) * 2
        assert not wrong


def _sections(
    processes: int, parallel: dict[str, Any], micro_batch: int, recompute: str, dropout: float
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": STEPS},
        "model": {"dropout": dropout},
        "task": {
            "eval_every_steps": 4,
            "generate_tokens": 4,
            "prompt": "def ",
            "temperature": 0.8,
            "top_k": 20,
        },
        "data": {"attend_across_documents": dropout == 0, "seq_len": SEQ_LEN},
        "optim": {"micro_batch": micro_batch},
        "parallel": parallel,
        "memory": {"recompute": recompute},
        "cluster": {"devices": processes},
    }


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        assert train_here(run_dir) == "finished"


def _numbers(run_dir: RunDir) -> list[float]:
    """Losses and gradient norms of the steps, then what the evaluations found."""
    steps = read_steps(run_dir.metrics)
    evaluations = read_evaluations(run_dir.metrics)
    assert len(steps) == STEPS and evaluations
    found = [line[name] for line in steps for name in ("loss", "grad_norm")]
    return found + [line["eval"]["loss"] for line in evaluations]


@pytest.mark.parametrize(
    ("layouts", "dropout"),
    [
        (LAYOUTS[:2], 0.2),
        pytest.param(LAYOUTS[2:], 0.2, marks=pytest.mark.slow),
        pytest.param(MORE, 0.2, marks=pytest.mark.slow),
        pytest.param([*LAYOUTS, *MORE], 0.0, marks=pytest.mark.slow),
    ],
    ids=["two", "four", "more", "all, no dropout"],
)
def test_split_samples_make_the_same_steps_evaluation_and_text(
    corpus: Corpus, tmp_path: Path, layouts: list[Setting], dropout: float
) -> None:
    reference = make_run(tmp_path / "one", corpus, _sections(1, {}, 6, "none", dropout))
    runs: dict[int, list[RunDir]] = {1: [reference]}
    for index, (processes, parallel, micro_batch, recompute) in enumerate(layouts):
        sections = _sections(processes, parallel, micro_batch, recompute, dropout)
        run_dir = make_run(tmp_path / f"layout-{index}", corpus, sections)
        runs.setdefault(processes, []).append(run_dir)
    for processes, run_dirs in runs.items():
        run_on_ranks(_train_all, processes, run_dirs)

    expected, text = _numbers(reference), reference.sample.read_text()
    for run_dir in [run_dir for run_dirs in runs.values() for run_dir in run_dirs]:
        assert _numbers(run_dir) == pytest.approx(expected, rel=TOLERANCE), run_dir.path.name
        assert run_dir.sample.read_text() == text


@pytest.mark.system
def test_half_precision_changes_the_steps_by_its_rounding_alone(
    corpus: Corpus, tmp_path: Path
) -> None:
    """FSDP casts the inputs of blocks: it must leave alone what attention carries."""
    one = _sections(1, {}, 6, "none", 0.0)
    runs = [make_run(tmp_path / "one", corpus, one)]
    for index, exchanged in enumerate(EXCHANGES):
        two = _sections(2, {"cp": 2, "cp_exchange": exchanged}, 3, "none", 0.0)
        two["precision"] = {"compute": "bf16"}
        runs.append(make_run(tmp_path / f"two-{index}", corpus, two))
    run_on_ranks(_train_all, 1, runs[:1])
    run_on_ranks(_train_all, 2, runs[1:])
    expected, *found = [read_steps(run_dir.metrics) for run_dir in runs]
    for steps in found:
        for name, first in (("loss", STEPS), ("grad_norm", 3)):  # AdamW magnifies later ones
            pair = [[line[name] for line in lines[:first]] for lines in (steps, expected)]
            assert pair[0] == pytest.approx(pair[1], rel=BF16[name])


def _first_gradients(run_dir: RunDir) -> dict[str, Any]:
    """Gradients of the first step, whole, divided by the tokens of the step."""
    training = set_up(run_dir, 0, _HOOKS, local_rank=0)
    tokens = training.stepper.accumulate(next(training.loader)).divisor
    counted = tokens if training.mesh.speaks_for_samples else 0
    total = sum(training.gather(counted))
    gradients = {}
    for name, param in training.task.model.named_parameters():
        assert param.grad is not None
        gradients[name] = (whole(param.grad) / total).numpy()
    training.close()
    return gradients


@pytest.mark.system
@pytest.mark.parametrize("exchanged", EXCHANGES)
def test_first_gradients_are_those_of_one_process(
    corpus: Corpus, tmp_path: Path, exchanged: str
) -> None:
    parallel = {"cp": 2, "cp_exchange": exchanged}
    one = make_run(tmp_path / "one", corpus, _sections(1, {}, 6, "none", 0.2))
    many = make_run(tmp_path / "many", corpus, _sections(2, parallel, 2, "none", 0.2))
    expected = run_on_ranks(_first_gradients, 1, one)[0]
    found = run_on_ranks(_first_gradients, 2, many)[-1]

    norm = np.sqrt(sum((gradient**2).sum() for gradient in expected.values()))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.linalg.norm(found[name] - gradient) <= TOLERANCE * norm, name


def _expected_traffic(
    exchanged: str, *, cp: int, times: int, per_head: int, gathers: int = 1
) -> dict[str, tuple[int, int]]:
    """Kind -> calls and bytes of attention with 4 heads and 2 KV heads, forward and backward.

    Of each tensor (cp - 1) / cp is sent.

    Args:
        times: Passes through an attention layer.
        per_head: Bytes of one head of all tokens of a micro-batch.
        gathers: How often keys and values are gathered in each pass through a layer.
    """
    heads, kv_heads = 4, 2
    if exchanged == "keys_values":
        # gathered whole; on the way back their gradients are summed and scattered
        sent = times * 2 * kv_heads * per_head * (cp - 1) // cp
        return {"all_gather": (gathers * times, gathers * sent), "reduce_scatter": (times, sent)}
    # a rank has 1 / cp of the tokens of q, k and v, and afterwards of the heads of the output;
    # where there are fewer KV heads than ranks, they are sent more than once
    sent = times * (2 * heads + 2 * max(kv_heads, cp)) * per_head // cp * (cp - 1) // cp
    return {"all_to_all": (4 * times, 2 * sent)}


def _exchanged_by_attention(exchanged: Any) -> dict[str, tuple[int, int]]:
    group = dist.group.WORLD
    assert group is not None
    length, cp = 32, dist.get_world_size()
    q, k, v = (torch.randn(3, h, length // cp, 16, requires_grad=True) for h in (4, 2, 2))
    attend = context_attention(
        length, exchanged=exchanged, group=group, is_causal=True, attend_across=True,
        regather_context_fn=None,
    )  # fmt: skip
    with Traffic() as traffic:
        out = attend(torch.arange(length).expand(3, -1), None)(q, k, v, scale=1.0)
        torch.autograd.backward(out.sum())
    found: dict[str, tuple[int, int]] = traffic.over(group)
    return found


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.system)])
@pytest.mark.parametrize("exchanged", EXCHANGES)
def test_attention_sends_what_the_formula_says(cp: int, exchanged: str) -> None:
    expected = _expected_traffic(exchanged, cp=cp, times=1, per_head=3 * 32 * 16 * 4)
    assert run_on_ranks(_exchanged_by_attention, cp, exchanged) == [expected] * cp


def _exchanged_in_a_step(run_dirs: list[RunDir]) -> list[dict[str, tuple[int, int]]]:
    """What the context group sends in one step of each run: kind -> calls and bytes."""
    found = []
    for run_dir in run_dirs:
        training = set_up(run_dir, 0, _HOOKS, local_rank=0)
        batches = next(training.loader)
        with Traffic() as traffic:
            training.stepper.run(batches, lr=1e-3, drain=False)
        found.append(traffic.over(training.mesh.group("cp")))
        training.close()
    return found


@pytest.mark.system
def test_a_step_sends_what_the_formula_says(corpus: Corpus, tmp_path: Path) -> None:
    run_dirs, expected = [], []
    for exchanged in EXCHANGES:
        # two data ranks, so that the ranks of a context group are not those that shard the model
        parallel = {"cp": 2, "dp_shard": 2, "cp_exchange": exchanged}
        sections = _sections(4, parallel, 1, "none", 0.0)
        run_dirs.append(make_run(tmp_path / exchanged, corpus, sections))
        passes, blocks = 3, 2
        traffic = _expected_traffic(
            exchanged, cp=2, times=passes * blocks, per_head=SEQ_LEN * 16 * 4, gathers=2
        )
        expected.append(traffic)
    assert run_on_ranks(_exchanged_in_a_step, 4, run_dirs) == [expected] * 4
