"""What other converters get wrong, one by one; and how several files become one job."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import RequestError
from shardyard.importers.configs.convert import Imported, import_files
from shardyard.importers.configs.rules import OutcomeKind

SAID = ["model.preset=llama2-7b", "data.source=./text"]


class Files:
    """Files of a job, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[Path] = []

    def add(self, name: str, content: Any) -> "Files":
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
        self.paths.append(path)
        return self

    def take(self, *words: str, without: tuple[str, ...] = ()) -> Imported:
        return import_files(self.paths, [*SAID, *words], without)

    def recipe(self, *words: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
        """The recipe's settings by dotted name."""
        imported = self.take(*words, without=without)
        assert [str(problem) for problem in imported.errors] == []
        return {
            f"{section}.{key}": value
            for section, content in imported.recipe.items()
            for key, value in content.items()
        }


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def script(*lines: str) -> str:
    return "\n".join(["#!/bin/bash", *lines, ""])


def outcome(imported: Imported, key: str) -> tuple[OutcomeKind, str]:
    found = next(each for each in imported.outcomes if each.entry.path == key)
    return found.result.kind, found.result.words


@pytest.mark.parametrize(
    ("written", "limit"),
    [
        ("90", "90min"), ("90:30", "91min"), ("24:00:00", "1d"), ("1-12", "36h"),
        ("2-00:00:00", "2d"), ("01:59:00", "119min"), ("1-00:30", "1470min"),
    ],
)  # fmt: skip
def test_time_is_a_wall_limit_and_no_idle_stop(files: Files, written: str, limit: str) -> None:
    files.add("job.sh", script(f"#SBATCH -t {written}", "torchrun --nproc_per_node=8 train.py"))
    recipe = files.recipe()
    assert recipe["launch.time_limit"] == limit
    assert "launch.stop_idle_after" not in recipe


def test_a_bare_srun_of_python_is_one_process_on_each_node(files: Files) -> None:
    recipe = files.add("job.sh", script("#SBATCH -N 4", "srun python train.py")).recipe()
    assert (recipe["cluster.nodes"], recipe["cluster.devices"]) == (4, 1)


def test_tasks_of_a_node_are_processes_where_srun_starts_python(files: Files) -> None:
    lines = ("#SBATCH -N 4", "#SBATCH --ntasks-per-node=8", "srun python train.py")
    recipe = files.add("job.sh", script(*lines)).recipe()
    assert (recipe["cluster.nodes"], recipe["cluster.devices"]) == (4, 8)


def test_one_task_for_each_node_may_be_said_to_srun(files: Files) -> None:
    lines = ("#SBATCH -N 2", "#SBATCH --ntasks-per-node=8")
    start = "srun --ntasks-per-node=1 torchrun --nproc_per_node=8 train.py"
    assert files.add("job.sh", script(*lines, start)).recipe()["cluster.devices"] == 8


@pytest.mark.parametrize(
    "value", ["$SLURM_NNODES", "${SLURM_JOB_NUM_NODES}", "$N", "${M:-3}", "$((1 * N))"]
)
def test_variables_that_the_script_or_slurm_says_are_put_in(files: Files, value: str) -> None:
    lines = ("#SBATCH --nodes=3", "N=3", f"srun torchrun --nnodes={value} --nproc_per_node=2 t.py")
    assert files.add("job.sh", script(*lines)).recipe()["cluster.nodes"] == 3


def test_a_start_in_quotes_and_options_in_an_array_are_read(files: Files) -> None:
    lines = (
        "#SBATCH -N 2", "ARGS=(", "  --num_train_epochs 2  # so many", "  --learning_rate 1e-4",
        ")",
        'srun bash -c "torchrun --nnodes=2 --nproc_per_node=8 t.py ${ARGS[@]}"',
    )  # fmt: skip
    recipe = files.add("job.sh", script(*lines)).recipe()
    assert (recipe["run.epochs"], recipe["optim.lr"]) == (2.0, 1e-4)


def test_an_elastic_torchrun_keeps_its_limits(files: Files) -> None:
    files.add("run.sh", "torchrun --nnodes=1:4 --nproc_per_node=8 --max_restarts=5 t.py\n")
    recipe = files.recipe()
    assert recipe["cluster.nodes"] == recipe["elastic.max_nodes"] == 4
    assert (recipe["elastic.min_nodes"], recipe["elastic.max_restarts"]) == (1, 5)
    # so snapshots and checkpoints by time are on
    assert not {"elastic.snapshot_every", "checkpoint.every"} & set(recipe)


def test_options_that_a_launch_passes_on_are_kept(files: Files) -> None:
    lines = ("#SBATCH --exclude=node7", "#SBATCH --mail-type END,FAIL", "torchrun t.py")
    slurm = files.add("job.sh", script(*lines)).recipe()["launch.slurm"]
    assert slurm["options"] == {"exclude": "node7", "mail-type": "END,FAIL"}


FSDP1 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": True,
    "fsdp_offload_params": False,
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": False,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
}


def accelerate(**content: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 16,
            "num_machines": 2, **content}  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("FULL_SHARD", {"zero": 3}), ("SHARD_GRAD_OP", {"zero": 2}), ("NO_SHARD", {"dp_shard": 1}),
        ("HYBRID_SHARD", {"strategy": "HYBRID_SHARD"}), (1, {"zero": 3}),
    ],
)  # fmt: skip
def test_every_key_of_fsdp_1_is_accounted_for(
    files: Files, strategy: object, settings: dict[str, object]
) -> None:
    part = {**FSDP1, "fsdp_sharding_strategy": strategy}
    imported = files.add("a.json", accelerate(fsdp_config=part)).take()
    assert imported.errors == ()
    assert imported.recipe["parallel"] == settings
    for key in ("fsdp_forward_prefetch", "fsdp_backward_prefetch", "fsdp_use_orig_params",
                "fsdp_sync_module_states"):  # fmt: skip
        assert outcome(imported, f"fsdp_config.{key}")[0] is OutcomeKind.NONE


@pytest.mark.parametrize(("reshard", "zero"), [(True, 3), (False, 2), ("true", 3)])
def test_fsdp_2_says_it_by_whether_parameters_are_resharded(
    files: Files, reshard: object, zero: int
) -> None:
    part = {"fsdp_version": 2, "fsdp_reshard_after_forward": reshard}
    assert files.add("a.json", accelerate(fsdp_config=part)).recipe()["parallel.zero"] == zero


def test_processes_of_accelerate_are_of_all_machines(files: Files) -> None:
    recipe = files.add("a.json", accelerate(fsdp_config={"fsdp_version": 2})).recipe()
    assert (recipe["cluster.nodes"], recipe["cluster.devices"]) == (2, 8)


def test_a_section_that_accelerate_does_not_read_says_nothing(files: Files) -> None:
    part = accelerate(deepspeed_config={"zero_stage": 2}, fsdp_config={"fsdp_version": 2})
    imported = files.add("a.json", part).take()
    assert outcome(imported, "deepspeed_config.zero_stage") == (
        OutcomeKind.NONE, "read only with DEEPSPEED",
    )  # fmt: skip


def test_the_line_of_accelerate_wins_over_its_file(files: Files) -> None:
    files.add("a.json", accelerate(num_machines=1, num_processes=8, distributed_type="MULTI_GPU"))
    files.add("run.sh", "accelerate launch --config_file a.json --num_processes 2 train.py\n")
    assert files.recipe()["cluster.devices"] == 2


def job(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "job"},
            "spec": spec}  # fmt: skip


def replicas(count: int, **pod: Any) -> dict[str, Any]:
    one = {"name": "pytorch", "image": "image:1", **pod.pop("container", {})}
    return {"replicas": count, "template": {"spec": {"containers": [one], **pod}}}


def test_the_master_is_a_node_and_auto_is_all_devices(files: Files) -> None:
    files.add("j.json", job(nprocPerNode="auto", pytorchReplicaSpecs={
        "Master": replicas(1), "Worker": replicas(3)}))  # fmt: skip
    recipe = files.recipe()
    assert recipe["cluster.nodes"] == 4
    assert "cluster.devices" not in recipe
    assert recipe["launch.kubernetes"]["target"] == "pytorchjob"


def test_volumes_environment_and_limits_of_a_pod_come_along(files: Files) -> None:
    container = {
        "env": [
            {"name": "NCCL_DEBUG", "value": "INFO"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
        ],
        "resources": {"limits": {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 4}},
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"}, {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "command": ["torchrun", "train.py", "--num_train_epochs", "2"],
    }  # fmt: skip
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "shared"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "128Gi"}},
    ]
    pod = replicas(2, container=container, volumes=volumes)
    files.add("j.json", job(runPolicy={"activeDeadlineSeconds": 7200},
                            pytorchReplicaSpecs={"Worker": pod}))  # fmt: skip
    recipe = files.recipe()
    assert recipe["launch.volumes"] == [{"path": "/data", "claim": "shared"}]
    assert recipe["launch.env"] == {"NCCL_DEBUG": "INFO"}
    assert recipe["secrets.TOKEN"] == "k8s:hf/token"
    assert (recipe["cluster.devices"], recipe["launch.time_limit"]) == (8, "2h")
    assert recipe["launch.kubernetes"]["shared_memory_gib"] == 128
    assert recipe["run.epochs"] == 2.0


TRAINER = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True,
           "learning_rate": 1e-5, "max_grad_norm": 0.5}  # fmt: skip
DEEPSPEED = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3},
}  # fmt: skip


def test_auto_is_what_the_trainer_says_elsewhere(files: Files) -> None:
    files.add("args.json", {**TRAINER, "deepspeed": "ds.json"}).add("ds.json", DEEPSPEED)
    recipe = files.recipe("cluster.devices=8")
    assert (recipe["optim.global_batch"], recipe["optim.micro_batch"]) == (64, 2)
    assert (recipe["optim.grad_clip"], recipe["precision.compute"]) == (0.5, "bf16")
    assert recipe["parallel.zero"] == 3


def test_what_the_trainer_does_without_being_told_is_written_down(files: Files) -> None:
    recipe = files.add("args.json", TRAINER).recipe()
    assert recipe["optim.betas"] == [0.9, 0.999]
    assert (recipe["optim.schedule"], recipe["optim.min_lr_ratio"]) == ("linear", 0.0)
    assert (recipe["optim.warmup_steps"], recipe["run.epochs"]) == (0, 3.0)
    assert recipe["optim.batch_per_device"] == 8


def test_a_value_of_the_command_line_wins_and_silences_contradictions(files: Files) -> None:
    files.add("args.json", TRAINER)
    files.add("ds.json", {**DEEPSPEED, "gradient_clipping": 2.0})
    assert [problem.path for problem in files.take().errors] == ["optim.grad_clip"]
    imported = files.take("optim.grad_clip=1.5")
    assert imported.errors == ()
    assert re.search(r"  grad_clip: 1.5 +# given on the command line\n", imported.text)


@pytest.mark.parametrize(
    ("fp16", "settings"),
    [
        ({"enabled": True, "loss_scale": 0}, {"compute": "fp16"}),
        ({"enabled": True, "loss_scale": 128}, {"compute": "fp16", "loss_scale": 128.0}),
        ({"enabled": False, "loss_scale": 128}, {"compute": "fp32"}),
    ],
)
def test_the_loss_scale_of_fp16_is_dynamic_or_fixed(
    files: Files, fp16: dict[str, Any], settings: dict[str, Any]
) -> None:
    files.add("ds.json", {"train_batch_size": 8, "fp16": fp16})
    assert files.take().recipe["precision"] == settings


def test_micro_batch_accumulation_and_ranks_make_the_batch(files: Files) -> None:
    part = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4}  # fmt: skip
    files.add("ds.json", part)
    assert files.recipe("cluster.devices=8")["optim.global_batch"] == 64
    problems = files.take("cluster.devices=4").errors
    assert [problem.path for problem in problems] == ["optim.global_batch"]
    assert "=64 is not 2 optim.micro_batch x 4 micro-batches of one rank" in problems[0].text


def test_offloading_of_deepspeed(files: Files) -> None:
    part = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    files.add("ds.json", {"train_batch_size": 8, "zero_optimization": part})
    assert files.recipe()["memory.offload"] == "optimizer"
    part["offload_param"] = {"device": "cpu"}
    files.paths.clear()
    files.add("ds.json", {"train_batch_size": 8, "zero_optimization": part})
    assert files.recipe()["memory.offload"] == "params"


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
steps = 100
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 2
pipeline_parallel_schedule = "Interleaved1F1B"
"""


def test_torchtitan_leaves_a_degree_open_and_cuts_the_batch_of_a_pipeline(files: Files) -> None:
    recipe = files.add("train.toml", TITAN).recipe("cluster.devices=8", "cluster.nodes=2")
    assert "parallel.dp_shard" not in recipe
    assert (recipe["parallel.tp"], recipe["parallel.pp"]) == (2, 2)
    assert (recipe["parallel.schedule"], recipe["parallel.virtual_stages"]) == ("interleaved", 2)
    assert (recipe["optim.micro_batch"], recipe["optim.global_batch"]) == (2, 32)


def test_every_problem_is_told_at_once(files: Files) -> None:
    lines = ("#SBATCH --array=1-4", "#SBATCH --nodes=2", "#SBATCH --frob", "torchrun t.py")
    files.add("job.sh", script(*lines))
    imported = import_files(files.paths, [])
    told = {problem.path.partition(": ")[2] or problem.path for problem in imported.errors}
    assert told == {"sbatch.array", "sbatch.frob", "start.program", "model", "data.source"}
    assert imported.text == ""


def test_lines_say_where_they_came_from(files: Files) -> None:
    files.add("ds.json", {"train_batch_size": 8, "zero_optimization": {"stage": 2}})
    origin = re.escape(f"# {files.paths[0]}: zero_optimization.stage, line 4")
    assert re.search(rf"\n  zero: 2 +{origin}\n", files.take().text)


def test_a_second_start_is_refused_wherever_it_stands(files: Files) -> None:
    files.add("job.sh", "torchrun --nproc_per_node=8 a.py && torchrun --nproc_per_node=8 b.py\n")
    assert any("start.program#2" in problem.path for problem in files.take().errors)


def test_assignments_before_a_start_are_its_environment(files: Files) -> None:
    files.add("job.sh", 'NCCL_DEBUG="INFO" OMP_NUM_THREADS=4 torchrun --nproc_per_node=2 t.py\n')
    recipe = files.recipe()
    assert recipe["launch.env"] == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}
    assert recipe["cluster.devices"] == 2


def test_directives_behind_the_first_command_are_not_read(files: Files) -> None:
    lines = ("#SBATCH --nodes=1", "echo hello", "#SBATCH --nodes=7", "srun torchrun t.py")
    imported = files.add("job.sh", script(*lines)).take()
    assert imported.recipe["cluster"] == {"devices": 1}
    assert outcome(imported, "unread.--nodes=7")[0] is OutcomeKind.NONE


@pytest.mark.parametrize(
    ("of_trainer", "of_accelerate", "compute"),
    [
        ({"bf16": True}, "fp16", "bf16"), ({"bf16": False}, "fp16", "fp16"), ({}, "bf16", "bf16"),
        ({"fp16": True}, "no", "fp16"), ({}, "no", "fp32"),
    ],
)  # fmt: skip
def test_precision_of_the_trainer_wins_over_that_of_accelerate(
    files: Files, of_trainer: dict[str, bool], of_accelerate: str, compute: str
) -> None:
    arguments = {key: value for key, value in TRAINER.items() if key != "bf16"}
    files.add("args.json", {**arguments, **of_trainer})
    files.add("a.json", accelerate(mixed_precision=of_accelerate, fsdp_config={"fsdp_version": 2}))
    assert files.recipe()["precision.compute"] == compute


@pytest.mark.parametrize("value", [True, 2.5, "many", [1], {"a": 1}, None, "${N}"])
def test_a_value_of_another_kind_is_told_and_never_guessed(files: Files, value: object) -> None:
    files.add("ds.json", {"train_batch_size": 8, "train_micro_batch_size_per_gpu": value,
                          "zero_optimization": {"stage": value}})  # fmt: skip
    imported = files.take()
    assert imported.recipe.get("optim", {}).get("micro_batch") is None
    assert value is None or imported.errors


@pytest.mark.parametrize("name", ["a.json", "j.json", "args.json", "train.json", "ds.json"])
def test_no_value_anywhere_makes_it_fall_over(files: Files, name: str) -> None:
    """Each source, with each of its values replaced by values of other kinds."""
    sources = {
        "a.json": accelerate(fsdp_config=dict(FSDP1)),
        "j.json": job(nprocPerNode="8", elasticPolicy={"rdzvBackend": "etcd", "minReplicas": 1},
                      pytorchReplicaSpecs={"Worker": replicas(2)}),
        "args.json": {**TRAINER, "fsdp": "full_shard", "warmup_ratio": 0.1, "eval_steps": 5},
        "train.json": {"training": {"local_batch_size": 8, "steps": 1},
                       "parallelism": {"pipeline_parallel_degree": 2}, "model": {"name": "x"}},
        "ds.json": DEEPSPEED,
    }  # fmt: skip
    odds: list[Any] = [True, -1, 1.5, "x", [], {}, [{"a": 1}], None, 10**30]
    for odd in odds:
        files.paths.clear()
        files.add(name, replaced(sources[name], odd))
        try:
            files.take()
        except RequestError as error:
            assert "is not a configuration of a known" in str(error)


def replaced(content: Any, odd: Any) -> Any:
    """Every value but the words by which a source is recognised."""
    kept = ("apiVersion", "kind")
    if isinstance(content, dict):
        return {key: each if key in kept else replaced(each, odd) for key, each in content.items()}
    return odd


def test_a_script_that_starts_nothing_asks_for_the_one_that_does(files: Files) -> None:
    files.add("job.sbatch", script("#SBATCH -N 2", "srun ./run.sh"))
    assert [problem.path.endswith(": start") for problem in files.take().errors] == [True]
    files.add("run.sh", "torchrun --nnodes=2 --nproc_per_node=4 train.py\n")
    assert files.recipe()["cluster.devices"] == 4


@pytest.mark.parametrize(
    "line",
    [
        "cd src && torchrun --nproc_per_node=4 train.py",
        "export A=1; torchrun --nproc_per_node=4 train.py",
        "srun --no-such-flag torchrun --nproc_per_node=4 train.py",
        "srun bash -c 'cd src; torchrun --nproc_per_node=4 train.py'",
        "time python3 -u -m torch.distributed.run --nproc-per-node 4 train.py",
    ],
)
def test_a_start_is_found_behind_other_words(files: Files, line: str) -> None:
    files.add("job.sh", script("#SBATCH -N 1", line))
    imported = files.take(without=("srun.no-such-flag",) if "no-such" in line else ())
    assert imported.recipe["cluster"] == {"devices": 4}


def test_words_that_only_name_a_program_start_nothing(files: Files) -> None:
    lines = ("pip install deepspeed accelerate torch", "echo it is deepspeed here",
             "torchrun --nproc_per_node=4 train.py")  # fmt: skip
    assert files.add("job.sh", script(*lines)).recipe()["cluster.devices"] == 4


def test_a_variable_cannot_grow_without_end(files: Files) -> None:
    lines = ["A=xxxxxxxxxxxxxxxx", *["A=$A$A$A$A"] * 12, "torchrun --nproc_per_node=2 $A"]
    assert files.add("job.sh", script(*lines)).recipe()["cluster.devices"] == 2


def test_the_trainer_and_deepspeed_begin_their_schedules_earlier(files: Files) -> None:
    arguments = {"max_steps": 20, "learning_rate": 1e-4, "per_device_train_batch_size": 2,
                 "lr_scheduler_type": "cosine", "deepspeed": "ds.json"}  # fmt: skip
    files.add("arguments.json", arguments).add("ds.json", {"zero_optimization": {"stage": 2}})
    assert files.recipe("optim.global_batch=4")["optim.schedule_from"] == 0
    arguments["lr_scheduler_type"] = "constant"
    files.folder.joinpath("arguments.json").write_text(json.dumps(arguments))
    assert "optim.schedule_from" not in files.recipe("optim.global_batch=4")


def test_a_schedule_of_deepspeed_begins_with_two_steps_at_its_least(files: Files) -> None:
    own = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 5}}
    arguments = {"max_steps": 20, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
                 "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5,
                 "deepspeed": "ds.json"}  # fmt: skip
    files.add("ds.json", {"zero_optimization": {"stage": 2}, "scheduler": own})
    files.add("arguments.json", arguments)
    assert files.recipe("optim.global_batch=4")["optim.schedule_from"] == -1


def test_an_optimizer_of_deepspeed_decays_norms_and_the_trainers_own_does_not(
    files: Files,
) -> None:
    arguments = {"max_steps": 20, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
                 "weight_decay": 0.1, "deepspeed": "ds.json"}  # fmt: skip
    content: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    files.add("arguments.json", arguments).add("ds.json", content)
    assert "optim.decay_vectors" not in files.recipe("optim.global_batch=4")
    content["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    files.folder.joinpath("ds.json").write_text(json.dumps(content))
    assert files.recipe("optim.global_batch=4")["optim.decay_vectors"] is True


def test_lion_has_the_betas_that_its_framework_gives_it_and_no_epsilon(files: Files) -> None:
    arguments = {"max_steps": 20, "per_device_train_batch_size": 2, "learning_rate": 1e-4,
                 "optim": "lion_32bit"}  # fmt: skip
    files.add("arguments.json", arguments)
    recipe = files.recipe("optim.global_batch=4")
    assert (recipe["optim.name"], recipe["optim.betas"]) == ("lion", [0.9, 0.999])  # adam_beta2
    assert "optim.eps" not in recipe
    del arguments["optim"]
    arguments["deepspeed"] = "ds.json"
    files.folder.joinpath("arguments.json").write_text(json.dumps(arguments))
    own = {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}
    files.add("ds.json", {"zero_optimization": {"stage": 2}, "optimizer": own})
    recipe = files.recipe("optim.global_batch=4")
    assert recipe["optim.name"] == "lion" and recipe["optim.decay_vectors"] is True
    # FusedLion's own default, which is the recipe's
    assert recipe.get("optim.betas", [0.9, 0.99]) == [0.9, 0.99] and "optim.eps" not in recipe


@pytest.mark.parametrize("chosen", [{"optim": "adafactor"}, {"adafactor": True}])
def test_adafactor_has_the_rate_of_the_schedule_and_no_betas(
    files: Files, chosen: dict[str, Any]
) -> None:
    arguments = {"max_steps": 50, "per_device_train_batch_size": 2, "learning_rate": 1e-3, **chosen}
    recipe = files.add("arguments.json", arguments).recipe("optim.global_batch=4")
    assert (recipe["optim.name"], recipe["optim.lr"]) == ("adafactor", 1e-3)
    assert recipe["optim.weight_decay"] == 0
    assert "optim.betas" not in recipe and "optim.eps" not in recipe


def test_schedule_free_adamw_warms_up_by_itself_and_takes_no_decay(files: Files) -> None:
    arguments = {"max_steps": 50, "per_device_train_batch_size": 2, "warmup_steps": 5,
                 "optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}  # fmt: skip
    recipe = files.add("arguments.json", arguments).recipe("optim.global_batch=4")
    assert (recipe["optim.name"], recipe["optim.warmup_steps"]) == ("schedule_free_adamw", 5)
    assert recipe["optim.betas"] == [0.9, 0.999]
    assert "optim.schedule_from" not in recipe  # its first step has a rate
    arguments["lr_scheduler_type"] = "cosine"
    files.folder.joinpath("arguments.json").write_text(json.dumps(arguments))
    (problem,) = files.take("optim.global_batch=4").errors
    assert str(problem).endswith("Give optim.schedule=constant, which keeps the warm-up.")


def test_a_share_of_warm_up_is_rounded_otherwise_by_the_trainer(files: Files) -> None:
    arguments = {"max_steps": 50, "per_device_train_batch_size": 2, "warmup_ratio": 0.03}
    imported = files.add("arguments.json", arguments).take()
    assert imported.recipe["optim"]["warmup_share"] == 0.03
    assert "the Trainer rounds up" in outcome(imported, "warmup_ratio")[1]


def test_torchtitan_decays_norms_and_falls_a_step_later(files: Files) -> None:
    lines = (
        "[model]", 'name = "llama3"', 'flavor = "8B"', "[optimizer]", 'name = "AdamW"', "lr = 1e-4",
        "[lr_scheduler]", "warmup_steps = 0", "[training]", "steps = 10",
    )  # fmt: skip
    files.add("train.toml", "\n".join(lines))
    recipe = files.recipe("cluster.devices=8")
    assert recipe["optim.decay_vectors"] is True
    assert recipe["optim.schedule_from"] == 0


def test_under_deepspeed_gradients_are_clipped_by_its_own_key_alone(files: Files) -> None:
    arguments = {"max_steps": 20, "per_device_train_batch_size": 2, "max_grad_norm": 0.5,
                 "deepspeed": "ds.json"}  # fmt: skip
    content: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    files.add("arguments.json", arguments).add("ds.json", content)
    assert files.recipe("optim.global_batch=4")["optim.grad_clip"] == 1.0
    assert "older DeepSpeed does not clip" in files.take("optim.global_batch=4").text
    kind, words = outcome(files.take("optim.global_batch=4"), "max_grad_norm")
    assert (kind, words[:9]) == (OutcomeKind.NONE, "DeepSpeed")
    content["gradient_clipping"] = "auto"
    files.folder.joinpath("ds.json").write_text(json.dumps(content))
    assert files.recipe("optim.global_batch=4")["optim.grad_clip"] == 0.5


def test_a_linear_warm_up_of_deepspeed_has_two_steps_at_least(files: Files) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_type": "linear"}}
    files.add("ds.json", {"train_batch_size": 8, "scheduler": scheduler})
    assert files.recipe()["optim.warmup_steps"] == 2


def test_any_way_to_say_the_model_settles_a_model_that_is_refused(files: Files) -> None:
    files.add("train.toml", '[model]\nname = "llama3"\nflavor = "debugmodel"\n[training]\n'
              'steps = 4\nlocal_batch_size = 1\n[lr_scheduler]\nwarmup_steps = 0\n')  # fmt: skip
    said = ["data.source=./text", "cluster.devices=2"]
    assert "debugmodel" in str(import_files(files.paths, said).errors[0])
    imported = import_files(files.paths, [*said, "model.path=/models/tiny"])
    assert outcome(imported, "model.name") == (OutcomeKind.NONE, "model.path of the command line")


def test_settings_of_deepspeed_among_the_arguments_clip_by_their_own_key_too(files: Files) -> None:
    arguments = {"max_steps": 20, "per_device_train_batch_size": 2, "max_grad_norm": 0.5,
                 "deepspeed": {"zero_optimization": {"stage": 2}}}  # fmt: skip
    files.add("arguments.json", arguments)
    assert files.recipe("optim.global_batch=4")["optim.grad_clip"] == 1.0
    assert "older DeepSpeed does not clip" in files.take("optim.global_batch=4").text


def test_finetuning_of_llama_recipes_in_a_job_is_read_as_a_recipe(files: Files) -> None:
    command = (
        "pip list; torchrun --nproc_per_node=8 --nnodes=2 examples/finetuning.py --num_epochs=5 "
        "--batch_size_training=3 --enable_fsdp --model_name meta-llama/Llama-2-7b-hf --output_dir ."
    )
    container = {
        "image": "registry.example/fsdp:llama2-efa",
        "command": ["bash", "-c", command],
        "resources": {"limits": {"nvidia.com/gpu": 8}},
    }
    files.add("j.json", job(pytorchReplicaSpecs={"Worker": replicas(2, container=container)}))
    imported = import_files(files.paths, ["data.source=./text"])
    assert not imported.errors
    recipe = {
        f"{section}.{key}": value
        for section, content in imported.recipe.items()
        for key, value in content.items()
    }
    wanted = {
        "model.hub": "meta-llama/Llama-2-7b-hf", "run.epochs": 5, "optim.micro_batch": 3,
        "optim.global_batch": 3 * 16, "parallel.zero": 3, "memory.recompute": "full",
        "precision.compute": "bf16", "optim.lr": 1e-4, "data.seq_len": 4096,
        "optim.weight_decay": 0,
        "optim.schedule": "step", "optim.milestones": [1, 2, 3, 4], "optim.milestone_factor": 0.85,
        "optim.grad_clip": None,
    }  # fmt: skip
    assert {name: recipe[name] for name in wanted} == wanted
    (image,) = [each for each in imported.outcomes if each.entry.value == container["image"]]
    assert "it needs Shardyard inside, `shardyard image build` makes one" in image.result.words


def test_every_field_of_llama_recipes_is_accounted_for(files: Files) -> None:
    fields = (
        "--enable_fsdp --low_cpu_fsdp --run_validation --batching_strategy packing "
        "--context_length 2048 --gradient_accumulation_steps 2 --gradient_clipping "
        "--gradient_clipping_threshold 0.5 --max_train_step 0 --num_workers_dataloader 2 --lr 2e-5 "
        "--gamma 0.9 --seed 1 --use_fp16 false --mixed_precision true --val_batch_size 1 "
        "--save_model --dist_checkpoint_folder x "
        "--sharding_strategy FULL_SHARD "
        "--fsdp_activation_checkpointing false --fsdp_cpu_offload --use_profiler --flop_counter "
        "--num_epochs 1 --model_name some/model"
    )
    files.add("run.sh", script(f"torchrun --nproc_per_node 4 finetuning.py {fields}"))
    recipe = files.recipe()
    wanted = {
        "data.seq_len": 2048, "optim.lr": 2e-5, "optim.grad_clip": 0.5, "run.seed": 1,
        "parallel.zero": 3, "optim.schedule": "constant", "optim.global_batch": 4 * 4 * 2,
        "memory.offload": "params",
    }  # fmt: skip
    assert {name: recipe.get(name) for name in wanted} == wanted
    assert recipe.get("memory.recompute", "none") == "none"
