"""Shell and sbatch scripts with torchrun, accelerate or deepspeed: what their parts become.

Source: sbatch(1) and srun(1) of Slurm; the options of torchrun (torch/distributed/run.py) and of
DeepSpeed's launcher (deepspeed/launcher/runner.py).
"""

import re
from fnmatch import fnmatchcase
from typing import Any

from shardyard.config.rules.slurm_options import ALLOWED, gpus_in
from shardyard.config.schema.base import NAME
from shardyard.config.secret_names import is_called_a_secret
from shardyard.config.secrets import find_credential
from shardyard.importers.configs import accelerate, llama_recipes, trainer
from shardyard.importers.configs.rules import (
    ConfigEntry,
    Rows,
    RuleResult,
    SourceConfig,
    choose,
    is_variable,
    mapped,
    none,
    nowhere,
    reject,
    rejected,
    same,
    to,
    under,
)

_LOGS = "logs are in the run's folder, where `shardyard logs` finds them"
_TASKS = "one program on each node starts a process per device (cluster.devices)"
_WHOLE = "nodes with accelerators are taken whole"
_MEET = "nodes find each other by themselves"
_OWN = {
    "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "NNODES",
    "NPROC_PER_NODE", "GPUS_PER_NODE", "NUM_NODES", "NUM_GPUS", "CUDA_DEVICE_ORDER", "HEAD_NODE_IP",
    "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "MAIN_PROCESS_IP", "MAIN_PROCESS_PORT", "NUM_PROCESSES",
}  # fmt: skip
"""Variables that say what a launch sets itself."""


def run_name(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    """A job's name, where a run can have it."""
    name = str(entry.value).lower().replace("_", "-").replace(".", "-").replace(" ", "-")
    if re.fullmatch(NAME, name):
        return mapped({"run.name": name})
    return none("is not a valid name of a run: give run.name=...")


def environment(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    """A variable of all processes."""
    name, value = entry.path.removeprefix("environment.").partition("#")[0], str(entry.value)
    if name in _OWN:
        return none("nodes, ranks and where they meet are said by the launch")
    if name == "CUDA_VISIBLE_DEVICES":
        return none("a run takes the first cluster.devices of a node")
    if find_credential(value) or is_called_a_secret(name, value):
        return rejected(
            "may be a secret, which a recipe never holds. Give secrets."
            f"{name}=env (or file:/path; docs/secrets.md).",
            f"secrets.{name}",
        )
    if is_variable(value):
        return none(f"holds what only a shell would know: give launch.env={{{name}: ...}}")
    return mapped({f"launch.env.{name}": value})


def _nodes(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    text = str(entry.value)
    fewest, dash, most = text.partition("-")
    if dash and fewest.isdigit() and most.isdigit() and fewest != most:
        return rejected(
            f"={text} leaves the number to Slurm. Give cluster.nodes=N; a run that may shrink has "
            "elastic.min_nodes too.",
            "cluster.nodes",
        )
    return to("cluster.nodes", convert=lambda value: int(str(value).partition("-")[0]))(entry, _)


def _nodes_of_step(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if config.get("sbatch.nodes") is not None:
        return none("a run takes all nodes of its job")
    return _nodes(entry, config)


def _time_limit(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    """Convert a wall limit: the run drains before it. It does not detect a hanging run."""
    minutes = _minutes(str(entry.value))
    if minutes is None:
        return rejected(
            f"={entry.value!r} is not a time of Slurm. Give launch.time_limit=24h.",
            "launch.time_limit",
        )
    return mapped({"launch.time_limit": _time(minutes)}) if minutes else same("no limit")


def _minutes(text: str) -> float | None:
    """Return minutes, from minutes, minutes:seconds, h:m:s, d-h, d-h:m or d-h:m:s; 0: no limit."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return 0.0
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return int(days) * 1440 + hours * 60 + minutes + seconds / 60
    if len(numbers) == 1:
        return float(numbers[0])
    if len(numbers) == 2:
        return numbers[0] + numbers[1] / 60
    return numbers[0] * 60 + numbers[1] + numbers[2] / 60


def _time(minutes: float) -> str:
    """Return the minutes as in ``launch.time_limit``; seconds are rounded up to a minute."""
    whole = -int(-minutes // 1)
    for unit, length in (("d", 1440), ("h", 60)):
        if whole % length == 0:
            return f"{whole // length}{unit}"
    return f"{whole}min"


def time_limit_of(seconds: float) -> str:
    """Return the seconds as in ``launch.time_limit``."""
    return _time(seconds / 60)


def _gres(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    text = str(entry.value)
    if is_variable(text):
        return to("cluster.devices", convert=int)(entry, _)
    gpus = gpus_in(text)
    if gpus is None and re.fullmatch(r"gpu(:[A-Za-z]\w*)?", text):
        gpus = 1
    values: dict[str, Any] = {} if gpus is None else {"cluster.devices": gpus}
    if gpus is None or text.count(":") > 1 or "," in text:
        values["launch.slurm.options.gres"] = text
    return mapped(values)


def _gpus(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    """``8`` or ``h100:8``."""
    return to("cluster.devices", convert=lambda value: int(str(value).rpartition(":")[2]))(entry, _)


def _all_gpus(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    return to("processes", convert=lambda value: int(str(value).rpartition(":")[2]))(entry, config)


def _tasks_per_node(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """One task a node starts all; several are a process each, or a torchrun each by mistake."""
    count = str(entry.value)
    if count == "1":
        return same(_TASKS)
    program = config.get("start.program")
    if program in ("torchrun", "accelerate", "deepspeed") and config.get("start.srun"):
        own = (
            config.get("srun.ntasks-per-node"),
            config.get("srun.ntasks"),
            config.get("srun.nodes"),
        )
        if own[0] == "1" or (own[1] is not None and own[1] == own[2]):
            return none("srun starts one task a node, without regard to the job's request")
        return rejected(
            f"={count}, and srun starts {program} in each task: {count} of them on each node, each "
            "with its own processes. Ask for 1 task a node, or say what is meant with "
            "cluster.devices=N.",
            "cluster.devices",
        )
    if program == "python":
        return to("cluster.devices", convert=int)(entry, config)
    return none(_TASKS)


def _gpus_per_task(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """All of a node's, where one task a node starts all its processes."""
    if config.get("start.program") == "python":
        return none("each process has a device of its own")
    return _gpus(entry, config)


def _tasks(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    if config.get("start.program") == "python" and config.get("start.srun"):
        return to("processes", convert=int)(entry, config)
    nodes, count = config.get("sbatch.nodes") or config.get("srun.nodes"), str(entry.value)
    if entry.path.startswith("srun.") and config.get("sbatch.nodes") is not None:
        return none(_TASKS)
    if nodes is not None and str(nodes) == count:
        return same(_TASKS)
    if nodes is None and count == "1":
        return same(_TASKS)
    if config.get("start.srun") and config.get("start.program") not in (None, "python"):
        return rejected(
            f"={count} tasks on {nodes or 'as many as Slurm chooses'} nodes, and srun starts "
            f"{config.get('start.program')} in each. Ask for one task a node, or give "
            "cluster.nodes and cluster.devices.",
            "cluster.nodes",
            "cluster.devices",
        )
    return none(_TASKS)


def _option(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    """An option of sbatch that a launch passes on."""
    name = entry.path.partition(".")[2]
    value: Any = entry.value
    if not ALLOWED[name].form:
        value = True
    elif is_variable(value):
        return none(f"holds what only a shell would know: give launch.slurm.options.{name}")
    return mapped({f"launch.slurm.options.{name}": value})


def _signal(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    found = re.fullmatch(r"(?:[RB]+:)?\w+@(\d+)", str(entry.value))
    if found is None:
        return none("launch.slurm.signal_before_s says how long before the limit a run drains")
    return mapped({"launch.slurm.signal_before_s": max(10, int(found[1]))})


_ARRAY = (
    "={value}: each element of an array is a job of its own, and a run is one. Import it with "
    "--without, and launch each of several by itself, or use `shardyard study`."
)


def _array(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    return rejected(_ARRAY.format(value=entry.value))


_HETJOB = (
    "a job of different parts has no counterpart: all nodes of a run are alike. Split it, and "
    "import the part that trains."
)

_SBATCH: Rows = {
    "nodes": _nodes,
    "ntasks-per-node": _tasks_per_node,
    "tasks-per-node": _tasks_per_node,
    "ntasks": _tasks,
    "ntasks-per-gpu": nowhere(_TASKS),
    "ntasks-per-socket": nowhere(_TASKS),
    "cpus-per-task": nowhere(_WHOLE),
    "cpus-per-gpu": nowhere(_WHOLE),
    "gpus-per-node": _gpus,
    "gpus": _all_gpus,
    "gpus-per-task": _gpus_per_task,
    "gpu-bind": nowhere("each process has a device of its own"),
    "cpu-bind": nowhere("processes are not bound to cores"),
    "distribution": nowhere(_TASKS),
    "hint": nowhere("processes are not bound to cores"),
    "threads-per-core": nowhere("processes are not bound to cores"),
    "gres": _gres,
    "time": _time_limit,
    "time-min": nowhere("launch.time_limit is one time"),
    "job-name": run_name,
    "partition": to("launch.slurm.partition"),
    "account": to("launch.slurm.account"),
    "qos": to("launch.slurm.qos"),
    "constraint": to("launch.slurm.constraint"),
    "requeue": nowhere("launch.slurm.requeue continues from the newest checkpoint; it is on"),
    "no-requeue": lambda _entry, _config: mapped({"launch.slurm.requeue": False}),
    "signal": _signal,
    "exclusive": nowhere(_WHOLE),
    "oversubscribe": nowhere(_WHOLE),
    "mem": nowhere(_WHOLE),
    "mem-per-cpu": nowhere(_WHOLE),
    "mem-per-gpu": nowhere(_WHOLE),
    "output": nowhere(_LOGS),
    "error": nowhere(_LOGS),
    "input": nowhere("a run reads no input"),
    "open-mode": nowhere(_LOGS),
    "comment": nowhere("`shardyard runs --on slurm` knows our jobs by it"),
    "chdir": nowhere("paths of a recipe begin where the command is typed; run.dir holds runs"),
    "export": nowhere("launch.env and secrets say what processes get"),
    "get-user-env": nowhere("launch.env and secrets say what processes get"),
    "no-kill": nowhere("elastic.min_nodes says whether a run outlives a node"),
    "kill-on-bad-exit": nowhere("nodes that may be saving are not killed"),
    "wait": nowhere("elastic.drain_timeout_s says how long the others have"),
    "wait-all-nodes": nowhere("nodes wait for each other"),
    "label": nowhere(_LOGS),
    "unbuffered": nowhere(_LOGS),
    "verbose": nowhere(_LOGS),
    "quiet": nowhere(_LOGS),
    "mpi": nowhere(_MEET),
    "jobid": nowhere("srun runs in its own job"),
    "container-image": to("launch.slurm.container_image"),
    "container-mounts": to(
        "launch.slurm.container_mounts", convert=lambda value: str(value).split(",")
    ),
    "container-workdir": nowhere("paths of a recipe are absolute in a container"),
    "container-name": nowhere("an image is unpacked for each job"),
    "*container-mount-home": nowhere("launch.slurm.container_mounts says what is mounted"),
    "container-env": nowhere("launch.env says what processes get"),
    "array": _array,
    "hetjob": reject(_HETJOB),
    "packjob": reject(_HETJOB),
    "het-group": reject(_HETJOB),
    **dict.fromkeys(ALLOWED, _option),
}


def _world(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """torchrun's nodes: 2, or 1:4 for a run that grows and shrinks."""
    text = str(entry.value)
    fewest, colon, most = text.partition(":")
    if colon and fewest.isdigit() and most.isdigit():
        if fewest == most:
            return mapped({"cluster.nodes": int(most)})
        return mapped(
            {
                "cluster.nodes": int(most),
                "elastic.min_nodes": int(fewest),
                "elastic.max_nodes": int(most),
            }
        )
    if re.search(r"SLURM_(JOB_NUM_NODES|NNODES)", text):
        return none("as many as the job has: give cluster.nodes=N")
    if config.get("torchrun.standalone") and text == "1":
        return mapped({"cluster.nodes": 1})
    return to("cluster.nodes", convert=int)(entry, config)


def _processes(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    text = str(entry.value).lower()
    if text in ("auto", "gpu") or re.search(r"slurm_gpus_(on|per)_node", text):
        return same("all devices of a node")
    if text == "cpu":
        return mapped({"cluster.device": "cpu"})
    return to("cluster.devices", convert=int)(entry, config)


_TORCHRUN: Rows = {
    "nnodes": _world,
    "nproc_per_node": _processes,
    "max_restarts": to("elastic.max_restarts", convert=int),
    "rdzv_backend": choose(
        {
            "c10d": same("elastic.rendezvous=tcp"),
            "static": same("elastic.rendezvous=tcp"),
            "etcd": rejected(
                "=etcd: give elastic.rendezvous=etcd://HOST:2379, or =tcp.", "elastic.rendezvous"
            ),
            "etcd_v2": rejected(
                "=etcd-v2: give elastic.rendezvous=etcd://HOST:2379, or =tcp.",
                "elastic.rendezvous",
            ),
            "etcd-v2": rejected(
                "=etcd-v2: give elastic.rendezvous=etcd://HOST:2379, or =tcp.",
                "elastic.rendezvous",
            ),
        }
    ),
    "rdzv_*": nowhere(_MEET),
    "standalone": nowhere(_MEET),
    "node_rank": nowhere("each node knows its place"),
    "master_addr": nowhere(_MEET),
    "master_port": nowhere(_MEET),
    "local_addr": nowhere(_MEET),
    "monitor_interval": nowhere("elastic.* says how soon a loss is noticed"),
    "start_method": nowhere("processes always start fresh"),
    "role": nowhere("there is one role"),
    "log_dir": nowhere("each rank has a log in the run's folder"),
    "redirects": nowhere("each rank has a log in the run's folder"),
    "tee": nowhere("each rank has a log in the run's folder"),
    "*filter*": nowhere("each rank has a log in the run's folder"),
    "logs_specs": nowhere("each rank has a log in the run's folder"),
    "numa_binding": nowhere("processes are not bound to cores"),
    "event_log_handler": nowhere("events.jsonl has the life of a run"),
    "signals_to_handle": nowhere("SIGTERM drains a run"),
    "shutdown_timeout": nowhere("elastic.drain_timeout_s says how long a drain may take"),
    "m": nowhere("says how the script is started"),
    "module": nowhere("says how the script is started"),
    "no_python": nowhere("says how the script is started"),
    "run_path": nowhere("says how the script is started"),
    "use_env": nowhere("says how ranks are assigned"),
}

_DEEPSPEED: Rows = {
    "num_gpus": to(
        "cluster.devices", convert=lambda value: int(value) if int(value) > 0 else "auto"
    ),
    "num_nodes": to("cluster.nodes", convert=lambda value: int(value) if int(value) > 0 else 1),
    "include": reject(
        "names the devices of nodes. Give cluster.nodes and cluster.devices.",
        "cluster.nodes",
        "cluster.devices",
    ),
    "exclude": reject(
        "names nodes or devices to leave out. Give cluster.devices.", "cluster.devices"
    ),
    "hostfile": reject(
        "names the machines in a file. Give cluster.nodes and cluster.devices.",
        "cluster.nodes",
        "cluster.devices",
    ),
    "*": nowhere("of DeepSpeed's own launcher"),
}


def _script(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    return none(
        f"{entry.value} is not run: the recipe trains by itself. A model of your own is "
        "model.module=package.module:function (docs/own-module.md); a script of your own loop "
        "imports shardyard (docs/library.md)"
    )


_OF_THE_SCRIPT = "an argument of the script itself, which is not run"


def _argument(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    """An argument of the script: the Trainer's where it is a script of the Trainer."""
    name = entry.path.removeprefix("arguments.").partition("#")[0]
    if name.isdigit():
        return none("an argument of the script itself")
    rows = trainer.ROWS
    inner = config.under("arguments")
    if is_of_llama_recipes(config):
        return _llama_recipes(ConfigEntry(path=name, value=entry.value, line=entry.line), inner)
    if not is_of_trainer(config) or name not in rows:
        for pattern, rule in rows.items() if is_of_trainer(config) else ():
            if pattern.endswith("*") and name.startswith(pattern[:-1]) and pattern[:-1]:
                return rule(ConfigEntry(path=name, value=entry.value, line=entry.line), inner)
        return none(_OF_THE_SCRIPT)
    return rows[name](ConfigEntry(path=name, value=entry.value, line=entry.line), inner)


def _llama_recipes(entry: ConfigEntry, arguments: SourceConfig) -> RuleResult:
    rows = llama_recipes.ROWS
    rule = rows.get(entry.path) or next(
        (rows[pattern] for pattern in rows if fnmatchcase(entry.path, pattern)), None
    )
    return none(_OF_THE_SCRIPT) if rule is None else rule(entry, arguments)


def is_of_trainer(config: SourceConfig) -> bool:
    """Whether the arguments of the script are those of the Hugging Face Trainer."""
    return any(config.get(f"arguments.{name}") is not None for name in trainer.MARKS)


def is_of_llama_recipes(config: SourceConfig) -> bool:
    """Whether the arguments are those of ``finetuning.py`` of llama-recipes."""
    return any(config.get(f"arguments.{name}") is not None for name in llama_recipes.MARKS)


def _start(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
    name = entry.path.removeprefix("start.")
    if name == "srun":
        return same(_TASKS)
    if name == "program":
        nodes = str(config.get("sbatch.nodes") or "1")
        alone = entry.value != "deepspeed" and not config.get("start.srun")
        if alone and nodes not in ("1", "1-1"):
            return rejected(
                f"={entry.value} without srun runs only on the first of {nodes} nodes. Say how "
                "many the run has with cluster.nodes=N.",
                "cluster.nodes",
            )
        return same("a launch starts a process per device")
    if name.startswith("program#"):
        return rejected("a second command starts processes. Give a file with the one that trains.")
    return none("is not run; do it in the image or in the Python environment")


_SHELL = {
    "loop": "a loop is not read: a recipe is one training, and `shardyard study` runs several",
    "function": "a function is not read",
    "branch": "what a condition decides is not read",
    "append": "`+=` is not read",
    "heredoc": "a here-document is not read, nor what follows it",
}


def _not_read(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
    """A part of a script that sets variables or starts processes and needs a shell."""
    kind = entry.path.removeprefix("shell.").partition("#")[0]
    return rejected(
        f"{_SHELL[kind]}. Give a copy of the script with plain assignments and one start instead, "
        f"or leave it out if the training does not depend on it: --without {entry.path}."
    )


ROWS: Rows = {
    **{f"sbatch.{name}": rule for name, rule in _SBATCH.items()},
    **{f"srun.{name}": rule for name, rule in _SBATCH.items()},
    "srun.nodes": _nodes_of_step,
    **{f"torchrun.{name}": rule for name, rule in _TORCHRUN.items()},
    **under("accelerate", accelerate.LINE),
    **{f"deepspeed.{name}": rule for name, rule in _DEEPSPEED.items()},
    "environment.*": environment,
    "variable.*": nowhere("is put in where the lines below name it"),
    "script*": _script,
    "arguments.*": _argument,
    "start.*": _start,
    "start": reject(
        "no command of it starts processes (torchrun, accelerate launch, deepspeed, python by "
        "srun). Give the script that it runs too, or say --without start."
    ),
    "shell.*": _not_read,
    "unread.*": nowhere("comes after the first command, where sbatch does not read it"),
    "line.*": nowhere(
        "is not run; what it prepares belongs into the image or the Python environment"
    ),
}


def implied(config: SourceConfig) -> dict[str, Any]:
    """Return the defaults where a script has no value."""
    values: dict[str, Any] = {}
    program = config.get("start.program")
    if program == "python" and not _has_tasks(config):
        values["cluster.devices"] = 1  # a bare srun starts one process on each node
    if program == "torchrun" and config.get("torchrun.nproc_per_node") is None:
        values["cluster.devices"] = 1
    if is_of_llama_recipes(config):
        values |= llama_recipes.implied(config.under("arguments"))
    elif is_of_trainer(config):
        values |= trainer.implied(config.under("arguments"))
    return values


def _has_tasks(config: SourceConfig) -> bool:
    names = ("ntasks", "ntasks-per-node", "tasks-per-node")
    return any(config.get(f"{part}.{name}") for part in ("sbatch", "srun") for name in names)


def named_files(config: SourceConfig) -> dict[str, str]:
    """Path of an entry -> the file it names."""
    found = {}
    for path in (
        "arguments.deepspeed",
        "arguments.deepspeed_config",
        "arguments.fsdp_config",
        "accelerate.config_file",
        "accelerate.deepspeed_config_file",
    ):
        value = config.get(path)
        if isinstance(value, str) and value.rpartition(".")[2] in ("json", "yaml", "yml"):
            found[path] = value
    for path, value in config.below("arguments").items():
        is_file = isinstance(value, str) and re.search(r"\.(json|ya?ml|toml)$", value)
        if path.isdigit() and is_file:
            found[f"arguments.{path}"] = value
    return found
