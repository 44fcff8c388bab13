"""Settings of `launch` that contradict each other, whichever launcher is used."""

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address

from shardyard.config.endpoints import TCP, rendezvous_of, secret_name
from shardyard.config.machines import check_capacity
from shardyard.config.rules.slurm_options import SETTING, check_slurm_options, gpus_in
from shardyard.config.schema.launch import Kubernetes, Launch, Slurm, Ssh
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secret_names import is_called_a_secret
from shardyard.config.secrets import HIDDEN, find_credential, is_hex_key, is_variable, show
from shardyard.config.ssh_hosts import host_problems, parse_host
from shardyard.errors import Problem, RequestError
from shardyard.hardware.catalogue import instance


def check_launch(recipe: Recipe) -> Iterable[Problem]:
    """Every contradiction, with what to do."""
    launch = recipe.launch
    yield from check_capacity(recipe.cluster)
    yield from _run_dir(launch)
    yield from _volumes(launch)
    yield from _image_paths(launch)
    yield from _efa(recipe)
    yield from _slurm(launch.slurm)
    yield from _kubernetes(launch.kubernetes)
    yield from _etcd(recipe)
    yield from _ssh(launch.ssh)


def _run_dir(launch: Launch) -> Iterable[Problem]:
    if launch.run_dir is not None and not launch.run_dir.startswith("/"):
        text = (
            f"={launch.run_dir} is not an absolute path. Nodes start elsewhere than here. Write "
            "the whole path, as the nodes see it."
        )
        yield Problem("launch.run_dir", text)


def _volumes(launch: Launch) -> Iterable[Problem]:
    for place, volume in enumerate(launch.volumes):
        sources = {"claim": volume.claim, "efs": volume.efs, "host": volume.host}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            what = "does not say what to mount" if not given else f"names {' and '.join(given)}"
            text = (
                f"{what} at {volume.path}. Give one of claim (Kubernetes), efs (AWS Batch), host."
            )
            yield Problem(f"launch.volumes[{place}]", text)
        if volume.access_point is not None and (
            volume.efs is None or not re.fullmatch("fsap-[0-9a-f]{8,40}", volume.access_point)
        ):
            text = (
                f"={volume.access_point} is not an access point of the EFS file system in efs. "
                "Write efs: fs-... and access_point: fsap-..., as `aws efs "
                "describe-access-points` prints them."
            )
            yield Problem(f"launch.volumes[{place}].access_point", text)
        if not volume.path.startswith("/"):
            text = f"={volume.path} is not an absolute path. Give the whole path in the container."
            yield Problem(f"launch.volumes[{place}].path", text)
        elif ":" in volume.path or ".." in volume.path.split("/"):
            text = (
                f"={volume.path} holds a colon or a step upwards, with which no container's "
                "mount can be written. Give the path that the container sees."
            )
            yield Problem(f"launch.volumes[{place}].path", text)
    counts = Counter(volume.path.rstrip("/") for volume in launch.volumes)
    for path, count in counts.items():
        if count > 1:
            text = f"{count} volumes are mounted at {path}, and only one can be seen. Keep one."
            yield Problem("launch.volumes", text)


def _image_paths(launch: Launch) -> Iterable[Problem]:
    for path in launch.image_paths:
        if not path.startswith("/"):
            text = f"={path} is not an absolute path. Give the whole path, as the nodes see it."
            yield Problem("launch.image_paths", text)


def _efa(recipe: Recipe) -> Iterable[Problem]:
    name, asked = recipe.cluster.instance, recipe.launch.kubernetes.efa
    offered = None if name is None else _efa_count(name)
    if asked != "auto" and offered is not None and asked > offered:
        text = (
            f"={asked}, but {name} has {offered} EFA interfaces. A pod that asks for more is never "
            f"scheduled. Use at most {offered}, or leave it out."
        )
        yield Problem("launch.kubernetes.efa", text)
    if asked == 0 and recipe.launch.require_efa:
        text = "=0, but launch.require_efa=true fails a run without EFA. Leave one of them out."
        yield Problem("launch.kubernetes.efa", text)
    if not recipe.launch.require_efa or (name is not None and offered != 0):
        return
    machines = "no machines are named" if name is None else f"{name} has no EFA"
    text = (
        f"=true but {machines}, so that every run would fail. Set cluster.instance to a type "
        "with EFA, such as p5.48xlarge, or leave it out."
    )
    yield Problem("launch.require_efa", text)


def _efa_count(name: str) -> int | None:
    try:
        return instance(name).efa_count
    except RequestError:  # an unknown type is told as such
        return None


# Source: README of NVIDIA/pyxis: SRC:DST[:FLAGS], flags joined by +.
_MOUNT = re.compile(r"/[^:,]*(:/[^:,]*(:[a-z][a-z-]*(=[a-z]+)?(\+[a-z][a-z-]*(=[a-z]+)?)*)?)?")


def _slurm(slurm: Slurm) -> Iterable[Problem]:
    yield from check_slurm_options(slurm.options)
    if not slurm.request_gpus and gpus_in(str(slurm.options.get("gres", ""))) is not None:
        text = (
            f"={slurm.options['gres']} asks for GPUs, and launch.slurm.request_gpus=false says "
            "that this Slurm manages none. Leave one of them out."
        )
        yield Problem(f"{SETTING}.gres", text)
    if slurm.container_mounts and slurm.container_image is None:
        text = (
            f"={list(slurm.container_mounts)} but launch.slurm.container_image is not set: mounts "
            "need a container. Set it, or leave the mounts out."
        )
        yield Problem("launch.slurm.container_mounts", text)
    for mount in slurm.container_mounts:
        if not _MOUNT.fullmatch(mount):
            text = (
                f"={mount} is not /source:/target or /source:/target:flags (such as ro). Pyxis "
                "separates parts by colons and mounts by commas, and knows no way to write either "
                "in a path: mount a folder above it, or leave a symbolic link without them."
            )
            yield Problem("launch.slurm.container_mounts", text)


def _ssh(ssh: Ssh) -> Iterable[Problem]:
    yield from host_problems(ssh)
    for key, value in (("python", ssh.python), ("config_file", ssh.config_file)):
        if value is not None and (not value.isprintable() or not value or value[0] == "-"):
            text = (
                f"={value!r} is not a path. Give the path of a file, such as /opt/venv/bin/python."
            )
            yield Problem(f"launch.ssh.{key}", text)
    if ssh.rendezvous_host is not None and not _is_address(ssh.rendezvous_host):
        text = (
            f"={ssh.rendezvous_host} is not a name or an address. Give one by which all hosts "
            "reach the first, such as 10.0.0.5."
        )
        yield Problem("launch.ssh.rendezvous_host", text)


def _is_address(text: str) -> bool:
    if ":" in text:
        with suppress(ValueError):
            return ip_address(text).version == 6
        return False
    host = parse_host(text)
    return host is not None and host.user is None


def _etcd(recipe: Recipe) -> Iterable[Problem]:
    etcd, rendezvous = recipe.launch.kubernetes.etcd, recipe.elastic.rendezvous
    if etcd is None:
        return
    host, _, port = etcd.rpartition(":")
    if not host or not port.isdecimal():
        text = (
            f"={etcd} is not host:port. Pods meet there. Give the service's name and port, such "
            "as etcd:2379; launch.kubernetes.etcd_secret says whether they use TLS."
        )
        yield Problem("launch.kubernetes.etcd", text)
    if rendezvous not in (TCP, rendezvous_of(recipe.launch.kubernetes)):
        text = f"={etcd} and elastic.rendezvous={rendezvous} name two places to meet. Keep one."
        yield Problem("launch.kubernetes.etcd", text)
    secret = secret_name(recipe.launch.kubernetes)
    files = {"ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"}
    given = files.intersection({*recipe.launch.env, *recipe.secrets})
    if secret is not None and given:
        text = (
            f"={secret} sets {', '.join(sorted(given))}, and so do launch.env or secrets. Keep one "
            "of the two: remove them there, or set launch.kubernetes.etcd_secret=null and write "
            f"elastic.rendezvous=etcds://{etcd} in place of launch.kubernetes.etcd."
        )
        yield Problem("launch.kubernetes.etcd_secret", text)


def _kubernetes(kubernetes: Kubernetes) -> Iterable[Problem]:
    belongs_to = {"etcd": "pytorchjob", "etcd_secret": "pytorchjob", "runtime": "trainjob"}
    for key, target in belongs_to.items():
        value = getattr(kubernetes, key)
        if value != getattr(Kubernetes(), key) and kubernetes.target != target:
            text = (
                f"={value} is read only for launch.kubernetes.target={target}; it is "
                f"{kubernetes.target}. Leave it out, or choose that target."
            )
            yield Problem(f"launch.kubernetes.{key}", text)
    if kubernetes.scheduler == "volcano" and kubernetes.target == "trainjob":
        text = (
            "=volcano is not built for launch.kubernetes.target=trainjob, whose pods no run may "
            "give a scheduler. Use target jobset or pytorchjob, or Kueue by "
            "launch.kubernetes.queue."
        )
        yield Problem("launch.kubernetes.scheduler", text)
    has_kueue = kubernetes.queue is not None and kubernetes.scheduler == "default"
    if kubernetes.topology != "none" and not has_kueue:
        text = (
            f"={kubernetes.topology} is a request to Kueue, and launch.kubernetes.queue is not "
            "set, or Volcano's. Name its local queue, or use topology: none."
        )
        yield Problem("launch.kubernetes.topology", text)


# What a process's environment can hold: names and values of `launch.env`, names of `secrets`.
#
# The same for all launchers, so that a recipe that one of them takes is not another one's surprise.

LONGEST_BYTES = 128 * 1024 - 1
"""Most bytes of NAME=VALUE: Linux starts no program with a longer one (MAX_ARG_STRLEN,
execve(2)).
"""

_TAKEN = re.compile(
    r"(?:SHARDYARD|PET|SLURM|SLURMD|AWS_BATCH)_.*"
    r"|AWS_BATCH.*"  # as Batch itself refuses them
    r"|JOB_COMPLETION_INDEX|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
)
"""Variables with which schedulers, torch and Shardyard give a process its place among the
others.
"""

_NAMES_A_COMMIT = re.compile(
    r"(?:^|_)(?:GIT|COMMIT|SHA1?|REV|REVISION|REF|HASH|DIGEST|CHECKSUM|VERSION|BUILD|TAG|ETAG)(?:_|$)",
    re.IGNORECASE,
)


def check_environment(recipe: Recipe) -> Iterable[Problem]:
    """Every variable that no process can be given, or whose name says that it is a secret."""
    for name, value in recipe.launch.env.items():
        yield from _check_variable_name("launch.env", name)
        size = len(f"{name}={value}".encode(errors="replace"))
        if size > LONGEST_BYTES:
            text = (
                f"has {size:,} bytes, and Linux starts no process with a variable of more than "
                f"{LONGEST_BYTES:,}. Put the content into a file, and its path here."
            )
            yield Problem(f"launch.env.{name}" if is_variable(name) else "launch.env", text)
        is_called_so = is_variable(name) and is_called_a_secret(name, value)
        if is_called_so and not find_credential(value):
            text = (
                f"has the name of a secret {HIDDEN}, and this section is copied into run folders "
                f"and jobs. Say where the secret is kept instead: `secrets: {{{name}: env}}`."
            )
            yield Problem(f"launch.env.{name}", text)
        if is_hex_key(value) and is_variable(name) and not _NAMES_A_COMMIT.search(name):
            text = (
                f"holds 40 hexadecimal digits {HIDDEN}, as a W&B key does, and this section is "
                "copied into run folders and jobs. Say where the key is kept instead: `secrets: "
                f"{{{name}: env}}`. If it is a commit or a digest, say so in the name, such as "
                f"{name}_COMMIT."
            )
            yield Problem(f"launch.env.{name}", text)
    for name in recipe.secrets:
        yield from _check_variable_name("secrets", name)


def _check_variable_name(section: str, name: str) -> Iterable[Problem]:
    if not is_variable(name):
        text = (
            f"{show(name)} is not a valid name of an environment variable. Use letters, digits and "
            "underscores, and do not begin with a digit, such as HF_HOME."
        )
        yield Problem(section, text)
    elif _TAKEN.fullmatch(name):
        text = (
            "is set by the scheduler or by shardyard: it gives a process its rank, or says how it "
            "reports. Remove it; a number of nodes is cluster.nodes."
        )
        yield Problem(f"{section}.{name}", text)
