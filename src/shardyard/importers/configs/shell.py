"""Reads a script that starts a training: directives, variables, the one line that starts it.

No code is executed. A variable is replaced by what the script itself assigns to it, or by
what Slurm sets where the script's directives say it. Any other stays as it is written, and
the rule of its key says whether that matters. Loops, functions, branches and here-documents are
not read: a variable or a start in one is an entry ``shell.*``, whose rule rejects it.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shardyard.errors import RequestError
from shardyard.importers.configs.rules import ConfigEntry

_SHORT = {
    "N": "nodes", "n": "ntasks", "J": "job-name", "p": "partition", "A": "account", "t": "time",
    "o": "output", "e": "error", "c": "cpus-per-task", "w": "nodelist", "x": "exclude",
    "C": "constraint", "q": "qos", "d": "dependency", "a": "array", "G": "gpus", "D": "chdir",
    "i": "input", "k": "no-kill", "H": "hold", "L": "licenses", "M": "clusters", "s":
    "oversubscribe", "b": "begin", "m": "distribution", "B": "extra-node-info", "K":
    "kill-on-bad-exit", "l": "label", "u": "unbuffered", "W": "wait", "v": "verbose", "O":
    "overcommit", "r": "relative", "S": "core-spec", "Q": "quiet", "I": "immediate",
}  # fmt: skip
"""Letter of an option of sbatch or srun -> its long name."""

_FLAGS = {
    "exclusive", "requeue", "no-requeue", "no-kill", "hold", "label", "unbuffered", "overcommit",
    "contiguous", "verbose", "quiet", "oversubscribe", "spread-job", "use-min-nodes", "reboot",
    "test-only", "parsable", "ignore-pbs", "pty", "multi-prog", "exact", "overlap",
    "no-container-mount-home", "container-mount-home", "container-remap-root", "preserve-env",
    "kill-on-bad-exit", "no-container-remap-root", "container-writable",
}  # fmt: skip
"""Options that may have no value."""

_STARTERS = r"(?:torchrun|accelerate|accelerate-launch|deepspeed)"
_START = re.compile(
    rf"(?:^|[\s;&|'\"/(]){_STARTERS}(?=\s)|torch\.distributed\.(?:run|launch)(?=\s)"
)

_TALK = re.compile(
    r"(sudo\s+)?(pip3?|conda|mamba|uv|echo|printf|which|module|git|ls|cat|cp|mv|rm|mkdir|apt(-get)?"
    r"|python[\d.]*\s+-m\s+pip)\b"
)
"""Commands that may name a program without starting it."""

_PROGRAMS = re.compile(r"(\S*/)?(torchrun|accelerate|deepspeed|python[\d.]*|bash|sh|env)")

_MOST_SCRIPT_BYTES, _MOST_SCRIPT_LINES = 200_000, 5_000
"""Scripts that start a job have a few hundred lines."""
_MOST_NESTED = 100
"""Parentheses in parentheses."""
_MOST_DIGITS = 300
"""Limit on the digits of a number; one with more is no float."""
_MOST_TEXT = 20_000
"""Characters that a text may grow to by its variables."""

_SLURM = {
    "SLURM_NNODES": ("nodes",),
    "SLURM_JOB_NUM_NODES": ("nodes",),
    "SLURM_NTASKS_PER_NODE": ("ntasks-per-node",),
    "SLURM_GPUS_PER_NODE": ("gpus-per-node",),
    "SLURM_GPUS_ON_NODE": ("gpus-per-node", "gres"),
    "SLURM_CPUS_PER_TASK": ("cpus-per-task",),
    "SLURM_NTASKS": ("ntasks",),
    "SLURM_JOB_NAME": ("job-name",),
    "SLURM_JOB_PARTITION": ("partition",),
}
"""Variable that Slurm sets -> directives that say what to."""

_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_ARRAY = re.compile(r"\"\$\{(\w+)\[[@*]\]\}\"|\$\{(\w+)\[[@*]\]\}")
_PRODUCT = re.compile(r"\$\(\(\s*\$?\{?(\w+)\}?\s*\*\s*\$?\{?(\w+)\}?\s*\)\)")
_ASSIGNMENT = re.compile(r"^(?:(export|declare)\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)=(.*)$", re.S)

_BLOCK = re.compile(r"(for|while|until|if|case|function)\b|[A-Za-z_][\w-]*\s*\(\)")
_BLOCKS = {"for": "loop", "while": "loop", "until": "loop", "if": "", "case": "branch"}
"""Word that opens a block -> why it is not read; empty: it is, up to its ``else``."""
_BLOCK_END = re.compile(r"(?:^|[\s;])(?:done|fi|esac|\})(?:\s*[|&<>;].*)?$")
_CONDITION = re.compile(r"(?:\[|test\s|\(\(|(?:then|do|else)\s+\S)")
"""The start of a line of which a part is run on a condition."""
_SETS = re.compile(
    r"(?:^|[;&|){]|\b(?:then|do|else)\b)\s*(?:(?:export|declare|local)\s+(?:-\w+\s+)?)?"
    r"[A-Za-z_]\w*\+?="
)
"""An assignment anywhere in a line."""
_APPEND = re.compile(r"(?:export\s+)?[A-Za-z_]\w*\+=")
_HEREDOC = re.compile(r"(?<!<)<<-?\s*['\"]?[A-Za-z_]")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One command of a script, over as many lines as it takes."""

    number: int
    text: str


@dataclass
class Script:
    """Content of a script, as values by path."""

    entries: list[ConfigEntry] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    """Entries of each path."""

    def add(self, path: str, value: object, line: int | None) -> None:
        """One value; a second of the same path gets a number."""
        number = self._counts.get(path, 0) + 1
        self._counts[path] = number
        name = path if number == 1 else f"{path}#{number}"
        self.entries.append(ConfigEntry(path=name, value=value, line=line))

    def get(self, path: str) -> object:
        """The value at a path, or None."""
        return next((entry.value for entry in self.entries if entry.path == path), None)


def is_start(text: str) -> bool:
    """Whether a text starts a training somewhere, or asks Slurm for a job."""
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return bool(_START.search(code)) or bool(re.search(r"^#SBATCH\s", text, re.MULTILINE))


def read_script(text: str) -> list[ConfigEntry]:
    """All of a script: ``sbatch.*``, ``environment.*``, ``variable.*``, ``srun.*``, the options of
    the program that starts processes (``torchrun.*``, ``accelerate.*``, ``deepspeed.*``),
    ``script``, its ``arguments.*``, ``shell.*`` for each part that would need a shell, and
    ``line.N`` for every other command.
    """
    check_script_size(text)
    script = Script()
    commands = list(_commands(text))
    first = commands[0].number if commands else len(text)
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"^#SBATCH\s+(.*)$", line)
        if found and number < first:
            _directive(script, found[1], number)
        elif found:  # sbatch stops at the first command
            script.add(f"unread.{found[1]}", True, number)
    _read_commands(script, commands)
    if not any(entry.path == "start.program" for entry in script.entries):
        script.add("start", "no command that starts processes", None)
    return script.entries


def check_script_size(text: str) -> None:
    """Reject a text that is too long to be a script, before it is read.

    Raises:
        RequestError: It has more bytes or lines than a script that starts a job.
    """
    lines = text.count("\n") + 1
    if len(text) > _MOST_SCRIPT_BYTES or lines > _MOST_SCRIPT_LINES:
        raise RequestError(
            f"the script has {lines:,} lines and {len(text):,} characters, more than the "
            f"{_MOST_SCRIPT_LINES:,} lines and {_MOST_SCRIPT_BYTES:,} characters that are read. "
            "Give the script that starts the job."
        )


def read_words(words: list[str], line: int | None) -> list[ConfigEntry]:
    """The same of one command that is there as words, such as a container's."""
    script = Script()
    _start(script, words, line)
    return script.entries


def _directive(script: Script, text: str, number: int) -> None:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    if words[:1] in (["hetjob"], ["packjob"]):
        script.add(f"sbatch.{words[0]}", True, number)
        return
    _slurm_options(script, "sbatch", words, number)


def _slurm_options(script: Script, program: str, words: list[str], number: int | None) -> list[str]:
    """Add options of sbatch or srun; the words behind them."""
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, value = _slurm_option(word, rest)
        script.add(f"{program}.{name}", _expand(script, value), number)
    if program == "sbatch" and rest:
        script.add(f"sbatch.{' '.join(rest)}", True, number)
    return rest


def _slurm_option(word: str, rest: list[str]) -> tuple[str, str]:
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
    else:
        name, equals, value = _SHORT.get(word[1:2], word[1:2]), word[2:], word[2:].lstrip("=")
    is_last = not rest or rest[0].startswith("-") or _PROGRAMS.fullmatch(rest[0])
    if equals or name in _FLAGS or is_last:
        return name, value if equals else "true"
    return name, rest.pop(0)


def _commands(text: str) -> Iterator[Line]:
    """Commands without comments, each joined over its lines."""
    held, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not held and (not line.strip() or line.lstrip().startswith("#")):
            continue
        if held and held.endswith("\n") and line.lstrip().startswith("#"):
            continue
        start = start or number
        if line.rstrip().endswith("\\"):
            held += line.rstrip()[:-1] + " "
            continue
        held += line
        if _is_open(held) and number < start + 200:
            held += "\n"
            continue
        yield Line(number=start, text=held.strip())
        held, start = "", 0
    if held.strip():
        yield Line(number=start, text=held.strip())


def _is_open(text: str) -> bool:
    """Whether a quote or a parenthesis is still open."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return True
    is_array = re.match(r"\s*(declare\s+-\w+\s+)?[A-Za-z_]\w*=\(", text) is not None
    return is_array and sum(w.count("(") - w.count(")") for w in words) > 0


def _read_commands(script: Script, commands: Iterable[Line]) -> None:
    """Read commands in their order, up to a here-document, and name the blocks not read."""
    blocks: list[str] = []
    for line in commands:
        if _HEREDOC.search(line.text):
            script.add("shell.heredoc", line.text, line.number)
            return
        opened = _BLOCK.match(line.text)
        if opened:
            blocks.append(_BLOCKS.get(opened[1], "function"))
        elif blocks and re.match(r"(else|elif)\b", line.text):
            blocks[-1] = "branch"
        is_conditional = opened or _CONDITION.match(line.text)
        kind = next(filter(None, blocks), "branch" if is_conditional else "")
        if kind and (_SETS.search(line.text) or _is_start(script, _expand(script, line.text))):
            script.add(f"shell.{kind}", line.text, line.number)
        else:
            _command(script, line)
        if blocks and _BLOCK_END.search(line.text):
            blocks.pop()


def _command(script: Script, line: Line) -> None:
    parts = re.split(r"(?<!\s)\s*(?:&&|;)\s+", line.text)
    if len(parts) > 1 and not re.search(r"[\"'(`]|\b(for|while|if|do|then|case)\b", line.text):
        for part in parts:
            _command(script, Line(number=line.number, text=part))
        return
    text = _expand(script, line.text)
    assignment = _ASSIGNMENT.match(line.text)
    if assignment and not _is_prefix(line.text):
        _assign(script, assignment, line.number)
    elif _is_start(script, text):
        _start(script, _words(text), line.number)
    else:
        path = "shell.append" if _APPEND.match(line.text) else f"line.{line.number}"
        script.add(path, line.text, line.number)


def _is_start(script: Script, text: str) -> bool:
    is_talk = _TALK.match(text) is not None and not re.search("&&|;", text)
    return (_START.search(text) is not None and not is_talk) or _is_python(script, text)


def _is_python(script: Script, text: str) -> bool:
    """Whether Python is started without one that starts processes, in a job of Slurm."""
    words = text.split()
    if words[:1] == ["srun"]:
        return any("python" in word.rpartition("/")[2] for word in words)
    has_directives = any(entry.path.startswith("sbatch.") for entry in script.entries)
    return has_directives and re.match(r"(\S*/)?python[\d.]*\s+(-u\s+)?\S+\.py\b", text) is not None


def _is_prefix(text: str) -> bool:
    """Return whether assignments precede a command on its line."""
    if re.match(r"(export|declare)\s", text):
        return False
    plain = re.sub(r"`[^`]*`", "X", text)
    for _ in range(_MOST_NESTED):
        plain, count = re.subn(r"\$?\([^()]*\)", "X", plain)
        if not count:
            break
    return any(_ASSIGNMENT.match(word) is None for word in _words(plain))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def _assign(script: Script, match: re.Match[str], number: int) -> None:
    """``export A=1 B=2`` or ``A=1``."""
    keyword, name, raw = match[1], match[2], match[3]
    pairs = [(name, raw)]
    if keyword == "export":
        words = _words(match[0])[1:]
        if all(_ASSIGNMENT.match(word) for word in words):
            pairs = [(word.partition("=")[0], word.partition("=")[2]) for word in words]
    for key, value in pairs:
        plain = value
        if re.fullmatch(r"\"[^\"]*\"|'[^']*'", value.strip(), re.S):
            plain = value.strip()[1:-1]
        elif re.fullmatch(r"\((?!\s*\$\().*\)", value.strip(), re.S):
            plain = " ".join(shlex.quote(word) for word in _words(value.strip()[1:-1]))
            plain = re.sub(r"'(\$\{?\w+\}?)'", r"\1", plain)
        elif not value.startswith(("(", "$(", "`")):
            plain = " ".join(_words(value)) if value.strip() else ""
        plain = _expand(script, plain)
        script.variables[key] = plain
        script.add(f"{'environment' if keyword == 'export' else 'variable'}.{key}", plain, number)


def _expand(script: Script, text: str) -> str:
    """The text with what the script itself says."""
    for _ in range(8):
        new = _ARRAY.sub(lambda match: script.variables.get(match[1] or match[2], match[0]), text)
        new = _PRODUCT.sub(lambda match: _product(script, match), new)
        new = _VARIABLE.sub(
            lambda match: _value(script, match[1] or match[3], match[2], match[0]), new
        )
        if new == text or len(new) > _MOST_TEXT:
            break
        text = new
    return text


def _value(script: Script, name: str, default: str | None, unknown: str) -> str:
    """Return the value that the script or Slurm gives a variable."""
    if name in script.variables and "$(" not in script.variables[name]:
        return script.variables[name]
    for directive in _SLURM.get(name, ()):
        value = str(script.get(f"sbatch.{directive}") or "")
        count = re.search(r"(?<!\d)(\d+)$", value)
        if directive not in ("gpus-per-node", "gres") and value:
            return value
        if count:
            return count[1]
    return unknown if default is None else default


def _product(script: Script, match: re.Match[str]) -> str:
    """``$((A * 8))``, of numbers that fit in the 64 bits of a shell's."""
    one, other = (_value(script, name, None, name) for name in match.groups())
    if not re.fullmatch(r"\d{1,9}", one) or not re.fullmatch(r"\d{1,9}", other):
        return match[0]
    return str(int(one) * int(other))


_BEFORE = {"&&", ";", "exec", "time", "nohup", "sudo", "env", "-u"}
"""Words before a program that do not change what it does."""


def _start(script: Script, words: list[str], number: int | None) -> None:
    """A command that starts processes: who does so, its options, the script, its arguments."""
    while words:
        word = words.pop(0)
        name = word.rpartition("/")[2]
        if word in _BEFORE:
            continue
        if _ASSIGNMENT.match(word) and "=" in word:
            key, _, value = word.partition("=")
            script.add(f"environment.{key}", value, number)
        elif name == "srun":
            script.add("start.srun", True, number)
            words = _slurm_options(script, "srun", words, number)
        elif name in ("bash", "sh") and words and words[0].startswith("-"):
            _shell(script, words, number)
            return
        elif name in ("torchrun", "deepspeed", "accelerate", "accelerate-launch"):
            script.add("start.program", name.removesuffix("-launch"), number)
            if name == "accelerate" and words[:1] == ["launch"]:
                words.pop(0)
            _program(script, name.removesuffix("-launch"), words, number)
            return
        elif re.match(r"python[\d.]*$", name):
            _python(script, words, number)
            return
        else:
            script.add(f"start.{word}", word, number)


def _shell(script: Script, words: list[str], number: int | None) -> None:
    """``bash -c "..."``: what is in the quotes is read as a script of its own."""
    while words and words[0].startswith("-"):
        words.pop(0)
    inner = words.pop(0) if words else ""
    parts = (part.strip() for part in re.split(r"\n|;|&&", _expand(script, inner)))
    lines = [part for part in parts if part and not part.startswith("#")]
    _read_commands(script, [Line(number=number or 0, text=part) for part in lines])


def _python(script: Script, words: list[str], number: int | None) -> None:
    while words and words[0] in ("-u", "-O", "-B"):
        words.pop(0)
    if words[:1] == ["-m"] and words[1:2] in (
        ["torch.distributed.run"], ["torch.distributed.launch"],
    ):  # fmt: skip
        program = "torchrun"
        del words[:2]
    elif words[:2] == ["-m", "accelerate.commands.launch"]:
        program = "accelerate"
        del words[:2]
    else:
        script.add("start.program", "python", number)
        _target(script, words, number)
        return
    script.add("start.program", program, number)
    _program(script, program, words, number)


_NO_VALUE: Mapping[str, frozenset[str]] = {
    "torchrun": frozenset({"standalone", "m", "module", "no_python", "run_path", "use_env"}),
    "accelerate": frozenset(
        {
            "multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config",
            "cpu", "quiet", "debug", "no_python", "module", "m", "tpu", "same_network",
            "use_xpu", "use_cpu", "enable_cpu_affinity", "use_mps_device", "q",
            "dynamo_use_dynamic",
        }
    ),
    "deepspeed": frozenset(
        {
            "no_python", "module", "no_local_rank", "no_ssh", "force_multi", "save_pid",
            "enable_each_rank_log",
        }
    ),
}  # fmt: skip


def _program(script: Script, program: str, words: list[str], number: int | None) -> None:
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not equals:
            value = "true" if name in _NO_VALUE[program] or not words else words.pop(0)
        script.add(f"{program}.{name}", value, number)
    _target(script, words, number)


def _target(script: Script, words: list[str], number: int | None) -> None:
    """Add the script that is run and its arguments, up to the shell's next command."""
    if words[:1] == ["-m"]:
        words.pop(0)
    if words:
        script.add("script", words.pop(0), number)
    place = 0
    while words:
        word = words.pop(0)
        if word in ("&&", ";", "||") and words:
            _start(script, words, number)
            return
        if word in ("&", "|", ";") or re.match(r"^[12&]?>", word):
            script.add("start.rest", " ".join([word, *words]), number)
            return
        if not word.startswith("-") or re.match(r"^-\d", word):
            script.add(f"arguments.{place}", _typed(word), number)
            place += 1
            continue
        name, equals, value = word.lstrip("-").partition("=")
        values = [value] if equals else []
        while not equals and words and not re.match(r"^(-+[A-Za-z]|&|\||[12&]?>|;)", words[0]):
            values.append(words.pop(0))
        typed = [_typed(value) for value in values]
        whole: object = typed[0] if len(typed) == 1 else (typed or True)
        script.add(f"arguments.{name.replace('-', '_')}", whole, number)


def _typed(text: str) -> object:
    """Numbers and switches of a command line as such."""
    if len(text) > _MOST_DIGITS:
        return text
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?", text):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)
