"""The four answers of a first recipe: what each becomes, what is refused, what the file says."""

import json
import re
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.rules.check import load_checked_recipe
from shardyard.control.init import (
    QUESTIONS,
    RecipeDraft,
    with_data,
    with_length,
    with_location,
    with_model,
)
from shardyard.control.init_text import TO_FILL_IN, commands_of, text_of, write
from shardyard.errors import CapacityError, RecipeError, RequestError, StorageError
from shardyard.families.presets import PRESETS
from shardyard.hardware.machine import Machine

LAPTOP = Machine(
    device="cpu",
    name="a laptop",
    hostname="laptop",
    count=1,
    memory_bytes=16 * 2**30,
    cores=8,
    has_bf16=False,
)
PLACES = ("here", "slurm 2 x p5.48xlarge", "kubernetes p4d.24xlarge", "aws-batch 4 x p5e.48xlarge")


def blank(file: Path = Path("recipe.yaml")) -> RecipeDraft:
    return RecipeDraft(file=file, probe_machine=lambda: LAPTOP)


def answered(*answers: str, file: Path = Path("recipe.yaml")) -> RecipeDraft:
    draft = blank(file)
    for question, answer in zip(QUESTIONS, answers, strict=False):
        draft = question.take(draft, answer)
    return draft


def refused(draft: RecipeDraft, place: str) -> str:
    with pytest.raises(RequestError) as caught:
        with_location(draft, place)
    return str(caught.value)


def test_a_model_of_no_family_becomes_a_recipe_that_trains_with_auto(tmp_path: Path) -> None:
    config = {"model_type": "bloom", "architectures": ["BloomForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_layer": 2, "hidden_size": 8}))
    (tmp_path / "model.safetensors").touch()
    draft = with_model(blank(), str(tmp_path))
    text = text_of(with_length(with_location(draft, "here"), "5 steps"), today="2026-11-28")
    assert commands_of(draft) == ["shardyard train recipe.yaml"]
    assert commands_of(draft)[0] in text
    words = " ".join(text.replace("#", " ").split())  # where a line ends depends on the path
    assert "No prediction" in words and "type bloom" in words and "tries again" not in words


# --- the table ----------------------------------------------------------------------------------


PLANNED_ONLY = [name for name, preset in PRESETS.items() if preset.shape.is_planned_only]
CASES = [
    pytest.param(
        model,
        place,
        # each preset at one place; all pairs take minutes
        marks=pytest.mark.system if at == number % len(PLACES) else pytest.mark.slow,
    )
    for number, model in enumerate(name for name in PRESETS if name not in PLANNED_ONLY)
    for at, place in enumerate(PLACES)
]


@pytest.mark.parametrize(("model", "place"), CASES)
def test_every_preset_makes_a_recipe_that_loads_and_plans_wherever_it_fits(
    model: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = with_data(with_model(blank(tmp_path / "recipe.yaml"), model), "python-stdlib")
    try:
        placed = with_location(draft, place)
    except RequestError as error:  # then another answer is told, and it is a good one
        said = re.search(r"It fits on more of them: (.*)\.$", str(error))
        if said is None:
            assert place == "here" or "machines with more memory" in str(error)
            return
        placed = with_location(draft, said[1])
    draft = with_length(placed, "1000 steps")
    write(draft, today="2026-11-23", is_forced=False)
    assert load_checked_recipe([draft.file]) == draft.recipe
    assert draft.planned is not None and draft.planned.plan.fits in ("fits", "tight")
    if draft.launcher is None:
        return
    assert main(["plan", str(draft.file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory_bytes"] == draft.planned.plan.memory_bytes
    assert plan["layout"] == plan["search"]["best"][0]["layout"]
    assert plan["step_s"] == pytest.approx(plan["search"]["best"][0]["step_s"])


@pytest.mark.parametrize("model", PLANNED_ONLY)
def test_a_model_that_can_only_be_planned_is_rejected(model: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"model.preset={model}: .* planned, not trained yet"):
        with_model(blank(tmp_path / "recipe.yaml"), model)


def test_the_usual_answers_make_a_recipe_for_this_machine() -> None:
    draft = answered(*(question.default for question in QUESTIONS))
    assert draft.overrides == (
        "model.preset=llama-tiny", "data.source=python-stdlib", "run.steps=300",
    )  # fmt: skip
    assert commands_of(draft) == ["shardyard plan recipe.yaml", "shardyard train recipe.yaml"]
    text = text_of(draft, today="2026-11-23")
    assert "no speed is predicted" in text and "1 CPU process" in text


@pytest.mark.heavy
@pytest.mark.parametrize("launcher", TO_FILL_IN)
def test_with_its_blanks_filled_in_a_recipe_can_be_launched(
    launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    draft = answered("llama2-7b", "python-stdlib", f"{launcher} 2 x p5.48xlarge", "9h", file=file)
    text = text_of(draft, today="2026-11-23")
    for line in TO_FILL_IN[launcher]:
        assert f"  # {line}\n" in text
        text = text.replace(f"  # {line}\n", f"  {line}\n")
    file.write_text(text)
    assert main(["launch", str(file), "--on", launcher, "--dry-run"]) == 0
    assert "would be refused" not in capsys.readouterr().err


# --- model and data -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "settings"),
    [
        (" qwen3-8b ", ("model.preset=qwen3-8b",)),
        ("bert-tiny", ("model.preset=bert-tiny", "task.name=masked_lm")),
    ],
)
def test_a_preset_brings_the_task_that_it_can_learn(answer: str, settings: tuple[str, ...]) -> None:
    assert with_model(blank(), answer).overrides == settings


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("llama-tini", "model.preset=llama-tini is not a preset. Did you mean llama-tiny?"),
        ("./nowhere", "model.path=./nowhere does not exist. Give a Hugging Face folder"),
        ("", "model: does not say which model to train. Write"),
        (
            "resnet18",
            "train model.preset=resnet18 task.name=image_classification data.source=FOLDER",
        ),
    ],
)
def test_a_wrong_model_is_refused_in_the_words_of_a_recipe(answer: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        with_model(blank(), answer)
    assert message in str(caught.value)


def test_a_network_for_images_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(RequestError, match="holds a network that classifies images") as caught:
        with_model(blank(), str(tmp_path))
    assert f"`shardyard train model.path={tmp_path} task.name=image" in str(caught.value)


def test_a_folder_is_a_model_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    shape = PRESETS["llama2-7b"].shape
    content = {"model_type": "llama", **shape.family.config_json.written(shape)}
    (tmp_path / "mine" / "config.json").write_text(json.dumps(content))
    (tmp_path / "mine" / "model.safetensors").touch()
    monkeypatch.setattr("shardyard.control.request.inspect_folder", lambda *_, **__: None)
    draft = answered("mine", "python-stdlib", "slurm p5.48xlarge", "2B tokens")
    assert draft.recipe.model.path == "mine" and draft.planned is not None
    assert draft.planned.plan.parameters == shape.parameters


def test_a_model_of_the_hub_that_is_out_of_reach_is_written_without_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def out_of_reach(*_: object, **__: object) -> None:
        raise CapacityError("the hub cannot be reached.")

    monkeypatch.setattr("shardyard.control.init.model_folder", out_of_reach)
    draft = answered("owner/name@v1", "python-stdlib", "slurm p5.48xlarge", "300 steps")
    assert (draft.recipe.model.hub, draft.recipe.model.revision) == ("owner/name", "v1")
    text = text_of(draft, today="2026-11-23")
    assert "# No prediction: the hub cannot be reached." in text
    with pytest.raises(RequestError, match=r"cannot be said in steps: .*the hub cannot be reached"):
        with_length(draft, "3h")


def test_data_that_cannot_be_read_is_refused_and_what_is_not_there_is_told() -> None:
    draft = with_model(blank(), "llama-tiny")
    with pytest.raises(RequestError, match=r"data\.source=.*ftp.* is a URL that is not read"):
        with_data(draft, "ftp://host/text")
    here = with_location(with_data(draft, "./no-text"), "here")
    assert here.errors() == [
        "data.source=./no-text: this path does not exist on this machine. Put text there, or fix "
        "the path."
    ]
    pods = with_location(with_data(draft, "./no-text"), "kubernetes p5.48xlarge")
    assert "data.source=./no-text is relative" in pods.errors()[0]
    assert "# Look at:\n#   - data.source=./no-text is relative" in text_of(pods, today="today")


# --- place --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("somewhere", "'somewhere' is not a place. Answer here, or LAUNCHER NODES x MACHINE"),
        ("local 2 x p5.48xlarge", "'local' is this machine. Answer here."),
        ("here p5.48xlarge", "launchers are local, slurm, kubernetes, aws-batch"),
        ("a b c d", "'a b c d' is not a place."),
        ("slurm", "'slurm' does not say on which machines, which a plan needs."),
        ("slurm 2 x p5.49xlarge", "cluster.instance="),
        ("slurm 0 x p5.48xlarge", "cluster.nodes=0 is not a whole number of at least 1."),
        ("slurm 2 x nodes.yaml", "nodes.yaml"),
    ],
)
def test_a_wrong_place_is_refused(place: str, message: str) -> None:
    assert message in refused(with_model(blank(), "llama-tiny"), place)


@pytest.mark.heavy
def test_a_model_that_does_not_fit_is_refused_with_the_nodes_on_which_it_does() -> None:
    draft = with_model(blank(), "llama3.1-405b")
    told = refused(draft, "slurm p5.48xlarge")
    assert "llama3.1-405b does not fit on 8 x H100 SXM. None of " in told
    place = re.search(r"It fits on more of them: (slurm \d+ x p5.48xlarge)\.$", told)
    assert place is not None
    assert "llama3.1-405b does not fit on 1 CPU process: " in refused(draft, "here")
    planned = with_location(draft, place[1]).planned
    assert planned is not None and planned.plan.fits == "fits"


def test_a_model_that_fits_by_offload_alone_is_drafted_with_it() -> None:
    draft = with_location(with_model(blank(), "llama3-70b"), "slurm p5.48xlarge")
    assert draft.planned is not None and draft.planned.plan.fits == "fits"
    assert draft.recipe.memory.offload != "none"


# --- length -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_a_node() -> RecipeDraft:
    return answered("llama2-7b", "python-stdlib", "slurm p5.48xlarge")


@pytest.mark.parametrize(
    ("answer", "setting"),
    [
        ("300 steps", "run.steps=300"),
        ("1,000", "run.steps=1000"),
        ("20B tokens", "run.tokens=20000000000"),
        ("1.5M samples", "run.samples=1500000"),
        ("0.5 epochs", "run.epochs=0.5"),
        ("1 epoch", "run.epochs=1"),
    ],
)
def test_a_count_is_taken_as_it_is(on_a_node: RecipeDraft, answer: str, setting: str) -> None:
    assert with_length(on_a_node, answer).overrides[-1] == setting


@pytest.mark.parametrize("answer", ["12h", "1 d 2 h", "$500"])
def test_a_time_or_a_price_becomes_as_many_steps_as_it_allows(
    on_a_node: RecipeDraft, answer: str
) -> None:
    draft = with_length(on_a_node, answer)
    steps = draft.recipe.run.steps
    assert draft.planned is not None and steps is not None
    now, longer = draft.planned.plan, draft.planned.of(steps + 1)
    if answer == "$500":
        assert draft.recipe.launch.max_usd == 500
        assert now.usd is not None and longer.usd is not None
        assert now.usd <= 500 < longer.usd
    else:
        limit_s = {"12h": 43200, "1 d 2 h": 93600}[answer]
        assert now.wall_s is not None and longer.wall_s is not None
        assert now.wall_s <= limit_s < longer.wall_s
    assert f"As many steps as {answer} allow: {steps:,} steps" in text_of(draft, today="today")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("long", "'long' is not a length. Answer 300 steps, 20B tokens"),
        ("1.2.3 steps", "'1.2.3 steps' is not a length."),
        ("$many", "'$many' is not a length."),
        ("$inf", "'$inf' is not a length."),
        (f"{'9' * 400} steps", "steps' is not a length."),
        ("$1e12", "'$1e12' is more than 1,000,000,000 steps. Answer less."),
        ("0 steps", "run.steps=0 is not a whole number of at least 1"),
        ("0.5 steps", "run.steps=0.5 is not a whole number"),
        ("$0", "launch.max_usd=0"),
        ("5s", "'5s' is too short: with its start, one step takes"),
        ("$0.01", "one step takes"),
    ],
)
def test_a_wrong_length_is_refused(on_a_node: RecipeDraft, answer: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        with_length(on_a_node, answer)
    assert message in str(caught.value)


@pytest.mark.parametrize("answer", ["2h", "$5"])
def test_a_time_on_a_cpu_cannot_be_said_in_steps(answer: str) -> None:
    with pytest.raises(RequestError) as caught:
        with_length(answered("llama-tiny", "python-stdlib", "here"), answer)
    assert "cannot be said in steps: the speed is not predicted" in str(caught.value)


# --- file ---------------------------------------------------------------------------------------


def test_the_file_says_what_was_chosen_why_and_what_else_there_is(on_a_node: RecipeDraft) -> None:
    draft = with_length(on_a_node, "500 steps")
    text = text_of(draft, today="2026-11-23")
    assert draft.planned is not None and draft.planned.search_result is not None
    assert "predicts, 2026-11-23" in text and "GiB are" in text and "tokens/s" in text
    flowing = text.replace("\n# ", " ")
    assert re.search(r"the fastest of [\d,]+ that fit\. \d+% of the step computes", flowing)
    assert text.count("#   next: ") == len(draft.planned.search_result.best) - 1 == 3
    assert "#   optim.lr=0.0003: Llama 2 at 7 B and 13 B" in text
    assert "#   shardyard launch recipe.yaml --on slurm\n" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_file_that_is_there_is_kept_unless_that_is_forced(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    draft = answered("llama-tiny", "python-stdlib", "here", "300 steps", file=file)
    file.write_text("mine")
    with pytest.raises(RequestError, match=r"exists already\. Name another one"):
        write(draft, today="today", is_forced=False)
    assert file.read_text() == "mine"
    write(draft, today="today", is_forced=True)
    assert load_checked_recipe([file]) == draft.recipe


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "recipe.yaml"
    draft = answered("llama-tiny", "python-stdlib", "here", "300 steps", file=file)
    with pytest.raises(StorageError, match=r"cannot be written: No such file.*init FILE"):
        write(draft, today="today", is_forced=False)


def test_chat_rows_are_recognised_by_their_keys(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"question": "a?", "answer": "b."}\n')
    draft = with_data(with_model(blank(), "llama-tiny"), str(chats))
    assert draft.overrides[-2:] == ("data.format=chat", "data.chat_template=chatml")
    assert with_data(with_model(blank(), "llama-tiny"), str(tmp_path)).overrides[-2:] == (
        "data.format=chat", "data.chat_template=chatml",
    )  # fmt: skip
    chats.write_text('{"prompt": "a?", "chosen": "b.", "rejected": "c."}\n')
    draft = with_data(with_model(blank(), "llama-tiny"), str(chats))
    assert draft.overrides[-3:] == (
        "task.name=preference", "data.format=preference_pairs", "data.chat_template=chatml",
    )  # fmt: skip
    chats.write_text('{"input_ids": [1, 2]}\n')
    draft = with_data(with_model(blank(), "llama-tiny"), str(chats))
    assert draft.overrides[-1] == "data.format=token_ids"
    chats.write_text('{"text": "a", "tokens": [1]}\n')
    draft = with_data(with_model(blank(), "llama-tiny"), str(chats))
    assert draft.overrides[-1] == f"data.source={chats}"
