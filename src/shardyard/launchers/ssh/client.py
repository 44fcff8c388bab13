"""The OpenSSH client: ask hosts, all at once, and say what a refusal means and what to do.

ssh runs with BatchMode, so it never waits for a password. Keys, known hosts, jump hosts and aliases
are those of the user's ssh configuration.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from shardyard.config.ssh_hosts import SshHost
from shardyard.errors import AccessError, CapacityError, RequestError, ShardyardError
from shardyard.io.files import parse_json
from shardyard.launchers.ssh.on_host import MARK, MODULE
from shardyard.own_processes import ISOLATED

PAGE = "launch#hosts-by-ssh"
SSH_ERROR = 255
"""Exit code of ssh itself (ssh(1)); any other is that of the program on the host."""
_ANSWER_S = 60.0
_AT_ONCE = 32
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "10",
    "ServerAliveCountMax": "3",
    # A forwarding of the user's configuration may be taken, and is of no use here.
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
}


@dataclass(frozen=True, kw_only=True)
class SshResult:
    """Result of one run of ssh."""

    exit_code: int
    out: str
    err: str


SshShell = Callable[[Sequence[str], str, float], SshResult]
"""Runs ssh to its end: arguments, stdin, seconds. May raise FileNotFoundError or
TimeoutExpired."""


def run_ssh(argv: Sequence[str], text: str, timeout_s: float) -> SshResult:
    """Run ssh on this machine."""
    done = subprocess.run(
        argv, input=text, capture_output=True, text=True, errors="replace", timeout=timeout_s,
        check=False,
    )  # fmt: skip
    return SshResult(exit_code=done.returncode, out=done.stdout, err=done.stderr)


@dataclass(frozen=True, kw_only=True)
class SshClient:
    """Asks the hosts of one launch."""

    python: str
    config_file: str | None = None
    shell: SshShell = run_ssh

    def command(self, host: SshHost) -> list[str]:
        """Return the words that ask a host; pure."""
        words = ["ssh", *self._config, "-T", "-a", "-x"]
        words += [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        words += [] if host.user is None else ["-l", host.user]
        words += [] if host.port is None else ["-p", str(host.port)]
        # The one string that a shell reads, on the host: nothing in it but Python's path varies.
        remote = shlex.join([*ISOLATED, MODULE])
        return [*words, "--", host.name, f"exec {remote_path(self.python)} {remote}"]

    def ask(
        self, host: SshHost, question: str, *, within_s: float = _ANSWER_S, **asked: Any
    ) -> dict[str, Any]:
        """Ask one host one question of ``on_host``.

        Raises:
            CapacityError: It does not answer.
            AccessError: It accepts none of the user's keys, or is unknown to this machine.
            RequestError: It has no such Python, or no Shardyard.
            ShardyardError: The program failed there, or ssh with words that are not known.
        """
        text = json.dumps({"question": question, **asked})
        try:
            done = self.shell(self.command(host), text, within_s)
        except FileNotFoundError as error:
            raise RequestError(
                "ssh is not installed here, and hosts are reached through it. Install OpenSSH's "
                "client: sudo apt-get install openssh-client",
                page=PAGE,
            ) from error
        except subprocess.TimeoutExpired as error:
            raise CapacityError(
                f"{host.text} gave no answer for {error.timeout:g} s. Look at it with `ssh "
                f"{self.by_hand(host)}`.",
                page=PAGE,
            ) from error
        answers = [line for line in done.out.splitlines() if line.startswith(MARK)]
        if done.exit_code == 0 and answers:
            answer: dict[str, Any] = parse_json(answers[-1].removeprefix(MARK))
            return answer
        raise self._error(host, done)

    def ask_all(
        self, hosts: Sequence[SshHost], question: str, *, within_s: float = _ANSWER_S,
        each: Mapping[int, Mapping[str, Any]] | None = None, **asked: Any,
    ) -> list[dict[str, Any] | ShardyardError]:  # fmt: skip
        """Ask several hosts at once; the error of one does not hide the answers of the others.

        Args:
            each: What is asked of one host only, by its place.
        """

        def ask(place: int) -> dict[str, Any] | ShardyardError:
            words = {"question": question, **asked, **(each or {}).get(place, {})}
            try:
                return self.ask(hosts[place], within_s=within_s, **words)
            except ShardyardError as error:
                return error

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(ask, range(len(hosts))))

    def host_name(self, host: SshHost) -> str:
        """Return the HostName of a host in the user's ssh configuration; connects to none."""
        try:
            done = self.shell(["ssh", *self._config, "-G", "--", host.name], "", _ANSWER_S)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return host.name
        match = re.search(r"^hostname (\S+)$", done.out, re.MULTILINE)
        return match[1] if match else host.name

    def by_hand(self, host: SshHost) -> str:
        """Return the arguments with which a person reaches a host, for a message."""
        words = [*self._config, *([] if host.port is None else ["-p", str(host.port)])]
        return shlex.join([*words, host.name if host.user is None else f"{host.user}@{host.name}"])

    @property
    def _config(self) -> list[str]:
        return [] if self.config_file is None else ["-F", self.config_file]

    def _error(self, host: SshHost, done: SshResult) -> ShardyardError:
        said = done.err.strip() or done.out.strip()
        last = said.splitlines()[-1].strip() if said else f"exit code {done.exit_code}"
        if done.exit_code == SSH_ERROR:
            return ssh_error(host.text, said, last, by_hand=self.by_hand(host))
        return self._remote_error(host, done.exit_code, said, last)

    def _remote_error(self, host: SshHost, exit_code: int, said: str, last: str) -> ShardyardError:
        where = host.text
        if exit_code in (126, 127) or "not found" in last:
            return RequestError(
                f"{where} has no Python at {self.python} ({last}). Name one that has Shardyard: "
                "launch.ssh.python=/path/to/venv/bin/python",
                page=PAGE,
            )
        if "No module named 'shardyard'" in said or last[-25:] == "No module named shardyard":
            return RequestError(
                f"{where}: {self.python} has no Shardyard. Install it there: ssh "
                f"{self.by_hand(host)} {shlex.quote(self.python)} -m pip install shardyard",
                page=PAGE,
            )
        if "No module named" in said:
            return RequestError(
                f"{where}: Shardyard of {self.python} is of another version ({last}). Install the "
                "version of this machine there.",
                page=PAGE,
            )
        return ShardyardError(f"{where}: {self.python} failed: {last}", page=PAGE)


_KNOWN: tuple[tuple[str, type[ShardyardError], str, str], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        AccessError,
        "has another host key than before: it was installed again, or another machine answers",
        "If you trust it, forget the old key: ssh-keygen -R {name}; then `ssh {hand}` once.",
    ),
    (
        r"Host key verification failed|No .*host key is known",
        AccessError,
        "is unknown to this machine's known_hosts",
        "Connect once by hand and accept its key: ssh {hand}",
    ),
    (
        r"Permission denied|Too many authentication failures|no mutual signature",
        AccessError,
        "accepts none of your keys",
        "Copy your public key there: ssh-copy-id {hand}; a key with a passphrase needs ssh-agent.",
    ),
    (
        r"Could not resolve hostname|Name or service not known",
        CapacityError,
        "is no name that this machine can resolve",
        "Correct it, or give it a HostName in ~/.ssh/config.",
    ),
    (
        r"Connection (refused|timed out|reset|closed)|No route to host|Operation timed out"
        r"|Network is unreachable|Timeout, server|Broken pipe|banner exchange",
        CapacityError,
        "does not answer",
        "Check that it is on and runs sshd: ssh {hand}",
    ),
    (
        r"[Bb]ad configuration option|Can't open user config file|terminating, \d+ bad",
        RequestError,
        "cannot be asked: ssh rejects its configuration",
        "Fix that file (launch.ssh.config_file, or ~/.ssh/config).",
    ),
)
"""Words of OpenSSH's client (ssh.c, sshconnect.c, readconf.c) -> error, what it means, the fix."""


def ssh_error(where: str, said: str, last: str, *, by_hand: str) -> ShardyardError:
    """Return the error that ssh's own output means."""
    name = where.rpartition("@")[2]
    for pattern, kind, meaning, remedy in _KNOWN:
        if (match := re.search(pattern, said)) is not None:
            lines = [line for line in said.splitlines() if match[0] in line]
            words = (lines[-1] if lines else last).strip().removesuffix(".")
            fix = remedy.format(hand=by_hand, name=name)
            return kind(f"{where} {meaning} ({words}). {fix}", page=PAGE)
    return ShardyardError(
        f"{where}: ssh failed: {last}. Shardyard does not know these words of ssh. Try by hand: "
        f"ssh {by_hand}",
        page=PAGE,
    )


def remote_path(path: str) -> str:
    """Return a path as one word of the host's shell; ``~/`` is the home folder there."""
    if path.startswith("~/"):
        return f'"$HOME"/{shlex.quote(path[2:])}'
    return shlex.quote(path)
