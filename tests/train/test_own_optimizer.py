"""Optimizers of the user's own next to a plain loop, in each layout, and what is wrong with one."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Optim
from shardyard.errors import RequestError
from shardyard.models.build import hf_config
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import DRAINED, FINISHED, Loop
from shardyard.train.optim import ShardOptimizer
from shardyard.train.run import train
from shardyard.train.schedule import OwnSchedule, lr_at
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus
from tests.distributed.whole import whole
from tests.train import own_optimizers

OWN = "tests.train.own_optimizers"
BATCH, STEPS, LR, DECAY = 5, 3, 1e-2, 0.1
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"dp_replicate": 2, "dp_shard": 1}),
    (2, {"dp_shard": 2, "zero": 3}),
    (2, {"tp": 2}),
]

# Without processes -------------------------------------------------------------------------------


def _twins() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
    return model, copy.deepcopy(model)


def _grads(models: tuple[nn.Module, ...], step: int) -> None:
    torch.manual_seed(step)
    x = torch.randn(4, 6)
    for model in models:
        model.zero_grad()
        torch.autograd.backward(model(x).square().mean())


def _step(optimizer: ShardOptimizer, *, lr: float, skip: float = 0.0) -> None:
    optimizer.step(lr=lr, divisor=torch.tensor(1.0), skip=torch.tensor(skip))


Made = Callable[..., torch.optim.Optimizer]
KINDS: list[tuple[str, Made, dict[str, Any]]] = [
    ("Lion", own_optimizers.Lion, {"weight_decay": 0.1}),
    ("ByGroup", own_optimizers.ByGroup, {}),
    ("slower_vectors", own_optimizers.slower_vectors, {"beta": 0.5}),
    ("Normed", own_optimizers.Normed, {"momentum": 0.9}),
    ("torch.optim:RAdam", torch.optim.RAdam, {"betas": [0.9, 0.99]}),
    ("torch.optim:Adagrad", torch.optim.Adagrad, {}),
    ("torch.optim:RMSprop", torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
]


def _optim(name: str, settings: dict[str, Any], **more: Any) -> Optim:
    path = name if ":" in name else f"{OWN}:{name}"
    return Optim(module=path, module_settings=settings, lr=0.1, weight_decay=0.0, **more)


@pytest.mark.parametrize(("name", "theirs", "settings"), KINDS)
def test_steps_are_those_of_the_optimizer_also_after_a_skip_and_a_resume(
    name: str, theirs: Made, settings: dict[str, Any]
) -> None:
    models = _twins()
    optim = _optim(name, settings)
    ours, plain = ShardOptimizer(models[0], optim), theirs(models[1].parameters(), 0.1, **settings)
    rates = [0.1, 0.05, 0.02, 0.01]
    of_groups = [group["lr"] / 0.1 for group in plain.param_groups]
    for step, lr in enumerate(rates):
        if step == 1:  # skipped: nothing moves, whatever the gradient is
            _grads(models[:1], 99)
            before = {key: each.clone() for key, each in ours.tensors().items()}
            _step(ours, lr=lr, skip=1.0)
            assert all(torch.equal(before[key], each) for key, each in ours.tensors().items())
        if step == 2:  # resumed: another optimizer, filled in place as a checkpoint does it
            saved = {key: each.clone() for key, each in ours.tensors().items()}
            ours = ShardOptimizer(models[0], optim)
            tensors = ours.tensors()
            assert tensors.keys() == saved.keys()
            for key, each in tensors.items():
                each.copy_(saved[key])
        _grads(models, step)
        _step(ours, lr=lr)
        for group, share in zip(plain.param_groups, of_groups, strict=True):
            group["lr"] = lr * share
        plain.step()
        for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(mine, other), (name, step)


def test_states_are_saved_by_name_and_declared_ones_are_compared() -> None:
    model, _ = _twins()
    names = ShardOptimizer(model, _optim("Lion", {}, module_states=["exp_avg"])).tensors()
    assert {each.split(".")[1] for each in names if each.startswith("optim.")} == {
        "exp_avg", "count", "updates",
    }  # fmt: skip
    with pytest.raises(RequestError, match=r"Set optim.module_states=\[exp_avg\]\."):
        ShardOptimizer(model, _optim("Lion", {}, module_states=["exp_avg", "exp_avg_sq"]))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Lion", {"wd": 1}, "unexpected keyword argument 'wd'"),
        ("Gone", {}, "own_optimizers.py has no Gone. Define it"),
        ("nothing", {}, "returned None. It is called as optimizer(params, lr=..., **optim"),
        ("half", {}, "leaves 1 of 2 parameters out"),
        ("Hidden", {}, "keeps a state outside of optimizer.state"),
        ("Noisy", {}, "draws random numbers"),
        (
            "Evaluates",
            {},
            "has a method eval(): it validates other weights than it trains, and "
            "Shardyard validates the trained ones. Use optim.name=schedule_free_adamw instead",
        ),
        ("lists", {}, "holds the state losses, "),
        ("torch.optim:Adafactor", {}, "holds the state row_var, float32 (8, 1)"),
        ("torch.optim:LBFGS", {}, "step() missing 1 required positional argument: 'closure'"),
    ],
)
def test_a_mistake_names_the_class_and_the_fix(
    name: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ShardOptimizer(_twins()[0], _optim(name, settings))
    assert words in str(caught.value), str(caught.value)
    assert "optim.module=" in str(caught.value)


def _schedule(name: str) -> OwnSchedule:
    return OwnSchedule(Optim(schedule_module=f"{OWN}:{name}", lr=0.1, decay_steps=20))


def test_a_schedule_is_a_factor_of_the_peak_at_each_step_as_lambda_lr_has_it() -> None:
    optim = Optim(schedule_module=f"{OWN}:rising", lr=0.1, decay_steps=20, schedule_from=0)
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        theirs, lambda step: own_optimizers.rising(step, 20)
    )
    own = OwnSchedule(optim)
    for step in range(1, 21):
        assert lr_at(step, optim, own=own) == theirs.param_groups[0]["lr"]
        theirs.step()
        schedule.step()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", "has no gone. Define it: it is called as schedule(step, steps)."),
        ("negative", "returned -0.5 (for step 20 of 20). It is called as schedule(step, steps)"),
        ("nothing", "returned None (for step 1 of 20)"),
        ("counting", "other factors when it was asked again"),
        ("half", "failed at "),
    ],
)
def test_a_mistake_of_a_schedule_names_the_step_and_what_it_must_return(
    name: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        _schedule(name)
    assert words in str(caught.value), str(caught.value)


# On processes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def sections(processes: int = 1, *, kind: str = "Lion", **layout: Any) -> dict[str, Any]:
    return {
        "run": {"steps": STEPS},
        "optim": {
            "module": f"{OWN}:{kind}", "module_settings": {"weight_decay": DECAY}, "lr": LR,
            "schedule_module": f"{OWN}:rising", "decay_steps": 10,
            "global_batch": BATCH, "micro_batch": 2, "warmup_steps": "auto",
        },
        "parallel": layout,
        "checkpoint": {"every": 100},
        "cluster": {"devices": processes},
    }  # fmt: skip


def _plain(training: Any) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    model = LlamaForCausalLM._from_config(hf_config(require_shape(training.resolved.shape)))
    names = dict(model.named_parameters())
    model.load_state_dict(
        {name: whole(training.tensors[f"model.{name}"]).clone() for name in names}, strict=False
    )
    optimizer = own_optimizers.Lion(model.parameters(), lr=LR, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: own_optimizers.rising(done + 1, 10)
    )
    found = []
    for step in range(STEPS):
        batch = training.train_source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
        loss = F.cross_entropy(
            model(batch["tokens"]).logits.flatten(0, 1), batch["targets"].view(-1)
        )
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append((float(loss), float(norm)))
    return found, {name: each.detach() for name, each in model.named_parameters()}


def _beside(run_dirs: list[RunDir]) -> list[Any]:
    answers = []
    for run_dir in run_dirs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        numbers, weights = _plain(training)
        Loop(training).run()
        apart = []
        for name, wanted in weights.items():
            held = whole(training.tensors[f"model.{name}"])
            apart.append(float((held - wanted).norm() / wanted.norm()))
        training.close()
        answers.append((numbers, max(apart)))
    return answers


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [1, 2])
def test_steps_are_those_of_a_plain_loop(corpus: Corpus, tmp_path: Path, processes: int) -> None:
    layouts = [layout for ranks, layout in LAYOUTS if ranks == processes]
    runs = [
        make_run(tmp_path / str(number), corpus, sections(processes, **layout))
        for number, layout in enumerate(layouts)
    ]
    answers = run_on_ranks(_beside, processes, runs)[0]
    for run_dir, layout, (numbers, apart) in zip(runs, layouts, answers, strict=True):
        lines = read_steps(run_dir.metrics)
        assert [(line["loss"], line["grad_norm"]) for line in lines] == [
            pytest.approx(pair, rel=1e-5) for pair in numbers
        ], layout
        assert apart < 1e-5, layout


def _train(run_dir: RunDir, attempt: int, drain_at: int) -> str:
    calls = 0

    def drain_requested() -> bool:
        nonlocal calls
        calls += 1
        return calls == drain_at

    return train(
        run_dir, attempt, Hooks(generation=0, drain_requested=drain_requested, events=None)
    )


def _in_two_parts(once: RunDir, parts: RunDir) -> list[str]:
    return [_train(once, 0, 0), _train(parts, 0, 2), _train(parts, 1, 0)]


@pytest.mark.heavy
def test_a_resume_takes_the_same_steps_bit_for_bit_and_in_another_layout(
    corpus: Corpus, tmp_path: Path
) -> None:
    given = sections(2, dp_shard=2, zero=3)
    once = make_run(tmp_path / "once", corpus, given)
    parts = make_run(tmp_path / "parts", corpus, given)
    make_run(parts.path, corpus, given, attempt=1)
    other = make_run(tmp_path / "other", corpus, given)
    make_run(other.path, corpus, sections(2, tp=2), attempt=1)
    outcomes = run_on_ranks(_in_two_parts, 2, once, parts)[0]
    assert outcomes == [FINISHED, DRAINED, FINISHED]
    losses = [[line["loss"] for line in read_steps(each.metrics)] for each in (once, parts)]
    assert losses[0] == losses[1]
    run_on_ranks(_train, 2, other, 0, 2)
    run_on_ranks(_train, 2, other, 1, 0)
    moved = [line["loss"] for line in read_steps(other.metrics)]
    assert moved == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.heavy
def test_an_optimizer_of_whole_matrices_is_rejected_where_they_are_split(
    corpus: Corpus, tmp_path: Path
) -> None:
    given = sections(2, kind="Normed", dp_shard=2)
    run_dir = make_run(tmp_path / "run", corpus, given)
    with pytest.raises(RuntimeError, match=r"needs whole parameters: .*Use parallel\.dp_shard=1"):
        run_on_ranks(_train, 2, run_dir, 0, 0)
