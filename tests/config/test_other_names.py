"""What people type who come from Trainer, TRL, PEFT, torchtitan, Axolotl, DeepSpeed and others.

docs: own cases. The names are those of transformers 5 (TrainingArguments), TRL (SFTConfig), PEFT
(LoraConfig), torchtitan (JobConfig), Axolotl, DeepSpeed, accelerate, LLaMA-Factory and Lightning.
"""

import re

import pytest

from shardyard.config import other_names
from shardyard.config.load import load_recipe
from shardyard.config.schema.reference import settings
from shardyard.config.validate import override_hint
from shardyard.control.request import option_hint  # adds the tables of import
from shardyard.errors import RecipeError
from shardyard.hardware.catalogue import instance
from shardyard.importers.configs.other_names import meaning_in_tables

TYPED = {
    # plain words
    "model=llama2-7b": "model.preset=llama2-7b",
    "gpu=A100": "cluster.instance=p4d.24xlarge",
    "accelerator=gpu": "cluster.device=cuda",
    # Trainer
    "learning_rate=2e-5": "optim.lr=2e-5",
    "per_device_train_batch_size=8": "optim.micro_batch=8",
    "num_train_epochs=3": "run.epochs=3",
    "max_steps=100": "run.steps=100",
    "warmup_ratio=0.1": "optim.warmup_share=0.1",
    "weight_decay=0.1": "optim.weight_decay=0.1",
    "adam_epsilon=1e-8": "optim.eps=1e-8",
    "adam_beta2=0.95": "optim.betas=[0.9,0.95]",
    "max_grad_norm=0": "optim.grad_clip=null",
    "lr_scheduler_type=linear": "optim.schedule=linear optim.min_lr_ratio=0",
    "optim=adamw_torch_fused": "optim.name=adamw",
    "bf16=true": "precision.compute=bf16",
    "fp16=true": "precision.compute=fp16",
    "gradient_checkpointing=true": "memory.recompute=full",
    "torch_compile=true": "model.compile=true",
    "save_steps=50": "checkpoint.every=50",
    "save_total_limit=3": "checkpoint.keep_last=3",
    "eval_steps=50": "task.eval_every_steps=50",
    "eval_strategy=epoch": "task.eval_every_epochs=1",
    "logging_steps=5": "observe.log_every=5",
    "report_to=tensorboard": "observe.tensorboard=true",
    "output_dir=out": "run.dir=out",
    "seed=7": "run.seed=7",
    "load_best_model_at_end=true": "checkpoint.keep_best=true",
    "label_smoothing_factor=0.1": "task.label_smoothing=0.1",
    "model_name_or_path=meta-llama/Llama-2-7b-hf": "model.hub=meta-llama/Llama-2-7b-hf",
    "attn_implementation=flash_attention_2": "model.attention=flash",
    # TRL
    "max_length=512": "data.seq_len=512",
    "max_seq_length=512": "data.seq_len=512",
    "packing=true": "data.pack=whole",
    "dataset_text_field=content": "data.text_key=content",
    "assistant_only_loss=true": "data.loss_on=answers",
    # PEFT
    "r=8": "model.lora.rank=8",
    "lora.r=8": "model.lora.rank=8",
    "lora_alpha=16": "model.lora.alpha=16",
    "lora_dropout=0.05": "model.lora.dropout=0.05",
    "target_modules=[q_proj,v_proj]": "model.lora.targets=[q_proj,v_proj]",
    "use_rslora=true": "model.lora.rslora=true",
    # torchtitan
    "training.max_steps=10": "run.steps=10",
    "training.local_batch_size=4": "optim.micro_batch=4",
    "training.global_batch_size=64": "optim.global_batch=64",
    "training.max_norm=1.0": "optim.grad_clip=1",
    "parallelism.tensor_parallel_degree=2": "parallel.tp=2",
    "tensor_parallel_degree=2": "parallel.tp=2",
    "context_parallel_degree=2": "parallel.cp=2",
    "pipeline_parallel_degree=2": "parallel.pp=2",
    "expert_parallel_degree=2": "parallel.ep=2",
    "activation_checkpoint.mode=full": "memory.recompute=full",
    "compile.enable=true": "model.compile=true",
    # DeepSpeed, accelerate and FSDP
    "zero_stage=3": "parallel.zero=3",
    "zero_optimization.stage=2": "parallel.zero=2",
    "train_micro_batch_size_per_gpu=4": "optim.micro_batch=4",
    "train_batch_size=64": "optim.global_batch=64",
    "gradient_clipping=1.0": "optim.grad_clip=1.0",
    "offload_optimizer=true": "memory.offload=optimizer",
    "offload_optimizer.device=cpu": "memory.offload=optimizer",
    "offload_param_device=cpu": "memory.offload=params",
    "mixed_precision=bf16": "precision.compute=bf16",
    "num_processes=8": "cluster.devices=8",
    "num_machines=2": "cluster.nodes=2",
    "fsdp_sharding_strategy=SHARD_GRAD_OP": "parallel.zero=2",
    "fsdp_reshard_after_forward=true": "parallel.zero=3",
    # Axolotl
    "base_model=./llama": "model.path=./llama",
    "sequence_len=4096": "data.seq_len=4096",
    "sample_packing=true": "data.pack=whole",
    "micro_batch_size=2": "optim.micro_batch=2",
    "num_epochs=3": "run.epochs=3",
    "val_set_size=0.1": "data.eval_fraction=0.1",
    "evals_per_epoch=4": "task.eval_every_epochs=0.25",
    "train_on_inputs=false": "data.loss_on=answers",
    "flash_attention=true": "model.attention=flash",
    "lora_r=8": "model.lora.rank=8",
    "lora_modules_to_save=[lm_head]": "model.lora.modules_to_save=[lm_head]",
    'tokens=["<tool>"]': 'data.add_tokens=["<tool>"]',
    # LLaMA-Factory
    "cutoff_len=1024": "data.seq_len=1024",
    "lora_rank=8": "model.lora.rank=8",
    "template=chatml": "data.chat_template=chatml",
    "val_size=0.1": "data.eval_fraction=0.1",
    # Lightning, timm, nanoGPT, and plain words
    "trainer.max_epochs=3": "run.epochs=3",
    "precision=bf16-mixed": "precision.compute=bf16",
    "gradient_clip_val=1.0": "optim.grad_clip=1.0",
    "max_iters=100": "run.steps=100",
    "img_size=224": "data.images.size=224",
    "drop_path_rate=0.1": "model.drop_path=0.1",
    "gpus=8": "cluster.devices=8",
    "nnodes=2": "cluster.nodes=2",
    "lr=1e-4": "optim.lr=1e-4",
    "batch_size=8": "optim.global_batch=8",
    "dataset=text.jsonl": "data.source=text.jsonl",
}
"""Override as typed -> overrides that are meant."""

WORDS = {
    "sft=true": "docs/chat.md",
    "stage=sft": "docs/chat.md",
    "dpo=true": "not supported",
    "resume_from_checkpoint=last": "docs/verbs/resume.md",
    "hub_model_id=a/b": "docs/verbs/export.md",
    "push_to_hub=true": "docs/verbs/export.md",
    "deepspeed=ds.json": "docs/verbs/import.md",
    "load_in_4bit=true": "QLoRA",
    "use_dora=true": "Adapters are LoRA or rsLoRA",
    "resize_vocab=true": "grow the embedding by themselves",
    "neftune_noise_alpha=5": "not supported: noise on embeddings",
    "tf32=true": "Leave it out: fp32 products",
    "ddp_find_unused_parameters=false": "Leave it out: of torch's DDP wrapper",
    "dataloader_num_workers=4": "data.prefetch_steps",
    "fp16=false": "it is so without a setting",
    "optimizer=adamw_8bit": "optim.name is one of adamw",
}
"""Override as typed -> words on what there is instead."""


def problem_of(override: str) -> str:
    with pytest.raises(RecipeError) as refused:
        load_recipe([], [override])
    assert len(refused.value.problems) == 1
    return str(refused.value.problems[0])


@pytest.mark.parametrize(("typed", "meant"), TYPED.items())
def test_a_setting_of_another_trainer_leads_to_ours(typed: str, meant: str) -> None:
    assert f"Did you mean {meant}?" in problem_of(typed)
    load_recipe([], meant.split())  # what is pasted is accepted


@pytest.mark.parametrize(("typed", "words"), WORDS.items())
def test_a_name_without_a_setting_leads_to_what_there_is(typed: str, words: str) -> None:
    text = problem_of(typed)
    assert words in text
    assert "Did you mean" not in text


def test_options_with_dashes_lead_to_settings() -> None:
    assert option_hint("--learning-rate", "1e-4") == "Did you mean optim.lr=1e-4?"
    assert option_hint("--bf16", "") == "Did you mean precision.compute=bf16?"
    assert option_hint("--max-length", "512") == "Did you mean data.seq_len=512?"
    assert option_hint("--unheard-of", "") is None


IN_FILES = [
    ({"learning_rate": 2e-4}, "Did you mean optim.lr=0.0002?"),
    ({"sequence_len": 4096}, "Did you mean data.seq_len=4096?"),
    ({"lora": {"r": 8, "lora_alpha": 32}}, "Did you mean model.lora.rank=8 model.lora.alpha=32?"),
    ({"optim": {"warmup_ratio": 0.1}}, "Did you mean optim.warmup_share?"),
    ({"data": {"packing": True}}, "Did you mean data.pack=whole?"),
    ({"data": {"max_length": 512}}, "Did you mean data.seq_len?"),
    ({"training": {"max_steps": 5, "warmup_ratio": 0.1}}, "run.steps=5 optim.warmup_share=0.1?"),
    ({"optim": {"lr_scheduler_type": "constant_with_warmup"}}, "Did you mean optim.schedule=const"),
    ({"checkpoint": {"save_total_limit": 3}}, "Did you mean checkpoint.keep_last?"),
    ({"run": {"resume_from_checkpoint": "last"}}, "docs/verbs/resume.md"),
]


@pytest.mark.parametrize(("tree", "words"), IN_FILES)
def test_keys_of_a_file_lead_to_ours(tree: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(tree)
    assert words in str(refused.value)


def test_the_table_names_settings_that_exist_and_agrees_with_import() -> None:
    for name, setting in other_names._SAME.items():
        assert setting in settings(), name
        assert name not in settings()
        converted = meaning_in_tables(name, 3, False)
        # torchtitan called a rank's samples batch_size, for all others it is the step's
        if converted is not None and converted.settings and name != "batch_size":
            assert set(converted.settings) == {setting}, name
    for name in other_names._TRANSLATED:
        for value in (True, False, "no", 4, "wandb", ["a"]):
            found = other_names.meaning_of(name, value)
            assert found is not None
            assert found.words or set(found.settings) <= {*settings(), "run.target.loss"}, name


def test_pages_that_hints_name_exist(request: pytest.FixtureRequest) -> None:
    for words in other_names._WORDS.values():
        for page in re.findall(r"docs/[\w/-]+\.md", words):
            assert (request.config.rootpath / page).is_file(), page


def test_a_credential_is_not_shown() -> None:
    token = "hf_" + "a" * 34
    for key in ("learning_rate", "r", "bf16", "report_to", "lr_scheduler_type", "base_model"):
        assert token not in str(override_hint(key, token, token))
        assert token not in problem_of(f"{key}={token}")


@pytest.mark.parametrize(("name", "machine"), other_names.INSTANCE_WITH.items())
def test_a_machine_suggested_for_an_accelerator_has_it(name: str, machine: str) -> None:
    assert name.upper() in instance(machine).accelerator.name.upper().split()
