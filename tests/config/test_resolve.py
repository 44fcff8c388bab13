"""Every auto becomes a value with a reason; a resume keeps what is learnt."""

from dataclasses import replace

import pytest

from shardyard.config.auto import ResolveContext
from shardyard.config.formulas import lr_of
from shardyard.config.load import load_recipe
from shardyard.config.model.vocabulary import check_vocabulary
from shardyard.config.resolve import PartialResolution, check_resume, resolve, resolve_partial
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.control.attempt import length_lines
from shardyard.errors import RecipeError
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.hardware.machine import Machine

CPU = Machine(device="cpu", name="a CPU", count=1, memory_bytes=2**33, cores=6, hostname="laptop")
GPUS = Machine(device="cuda", name="a GPU", count=8, memory_bytes=2**36, cores=96, hostname="node")
DATA = DatasetMetadata(
    dir="prepared/x",
    fingerprint="f",
    vocab_size=4096,
    train_tokens=256 * 1000 + 1,  # 1,000 samples of llama-tiny's 256 tokens
    eval_tokens=256 * 10 + 1,
    train_documents=100,
    eval_documents=5,
    unigram_entropy=6.0,
)
TINY = replace(PRESETS["llama-tiny"].shape, vocab_size=4096)


def resolved(
    *overrides: str,
    machine: Machine = CPU,
    data: DatasetMetadata = DATA,
    shape: ModelShape = TINY,
    previous: Resolved | None = None,
) -> Resolved:
    recipe = load_recipe([], ["model.preset=llama-tiny", *overrides])
    return resolve(recipe, shape=shape, machine=machine, data=data, previous=previous)


def preview(preset: str, *overrides: str) -> PartialResolution:
    recipe = load_recipe([], [f"model.preset={preset}", *overrides])
    return resolve_partial(recipe, ResolveContext(shape=PRESETS[preset].shape))


def test_processes_are_parked_where_a_compiler_has_to_get_ready() -> None:
    assert resolved("model.compile=true").recipe.elastic.parked is True
    assert resolved().recipe.elastic.parked is False
    assert resolved("elastic.parked=true").recipe.elastic.parked is True
    unrepeated = resolved("model.compile=true", "elastic.max_restarts=0")
    assert unrepeated.recipe.elastic.parked is False
    assert "no restarts" in unrepeated.reasons["elastic.parked"]


@pytest.mark.parametrize(
    ("preset", "overrides", "compiles", "why"),
    [
        ("llama3-8b", [], True, "each block is one graph"),
        ("llama3-8b", ["memory.recompute=full", "precision.compute=fp8"], True, "one graph"),
        ("llama3-8b", ["parallel.tp=2"], False, "blocks that ask other ranks"),
        ("llama3-8b", ["parallel.cp=2"], False, "blocks that ask other ranks"),
        ("llama3-8b", ["parallel.pp=2", "parallel.schedule=zero-bubble"], False, "zero-bubble"),
        ("mixtral-8x7b", [], False, "a block of mixtral cannot be compiled as one graph"),
        ("llama3-8b", ["cluster.device=cpu"], False, "compiles for minutes"),
    ],
)
def test_blocks_are_compiled_where_they_are_known_to_be_one_graph(
    preset: str, overrides: list[str], compiles: bool, why: str
) -> None:
    machines = [] if "cluster.device=cpu" in overrides else ["cluster.instance=p5.48xlarge"]
    found = preview(preset, "model.compile=auto", *machines, *overrides)
    assert found.recipe.model.compile is compiles
    assert why in found.reasons["model.compile"]
    assert found.recipe.elastic.parked is compiles


@pytest.mark.parametrize(
    ("preset", "overrides", "kernel"),
    [
        ("llama3-8b", ["data.attend_across_documents=false"], "flash"),
        ("llama3-8b", ["data.pack=whole"], "flash"),
        ("llama3-8b", [], "sdpa"),
        ("phi3-mini-4k", [], "flash"),  # a window of 2,047 tokens
        ("phi3-mini-4k", ["data.seq_len=1024"], "sdpa"),
        ("llama3-8b", ["data.pack=whole", "parallel.cp=2"], "sdpa"),
        ("llama3-8b", ["data.pack=whole", "model.attention=cudnn"], "cudnn"),
        ("bert-large", ["task.name=masked_lm"], "sdpa"),
        ("llama3-8b", ["data.pack=whole", "cluster.device=cpu"], "sdpa"),
    ],
)
def test_flash_attention_is_chosen_where_it_spares_a_mask(
    preset: str, overrides: list[str], kernel: str
) -> None:
    machines = [] if "cluster.device=cpu" in overrides else ["cluster.instance=p5.48xlarge"]
    found = preview(preset, *machines, *overrides)
    assert found.recipe.model.attention == kernel
    if kernel == "flash":
        assert "it needs no mask" in found.reasons["model.attention"]


def test_snapshots_are_copied_to_a_neighbour_where_there_is_one() -> None:
    def copied(*overrides: str) -> bool | str:
        return resolved(*overrides).recipe.elastic.snapshot_neighbour

    snapshots, two = "elastic.snapshot_every=auto", "cluster.nodes=2"
    assert copied(snapshots, two) is True
    assert copied(snapshots, "elastic.max_nodes=2") is True
    assert copied(snapshots) is copied(two) is False
    assert copied(snapshots, two, "elastic.snapshot_neighbour=false") is False


ELASTIC = ("cluster.nodes=2", "elastic.min_nodes=1")


@pytest.mark.parametrize(
    ("overrides", "snapshots", "checkpoints"),
    [
        (["cluster.nodes=2"], None, 500),
        (["elastic.min_nodes=1", "elastic.max_nodes=1"], None, 500),
        (["elastic.max_nodes=4"], "auto", "auto"),
        (ELASTIC, "auto", "auto"),
        ([*ELASTIC, "elastic.snapshot_every=null", "checkpoint.every=500"], None, 500),
        ([*ELASTIC, "elastic.snapshot_every=7"], 7, "auto"),
        (["cluster.nodes=2", "elastic.snapshot_every=auto"], "auto", 500),
    ],
)
def test_where_nodes_may_change_snapshots_and_checkpoints_by_time_are_on_unless_set(
    overrides: list[str], snapshots: int | str | None, checkpoints: int | str
) -> None:
    found = resolved(*overrides)
    assert found.recipe.elastic.snapshot_every == snapshots
    assert found.recipe.checkpoint.every == checkpoints
    reasons = {
        name: found.reasons.get(name, "") for name in ("checkpoint.every", "elastic.snapshot_every")
    }
    for name, reason in reasons.items():
        asked = [each for each in overrides if each.startswith(name)]
        assert bool(reason) != bool(asked)


def test_nothing_stays_auto_and_everything_has_a_reason() -> None:
    result = resolved()
    settings = result.to_json()["settings"]
    # what launch leaves open is settled where a request is rendered
    opened = [name for name, entry in settings.items() if entry["value"] == "auto"]
    others = [name for name in opened if not name.startswith(("launch.", "data.images."))]
    # of images; and of whom a profile is taken, which follows from the ranks that there are then
    of_images = ["model.drop_path", "model.batch_norm_momentum"]
    assert others == [*of_images, "observe.profile.ranks"]
    assert Resolved.from_json(result.to_json()) == result
    given = load_recipe([], ["model.preset=llama-tiny"]).model_dump()
    autos = {f"{s}.{k}" for s, keys in given.items() if s != "phases"
             for k, v in keys.items() if v in ("auto", "elastic")}  # fmt: skip
    assert autos == {name for name in result.reasons if not name.startswith("data.images.")}
    assert all(result.reasons.values())


def test_a_cpu_gets_one_fp32_process_and_gpus_get_one_bf16_process_each() -> None:
    on_cpu, on_gpus = resolved().recipe, resolved(machine=GPUS).recipe
    assert (on_cpu.cluster.devices, on_cpu.precision.compute, on_cpu.data.workers) == (1, "fp32", 6)
    assert (on_gpus.cluster.devices, on_gpus.precision.compute) == (8, "bf16")
    assert on_gpus.precision.output == "bf16"
    assert (on_gpus.parallel.zero, on_gpus.parallel.dp_shard) == (3, 8)


@pytest.mark.parametrize("instance", ["p3dn.24xlarge", "g4dn.12xlarge"])
def test_a_device_without_bf16_gets_fp16_and_says_why(instance: str) -> None:
    result = preview("llama3.2-1b", f"cluster.instance={instance}")
    precision = result.recipe.precision
    assert (precision.compute, precision.output) == ("fp16", "fp32")
    name = "V100 32GB" if instance.startswith("p3") else "T4"
    why = result.reasons["precision.compute"]
    assert why == f"{name} has no bf16; the loss is scaled"
    here = resolved(machine=replace(GPUS, has_bf16=False))
    assert here.recipe.precision.compute == "fp16"
    assert here.reasons["precision.compute"].startswith("a GPU has no bf16")


def test_an_accelerator_nobody_has_seen_is_taken_as_the_machine_names_it() -> None:
    machine = replace(GPUS, device="acme", name="Acme One")
    result = resolved(machine=machine)
    assert (result.recipe.cluster.device, result.recipe.cluster.devices) == ("acme", 8)
    assert result.recipe.precision.compute == "bf16"
    assert Resolved.from_json(result.to_json()) == result
    with pytest.raises(RecipeError, match=r"cluster\.device=other but node has only 8 x Acme One"):
        resolved("cluster.device=other", machine=machine)


def test_an_instance_says_device_and_number_without_any_machine() -> None:
    cluster = preview("llama2-7b", "cluster.instance=p5.48xlarge", "cluster.nodes=2").recipe
    assert (cluster.cluster.device, cluster.cluster.devices) == ("cuda", 8)
    assert cluster.parallel.dp_shard == 16
    assert cluster.precision.compute == "bf16"


# Published: Llama 2 (arXiv:2307.09288) table 1 and section 2.2: 4 M tokens a step.
@pytest.mark.parametrize(
    ("preset", "lr", "global_batch"),
    [("llama2-7b", 3e-4, 1024), ("llama2-13b", 3e-4, 1024), ("llama2-70b", 1.5e-4, 1024)],
)
def test_large_models_get_the_published_rate_and_batch(
    preset: str, lr: float, global_batch: int
) -> None:
    optim = preview(preset).recipe.optim
    assert (optim.lr, optim.global_batch) == (lr, global_batch)


def test_a_small_model_gets_the_rate_of_the_scaling_law() -> None:
    # A block of llama-tiny: 2*64*64 + 2*64*32 (attention) + 3*64*172 (MLP) + 2*64 (norms) = 45,440.
    # Two of them: 0.003239 - 0.0001395 * ln(90,880) = 0.003239 - 0.0001395 * 11.417 = 0.00165
    assert preview("llama-tiny").recipe.optim.lr == pytest.approx(0.00165, abs=6e-5)


@pytest.mark.parametrize(
    ("optim", "decay", "reason"),
    [
        ([], 0.1, "as Llama 2 (arXiv:2307.09288, section 2.2)"),
        (["optim.name=sgd", "optim.lr=0.1"], 0.0, "sgd decays weights only if you set it"),
    ],
)
def test_weight_decay_is_by_optimizer(optim: list[str], decay: float, reason: str) -> None:
    recipe = load_recipe([], ["model.preset=llama-tiny", *optim])
    found = resolve_partial(recipe, ResolveContext(shape=PRESETS["llama-tiny"].shape))
    assert found.recipe.optim.weight_decay == decay
    assert found.reasons["optim.weight_decay"] == reason


@pytest.mark.parametrize(
    ("preset", "overrides", "chunk", "reason"),
    [
        ("llama-tiny", [], "none", "chunks would save less than 1 GiB"),
        ("llama3-8b", ["data.seq_len=8192"], 2048, "logits of 8,192 tokens take 5.9 GiB; in "),
        ("llama3-8b", ["data.seq_len=8192", "parallel.tp=8"], "none", "take 751.5 MiB: "),
        ("llama3-8b", ["data.seq_len=65536", "parallel.cp=8"], 2048, "logits of 8,192 tokens"),
        ("llama3-8b", ["data.seq_len=8192", "parallel.pp=2", "parallel.schedule=gpipe"], "none",
         "with gpipe a gradient of the head would wait for each micro-batch"),
        ("llama3-8b", ["data.seq_len=8192", "memory.loss_chunk=512"], 512, None),
        ("bert-large", ["task.name=masked_lm", "optim.micro_batch=64"], "none", "4,915 tokens"),
    ],
)  # fmt: skip
def test_the_loss_is_cut_into_chunks_where_logits_are_large(
    preset: str, overrides: list[str], chunk: int | str, reason: str | None
) -> None:
    found = preview(preset, "cluster.device=cuda", "cluster.devices=8", *overrides)
    assert found.recipe.memory.loss_chunk == chunk
    assert (reason or "") in found.reasons.get("memory.loss_chunk", "")


def test_loaded_weights_get_the_rate_and_batch_of_fine_tuning() -> None:
    recipe = load_recipe([], ["model.path=somewhere"])
    facts = ResolveContext(shape=PRESETS["llama2-7b"].shape, model_has_tokenizer=True)
    known = resolve_partial(recipe, facts).recipe
    assert (known.optim.lr, known.optim.global_batch) == (2e-5, 64)
    assert (known.model.weights, known.data.tokenizer) == ("load", "somewhere")


@pytest.mark.parametrize(
    ("overrides", "rate", "reason"),
    [
        (["model.path=somewhere"], 1e-6, "the default of TRL's DPOTrainer"),
        (["run.from=chat"], 1e-6, "the default of TRL's DPOTrainer"),
        (["model.path=somewhere", "model.lora.rank=8"], 1e-5, "adapters on pairs of answers"),
        (["model.path=somewhere", "task.name=reward"], 1e-5, "reward model: as TRL's example"),
        ([], lr_of(PRESETS["llama2-7b"].shape)[0], None),
    ],
)
def test_pairs_of_answers_get_rates_of_their_own_where_the_model_is_trained(
    overrides: list[str], rate: float, reason: str | None
) -> None:
    recipe = load_recipe([], ["task.name=preference", *overrides])
    facts = ResolveContext(shape=PRESETS["llama2-7b"].shape, model_has_tokenizer=True)
    found = resolve_partial(recipe, facts)
    assert found.recipe.optim.lr == rate
    assert (reason or "") in found.reasons["optim.lr"]


def test_the_context_is_cut_at_4096_tokens() -> None:
    assert preview("llama3-8b").recipe.data.seq_len == 4096
    assert preview("llama-tiny").recipe.data.seq_len == 256


LENGTHS = [
    # 1,000 samples in batches of 64: one epoch is 15.6 steps.
    ([], 16),
    (["run.epochs=2"], 32),
    (["run.epochs=0.064"], 1),
    (["run.samples=637"], 10),
    (["run.tokens=16384"], 1),
    (["run.tokens=163000"], 10),
    (["run.steps=7"], 7),
    (["run.epochs=0.7", "optim.global_batch=1"], 700),
]


@pytest.mark.parametrize(("overrides", "steps"), LENGTHS)
def test_a_length_in_any_unit_is_rounded_up_to_steps(overrides: list[str], steps: int) -> None:
    assert resolved("optim.global_batch=64", *overrides).steps == steps


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["run.epochs=0.1"],
            r"run\.epochs=0\.1: 256,001 training tokens make 1,000 samples of 256 tokens; 2 steps "
            r"of 64 samples would train 0\.128 epochs, 1\.28 times as much\. To train that, set "
            r"run\.steps=2 instead\. For the length as given: optim\.global_batch=52\.$",
        ),
        (["run.samples=65"], r"=65; 2 steps of 64 samples would train 128 samples, 1\.97 times"),
        (["run.tokens=16385"], r"=16385; 2 steps of 64 samples would train 32,768 tokens, 2 times"),
        (
            ["run.epochs=0.064", "optim.global_batch=100", "optim.micro_batch=100"],
            "batch=64 optim.mi",
        ),
    ],
)
def test_a_length_that_rounding_makes_much_longer_is_rejected(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        resolved("optim.global_batch=64", "optim.micro_batch=1", *overrides)


def test_an_open_batch_makes_whole_steps_of_the_length() -> None:
    found = resolved(data=replace(DATA, train_tokens=256 * 100 + 1))
    assert (found.recipe.optim.global_batch, found.steps) == (52, 2)


def test_a_length_that_is_rounded_is_reported_with_both_numbers() -> None:
    assert length_lines(resolved("optim.global_batch=64")) == [
        "length: 1,000 samples are asked for, and 16 steps of 64 train 1,024 (1.024 epochs)"
    ]


def test_warmup_and_decay_follow_the_length() -> None:
    optim = resolved("run.steps=100").recipe.optim
    assert (optim.warmup_steps, optim.decay_steps) == (10, 100)
    assert resolved("run.steps=1e5").recipe.optim.warmup_steps == 2000
    trial = resolved("run.steps=5", "optim.warmup_steps=100").recipe.optim
    assert trial.decay_steps == 101


# global batch, ranks -> the largest power of two within 4,096 tokens that makes no rank do more
@pytest.mark.parametrize(
    ("global_batch", "ranks", "micro_batch"), [(32, 2, 16), (32, 3, 1), (30, 4, 8), (4, 4, 1)]
)
def test_the_micro_batch_leaves_no_rank_idle(
    global_batch: int, ranks: int, micro_batch: int
) -> None:
    overrides = f"optim.global_batch={global_batch}", f"cluster.devices={ranks}"
    assert resolved(*overrides).recipe.optim.micro_batch == micro_batch


def test_a_small_data_set_makes_a_small_batch() -> None:
    data = replace(DATA, train_tokens=256 * 10 + 1)
    assert resolved(data=data).recipe.optim.global_batch == 10


def test_the_run_is_named_after_its_file() -> None:
    recipe = load_recipe([], ["model.preset=llama-tiny"])
    result = resolve(recipe, shape=TINY, machine=CPU, data=DATA, name="My first_run (2)")
    assert result.recipe.run.name == "my-first-run-2"


def test_what_is_not_known_yet_says_when_it_will_be() -> None:
    result = preview("llama-tiny")
    assert result.recipe.data.workers == "auto"
    assert result.reasons["data.workers"] == "known once training starts on a machine"
    assert result.reasons["parallel.dp_shard"] == "known once the number of devices is"
    assert (result.steps, result.steps_reason) == (None, "known once the data is prepared")


MISFITS = [
    (["data.seq_len=512"], DATA, "data.seq_len=512 is more than the model's context of 256"),
    ([], replace(DATA, vocab_size=5000), "5,000 tokens, the model's embedding has 4,096 rows"),
    (["cluster.devices=2"], replace(DATA, train_tokens=200), "make 1 samples of 256 tokens, fewer"),
    (["cluster.devices=65", "optim.global_batch=64"], DATA, "fewer samples than the 65"),
    (
        ["run.target.bits_per_byte=2"],
        DATA,
        ("the size in bytes of the validation split in prepared/x is not known"),
    ),
    (["task.eval_every_steps=1"], replace(DATA, eval_tokens=0), "eval_fraction=0.05 leaves no"),
    (["cluster.device=cuda"], DATA, "cluster.device=cuda but laptop has only 1 x a CPU (cpu)"),
    (
        ["parallel.cp=2", "cluster.devices=2", "data.seq_len=254"],
        DATA,
        "parallel.cp=2 needs samples of a multiple of 4 tokens, and data.seq_len is 254.",
    ),
    (
        ["parallel.tp=4", "cluster.devices=4"],
        DATA,
        "parallel.tp=4 does not divide the model's 4 heads and 2 key-value heads.",
    ),
    (["parallel.dp_shard=2"], DATA, "parallel.dp_shard=2 does not divide the 1 data-parallel"),
]


@pytest.mark.parametrize(("overrides", "data", "words"), MISFITS)
def test_what_does_not_fit_together_is_refused(
    overrides: list[str], data: DatasetMetadata, words: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        resolved(*overrides, data=data)
    assert words in str(refused.value)


def test_more_devices_than_the_machine_has_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"cluster.devices=9 but node has 8 x a GPU.* at most 8"):
        resolved("cluster.devices=9", machine=GPUS)


def test_a_recipe_for_an_instance_says_how_to_try_it_here() -> None:
    with pytest.raises(RecipeError, match=r"cluster.device=cpu with cluster.instance=null"):
        resolved("cluster.instance=p5.48xlarge")


def test_a_resume_keeps_its_schedule_when_it_gets_longer() -> None:
    before = resolved("run.steps=100")
    after = resolved("run.steps=200", "cluster.devices=4", previous=before)
    assert (after.steps, after.recipe.optim.decay_steps) == (200, 100)
    assert after.recipe.optim.warmup_steps == 10
    assert after.reasons["optim.decay_steps"] == "as the run began"
    assert after.recipe.parallel.dp_shard == 4


def test_a_resume_that_changes_what_is_learnt_names_each_setting_old_and_new() -> None:
    before = resolved("run.steps=100", "optim.lr=1e-3")
    with pytest.raises(RecipeError) as refused:
        resolved("run.steps=100", "optim.lr=2e-3", "run.seed=1", previous=before)
    message = str(refused.value)
    assert message.startswith("resume has 2 problems:")
    assert "optim.lr: 0.001 -> 0.002 changes what is learnt." in message
    assert "run.seed: 0 -> 1" in message
    line = "`shardyard train RECIPE run.from=run run.seed=1 optim.lr=0.002`"
    assert f"or start a new run from its weights: {line}. A resume may change the length" in message


def test_a_resume_on_other_data_is_refused() -> None:
    before = resolved()
    now = replace(before, data=replace(DATA, fingerprint="g"))
    with pytest.raises(RecipeError, match="data: 'f' -> 'g'"):
        check_resume(before, now)


def test_a_token_that_begins_documents_is_resolved_with_its_reason() -> None:
    trained, found = resolved(), resolved(data=replace(DATA, bos_token="<s>"))
    assert (trained.recipe.data.bos, found.recipe.data.bos) == (False, True)
    assert trained.reasons["data.bos"].startswith("trained here: the end of one document is where")
    assert found.reasons["data.bos"].startswith("the tokenizer puts <s> before a text")
    assert "before a text" in resolved("data.tokenizer=some/model").reasons["data.bos"]


def of_before_data_bos(run: Resolved) -> Resolved:
    """A run's resolved.json as it was written before there was such a setting, read again."""
    content = run.to_json()
    del content["settings"]["data.bos"], content["data"]["bos_token"]
    return Resolved.from_json(content)


def test_a_run_of_before_goes_on_without_a_token_that_begins_documents() -> None:
    before = of_before_data_bos(resolved("data.tokenizer=some/llama"))
    assert (before.recipe.data.bos, before.data.bos_token) == (False, None)
    after = resolved("data.tokenizer=some/llama", previous=before)
    assert after.recipe.data.bos is False
    assert after.reasons["data.bos"] == "as the run began"
    with pytest.raises(RecipeError, match=r"data\.bos: False -> True changes what is learnt"):
        resolved("data.tokenizer=some/llama", "data.bos=true", previous=before)


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ("auto", "it is another model's tokenizer. Use the model's own: copy its tokenizer.json"),
        ("train", "Use a smaller vocabulary: data.vocab_size=512."),
        ("gpt2", "and set data.tokenizer=auto."),
    ],
)
def test_a_tokenizer_that_is_too_large_gets_the_remedy_that_fits(
    tokenizer: str, words: str
) -> None:
    (found,) = check_vocabulary(tokenizer=tokenizer, vocab_size=514, rows=512)
    assert words in str(found)
