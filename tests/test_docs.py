"""README, pages and example recipes do what they say: commands, recipes, links, names."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path

import click
import pytest

from docs.generate.verbs import verb_page
from shardyard.cli import _VERBS as VERBS
from shardyard.cli import main
from shardyard.config.load import is_override, load_recipe
from shardyard.config.rules.check import check
from shardyard.config.rules.layout import _STRATEGIES as STRATEGIES
from shardyard.config.schema.reference import settings
from shardyard.config.versions import ENGINES, OPTIONAL, TORCH
from shardyard.control.attempt import prepare_data
from shardyard.control.launch_script import script_proposal
from shardyard.control.request import Request
from shardyard.hardware.machine import Machine, probe
from shardyard.launchers.base import launcher_class

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "docs", ROOT / "internals", ROOT / "benchmarks")
PAGES = sorted([*ROOT.glob("*.md"), *chain.from_iterable(each.rglob("*.md") for each in FOLDERS)])
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
TAKES_A_RECIPE = {"config", "plan", "prepare", "train", "launch", "study", "drill"}

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*src=\"([^\"]+)\"")
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Command:
    """One `shardyard ...` line of a page or of a recipe's header."""

    page: str
    line: str
    folder: str = "."
    """Where a ``cd`` before it in its block leads, from the reader's folder."""

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.line, comments=True)[1:]

    @property
    def exit_code(self) -> int:
        """What the page says about it; 0 if it says nothing."""
        said = re.search(r"# exit code (\d+)", self.line)
        return int(said[1]) if said else 0

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands() -> Iterator[Command]:
    for page in PAGES:
        for language, block in _FENCED.findall(page.read_text()):
            lines = block.splitlines() if language in ("sh", "console") else []
            folder = "."
            for line in (line.removeprefix("$ ") for line in lines):
                if line.startswith("cd "):
                    folder = line.removeprefix("cd ")
                elif line.startswith("shardyard "):
                    yield Command(shown(page), line, folder)
    for example in EXAMPLES:
        for line in re.findall(r"^# +(shardyard .*)$", example.read_text(), re.MULTILINE):
            yield Command(shown(example), re.sub(r" +\(.*\)$", "", line))


COMMANDS = list(commands())


_NAMED = re.compile(
    r"^```(?:yaml|toml|python|bash)\n(# ([\w-]+\.(?:yaml|toml|py|sh))\n.*?)^```$", re.M | re.S
)
_JSON = re.compile(r"^.*`([\w-]+\.json)`:\n\n```json\n(.*?)^```$", re.M | re.S)


def files_of(page: Path) -> dict[str, str]:
    """Files that a page tells its reader to save.

    A block begins with their name; JSON has no comments, so the sentence before it ends with it.
    """
    text = page.read_text()
    named = {name: block for block, name in _NAMED.findall(text)}
    return named | dict(_JSON.findall(text))


def is_printed(shown: str, printed: str) -> bool:
    """Whether a line of a page is in an output; the page may shorten it by `...`."""
    parts = [re.escape(part.strip()) for part in shown.split("...")]
    return re.search("^ *" + ".*".join(parts), printed, re.MULTILINE) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands: examples, published tables, some text, what pages say to save."""
    folder = tmp_path_factory.mktemp("reader")
    for page in PAGES:
        for name, text in files_of(page).items():
            (folder / name).write_text(text)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    sources = sorted((ROOT / "src" / "shardyard").rglob("*.py"))
    texts = [text for source in sources if len(text := source.read_text()) > 2000]
    (folder / "my-text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "my-text").mkdir()
    for number, text in enumerate(texts):
        (folder / "my-text" / f"{number}.txt").write_text(text)
    return folder


def test_every_page_has_commands_that_are_checked() -> None:
    shown_on = {(command.page, command.arguments[0]) for command in COMMANDS}
    assert {(f"docs/{verb_page(verb)}", verb) for verb in VERBS} <= shown_on
    assert {shown(example) for example in EXAMPLES} <= {command.page for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_parses_and_its_recipe_is_good(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / command.folder)
    verb, *rest = command.arguments
    program = import_module(f"shardyard.cli.{verb}").command
    assert isinstance(program, click.Command)
    given = program.make_context(verb, rest).params
    if command.exit_code:
        return
    words = given.get("recipe") if verb in TAKES_A_RECIPE else given.get("overrides")
    if verb == "launch" and "--" in rest:  # of a script, which reads no recipe
        script = rest[rest.index("--") + 1 :]
        script_proposal(words or (), script, launcher_class(given["on"])(), is_dry_run=True)
        return
    named = [word for word in words or () if not is_override(word)]
    # what `cluster create` writes is in no clone: test_launch_pages.py has it
    files = [Path(word) for word in named if not word.startswith("clusters/")]
    recipe = load_recipe(files, [word for word in words or () if is_override(word)])
    if verb in TAKES_A_RECIPE and words:
        check(recipe, to_train=verb not in ("config", "plan"))


LOOKING = list(
    {
        (*command.arguments, command.exit_code): command  # the same line of two pages runs once
        for command in COMMANDS
        if command.arguments[0] in ("config", "plan", "runs") and "--on" not in command.arguments
    }.values()
)


@pytest.mark.heavy
@pytest.mark.parametrize("command", LOOKING, ids=str)
def test_a_command_that_only_looks_runs(
    command: Command,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(command.arguments) == command.exit_code, capsys.readouterr().err


def test_the_smallest_recipe_of_the_readme_is_good(tmp_path: Path) -> None:
    blocks = [text for language, text in _FENCED.findall(readme()) if language == "yaml"]
    assert blocks
    for text in blocks:
        (tmp_path / "recipe.yaml").write_text(text)
        check(load_recipe([tmp_path / "recipe.yaml"]))


@pytest.mark.parametrize("example", EXAMPLES, ids=shown)
def test_an_example_says_hardware_time_price_and_result(example: Path) -> None:
    header = example.read_text().partition("\nmodel:")[0].lower()
    assert "price" in header
    assert "2 x p5.48xlarge" in header or "hardware:" in header
    assert "not run yet on this hardware" in header or "measured on" in header
    assert re.search(r"\d+ min", header)
    assert "loss" in header


@pytest.mark.parametrize(
    "name",
    [
        "llama2-7b-finetune",
        "llama2-7b-lora",
        "llama2-7b-chat",
        "plan-llama3-70b",
        "sources/s1-llama2-7b",
        "sources/s2-efficientnet-b7",
        "sources/s2-resnet50",
        "sources/s3-llama2-70b",
        "sources/s3-mixtral",
        "sources/s4-bert-large",
        "sources/s4-bert-1.5b",
        "sources/s4-bert-5b",
    ],
)
def test_the_header_of_a_large_example_is_what_the_plan_says(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    example = Path(f"examples/{name}.yaml")
    length = () if "epochs:" not in example.read_text() else ("run.epochs=null", "run.steps=1000")
    assert main(["plan", str(example), *length, "--layouts", "0"]) == 0
    plan, header = capsys.readouterr().out, example.read_text().partition("\nmodel:")[0]
    memory = r"[\d.]+ GiB are \d+% of [\d.]+ GiB"
    time = r"\d+ (?:d|h|min) \d+ (?:h|min|s)(?= for)"
    claims = re.findall(rf"{memory}|{time}|\$[\d,]+\.\d\d", header)
    assert len(claims) == 4
    assert [claim for claim in claims if claim not in plan] == []


SMALL = ("run.steps=2", "task.generate_tokens=4", "optim.warmup_steps=0", "data.workers=1")
HERE = ("cluster.nodes=1", "cluster.instance=null", "cluster.device=cpu", "cluster.devices=2")


def train(folder: Path, run_id: str, *arguments: str) -> dict[str, object]:
    """`shardyard train` as a reader calls it, for two steps; its answer."""
    return shardyard(folder, "train", *arguments, *SMALL, f"run.id={run_id}", "--json")


def shardyard(folder: Path, *arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "shardyard", *arguments],
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.heavy
def test_the_quickstart_trains(folder: Path) -> None:
    answer = train(folder, "quick", "examples/quickstart.yaml", "data.source=my-text")
    assert answer["outcome"] == "finished"


@pytest.mark.system
@pytest.mark.parametrize("example", ["chat-small", "sources/s1-small", "sources/s3-small"])
def test_the_small_dialogues_train(folder: Path, example: str) -> None:
    run_id = Path(example).name
    answer = train(folder, run_id, f"examples/{example}.yaml", "run.epochs=null")
    assert answer["outcome"] == "finished"


@pytest.mark.system
def test_the_labelled_texts_train(folder: Path) -> None:
    """Without SMALL, as no text is generated."""
    short = ("run.epochs=null", "run.steps=2", "run.id=labels", "--json")
    answer = shardyard(folder, "train", "examples/classify-texts.yaml", *short)
    assert answer["outcome"] == "finished"


@pytest.fixture(scope="module")
def machine() -> Machine:
    """This one; a process with torch describes it."""
    return probe()


@pytest.mark.heavy
@pytest.mark.parametrize("example", ["chat-small", "sources/s1-small", "sources/s3-small"])
def test_the_length_of_a_small_example_is_accepted_as_it_stands(
    folder: Path, example: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train` checks it once the data is prepared; the others here train fewer steps."""
    monkeypatch.chdir(folder)
    request = Request.read([f"examples/{example}.yaml"], to_train=True)
    request.resolve(machine, prepare_data(request))


@pytest.mark.system
def test_the_small_bert_trains_in_both_phases(folder: Path) -> None:
    answer = shardyard(
        folder, "train", "examples/sources/s4-bert-small.yaml", "data.source=my-text", "--json",
        "phases.1.run.steps=2", "phases.2.run.steps=2", "data.vocab_size=600", "data.workers=1",
        "optim.batch_per_device=4", "phases.1.optim.micro_batch=2", "phases.2.optim.micro_batch=2",
        "data.min_true_pairs=0",  # in source code few sentences have an end
    )  # fmt: skip
    assert (answer["outcome"], answer["steps_done"]) == ("finished", 4)


LAUNCHED = [
    command
    for command in COMMANDS
    if command.page == "docs/tutorials/imagenet-on-spot-nodes.md"
    if command.arguments[0] in ("prepare", "launch")
]


@pytest.mark.heavy
@pytest.mark.parametrize("command", LAUNCHED, ids=str)
def test_the_jobs_of_the_page_for_images_are_rendered(
    command: Command,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    # what `cluster create` writes is no part of a clone; test_page_lines.py has it
    words = [word for word in command.arguments if not word.startswith("clusters/")]
    place = ("launch.kubernetes.context=c", "launch.run_dir=/shared/runs")
    volume = "launch.volumes=[{path: /shared, claim: shared}]"
    assert main([*words, *place, volume]) == 0
    rendered = capsys.readouterr().out
    assert "image_classification" in rendered
    assert ("kind: PyTorchJob" in rendered) == (command.arguments[0] == "launch")


@pytest.mark.system
def test_weights_come_in_and_go_out_as_a_hugging_face_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fine-tuning example, on a small model that the example for own text made."""
    train(folder, "own", "examples/own-text.yaml")
    shardyard(folder, "export", "own", "--to", "before", "--json")
    example = "examples/llama2-7b-finetune.yaml"
    smaller = ("data.seq_len=64", "optim.global_batch=2", "optim.lr=1e-2")
    ours = ("model.hub=null", "model.preset=null", "model.path=before", "data.source=my-text")
    monkeypatch.setenv("HF_TOKEN", "not-used")
    train(folder, "tuned", example, *ours, *smaller, *HERE)
    shardyard(folder, "export", "tuned", "--to", "after", "--dtype", "bfloat16", "--json")

    from transformers import AutoModelForCausalLM

    before, after = (AutoModelForCausalLM.from_pretrained(folder / name) for name in
                     ("before", "after"))  # fmt: skip
    assert str(after.dtype) == "torch.bfloat16"
    weights = dict(after.named_parameters())
    assert {name for name, _ in before.named_parameters()} == set(weights)
    change = max(
        float((weights[name].float() - old).detach().abs().max())
        for name, old in before.named_parameters()
    )
    assert 1e-3 < change < 0.1  # two steps of AdamW move a weight by about 2 x lr


def readme() -> str:
    return (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_link_between_files_resolves(page: Path) -> None:
    found = [first or second for first, second in _LINK.findall(page.read_text())]
    local = [link.partition("#") for link in found if "://" not in link]
    broken = []
    for path, _, heading in local:
        target = (page.parent / path) if path else page
        if not target.exists() or (heading and heading not in anchors(target)):
            broken.append(f"{path}#{heading}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.replace(" ", "-") for word in words}


def test_every_measured_result_links_to_its_raw_file() -> None:
    page = ROOT / "docs" / "evidence.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    results = [row for row in rows if not row.startswith("| measurement |")]
    assert len(results) > 35
    for row in results:
        links = [link for link, _ in _LINK.findall(row) if "/benchmarks/results/" in link]
        assert links, row
        for link in links:
            raw = (page.parent / link).read_text()
            assert link.endswith(".csv") or json.loads(raw)


def test_the_readme_is_short_and_begins_with_what_to_try() -> None:
    text = re.sub(r"<[^>]+>", " ", re.sub(_FENCED, " ", readme())).replace("|", " ")
    assert len(re.sub(r"\]\([^)]*\)", "]", text).split()) <= 900
    beginning = "\n".join(readme().splitlines()[:40])
    assert all(word in beginning for word in ("make demo", "make test", "docs/terminal.svg"))
    commands = [c.line for c in COMMANDS if c.page == "README.md"]
    assert commands and max(len(line) for line in commands) <= 100


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_files_and_settings_that_a_page_names_exist(page: Path) -> None:
    sections = {name.partition(".")[0] for name in settings()}
    wrong = []
    for code in _CODE.findall(re.sub(_FENCED, "", page.read_text())):
        name = code.partition("=")[0]
        if re.fullmatch(r"[\w/]+/\w+\.(py|yaml|md)", code):
            places = (ROOT / code, ROOT / "src" / "shardyard" / code, page.parent / code)
            is_elsewhere = code.endswith("recipe.yaml") or code.startswith("/")
            wrong += [code] if not is_elsewhere and not any(p.exists() for p in places) else []
        elif re.fullmatch(r"[a-z]+\.[a-z_]+", name) and name.partition(".")[0] in sections:
            is_file = name.endswith(".safetensors") or any((ROOT / "src").rglob(name))
            # a section, as `observe.wandb`, is named by itself too
            is_setting = any(f"{known}.".startswith(f"{name}.") for known in settings())
            wrong += [name] if not is_setting and not is_file else []
    assert wrong == []


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_of_a_verb_names_all_its_options(verb: str) -> None:
    page = (ROOT / "docs" / verb_page(verb)).read_text()
    program = import_module(f"shardyard.cli.{verb}").command
    options = [option for param in program.params for option in param.opts if option[0] == "-"]
    assert [option for option in options if f"`{option}" not in page] == []


def test_the_page_on_sharding_has_every_name_with_its_level() -> None:
    page = (ROOT / "docs" / "sharding.md").read_text()
    for name, strategy in STRATEGIES.items():
        row = next(line for line in page.splitlines() if line.startswith("| `") and name in line)
        assert f"| {strategy.zero} |" in row, name


def test_the_page_on_versions_is_that_of_the_check() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    for engine in (*ENGINES, *OPTIONAL):
        accepted = f">={engine.at_least}" + (f",<{engine.below}" if engine.below else "")
        tested = ", ".join(engine.tested) or "-"
        row = (engine.package, f"`{accepted}`", tested, engine.note, engine.required_by or "always")
        assert f"| {' | '.join(row)} |" in page


def test_the_newest_torch_that_is_accepted_was_tried_and_passed() -> None:
    page = (ROOT / "docs/compatibility.md").read_text()
    tried = dict(re.findall(r"^\| (2\.\d+\.\d+) .*\]\(\.\./(.*json)\) \|$", page, re.M))
    assert set(tried) <= set(TORCH.tested) and TORCH.tested[-1] in tried
    _, newest, _ = TORCH.tested[-1].split(".")
    assert TORCH.below == f"2.{int(newest) + 1}"
    for version, link in tried.items():
        result = json.loads((ROOT / link).read_text())
        assert result["versions"]["torch"].partition("+")[0] == version
        assert result["passed"] > 250 and result["failed"] == 0
        assert {run["exit_code"] for run in result["runs"]} == {0}


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=shown)
def test_no_page_names_a_folder_of_one_machine(page: Path) -> None:
    assert re.findall(r"(?<![\w.<>])/(?:root|home|tmp|work|Users)/", page.read_text()) == []


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("README.md", "plan examples/llama2-7b-finetune.yaml"),
        (
            "docs/verbs/plan.md",
            "plan model.preset=llama2-7b cluster.nodes=2 cluster.instance=p5.48xlarge "
            "run.steps=500 optim.global_batch=64 optim.micro_batch=1",
        ),
    ],
)
def test_the_plan_that_a_page_shows_is_the_one_that_is_printed(
    page: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / page).read_text()
    _, _, block = text.partition(f"$ shardyard {words}\n")
    shown = [line.partition("...")[0].strip() for line in block.partition("```")[0].splitlines()]
    assert len(shown) > 8 and main(words.split()) == 0
    printed = capsys.readouterr().out
    assert [line for line in shown if line not in printed] == []


PLANNED = [
    (page.name, line.removeprefix("$ "), output.splitlines())
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))
    for language, block in _FENCED.findall(page.read_text())
    for line, _, output in [block.partition("\n")]
    if language == "console" and line.startswith(("$ shardyard plan ", "$ shardyard config "))
]


@pytest.mark.heavy
@pytest.mark.parametrize(("page", "line", "shown"), PLANNED)
def test_a_tutorial_shows_what_its_plan_prints(
    page: str,
    line: str,
    shown: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert len(shown) > 1, page
    said = re.search(r"# exit code (\d+)", line)
    assert main(shlex.split(line, comments=True)[1:]) == (int(said[1]) if said else 0)
    answer = capsys.readouterr()
    assert [row for row in shown if not is_printed(row, answer.out + answer.err)] == []
