"""Batch normalisation in every layout beside torch's own in one process, on the same samples."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardyard
from shardyard.errors import RecipeError, RequestError, ShardyardError
from shardyard.models.batch_norm import BatchNorms
from shardyard.parallel.custom_module import module_errors
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import FINISHED, Loop
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus, train_here
from tests.distributed.whole import whole

LR, STEPS = 0.3, 3

MODULE = """
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.look_back = nn.Conv1d(16, 16, kernel_size=3, padding=1)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        y = self.norm(self.look_back(x))
        y += x  # in place, as residual networks do
        return F.relu(y)

class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.pooled = nn.BatchNorm1d(16, momentum=None)  # over samples alone
        self.head = nn.Linear(16, vocab_size)

    def forward(self, tokens):
        x = self.table(tokens).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head((x + self.pooled(x.mean(dim=2))[:, :, None]).transpose(1, 2))

def build(*, vocab_size, seq_len):
    return Model(vocab_size), loss_sum

def loss_sum(model, batch):
    logits, targets = model(batch["tokens"]), batch["targets"]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (
        targets != -100
    ).sum()
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def _where_the_module_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "normed.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("normed", None)


def sections(processes: int, *, batch: int, micro_batch: int, **parallel: Any) -> dict[str, Any]:
    return {
        "run": {"steps": STEPS},
        "model": {"preset": None, "module": "normed:build", "blocks": ["blocks"]},
        "optim": {
            "name": "sgd", "lr": LR, "momentum": 0.9, "grad_clip": 0.5, "schedule": "constant",
            "warmup_steps": 0, "global_batch": batch, "micro_batch": micro_batch,
        },
        "memory": {"recompute": "full"},
        "parallel": parallel,
        "checkpoint": {"every": 100},
        "cluster": {"devices": processes},
    }  # fmt: skip


class Seen:
    """What a norm of the plain model is given in a step."""

    def __init__(self, norm: nn.Module) -> None:
        self._inputs: list[Tensor] = []
        norm.register_forward_pre_hook(lambda _, given: self._inputs.append(given[0].detach()))

    def take(self) -> tuple[Tensor, Tensor]:
        """Mean and unbiased variance of all of it, by feature."""
        rows = [x.double().transpose(0, 1).flatten(1) for x in self._inputs]
        self._inputs.clear()
        variance, mean = torch.var_mean(torch.cat(rows, dim=1), dim=1)
        return mean, variance


def plain(samples: Any, *, vocab_size: int, batch: int, micro_batch: int) -> tuple[Any, ...]:
    """torch's own batch normalisation in the loop that the module's owner would write.

    Returns loss and norm of each step; weights; running statistics as torch has them, and as they
    are if all of a step is one batch.
    """
    normed = __import__("normed")
    torch.manual_seed(0)
    model, loss_sum = normed.build(vocab_size=vocab_size, seq_len=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    norms = {name: each for name, each in model.named_modules() if isinstance(each, nn.BatchNorm1d)}
    seen = {name: Seen(norm) for name, norm in norms.items()}
    running = {name: (torch.zeros(16).double(), torch.ones(16).double()) for name in norms}
    numbers = []
    for step in range(STEPS):
        positions = range(step * batch, (step + 1) * batch)
        parts = [positions[at : at + micro_batch] for at in range(0, batch, micro_batch)]
        found = [loss_sum(model, samples.micro_batch(part, len(part)).fields) for part in parts]
        count = sum(int(each) for _, each in found)
        loss = sum(total for total, _ in found) / count
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((float(loss.detach()), float(norm)))
        for name, (mean, variance) in running.items():
            share = norms[name].momentum or 1 / (step + 1)
            now = seen[name].take()
            running[name] = (mean + share * (now[0] - mean), variance + share * (now[1] - variance))
    own = {name: (norm.running_mean, norm.running_var) for name, norm in norms.items()}
    return numbers, dict(model.named_parameters()), own, running


def apart(ours: Tensor, wanted: Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())


def _beside(run_dirs: list[RunDir], batch: int, micro_batch: int) -> list[dict[str, Any]]:
    """Of each run: the plain loop's numbers, and how far apart the models are."""
    sys.path.insert(0, str(Path.cwd()))
    answers = []
    for run_dir in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        numbers, weights, own, running = plain(
            training.train_source,
            vocab_size=training.resolved.data.vocab_size,
            batch=batch,
            micro_batch=micro_batch,
        )
        loop = Loop(training)
        for _ in range(STEPS):
            loop.step()
        answer: dict[str, Any] = {"numbers": numbers, "kept": []}
        params = {name: training.tensors[f"model.{name}"] for name in weights}
        # all together: biases begin at zero, so that little of them would be much
        answer["weights"] = apart(
            torch.cat([whole(params[name]).flatten() for name in weights]),
            torch.cat([wanted.detach().flatten() for wanted in weights.values()]),
        )
        for wanted in (own, running):
            answer["kept"].append(
                max(
                    apart(training.tensors[f"buffer.{name}.{key}"], values[place])
                    for name, values in wanted.items()
                    for place, key in enumerate(("running_mean", "running_var"))
                )
            )
        answer["steps"] = int(training.tensors["buffer.blocks.0.norm.num_batches_tracked"])
        training.close()
        answers.append(answer)
    return answers


def compare(
    corpus: Corpus,
    folder: Path,
    layouts: Sequence[dict[str, Any]],
    *,
    processes: int,
    batch: int,
    micro_batch: int,
) -> None:
    runs = [
        make_run(
            folder / str(number),
            corpus,
            sections(processes, batch=batch, micro_batch=micro_batch, **parallel),
        )
        for number, parallel in enumerate(layouts)
    ]
    for answers in run_on_ranks(_beside, processes, runs, batch, micro_batch):
        for run_dir, answer in zip(runs, answers, strict=True):
            lines = read_steps(run_dir.metrics)
            for line, pair in zip(lines, answer["numbers"], strict=True):
                assert (line["loss"], line["grad_norm"]) == pytest.approx(pair, rel=1e-5)
            as_torch, as_one_batch = answer["kept"]
            assert answer["weights"] < 1e-6
            assert answer["steps"] == STEPS
            assert as_one_batch < 2e-6
            if micro_batch == batch:
                assert as_torch < 2e-6
            assert read_evaluations(run_dir.metrics)


ZERO_1, ZERO_3 = {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 3}


@pytest.mark.heavy
@pytest.mark.usefixtures("_where_the_module_is")
def test_two_ranks_are_one_process_with_a_ragged_and_a_weightless_micro_batch(
    corpus: Corpus, tmp_path: Path
) -> None:
    # 5 samples as 2 + 2 + 1 would leave one alone, which torch refuses too; 3 + 3 + 2, and none
    compare(corpus, tmp_path, [ZERO_3], processes=2, batch=8, micro_batch=3)


@pytest.mark.system
@pytest.mark.usefixtures("_where_the_module_is")
@pytest.mark.parametrize(
    ("processes", "batch", "micro_batch", "layouts"),
    [
        (1, 8, 3, [{}]),
        (1, 6, 6, [{}]),
        (2, 8, 3, [ZERO_1, {"dp_replicate": 2, "dp_shard": 1}]),
        (2, 6, 6, [ZERO_1, ZERO_3]),
        (3, 8, 3, [{"dp_shard": 3, "zero": 1}, {"dp_shard": 3, "zero": 3}]),
    ],
)
def test_more_layouts_are_one_process(
    corpus: Corpus,
    tmp_path: Path,
    processes: int,
    batch: int,
    micro_batch: int,
    layouts: list[dict[str, Any]],
) -> None:
    compare(corpus, tmp_path, layouts, processes=processes, batch=batch, micro_batch=micro_batch)


class Vision(nn.Module):
    """Features of a sample in, a number out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def _squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    is_asked = y >= 0
    return (is_asked * (model(x) - y).square()).sum(), int(is_asked.sum())


def _script() -> tuple[float, list[float]]:
    torch.manual_seed(1)
    batches = [(torch.randn(4, 8) * (n + 1), torch.rand(4, 1)) for n in range(3)]
    weightless = (torch.full((4, 8), 1e3), torch.full((4, 1), -1.0))
    torch.manual_seed(0)
    reference = Vision()
    torch.manual_seed(0)
    mesh = shardyard.build_mesh(zero=3)
    model = shardyard.parallelize(Vision(), mesh, blocks="layers")
    rank, ranks = mesh.data_rank, mesh.layout.data_ranks
    mine = [*batches, weightless][rank::ranks]
    loss = shardyard.accumulate(model, mine, _squares)
    totals = [_squares(reference, batch) for batch in batches]
    wanted = sum(total for total, _ in totals) / 12
    wanted.backward()  # type: ignore[union-attr]
    found = [abs(float(loss) - float(wanted))]
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        found.append(float((param.grad.full_tensor() - other.grad).abs().max()))  # type: ignore[union-attr]
    first = torch.cat([x for x, _ in batches])
    variance, mean = torch.var_mean(F.linear(first, *reference.layers[0][0].parameters()), dim=0)  # type: ignore[index]
    norm = model.layers[0][1]  # type: ignore[index]
    found.append(float((norm.running_mean - 0.1 * mean).abs().max()))
    found.append(float((norm.running_var - (0.9 + 0.1 * variance)).abs().max()))
    return float(wanted), found


@pytest.mark.heavy
def test_a_script_of_ones_own_counts_the_same_way() -> None:
    for _, found in run_on_ranks(_script, 2):
        assert max(found) < 2e-6


def test_running_statistics_stay_of_a_skipped_step_and_of_one_that_counted_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    norms = BatchNorms(model)
    running = model.state_dict()

    def step(x: Tensor, *, skipped: bool) -> None:
        model(x.requires_grad_()).sum().backward()
        norms.give_back(norms.take(x.device), skipped=torch.tensor(skipped))

    x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    step(x, skipped=True)
    norms.counts = 0
    step(x, skipped=False)
    assert running["0.running_mean"].tolist() == [0.0, 0.0]
    assert int(running["0.num_batches_tracked"]) == 0
    norms.counts = 1
    step(x, skipped=False)
    assert running["0.running_mean"].tolist() == pytest.approx([0.2, 2.0])
    assert running["0.running_var"].tolist() == pytest.approx([0.9 + 0.2, 0.9 + 20.0])
    assert int(running["0.num_batches_tracked"]) == 1
    norms.is_weightless = True  # one sample, which has no variance
    assert torch.isfinite(model(x[:1])).all()
    assert norms.take(x.device).tolist() == [0.0] * 5


def _told(run_dir: RunDir, attempt: int) -> str:
    try:
        return train_here(run_dir, attempt)
    except ShardyardError as error:
        return str(error)


@pytest.mark.heavy
@pytest.mark.usefixtures("_where_the_module_is")
def test_a_resume_keeps_the_micro_batch_and_a_new_run_of_one_sample_is_told(
    corpus: Corpus, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", corpus, sections(1, batch=8, micro_batch=4))
    assert run_on_ranks(_told, 1, run, 0) == [FINISHED]
    other = sections(1, batch=8, micro_batch=2)
    make_run(run.path, corpus, other, attempt=1)
    (told,) = run_on_ranks(_told, 1, run, 1)
    assert "(optim.micro_batch: 4 -> 2, and batch normalisation is over a micro-batch, so" in told
    assert "Give these the values that they had" in told
    other["optim"]["micro_batch"] = 4
    make_run(run.path, corpus, other, attempt=2)
    assert run_on_ranks(_told, 1, run, 2) == [FINISHED]

    # 5 samples as 2 + 2 + 1: the blocks see 32 tokens of the last, "pooled" one mean of them
    alone = make_run(tmp_path / "alone", corpus, sections(1, batch=5, micro_batch=2))
    (told,) = run_on_ranks(_told, 1, alone, 0)
    assert told.startswith("pooled, a batch normalisation, is given a micro-batch of one sample")
    assert "choose optim.micro_batch above 1" in told
    assert read_steps(alone.metrics) == []


def test_one_number_of_a_feature_is_refused_where_the_batch_normalises_and_only_there() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    BatchNorms(model)
    assert torch.isfinite(model(torch.ones(1, 2, 3))).all(), "three numbers of each feature"
    with pytest.raises(RequestError, match=r"^0, a batch normalisation, is given a micro-batch of"):
        model(torch.ones(1, 2))
    model.eval()
    with pytest.raises(RequestError, match=r"^1, a batch normalisation, .* of the held-out ones"):
        model(torch.ones(1, 2))


class Doubled(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_what_cannot_be_counted_is_refused() -> None:
    told = module_errors(nn.Sequential(nn.BatchNorm1d(2)), {}, tp=2)
    assert "batch normalisation: ranks of tp hold other features" in str(RecipeError(told))
    told = module_errors(nn.Sequential(Doubled(2)), {}, tp=1)
    assert "has 0, a batch normalisation with a forward method of its own" in str(RecipeError(told))
    told = module_errors(nn.Sequential(nn.SyncBatchNorm(2)), {}, tp=1)
    assert "has 0, an nn.SyncBatchNorm: what it normalises over are" in str(RecipeError(told))
    assert "Use nn.BatchNorm with a larger optim.micro_batch" in str(RecipeError(told))
