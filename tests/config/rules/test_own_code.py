"""The user's own functions, checked by their source and without an import."""

from pathlib import Path

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check
from shardyard.errors import RecipeError

SOURCE = """
raise RuntimeError("this module is never imported by a check")


def focal(outputs, batch):
    return 0.0, 1


def one(outputs):
    return 0.0, 1


def three(outputs, batch, gamma):
    return 0.0, 1


def with_default(outputs, batch, gamma=2.0):
    return 0.0, 1


def named(outputs, batch, *, gamma):
    return 0.0, 1


def loss(outputs, batch):
    return 0.0, 1


async def later(outputs, batch):
    return 0.0, 1


if True:
    from math import sqrt as elsewhere
made = focal
"""

GOOD = ["focal", "with_default", "elsewhere", "made"]
PROBLEMS = [
    (["task.loss=focal"], "task.loss='focal' is not of the form package.module:function. It is"),
    (["task.loss=nowhere:f"], "task.loss=nowhere:f: module nowhere is neither in "),
    (["task.loss=own.inner:f"], "module own.inner is neither in "),
    (["task.loss=own:focl"], "three, with_default, named. Did you mean own:focal?"),
    (["task.loss=own.py:focal"], "Did you mean own:focal?"),
    (["task.loss=own.focal"], "Did you mean own:focal?"),
    (["task.loss=own:gone"], "own.py defines no gone. It has focal, one, three, with_default"),
    (["task.loss=own:one"], "own.py:9: one takes outputs, and it is called as loss(outputs"),
    (["task.loss=own:three"], "own.py:13: three takes outputs, batch, gamma, and it is called as"),
    (["task.loss=own:named"], "own.py:21: named takes outputs, batch, gamma, and it is called as"),
    (["task.loss=own:later"], "later is async. Write a plain function."),
    (["task.loss=broken:f"], "broken.py:1: '(' was never closed."),
    (["task.metrics=[own:one]"], "task.metrics=own:one: "),
    (["task.metrics=[own:loss]"], "task.metrics: names loss, which causal_lm has already."),
    (["task.metrics=[own:focal, own:focal]"], "task.metrics: names focal twice"),
    (["task.lower_is_better=[x]", "task.metrics=[own:focal]"], "no function of task.metrics. It"),
    (["task.metrics=[own:focal]", "data.eval_fraction=0"], "task.metrics needs a validation split"),
    (["task.loss=own:focal", "parallel.cp=2"], "parallel.cp=2: task.loss gets the outputs of"),
    (["task.metrics=[own:focal]", "parallel.pp=2"], "parallel.pp=2: task.metrics gets the outputs"),
    (["task.loss=own:focal", "memory.loss_chunk=64"], "memory.loss_chunk=64: task.loss gets all"),
    (["task.loss=own:focal", "precision.reduce=exact"], "the sums inside of task.loss are not"),
    (["task.loss=own:focal", "run.target={perplexity: 2}"], "perplexity, which is not a metric of"),
    (
        ["task.loss=own:focal", "model.preset=bert-tiny", "task.name=bert_pretraining"],
        "task.loss: is not supported with task.name=bert_pretraining",
    ),
    (
        ["task.loss=own:focal", "model.preset=mixtral-tiny"],
        "task.loss=own:focal replaces the loss that a mixture's router losses are shares of",
    ),
    (["optim.module=own:Gone", "optim.lr=1"], "defines no Gone. It has focal, one"),
    (["optim.module=own:one"], "Give one; 1e-3 is a usual start for own:one."),
    (["optim.module=own:one", "optim.name=sgd"], "sgd and optim.module=own:one each name an"),
    (
        ["optim.module=own:one", "optim.betas=[0.9, 0.99]"],
        "optim.betas=[0.9, 0.99] is read by Shardyard's own optimizers only. Give it to yours: "
        "optim.module_settings={betas: [0.9, 0.99]}.",
    ),
    (["optim.module_settings={a: 1}"], "optim.module_settings: is for optim.module, and the"),
    (["optim.module_states=[a]"], "optim.module_states: is for optim.module, and the recipe"),
    (["optim.module=own:one", "optim.module_settings={lr: 1}"], "Leave it out, and set optim.lr."),
    (["optim.module=own:one", "precision.optimizer_states=bf16"], "of your own chooses the format"),
    (["optim.schedule_module=own:one"], "own.py:9: one takes outputs, and it is called as sched"),
    (
        ["optim.schedule_module=own:focal", "optim.warmup_steps=5"],
        "optim.warmup_steps=5 is not read with optim.schedule_module=own:focal, which decides",
    ),
    (["optim.schedule_module=own:focal", "optim.schedule=linear"], "optim.schedule=linear is not"),
    (["data.module=own:gone"], "defines no gone. It has focal, one, three, with_default"),
    (["data.module=own:one", "data.source=x"], "data.source: and data.module=own:one both say"),
    (["data.module=own:one", "data.eval_source=x"], "data.eval_source: and data.module=own:one"),
    (["data.module=own:one", "data.module_settings={split: a}"], "which the function gets anyway"),
    (["data.module=own:one", "data.format=bert_h5", "data.tokenizer=x"], "=bert_h5 names files"),
    (
        [
            "data.module=own:one", "model.preset=resnet18", "task.name=image_classification",
            "optim.lr=1", "data.images.flip=0.25",
        ],
        "data.images.flip=0.25 is for image files, and data.module=own:one makes its images.",
    ),
    (["data.module_settings={a: 1}"], "data.module_settings: is for data.module, and the recipe"),
    (["observe.callbacks=[own:one]"], "observe.callbacks=own:one: "),
    (["data.module_workers=2"], "data.module_workers: is for data.module, and the recipe has"),
    (["optim.module=own:one", "precision.reduce=exact"], "=exact cuts shards into pieces"),
    (["optim.module=own:one", "memory.offload=optimizer"], "=optimizer moves states, and those"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("f = (\n")


@pytest.mark.parametrize(("settings", "words"), PROBLEMS)
def test_a_problem_names_file_line_and_call(settings: list[str], words: str) -> None:
    preset = [] if any("model.preset" in each for each in settings) else ["model.preset=llama-tiny"]
    with pytest.raises(RecipeError) as caught:
        check(load_recipe([], [*preset, *settings]))
    assert words in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_functions_that_can_be_called_pass(name: str) -> None:
    settings = ["model.preset=llama-tiny", f"task.loss=own:{name}", "run.target={made: 1}"]
    check(load_recipe([], [*settings, "task.metrics=[own:made]"]))


def test_an_optimizer_may_be_a_class_or_a_function_and_torchs() -> None:
    given = ["model.preset=llama-tiny", "optim.lr=1", "optim.module_states=[exp_avg]"]
    for path in ("own:made", "own:focal", "torch.optim:RAdam"):
        check(load_recipe([], [*given, f"optim.module={path}"]))


def test_a_node_checks_a_recipe_before_it_unpacks_the_code() -> None:
    settings = ["model.preset=llama-tiny", "task.loss=sent:f", "launch.code=[sent.py]"]
    check(load_recipe([], settings))


def test_a_module_is_found_by_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere/package").mkdir(parents=True)
    (tmp_path / "elsewhere/package/inner.py").write_text("def f(outputs, batch): ...\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    check(load_recipe([], ["model.preset=llama-tiny", "task.loss=package.inner:f"]))
