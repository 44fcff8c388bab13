"""TAB completion: verbs, options, run ids, recipe files, settings and their values.

`eval "$(_SHARDYARD_COMPLETE=bash_source shardyard)"` turns it on (zsh and fish likewise). The shell
then calls `shardyard` at each TAB with the words so far, on click's machinery for it. Ours are the
values, and that bash, which ends words at = and :, replaces the right part.

The user waits at the keyboard: no verb's module is imported where its name says what its words are.
"""

# ruff: noqa: ARG001, ARG005 - all completers take what one of them needs

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    split_arg_string,
)

from shardyard.errors import RequestError, ShardyardError
from shardyard.io.terminal import echo_raw
from shardyard.rundir.layout import RUNS_DIR, RunDir, is_run

VARIABLE = "_SHARDYARD_COMPLETE"
"""Environment variable of the request: bash_source, bash_complete; zsh and fish likewise."""

if TYPE_CHECKING:
    Item = CompletionItem[str]
else:
    Item = CompletionItem  # that of click 8.4 takes no parameter
Completer = Callable[[str, Mapping[str, Any]], Iterable[Item]]
"""The word so far and the options before it, by name -> what it may become, whole words."""

_DESCRIBED_RUNS = 20
"""Newest runs whose state is looked up: that opens three files each."""


def answer(program: click.Command) -> None:
    """Print what the shell asks for: its script, or what the word at the cursor may become.

    Raises:
        RequestError: It is another shell's.
    """
    asked = os.environ[VARIABLE]
    shell, _, instruction = asked.partition("_")
    if shell not in _SHELLS or instruction not in ("source", "complete"):
        raise RequestError(
            f"{VARIABLE}={asked}: there is completion for {', '.join(_SHELLS)}, by "
            f'`eval "$({VARIABLE}=bash_source shardyard)"` or the other\'s name in place of bash.'
        )
    completion = _SHELLS[shell](program, {}, "shardyard", VARIABLE)
    text = completion.source() if instruction == "source" else completion.complete()
    echo_raw(f"{text}\n")


# --- words --------------------------------------------------------------------------------------


def runs(word: str, options: Mapping[str, Any]) -> Iterator[Item]:
    """Ids of runs, the newest first, each with its state; or paths, where one is begun."""
    if "/" in word or word.startswith("~"):
        yield from paths(word, is_match=Path.is_dir)
        return
    folder = Path(options.get("runs_dir") or RUNS_DIR)
    found = [each for each in _entries(folder) if each.name.startswith(word)]
    found = [each for each in found if is_run(each)]
    found.sort(key=_changed_at, reverse=True)
    for number, each in enumerate(found):
        yield Item(each.name, help=_state(each) if number < _DESCRIBED_RUNS else None)


def recipe(word: str, options: Mapping[str, Any]) -> Iterator[Item]:
    """Recipe files, and what ``overrides`` offers."""
    if "=" not in word:
        yield from paths(word, is_match=lambda path: path.suffix in (".yaml", ".yml"))
    yield from overrides(word, options)


def configurations(word: str, options: Mapping[str, Any]) -> Iterator[Item]:
    """Configurations of other tools, and what ``overrides`` offers."""
    if "=" not in word:
        yield from paths(word, is_match=lambda path: path.suffix in _CONFIGURATIONS)
    yield from overrides(word, options)


_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml", ".sh", ".sbatch", ".slurm", ".txt")


def overrides(word: str, options: Mapping[str, Any]) -> Iterator[Item]:
    """Names of settings up to their next dot, as there are too many for one list; then values."""
    name, equals, text = word.partition("=")
    if equals:
        for item in _values(name, text):
            yield _like(item, f"{name}={item.value}")
        return
    offered: dict[str, str] = {}
    for setting, sentence in _settings(word):
        if setting.startswith(word):
            rest = setting[len(word) :]
            group, dot, _ = rest.partition(".")
            if dot:
                offered.setdefault(f"{word}{group}.", _about_section(f"{word}{group}"))
            elif setting == "secrets":
                offered["secrets."] = _first_words(sentence)
            else:
                offered[f"{setting}="] = _first_words(sentence)
    yield from (Item(value, type="part", help=about) for value, about in offered.items())


def launchers(word: str, options: Mapping[str, Any]) -> Iterator[Item]:
    """Names of launchers, ours and those of packages."""
    from shardyard.launchers.registry import LAUNCHERS
    from shardyard.plugins import installed

    return _words(word, [*LAUNCHERS, *installed("launchers")])


def faults(word: str, options: Mapping[str, Any]) -> Iterator[Item]:
    """Names of faults of a drill, the last of a list that is joined by commas."""
    from shardyard.drill.faults import FAULTS

    before, comma, start = word.rpartition(",")
    taken = before.split(",")
    for name, fault in FAULTS.items():
        if name.startswith(start) and name not in taken:
            yield Item(f"{before}{comma}{name}", help=fault.what)


def values_of(setting: str) -> Completer:
    """Return a completer of a setting's values, each a word of its own."""
    return lambda word, options: _values(setting, word)


def paths(word: str, *, is_match: Callable[[Path], bool]) -> Iterator[Item]:
    """Yield the files of the folder that a path is in, and its folders, to complete further."""
    above, slash, start = word.rpartition("/")
    folder = Path(above + slash).expanduser()
    for entry in sorted(_entries(folder)):
        is_hidden = entry.name.startswith(".") and not start.startswith(".")
        if not entry.name.startswith(start) or is_hidden:
            continue
        if entry.is_dir():
            yield Item(f"{above}{slash}{entry.name}/", type="part")
        elif is_match(entry):
            yield Item(f"{above}{slash}{entry.name}")


WORDS: dict[str, tuple[Completer, ...]] = {
    **dict.fromkeys(
        ("config", "plan", "prepare", "train", "launch", "study", "doctor", "drill"), (recipe,)
    ),
    **dict.fromkeys(("status", "logs", "watch", "top", "cancel", "scale", "profile"), (runs,)),
    "teardown": (runs,),
    **dict.fromkeys(("fetch", "export", "report"), (runs,)),
    "resume": (runs, overrides),
}
"""Verb -> what its words are, so that its module need not be imported for them. Of ``recipe`` and
``overrides`` there may be any number."""


def by(completer: Completer) -> Callable[..., list[Item]]:
    """The ``shell_complete`` of an argument or option of click's."""
    return lambda context, parameter, word: list(completer(word, context.params))


# --- settings -----------------------------------------------------------------------------------


def _settings(word: str) -> Iterator[tuple[str, str]]:
    """Every setting with its sentence, those that packages add included where they are meant."""
    from shardyard.config.schema.base import section_key
    from shardyard.config.schema.plugin_sections import SECTIONS, described_at
    from shardyard.config.schema.reference import settings
    from shardyard.config.tasks import TASKS
    from shardyard.plugins import installed

    for name, setting in settings().items():
        yield name, setting.sentence
    for metric in dict.fromkeys(metric for row in TASKS.values() for metric in row.metrics):
        yield f"run.target.{metric}", "Stop early once an evaluation reaches this."
    for section, group in SECTIONS.items():
        for path in (f"{section}.{section_key(name)}" for name in installed(group)):
            if not word.startswith(f"{path}."):  # nothing of the package is imported yet
                yield f"{path}.", ""
            elif (own := described_at(path)) is not None:
                yield from ((setting.name, setting.sentence) for setting in own.settings)


def _about_section(name: str) -> str:
    from shardyard.config.schema.reference import sections

    return next((_first_words(found.sentence) for found in sections() if found.name == name), "")


def _first_words(sentence: str) -> str:
    first = re.split(r"[;:(]|\. ", sentence, maxsplit=1)[0].strip(" .`")
    return first if len(first) <= 60 else f"{first[:57]}..."


def _values(name: str, text: str) -> Iterator[Item]:
    """Yield the values that a setting accepts, if they can be listed."""
    from shardyard.config.paths import PATHS

    row = PATHS.get(name)
    if row is not None and row.opened_by is not None:
        suffixes, is_folder = row.suffixes, row.is_folder
        yield from paths(
            text, is_match=lambda path: not is_folder and (not suffixes or path.suffix in suffixes)
        )
    yield from _words(text, dict.fromkeys([*_names(name), *_choices(name)]))


def _names(setting: str) -> Iterable[str]:
    """Return a setting's values from a registry outside the schema."""
    match setting:
        case "model.preset":
            from shardyard.families.presets import PRESETS

            return PRESETS
        case "task.name":
            from shardyard.config.tasks import TASKS
            from shardyard.plugins import installed

            return [*TASKS, *installed("tasks")]
        case "cluster.instance":
            from shardyard.hardware.catalogue import instance_names

            return instance_names()
        case "cluster.device":
            return ("cpu", "cuda", "xpu", "hpu", "xla")
        case "data.source":
            return ("python-stdlib", "digits")
        case "data.tokenizer":
            return ("train",)
    return ()


def _choices(setting: str) -> Iterable[str]:
    """Return a setting's values from the schema."""
    from shardyard.config.schema.reference import settings

    found = settings().get(setting)
    if found is None:
        return ()
    truths = ("true", "false") if found.accepts.startswith("true or false") else ()
    return (*truths, *found.choices)


# --- items --------------------------------------------------------------------------------------


def _words(start: str, words: Iterable[str]) -> Iterator[Item]:
    return (Item(word) for word in words if word.startswith(start))


def _like(item: Item, value: str) -> Item:
    return Item(value, type=item.type, help=item.help)


def _entries(folder: Path) -> list[Path]:
    """Return a folder's entries, except names that would act on a terminal."""
    try:
        return [entry for entry in folder.iterdir() if entry.name.isprintable()]
    except OSError:
        return []


def _changed_at(folder: Path) -> float:
    run = RunDir(folder)
    times = [path.stat().st_mtime for path in (run.events, run.metrics, folder) if path.exists()]
    return max(times, default=0.0)


def _state(folder: Path) -> str | None:
    from shardyard.rundir.state import read_state

    try:
        found = read_state(RunDir(folder))
    except (ShardyardError, OSError):  # a damaged run can be named all the same
        return None
    return found.state if found.step is None else f"{found.state}, step {found.step:,}"


# --- shells -------------------------------------------------------------------------------------


class _ShellCompleteBase(ShellComplete):
    """Completion common to all shells. An item of type ``part`` is followed by no space."""

    def get_completions(self, args: list[str], incomplete: str) -> list[Item]:
        """Return completions of the word; none after an error, as a prompt is no place for one."""
        try:
            return self._completions(args, incomplete)
        except Exception:  # noqa: BLE001 - the outermost line of this call
            return []

    def _completions(self, args: list[str], incomplete: str) -> list[Item]:
        completer = _by_verb(args, incomplete)
        if completer is not None:
            return list(completer(incomplete, {}))
        option, equals, _ = incomplete.partition("=")
        is_value = bool(equals) and incomplete.startswith("-")
        found = super().get_completions(args, incomplete)
        return [_like(item, f"{option}={item.value}") if is_value else item for item in found]


def _by_verb(args: list[str], incomplete: str) -> Completer | None:
    """Return the completer of a word that depends only on its verb; None: leave it to click."""
    verb, *words = args or [""]
    if verb not in WORDS or any(word.startswith("-") for word in [*words, incomplete]):
        return None
    completers = WORDS[verb]
    if len(words) < len(completers):
        return completers[len(words)]
    return _nothing if completers[-1] is runs else completers[-1]


def _nothing(word: str, options: Mapping[str, Any]) -> Iterable[Item]:
    return ()


class _Bash(_ShellCompleteBase, BashComplete):
    """Gets the whole line: bash's own words end at = and :, and it replaces the last of them."""

    source_template = """\
%(complete_func)s() {
    local kind value
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            part) compopt -o nospace; COMPREPLY+=("$value") ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORD="$2" %(complete_var)s=bash_complete \\
        "$1" 2>/dev/null)
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        # The letter ends the last word, also where it is empty or in an open quote.
        words = split_arg_string(f"{os.environ['COMP_LINE']}x")
        return words[1:-1], words[-1][:-1]

    def format_completion(self, item: "CompletionItem[Any]") -> str:
        _, whole = self.get_completion_args()
        line, word = os.environ["COMP_LINE"], os.environ["COMP_WORD"]
        kept = whole.removesuffix(word)
        value = str(item.value).removeprefix(kept)
        is_quoted = '"' in line or "'" in line
        return f"{item.type},{value if is_quoted else _escaped(value)}"


def _escaped(value: str) -> str:
    return re.sub(r"([^\w@%+=:,./~^-])", r"\\\1", value)


class _Zsh(_ShellCompleteBase, ZshComplete):
    source_template = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a response whole parts
    local kind value about
    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \\
%(complete_var)s=zsh_complete ${words[1]} 2>/dev/null)}")
    for kind value about in ${response}; do
        [[ $about == _ ]] || value="${value//:/\\\\:}:$about"
        case $kind in
            plain) whole+=("$value") ;;
            part) parts+=("$value") ;;
            dir) _path_files -/ ;;
            file) _path_files -f ;;
        esac
    done
    (( $#whole )) && _describe -V shardyard whole -U
    (( $#parts )) && _describe -V shardyard parts -U -S ''
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""

    def format_completion(self, item: Item) -> str:
        return f"{item.type}\n{item.value}\n{item.help or '_'}"


class _Fish(_ShellCompleteBase, FishComplete):
    """Fish adds no space after a word that ends in = . or /."""

    source_template = """\
function %(complete_func)s
    set -l response (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) \\
COMP_CWORD=(commandline -ct) (commandline -po)[1] 2>/dev/null)
    for completion in $response
        set -l parts (string split --max 1 , $completion)
        switch $parts[1]
            case dir
                __fish_complete_directories $parts[2]
            case file
                __fish_complete_path $parts[2]
            case '*'
                echo $parts[2]
        end
    end
end

complete --no-files --keep-order --command %(prog_name)s --arguments "(%(complete_func)s)"
"""


_SHELLS: dict[str, type[_ShellCompleteBase]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}
