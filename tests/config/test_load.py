"""Reading recipes: what merges, what is refused, and in which words."""

from pathlib import Path

import pytest

from shardyard.config.load import dump_recipe, is_override, load_recipe
from shardyard.config.schema.launch import Volume
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError, RequestError


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(*overrides: str) -> str:
    with pytest.raises(RecipeError) as refused:
        load_recipe([], overrides)
    return str(refused.value)


def test_later_files_win_setting_by_setting_and_overrides_win_over_files(tmp_path: Path) -> None:
    base = write(tmp_path, "optim: {lr: 1e-3, eps: 1e-6}\nrun: {seed: 1}", "base.yaml")
    more = write(tmp_path, "optim: {lr: 2e-3}\nrun: {seed: 2}", "more.yaml")
    recipe = load_recipe([base, more], ["run.seed=3"])
    assert (recipe.optim.lr, recipe.optim.eps, recipe.run.seed) == (0.002, 1e-6, 3)
    assert recipe.optim.weight_decay == Recipe().optim.weight_decay


def test_sections_in_a_section_merge_setting_by_setting_and_mappings_as_a_whole(
    tmp_path: Path,
) -> None:
    base = write(tmp_path, "launch: {env: {A: a}, slurm: {qos: low, account: us}}", "base.yaml")
    more = write(tmp_path, "launch: {env: {B: b}, slurm: {qos: high}, kubernetes: }", "more.yaml")
    launch = load_recipe([base, more], ["launch.slurm.partition=gpu"]).launch
    assert (launch.slurm.qos, launch.slurm.account, launch.slurm.partition) == ("high", "us", "gpu")
    assert launch.env == {"B": "b"}


def test_overrides_of_single_keys_add_to_a_mapping(tmp_path: Path) -> None:
    base = write(tmp_path, "launch: {env: {A: a, B: b}}\ndata: {keys: }\nrun: {tags: {x: y}}")
    keys = ["data.keys.prompt=Frage", "data.keys.completion=Antwort"]
    recipe = load_recipe([base], [*keys, "launch.env.B=c", "launch.env.C=d", "run.tags.z=w"])
    assert recipe.data.keys == {"prompt": "Frage", "completion": "Antwort"}
    assert recipe.launch.env == {"A": "a", "B": "c", "C": "d"}
    assert recipe.run.tags == {"x": "y", "z": "w"}
    assert load_recipe([base], ["launch.env={D: e}"]).launch.env == {"D": "e"}


def test_a_key_of_a_value_without_keys_is_a_problem(tmp_path: Path) -> None:
    base = write(tmp_path, "model: {config: my-config.json}")
    with pytest.raises(RecipeError, match=r"model\.config='my-config\.json' has no keys"):
        load_recipe([base], ["model.config.hidden_size=64"])


def test_a_dotted_name_in_a_file_says_how_it_is_written(tmp_path: Path) -> None:
    path = write(tmp_path, "launch.slurm.partition: gpu")
    with pytest.raises(RecipeError, match=r"`launch: \{slurm: \{partition: value\}\}`"):
        load_recipe([path])


SCALARS = [
    ("optim.lr=1e-3", 0.001),
    ("optim.lr=3E-4", 0.0003),
    ("optim.lr=1", 1.0),
    ("run.tokens=1e9", 1_000_000_000),
    ("run.tokens=1_000_000", 1_000_000),
    ("run.tokens=1.5e9", 1_500_000_000),
    ("run.id=2026-11-21", "2026-11-21"),
    ("task.prompt=no", "no"),
    ("task.prompt='1e3'", "1e3"),
    ("optim.grad_clip=null", None),
    ("model.compile=true", True),
    ("data.source=[a, b]", ("a", "b")),
    ("data.source=a=b", "a=b"),
    ("optim.betas=[0.8, 0.9]", (0.8, 0.9)),
    ("memory.recompute=2", 2),
    ("memory.recompute=[attention]", ("attention",)),
    ("launch.slurm.partition=gpu", "gpu"),
    ("launch.slurm.signal_before_s=300", 300),
    ("launch.env={NCCL_DEBUG: INFO}", {"NCCL_DEBUG": "INFO"}),
    ("launch.volumes=[{path: /data, claim: texts}]", (Volume(path="/data", claim="texts"),)),
]


@pytest.mark.parametrize(("override", "value"), SCALARS)
def test_a_scalar_means_what_people_mean_by_it(override: str, value: object) -> None:
    recipe = load_recipe([], [override])
    found: object = recipe
    for part in override.partition("=")[0].split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize("override", [row[0] for row in SCALARS])
def test_a_dumped_recipe_loads_back_equal(tmp_path: Path, override: str) -> None:
    recipe = load_recipe([], ["model.preset=llama-tiny", override])
    text = dump_recipe(recipe)
    assert load_recipe([write(tmp_path, text)]) == recipe
    assert "weight_decay" not in text  # defaults are left out


WRONG_VALUES = [
    ("optim.lr=fast", "optim.lr='fast' is not a number above 0, or auto. (Peak learning rate"),
    ("optim.lr=-1", "optim.lr=-1 is not a number above 0, or auto."),
    ("optim.lr=.inf", "optim.lr=inf is not a number above 0"),
    ("optim.lr='3e-4'", "optim.lr='3e-4' is not a number above 0, or auto. Write it without quot"),
    ("parallel.tp=0", "parallel.tp=0 is not a whole number of at least 1."),
    ("parallel.tp=true", "parallel.tp=true is not a whole number"),
    ("parallel.strategy=full_shard", "Did you mean FULL_SHARD?"),
    ("precision.compute=bf61", "Did you mean bf16?"),
    ("run.name=My Run", "is not a name of lower-case letters, digits and inner hyphens"),
    ("run.name=My_Run 1.5b", "Did you mean my-run-1-5b?"),
    ("model.compile=yes", "model.compile='yes' is not true or false, or auto."),
    ("optim.betas=[0.9]", "is not a list of 2, each a number from 0 to below 1."),
    ("launch.slurm.signal_before_s=1", "launch.slurm.signal_before_s=1 is not a whole number of"),
    ("launch.env={A: [1]}", "launch.env={'A': [1]} is not a name and a text each."),
    ("launch.volumes=[{path: 3}]", "settings of its own (path, claim, efs, access_point, host)."),
    ("run.steps=1.5", "run.steps=1.5 is not a whole number of at least 1, or null."),
]


@pytest.mark.parametrize(("override", "words"), WRONG_VALUES)
def test_a_wrong_value_is_shown_with_what_is_accepted(override: str, words: str) -> None:
    message = refusal(override)
    assert words in message
    assert "pydantic" not in message
    assert "Input should" not in message


AS_WRITTEN = [
    "*.jsonl", "*", "**/*.txt", "&a", "&a b", "!x", "!!python/name:os", "@x", "%x", "`x`",
    "[abc].txt", "[unclosed", "{unclosed", "{a}", "a: b", ": x", "- x", "-", "#x", "a #b",
    "? x", "|", "> x", "no", "yes", "true", "1e3", "017", "1_000", "2026-11-22",
    "null hypothesis", "~/texts", " a ", "'", '"a" b', "a, b", "---", "=", "a=b", ".nan", "<<",
    "\N{GREEK SMALL LETTER ALPHA}",
]  # fmt: skip


@pytest.mark.parametrize("text", AS_WRITTEN)
@pytest.mark.parametrize("setting", ["task.prompt", "data.source", "launch.image"])
def test_a_text_in_an_override_means_what_is_written(
    setting: str, text: str, tmp_path: Path
) -> None:
    section, key = setting.split(".")
    recipe = load_recipe([], [f"{setting}={text}"])
    assert getattr(getattr(recipe, section), key) == text
    assert load_recipe([write(tmp_path, dump_recipe(recipe))]) == recipe


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("launch.image=", None),
        ("launch.image=~", None),
        ("launch.image=null", None),
        ("launch.image='null'", "null"),
        ("data.source=[a, '*.txt']", ("a", "*.txt")),
        ('task.prompt="a\\tb"', "a\tb"),
        ("task.prompt=''", ""),
        ("run.id=17", "17"),
    ],
)
def test_null_lists_and_quotes_keep_their_meaning_in_an_override(
    override: str, value: object
) -> None:
    section, _, key = override.partition("=")[0].partition(".")
    assert getattr(getattr(load_recipe([], [override]), section), key) == value


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.prompt=", "task.prompt=null is not text."),
        ("run.dir=~", "run.dir=null is not text."),
        ("run.dir=a\x1bb", "override run.dir is not YAML that can be read"),
        ("run.dir=a\udcffb", "override run.dir is not YAML that can be read"),
        ("launch.code=[*.py]", 'A text that begins with * needs quotes in YAML: "*.py".'),
        ("run.steps=[1", "The [ is not closed: add ]."),
    ],
)
def test_an_override_that_cannot_be_read_says_what_to_write(override: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        load_recipe([], [override])
    assert words in str(refused.value)


def test_a_number_in_a_file_where_a_text_belongs_says_to_quote_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match='Put it in quotes: "17"'):
        load_recipe([write(tmp_path, "run:\n  id: 17")])


@pytest.mark.parametrize("text", ["*.jsonl", "@x", "%x", "`x`", "!x", "*a"])
def test_a_text_in_a_file_that_yaml_takes_for_something_else_is_told_with_its_line(
    text: str, tmp_path: Path
) -> None:
    path = write(tmp_path, f"run: {{seed: 1}}\ndata:\n  source: {text}\n")
    with pytest.raises(RequestError) as refused:
        load_recipe([path])
    said = str(refused.value)
    assert "recipe.yaml, line 3, column 1" in said
    assert said.endswith(f'A text that begins with {text[0]} needs quotes in YAML: "{text}".')


UNKNOWN_KEYS = [
    (
        "optim.weight_dcay=1",
        "optim.weight_dcay: unknown setting. Did you mean optim.weigh",
    ),
    ("opt.lr=1", "opt: unknown section. Did you mean optim?"),
    ("optim.learning_rate=1", "Did you mean optim.lr?"),
    ("optim.seq_len=1", "Did you mean data.seq_len?"),
    ("lr=1", "lr: an override names section and setting. Did you mean optim.lr=1?"),
    ("task.zzz=1", "task has: name, loss, metrics"),
    ("launch.qqqqqq=1", "launch has: image, run_dir"),
    ("launch.slurm.partitoin=a", "Did you mean launch.slurm.partition?"),
    ("launch.slurm.zzzzzz=a", "launch.slurm has: partition, account"),
    ("launch.slurm=a", "launch.slurm: holds text, not settings. Write `launch: {slurm: {setting:"),
    ("launch.partition=a", "Did you mean launch.slurm.partition?"),
    ("model.lora=8", "Its settings: rank, alpha, dropout, targets, modules_to_save, path, rslora."),
    ("observe.wandb=true", "Its settings: project, entity, url."),
    ("optim.accumulate=4", "Did you mean optim.micro_batch=...?"),
    ("gradient_accumulation=4", "Did you mean optim.micro_batch=...?"),
    ("run.early_stopping=true", "Did you mean run.patience=3?"),
    ("tokens=10B", "Did you mean run.tokens=10B?"),
    ("max_tokens=10B", "Did you mean run.tokens=10B?"),
    ("tokens=[a, b]", "Did you mean data.add_tokens=[a, b]?"),
    ("early_stopping_patience=5", "Did you mean run.patience=5?"),
    ("data.packing=true", "Did you mean data.pack=whole?"),
    ("cluster.spot=true", "Did you mean cluster.capacity=spot?"),
    ("spot=true", "Did you mean cluster.capacity=spot?"),
    ("precision=fp8", "Did you mean precision.compute=fp8?"),
    ("wandb=true", "Did you mean observe.wandb.project=NAME?"),
    ("parallel.strategy=fsdp", "Did you mean FULL_SHARD?"),
    ("parallel.strategy=DDP", "Did you mean NO_SHARD?"),
    ("zzz.x=1", "Sections are: checkpoint, cluster"),
]


@pytest.mark.parametrize(("override", "words"), UNKNOWN_KEYS)
def test_an_unknown_key_is_refused_with_the_nearest_one(override: str, words: str) -> None:
    assert words in refusal(override)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('launch: {"slurm.partition": x}', "`launch: {slurm: {partition: value}}`"),
        ('model: {preset: llama-tiny, "lora.rank": 4}', "`model: {lora: {rank: value}}`"),
        ('model.lora: {rank: 4}', "`model: {lora: value}`"),
    ],
)  # fmt: skip
def test_a_dotted_name_in_a_file_is_told_as_sections(text: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RecipeError, match="in a file write it as") as refused:
        load_recipe([path])
    assert words in str(refused.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = "optim: {lr: fast, learning_rate: 1}\noptim.lr: 2\ncheckpoint: 3\nelastic:\n"
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as refused:
        load_recipe([path], ["run.sed=1", "parallel.pp=0"])
    message = str(refused.value)
    assert message.startswith(f"{path} has 6 problems:")
    assert "in a file write it as `optim: {lr: value}`" in message
    assert "checkpoint: holds a number, not settings." in message
    paths = {problem.path for problem in refused.value.problems}
    assert {"run.sed", "parallel.pp", "optim.learning_rate", "optim.lr"} <= paths


BAD_FILES = [
    ("run: {seed: 1}\nrun: {seed: 2}", "line 2, column 1: run is given twice, on lines 1 and 2"),
    ("run:\n  seed: 1\n  seed: 2", "line 3, column 3: seed is given twice"),
    ("run: {seed: 1", "line 1, column 14: expected ',' or '}'"),
    ("- run", "holds a list at the top, not sections"),
    ("run", "holds text at the top, not sections"),
    ("run: \x01", "is not YAML that can be read"),
    ("run: !!python/object:os.system {}", "could not determine a constructor"),
    ("data: {source: a: b}", "line 1, column"),
    ("task:\n  prompt: a: b", 'holds a colon and a space needs quotes in YAML: "a: b".'),
]


@pytest.mark.parametrize(("text", "words"), BAD_FILES)
def test_a_file_that_is_no_recipe_is_refused_with_its_place(
    tmp_path: Path, text: str, words: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RequestError, match=r"recipe .*recipe\.yaml") as refused:
        load_recipe([path])
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("examples/quickstart.yaml", r"Folder examples does not exist in .*Change to the folder"),
        ("quickstart", "Did you mean examples/quickstart.yaml"),
        ("clusters/a.us-east-1/launch.yaml", "`shardyard cluster create` writes it"),
        ("gone", "Give a YAML file"),
        ("observe.alerts.0.when=cost", r"An override .* list: 'observe.alerts=\[...\]'"),
    ],
)
def test_a_missing_recipe_says_what_is_likely_meant(
    given: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "/" not in given:
        (tmp_path / "examples").mkdir()
        write(tmp_path / "examples", "", "quickstart.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=f"recipe {given} does not exist. {words}"):
        load_recipe([given])


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    write(tmp_path, "", "quickstart.yaml")
    with pytest.raises(RequestError, match=r"does not exist. Did you mean .*quickstart.yaml\?"):
        load_recipe([tmp_path / "quikstart.yaml"])
    with pytest.raises(RequestError, match=r"is a folder. It holds quickstart.yaml. Give a YAML"):
        load_recipe([tmp_path])


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="is not UTF-8 text"):
        load_recipe([path])


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_recipe([write(tmp_path, "# nothing\n")]) == Recipe()


def test_a_credential_in_a_wrong_value_is_not_shown() -> None:
    message = refusal("optim.lr=hf_" + "a" * 30)
    assert "optim.lr=(not shown) is not a number" in message
    assert "aaaa" not in message


def test_an_override_is_told_from_a_file_by_its_form() -> None:
    assert is_override("optim.lr=3e-4")
    assert is_override("lr=3")
    assert not is_override("recipes/a=b.yaml")
    assert not is_override("recipe.yaml")
