"""What can be planned and not trained yet is refused where a training begins, and only there."""

import pytest

from shardyard.cli import main
from shardyard.config.load import load_recipe
from shardyard.config.rules.check import check, check_trainable, load_checked_recipe
from shardyard.errors import RecipeError

REFUSED = [
    (
        "cluster.instance=trn1.32xlarge",
        "cluster.instance=trn1.32xlarge: a run on Trainium1 can be planned, not trained",
    ),
    (
        "model.preset=deepseek-v3",
        "model.preset=deepseek-v3: a model with latent attention can be planned, not trained yet. "
        "Use a preset of another family, such as qwen3-30b-a3b.",
    ),
    ("cluster.device=xla", "cluster.device=xla: a run on Trainium or TPU can be planned, not trai"),
]


@pytest.mark.parametrize(("override", "words"), REFUSED)
def test_what_only_the_planner_knows_is_refused_with_a_remedy(override: str, words: str) -> None:
    given = ["model.preset=llama-tiny", override]
    with pytest.raises(RecipeError) as refused:
        load_checked_recipe([], given)
    assert words in str(refused.value)
    assert len(refused.value.problems) == 1
    load_checked_recipe([], given, to_train=False)
    check(load_recipe([], given), to_train=False)


@pytest.mark.heavy
@pytest.mark.parametrize("verb", ["plan", "config"])
@pytest.mark.parametrize(("override", "words"), REFUSED)
def test_verbs_that_only_look_say_that_it_cannot_be_trained(
    verb: str, override: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = [] if "device" in override else ["cluster.instance=p5.48xlarge"]
    assert main([verb, "model.preset=llama3-8b", *machines, override]) == 0
    said = capsys.readouterr().err
    assert said.startswith("note: ") and words in said


def test_what_can_be_trained_has_no_such_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_trainable(load_recipe([], ["model.preset=llama3.2-1b"])) == []
    assert main(["config", "model.preset=llama3.2-1b"]) == 0
    assert capsys.readouterr().err == ""


def test_a_layout_that_can_only_be_planned_must_still_be_legal() -> None:
    with pytest.raises(RecipeError, match=r"tp=3 does not divide the 8 devices of a node"):
        load_checked_recipe(
            [],
            ["model.preset=llama-tiny", "parallel.tp=3", "cluster.devices=8"],
            to_train=False,
        )


@pytest.mark.parametrize("verb", ["plan", "config"])
def test_verbs_that_only_look_accept_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.preset=mixtral-8x7b", "cluster.instance=p5.48xlarge", "parallel.tp=2"]
    assert main([verb, *words]) == 0
    assert "mixtral" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_verbs_of_a_training_refuse_it_before_they_look_at_data(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "model.preset=llama-tiny", "data.source=nowhere", "cluster.device=xla"]) == 2
    assert "can be planned, not trained yet" in capsys.readouterr().err
