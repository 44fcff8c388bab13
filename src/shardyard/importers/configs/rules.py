"""Rules for the keys of a source: the four outcomes, and how a rule decides between them.

A source is a table, pattern -> rule. ``apply_rules`` gives every value of a parsed file exactly
one outcome. A key without a rule is rejected, so that no part of a source is dropped
silently.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from shardyard.config.optimizers import OPTIMIZERS, Elsewhere, optimizer_by_alias
from shardyard.config.schema.reference import settings
from shardyard.config.secrets import HIDDEN, find_credential

QUANTITIES = {
    "processes": "processes of the whole job",
    "accumulation_steps": "micro-batches of one rank in one optimizer step",
    "bf16": "whether matrix products are in bf16",
    "fp16": "whether matrix products are in fp16",
    "offload_params": "whether parameters wait in host memory",
    "offload_optimizer": "whether the optimizer's states wait in host memory",
}
"""Quantities in sources that no single setting states; ``job.py`` makes settings of them."""


class OutcomeKind(Enum):
    """The outcomes."""

    MAPPED = "mapped"
    DEFAULT = "equal to the default"
    NONE = "no counterpart"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """Verdict of a rule on one value."""

    kind: OutcomeKind
    words: str = ""
    """Why there is no counterpart; what is wrong and what to do now."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted setting, or one of ``QUANTITIES`` -> value.

    Of a rejected value: the settings that settle it when they are given on the command line,
    each with None.
    """
    is_open: bool = False
    """Whether the Trainer's arguments settle a rejected value too."""


@dataclass(frozen=True, kw_only=True)
class ConfigEntry:
    """One value of a source."""

    path: str
    """Dotted; entries of a list by their number."""
    value: Any
    """A scalar, a list of scalars, or an empty list or mapping."""
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome for one value of a source."""

    file: str
    entry: ConfigEntry
    result: RuleResult
    source: str = ""
    """Name of the kind of file."""

    @property
    def location(self) -> str:
        """Return the place of the value: file, key and line."""
        line = "" if self.entry.line is None else f", line {self.entry.line}"
        return f"{self.file}: {self.entry.path}{line}"

    @property
    def redacted_value(self) -> Any:
        """The value, unless it may be a credential."""
        text = str(self.entry.value)
        is_secret = "secret" in self.result.words or _SECRET.search(text)
        return HIDDEN if is_secret or find_credential(text) else self.entry.value

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "file": self.file,
            "key": self.entry.path,
            "line": self.entry.line,
            "value": self.redacted_value,
            "outcome": self.result.kind.value,
            "settings": dict(self.result.settings),
            "words": self.result.words,
        }


@dataclass(frozen=True)
class SourceConfig:
    """All values of a source by path, for rules that look at more than their own."""

    entries: Mapping[str, ConfigEntry]
    prefix: str = ""

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a path below the prefix."""
        entry = self.entries.get(self.prefix + path)
        return default if entry is None else entry.value

    def below(self, path: str) -> dict[str, Any]:
        """Values below a path, by the rest of their paths."""
        start = f"{self.prefix}{path}."
        return {
            name.removeprefix(start): entry.value
            for name, entry in self.entries.items()
            if name.startswith(start)
        }

    def whole(self) -> "SourceConfig":
        """The whole source."""
        return SourceConfig(self.entries)

    def under(self, path: str) -> "SourceConfig":
        """The same, seen from a part of the source."""
        return SourceConfig(self.entries, f"{self.prefix}{path}.")


_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|_KEY)\"?[=:]\s*\S|\blogin\s+\S")

Rule: TypeAlias = Callable[[ConfigEntry, SourceConfig], RuleResult]
Rows: TypeAlias = Mapping[str, Rule]
"""Pattern of a path -> rule; ``*`` is any text. Exact paths win, then the first pattern."""

ON = (True, "true", "True", "yes", "1", 1)
OFF = (False, "false", "False", "no", "0", 0, None, "null", "None", "")


def mapped(values: Mapping[str, Any], words: str = "") -> RuleResult:
    """Return the verdict that settings or quantities state the value.

    Args:
        words: Small differences, for the comment of the line.
    """
    return RuleResult(kind=OutcomeKind.MAPPED, settings=values, words=words)


def same(words: str = "", **says: Any) -> RuleResult:
    """The value asks what happens anyway."""
    return RuleResult(kind=OutcomeKind.DEFAULT, words=words, settings=says)


def none(words: str) -> RuleResult:
    """Return the verdict that the value has no counterpart."""
    return RuleResult(kind=OutcomeKind.NONE, words=words)


def rejected(words: str, *settings_: str) -> RuleResult:
    """It cannot be taken over.

    Args:
        settings_: Those that settle it when the command line gives all of them.
    """
    return RuleResult(kind=OutcomeKind.REFUSED, words=words, settings=dict.fromkeys(settings_))


def optimizer_of(where: Elsewhere) -> Rule:
    """The optimizer that a source names in its own way."""

    def named(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
        name = optimizer_by_alias(where, str(entry.value))
        if name is None:
            return rejected(
                f"={entry.value!r} is not there. optim.name={', '.join(OPTIMIZERS)}: each trains "
                "with another optimizer, which is another training.",
                "optim.name",
            )
        return mapped({"optim.name": name})

    return named


def auto(rule: Rule, *names: str) -> Rule:
    """``auto``, which the Hugging Face Trainer fills in from its arguments; or what a rule says."""

    def filled(entry: ConfigEntry, config: SourceConfig) -> RuleResult:
        if entry.value != "auto":
            return rule(entry, config)
        return RuleResult(
            kind=OutcomeKind.REFUSED,
            is_open=True,
            settings=dict.fromkeys(names),
            words="=auto is filled in by the Trainer from its arguments, which no file here holds. "
            f"Give them as a file too, or {' and '.join(f'{name}=...' for name in names)}.",
        )

    return filled


def to(*names: str, convert: Callable[[Any], Any] | None = None) -> Rule:
    """Return the rule that sets settings or quantities; values it cannot convert are rejected."""

    def rule(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
        value = entry.value
        if value is None:
            return same("null: not set")
        if is_variable(value):
            return _unknown_variable(value, names)
        try:
            value = value if convert is None else _converted(value, convert)
        except (ValueError, TypeError, KeyError, IndexError):
            return rejected(
                f"={value!r} is not a value that {' and '.join(names)} can take. Fix it, or give "
                f"{names[0]}=... on the command line.",
                *names,
            )
        return mapped(dict.fromkeys(names, value))

    return rule


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Whole numbers stay whole, and switches are no numbers.

    Raises:
        ValueError: It is none.
    """
    is_part = isinstance(value, float) and not value.is_integer()
    if (isinstance(value, bool) and convert in (int, float)) or (is_part and convert is int):
        raise ValueError(value)
    return convert(value)


def is_variable(value: Any) -> bool:
    """Whether a text still holds a variable or a command of a shell, or of a template."""
    return isinstance(value, str) and ("$" in value or "`" in value or "{{" in value)


def _unknown_variable(value: str, names: Sequence[str]) -> RuleResult:
    return rejected(
        f"={value!r} holds what only a shell would know, and the file does not set it. Write the "
        f"value there, or give {names[0]}=... on the command line.",
        *names,
    )


def nowhere(words: str) -> Rule:
    """Return the rule that no value has a counterpart."""
    return lambda _entry, _config: none(words)


def reject(words: str, *settings_: str) -> Rule:
    """Return the rule that rejects every value."""
    return lambda _entry, _config: rejected(words, *settings_)


def reject_if_on(words: str, *settings_: str) -> Rule:
    """It cannot be taken over, unless it is switched off."""

    def rule(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
        if entry.value in OFF or entry.value in ({}, []):
            return same("off, as here")
        return rejected(words, *settings_)

    return rule


def choose(
    rows: Mapping[Any, RuleResult],
    otherwise: Callable[[Any], RuleResult] | RuleResult | None = None,
) -> Rule:
    """A verdict for each value; texts are compared without capitals."""

    def rule(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
        value = entry.value
        key = value.lower() if isinstance(value, str) else value
        for known, verdict in rows.items():
            if isinstance(known, bool) == isinstance(key, bool) and known == key:
                return verdict
        if otherwise is not None:
            return otherwise if isinstance(otherwise, RuleResult) else otherwise(value)
        words = ", ".join(str(known) for known in rows)
        return rejected(f"={value!r} is not known to this version, which knows {words}. Fix it.")

    return rule


def switch(on: RuleResult, off: RuleResult) -> Rule:
    """A verdict for on and one for off, as sources spell them."""

    def rule(entry: ConfigEntry, _: SourceConfig) -> RuleResult:
        value = entry.value.lower() if isinstance(entry.value, str) else entry.value
        if value in ON:
            return on
        if value in OFF:
            return off
        return rejected(f"={entry.value!r} is neither true nor false. Fix it.")

    return rule


def under(prefix: str, rows: Rows) -> dict[str, Rule]:
    """Return the rows of a source that is inside another one."""

    def moved(rule: Rule) -> Rule:
        return lambda entry, config: rule(
            replace(entry, path=entry.path.removeprefix(f"{prefix}.")), config.under(prefix)
        )

    return {f"{prefix}.{pattern}": moved(rule) for pattern, rule in rows.items()}


def apply_rules(
    file: str, entries: Sequence[ConfigEntry], rows: Rows, source: str = ""
) -> list[Outcome]:
    """One outcome for each value."""
    config = SourceConfig({entry.path: entry for entry in entries})
    return [
        Outcome(file=file, entry=entry, result=_apply_rule(entry, config, rows), source=source)
        for entry in entries
    ]


def _apply_rule(entry: ConfigEntry, config: SourceConfig, rows: Rows) -> RuleResult:
    path = re.sub(r"#\d+$", "", entry.path)
    rule = rows.get(path) or next((rows[each] for each in rows if fnmatchcase(path, each)), None)
    if rule is None:
        return rejected(
            "is unknown to this version of Shardyard, so its effect would be lost. If the run "
            f"does not need it, leave it out: --without {entry.path}."
        )
    try:
        verdict = rule(entry, config)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError):
        return rejected(
            f"={entry.value!r} is not a legal value of this key, or contradicts a key next to it. "
            f"Fix it, or leave it out: --without {entry.path}."
        )
    if verdict.kind is OutcomeKind.MAPPED and is_default(verdict.settings):
        return replace(verdict, kind=OutcomeKind.DEFAULT)
    return verdict


def is_default(values: Mapping[str, Any]) -> bool:
    """Whether settings say what is so anyway."""
    known = settings()
    return bool(values) and all(
        name in known and _same(known[name].default, value) for name, value in values.items()
    )


def _same(default: Any, value: Any) -> bool:
    if isinstance(default, tuple | list) and isinstance(value, tuple | list):
        return list(default) == list(value)
    return type(default) is type(value) and bool(default == value)


def values_agree(one: Any, other: Any) -> bool:
    """Whether two sources say the same; 1 and 1.0 do."""
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return list(one) == list(other)
    return bool(one == other)
