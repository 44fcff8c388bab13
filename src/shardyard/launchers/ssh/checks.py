"""Checks of hosts before anything is started on them: all hosts, all problems at once."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shardyard
from shardyard.config.ssh_hosts import SshHost
from shardyard.doctor.finding import Finding
from shardyard.errors import AccessError, CapacityError, RequestError, ShardyardError
from shardyard.io.files import write_text
from shardyard.launchers.ssh.client import PAGE, SshClient

_CHECK_S = 240.0
"""A cold file system can take minutes to import torch."""
_CONNECT_S = 12.0
_MEET_S = 60.0


@dataclass(frozen=True, kw_only=True)
class HostRequirements:
    """Requirements of a launch for each host."""

    run_dir: str
    """Folder that all must see, as the hosts name it."""
    here: Path | None
    """The same folder on this machine; None: whether they see it is not checked."""
    device: str
    devices: int
    """Processes of each host."""
    address: str
    """Name or address of the first host, for the others."""
    port: int | str
    is_side: bool = False
    """Whether only one host works, without accelerators."""


@dataclass(kw_only=True)
class HostChecks:
    """Results of the checks."""

    problems: list[tuple[SshHost, ShardyardError]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    answers: list[dict[str, Any] | None] = field(default_factory=list)
    """Answers by host; None: it has problems."""
    port: int = 0
    """Free port of the first host."""

    def error(self) -> ShardyardError:
        """Return all problems as one error, with the exit code of what they have in common."""
        kinds = {type(error) for _, error in self.problems}
        kind = kinds.pop() if len(kinds) == 1 else RequestError
        texts = list(dict.fromkeys(str(error) for _, error in self.problems))
        count = f"{len(texts)} problem{'s' * (len(texts) > 1)}"
        lines = "\n".join(f"  {text}" for text in texts)
        return kind(f"the hosts have {count}, and no node was started:\n{lines}", page=PAGE)

    def findings(self, hosts: Sequence[SshHost]) -> list[Finding]:
        """Return the same for `shardyard doctor`."""
        found = [
            Finding(name=host.text, verdict="problem", what=str(error))
            for host, error in self.problems
        ]
        found += [Finding(name="hosts", verdict="warning", what=text) for text in self.warnings]
        for host, answer in zip(hosts, self.answers, strict=True):
            if answer is not None:
                devices = answer.get("devices")
                has = "" if not devices else f", {devices} x {answer['device']}"
                what = f"{answer['host']}, Shardyard {answer['version']}{has}"
                found.append(Finding(name=host.text, verdict="ok", what=what))
        return found


def check_hosts(
    client: SshClient, hosts: Sequence[SshHost], required: HostRequirements
) -> HostChecks:
    """Ask all hosts; then let the others reach the first where the nodes will meet.

    Raises:
        StorageError: The run folder cannot be written here.
    """
    nonce = secrets.token_hex(8)
    name = f".ssh-check-{nonce}"
    here = None if required.here is None else required.here / name
    if here is not None:
        write_text(here, nonce)
    try:
        answers = client.ask_all(
            hosts,
            "check",
            within_s=_CHECK_S,
            each={0: {"port": required.port}},
            version=shardyard.__version__,
            run_dir=required.run_dir,
            probe=f"{required.run_dir}/{name}",
            device="cpu" if required.is_side else required.device,
            port=None,
        )
    finally:
        if here is not None:
            with suppress(OSError):
                here.unlink()
    found = HostChecks()
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, ShardyardError):
            errors = [answer]
        else:
            errors = list(_errors(client, host, answer, required, nonce))
            found.warnings += _busy(host, answer, required)
        found.problems += [(host, error) for error in errors]
        found.answers.append(answer if isinstance(answer, dict) and not errors else None)
    found.problems += _unlike(hosts, found.answers)
    first = found.answers[0]
    found.port = 0 if first is None else int(first["port"])
    if not found.problems and len(hosts) > 1:
        found.problems += _rendezvous_errors(client, hosts, required, found.port, nonce)
    return found


def _errors(
    client: SshClient, host: SshHost, answer: dict[str, Any], required: HostRequirements, nonce: str
) -> Iterator[ShardyardError]:
    mine, version = shardyard.__version__, answer.get("version")
    if version != mine:
        yield RequestError(
            f"{host.text} has Shardyard {version}, and this machine {mine}: both must be of one "
            f"version. Install it there: ssh {client.by_hand(host)} {client.python} -m pip install "
            f"shardyard=={mine}"
        )
        return
    if required.here is not None and answer.get("seen") != nonce:
        yield RequestError(
            f"{host.text} does not see the run folder: {required.run_dir} there is not "
            f"{required.here} here. All hosts share it with this machine, by NFS for example. Set "
            "run.dir=/path/of/a/shared/folder; if its path on the hosts is another, also "
            "launch.run_dir."
        )
    elif not answer.get("writable"):
        yield AccessError(
            f"{host.text}: you may not write {required.run_dir} there. On a shared folder, your "
            f"user number must be the same on all hosts: ssh {client.by_hand(host)} id -u"
        )
    if answer.get("ends_at_logout"):
        yield RequestError(
            f"{host.text} ends your processes when you log out (KillUserProcesses in logind.conf), "
            f"and the run with them. Keep them: ssh {client.by_hand(host)} loginctl enable-linger"
        )
    if "devices_error" in answer:
        yield RequestError(f"{host.text}: {answer['devices_error']}")
    devices = answer.get("devices")
    if (
        devices is not None
        and devices < required.devices
        and (devices or required.device != "auto")
    ):
        yield RequestError(
            f"{host.text} has {devices} accelerators, and cluster.devices={required.devices}. "
            f"Leave the host out, or set cluster.devices={devices or 1}"
            f"{'' if devices else ' cluster.device=cpu'}."
        )
    if "port" in answer and answer["port"] is None:
        taken = "all ports from 20000 to 29999 are" if required.port == "auto" else "it is"
        yield CapacityError(
            f"{host.text}: launch.ssh.rendezvous_port={required.port}, and {taken} taken there. "
            "Name a free port, or leave the setting out."
        )
    for folder in () if required.is_side else answer["others"]:
        if folder.startswith(f"{required.run_dir}/"):
            yield RequestError(
                f"{host.text} still runs a node of this run ({folder}). Two jobs at once would "
                "overwrite each other's checkpoints. End it with `shardyard teardown "
                f"{Path(required.run_dir).name} --force`."
            )


def _busy(host: SshHost, answer: dict[str, Any], required: HostRequirements) -> list[str]:
    if required.is_side:
        return []
    others = [
        Path(folder).parents[1].name
        for folder in answer.get("others", ())
        if not folder.startswith(f"{required.run_dir}/")
    ]
    return [
        f"{host.text} also trains your run {name}: both share its devices and memory."
        for name in others
    ]


def _unlike(
    hosts: Sequence[SshHost], answers: Sequence[dict[str, Any] | None]
) -> Iterator[tuple[SshHost, ShardyardError]]:
    """Find hosts without accelerators among hosts with some: a run uses one kind of device."""
    kinds = [None if answer is None else answer.get("device") for answer in answers]
    others = [kind for kind in kinds if kind not in (None, "cpu")]
    for host, kind in zip(hosts, kinds, strict=True):
        if others and kind not in (None, others[0]):
            yield (
                host,
                RequestError(
                    f"{host.text} has {kind} devices, other hosts {others[0]}: a run uses one "
                    "kind. Leave the host out, or set cluster.device=cpu for all."
                ),
            )


def _rendezvous_errors(
    client: SshClient, hosts: Sequence[SshHost], required: HostRequirements, port: int, nonce: str
) -> list[tuple[SshHost, ShardyardError]]:
    """Let the other hosts connect to the first, as the rendezvous will."""
    asked: dict[int, dict[str, Any]] = {
        place: {"question": "connect"} for place in range(1, len(hosts))
    }
    answers = client.ask_all(
        hosts,
        "listen",
        within_s=_MEET_S,
        each=asked,
        port=port,
        others=len(hosts) - 1,
        nonce=nonce,
        address=required.address,
        connect_s=_CONNECT_S,
    )
    found: list[tuple[SshHost, ShardyardError]] = []
    for place, (host, answer) in enumerate(zip(hosts, answers, strict=True)):
        if isinstance(answer, ShardyardError):
            found.append((host, answer))
        elif place > 0 and "error" in answer:
            text = (
                f"{host.text} cannot reach {hosts[0].text} at {required.address}:{port} "
                f"({answer['error']}), where the nodes meet. Give the address by which the hosts "
                "reach it, launch.ssh.rendezvous_host=ADDRESS, and let the firewall pass all ports "
                "between them."
            )
            found.append((host, CapacityError(text)))
    return found
