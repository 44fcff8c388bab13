"""Turn rows of dialogues, in the shapes that people have, into one: a list of messages.

Only its keys decide a shape. What is ambiguous, broken or made for another kind of training
is rejected with its place. Rows that a chat template rejects are counted; too many of them end
the preparation.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardyard.config.data_choices import PREFERENCE_KEYS, chat_rows_of
from shardyard.data.byte_ranges import escape_text
from shardyard.data.readers.columns import check_surrogates, kind_of, some_keys
from shardyard.errors import SourceError
from shardyard.io.files import parse_json

if TYPE_CHECKING:
    from shardyard.config.schema.data import Data

ROLES = ("system", "developer", "user", "assistant", "tool")

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which people keep what is thought before an answer."""

_KEPT = ("role", "content", *REASONING, "name", "tool_calls", "tool_call_id", "weight")
"""Keys of a message that are kept; others (ids, times, votes) are of no use to a model."""

_OTHER_TRAINING = {
    "label": "preference tuning (answers that are good or bad)",
    "images": "training on pictures",
    "videos": "training on videos",
    "audio": "training on sound",
}
"""Keys that make a row one of something that is not built; learnt as a dialogue it would teach the
wrong thing."""

_SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant",
             "assistant": "assistant", "chatgpt": "assistant", "model": "assistant"}  # fmt: skip
"""``from`` of ShareGPT's turns -> role."""

Row = Mapping[str, Any]
Messages = list[dict[str, Any]]


class RowError(Exception):
    """Error in a row, and what to do, without its place."""


def dialogue_text(row: Any, location: object) -> str:
    """A dialogue as JSON: ``{"messages": [...]}``, and ``tools`` where the row has them.

    Raises:
        SourceError: The row is none of the shapes, or a broken one.
    """
    return row_text(row, location, _dialogue_of, what="the dialogue", forms=_FORMS)


def row_text(
    row: Any,
    location: object,
    read: Callable[[Row], dict[str, Any]],
    *,
    what: str,
    forms: str,
) -> str:
    """Write what a function reads of a row as JSON, with ``tools`` where the row has them.

    Args:
        location: File and line, for messages.
        read: Gets the row without keys that have no value.
        what: Name of the result in messages.
        forms: Shapes that are accepted, in words.

    Raises:
        SourceError: The row is none of the shapes, or a broken one.
    """
    try:
        if not isinstance(row, dict):
            raise RowError(f"{kind_of(row)}, not an object. {forms}")
        there = {key: value for key, value in row.items() if value is not None}
        content = read(there)
        if there.get("tools"):
            content["tools"] = there["tools"]
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    except RowError as error:
        raise SourceError(f"{location}: {error}") from error
    except (TypeError, ValueError) as error:
        raise SourceError(
            f"{location}: {what} holds a value that JSON cannot express ({error}). Use only "
            "texts, numbers, lists and objects."
        ) from error
    check_surrogates(text, location, what)
    return text


def _dialogue_of(row: Row) -> dict[str, Any]:
    messages = [checked_message(message) for message in _messages_of(row)]
    if not any(is_target(message) for message in messages):
        raise RowError("the dialogue has no answer to learn. Take the row out.")
    return {"messages": messages}


def is_target(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer that is to be learnt."""
    return bool(message["role"] == "assistant" and message.get("weight", 1) != 0)


def words_of(text: str) -> str:
    """Return the words of a dialogue without its speakers, to train a tokenizer on."""
    contents = (message.get("content") or "" for message in parse_json(text)["messages"])
    return "\n".join(contents)


def _messages_of(row: Row) -> Messages:
    found = chat_rows_of(row)
    if {*PREFERENCE_KEYS} & {*row}:
        raise RowError(
            f"it is a pair of answers ({' and '.join(PREFERENCE_KEYS)}). Set task.name=preference "
            "data.format=preference_pairs (docs/chat.md), or take the row out."
        )
    for key, training in _OTHER_TRAINING.items():
        if key in row and (key != "label" or isinstance(row[key], bool)) and row[key] != []:
            raise RowError(
                f"its key {key!r} is of {training}, which is not built. Take these rows out, or "
                f"the key if it means something else."
            )
    if len(found) != 1:
        what = f"is of several shapes ({', '.join(found)})" if found else "is of no known shape"
        raise RowError(f"the row {what}; its keys: {some_keys(row)}. {_FORMS}{_mapping(row)}")
    return _READERS[found[0]](row)


def _mapping(row: Row) -> str:
    """Return a mapping of two texts of a row; empty where it has no two."""
    texts = [escape_text(key) for key, value in row.items() if isinstance(value, str)][:2]
    if len(texts) < 2 or not all(text.isidentifier() for text in texts):
        return ""
    return f" For example: data.keys.prompt={texts[0]} data.keys.completion={texts[1]}."


def chat_rows_name(row: Any, location: object) -> str:
    """The name of a row's kind, after the same checks as ``dialogue_text``."""
    dialogue_text(row, location)
    return chat_rows_of([key for key, value in row.items() if value is not None])[0]


def _of_messages(row: Row) -> Messages:
    return list_of_objects(row, "messages")


def _of_completion(row: Row) -> Messages:
    """Texts, or lists of messages of which only those of the completion are learnt."""
    if isinstance(row["prompt"], str):
        answer = {"role": "assistant", "content": text_under(row, "completion")}
        return [*system_messages(row), {"role": "user", "content": row["prompt"]}, answer]
    prompt = [{**message, "weight": 0} for message in list_of_objects(row, "prompt")]
    for message in prompt:
        if message.get("role") != "assistant":
            del message["weight"]
    return [*system_messages(row), *prompt, *list_of_objects(row, "completion")]


def _of_instruction(row: Row) -> Messages:
    if row.get("history"):
        raise RowError(
            "its key 'history' holds earlier turns, which no two tools write alike. Write the row "
            "as messages."
        )
    further = text_under(row, "input") if "input" in row else ""
    prompt = "\n\n".join(part for part in (text_under(row, "instruction"), further) if part)
    answer = {"role": "assistant", "content": text_under(row, "output")}
    return [*system_messages(row), {"role": "user", "content": prompt}, answer]


def _of_texts(prompt: str, reply: str) -> Callable[[Row], Messages]:
    """Two texts, and a context behind the first."""

    def messages_of(row: Row) -> Messages:
        further = text_under(row, "context") if "context" in row else ""
        words = "\n\n".join(part for part in (text_under(row, prompt), further) if part)
        answer = {"role": "assistant", "content": text_under(row, reply)}
        return [*system_messages(row), {"role": "user", "content": words}, answer]

    return messages_of


def messages_of_turns(row: Row) -> Messages:
    turns = list_of_objects(row, "conversations")
    if all("role" in turn and "from" not in turn for turn in turns):
        return turns
    messages: Messages = []
    for number, turn in enumerate(turns, start=1):
        speaker = turn.get("from")
        role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise RowError(
                f"turn {number} is from {_quoted(speaker)}; known are {', '.join(_SPEAKERS)}. "
                "Write the row as messages, with tool calls as OpenAI has them, or take it out."
            )
        weight = {"weight": turn["weight"]} if turn.get("weight") is not None else {}
        messages.append({"role": role, "content": turn.get("value"), **weight})
    return [*system_messages(row), *messages]


_READERS: Mapping[str, Callable[[Row], Messages]] = {
    "messages": _of_messages,
    "prompt and completion": _of_completion,
    "alpaca": _of_instruction,
    "sharegpt": messages_of_turns,
    "question and answer": _of_texts("question", "answer"),
    "prompt and response": _of_texts("prompt", "response"),
    "instruction and response": _of_texts("instruction", "response"),
    "input and output": _of_texts("input", "output"),
}
"""Name in ``CHAT_ROWS`` -> how the messages of a row are read."""

_FORMS = (
    "data.format=chat takes messages (a list of role and content), prompt and completion, "
    "instruction and output (and input), question and answer, or conversations (a list of from "
    "and value). Rename the row's keys, or map them with data.keys."
)


def system_messages(row: Row) -> Messages:
    return [{"role": "system", "content": text_under(row, "system")}] if row.get("system") else []


def text_under(row: Row, key: str) -> str:
    if not isinstance(row[key], str):
        raise RowError(f"{key!r} holds {kind_of(row[key])}, not a string. Fix the row.")
    text: str = row[key]
    return text


def list_of_objects(row: Row, key: str) -> Messages:
    value = row[key]
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        found = "a JSON list" if isinstance(value, list) else kind_of(value)
        raise RowError(f"{key!r} holds {found}, not a list of objects. Fix the row.")
    return value


def checked_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with what a template may read, or why it is none."""
    if message.get("function_call") is not None:
        raise RowError(
            "a message has a function_call, OpenAI's older form. Write it as tool_calls."
        )
    kept = {key: message[key] for key in _KEPT if message.get(key) is not None}
    role = kept.get("role")
    if role not in ROLES:
        raise RowError(f"a message's role is {_quoted(role)}, not {', '.join(ROLES)}. Fix it.")
    if kept.get("weight", 1) not in (0, 1) or ("weight" in kept and role != "assistant"):
        raise RowError(
            f"a message of {role} has weight {_quoted(kept['weight'])}: an answer's weight is 0 "
            "(not learnt) or 1; other messages have none. Fix it."
        )
    if "tool_calls" in kept:
        kept["tool_calls"] = [_checked_call(call) for call in list_of_objects(kept, "tool_calls")]
    content = _joined(kept.get("content", ""))
    if role == "assistant" and not content.strip() and not kept.get("tool_calls"):
        raise RowError("an answer is empty. Take it out, or the row.")
    if "content" in kept or not kept.get("tool_calls"):
        kept["content"] = content
    return kept


def _joined(content: Any) -> str:
    """The text of a content: a string, or OpenAI's list of parts of text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RowError(
            f"the content of a message is {kind_of(content)} with a part that is not text. "
            "Dialogues are learnt only as text: fix it, or take the row out."
        )
    return "".join(text for text in texts if text is not None)


def _checked_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call; its arguments as an object, which templates expect, where OpenAI has text."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("a tool call names no function. Fix it, or take the row out.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = parse_json(arguments)
        except (ValueError, RecursionError) as error:
            raise RowError(
                f"the arguments of a tool call are not JSON ({error}). Fix them."
            ) from error
        function = {**function, "arguments": parsed}
    return {**call, "function": function} if "function" in call else function


def _quoted(value: Any) -> str:
    return escape_text(json.dumps(value, default=str)[:60])


Records = Sequence[dict[str, Any]]
"""Records of finished pieces (``work_units.py``)."""


def check_rejected_in(records: Records, data: "Data", *, setting: str) -> None:
    """Apply ``check_rejected`` to the dialogues of finished pieces."""
    rejected, of = _rejected_in(records), _sections_in(records)
    check_rejected(rejected, data, of=of, setting=setting, example=_first(records))


def check_rejected(
    rejected: int, data: "Data", *, of: int, setting: str, example: str = ""
) -> None:
    """Raise where more dialogues are rejected by the template than may be left out.

    Args:
        of: Dialogues that there are.
        setting: Setting that names the files.
        example: The first of them, with the reason; empty: it is not known any more.

    Raises:
        SourceError: More are, or all of them.
    """
    if not rejected or (rejected <= data.max_rejected * of and rejected < of):
        return
    share = math.ceil(10_000 * rejected / of) / 10_000
    first = f"{example} " if example else f"{setting}={data.source!r}: "
    remedy = (
        "Choose another template with data.chat_template."
        if rejected == of
        else f"To leave them out, set data.max_rejected={share:g}; else correct the rows, or "
        "choose another template with data.chat_template."
    )
    raise SourceError(
        f"{first}The chat template rejects {rejected:,} of {of:,} dialogues ({share:.2%}), and "
        f"data.max_rejected is {data.max_rejected:g}. {remedy}"
    )


def _rejected_in(records: Records) -> int:
    """Rows that were rejected; none in records of earlier versions."""
    return sum(record.get("rejected", 0) for record in records)


def _sections_in(records: Records) -> int:
    return sum(record.get("sections", 0) for record in records)


def _first(records: Records) -> str:
    return next((row for record in records for row in record.get("first_rejected", ())), "")


def rejected_of(records: Records) -> dict[str, int]:
    """Return the counts of rejected rows; empty where no row was, as in older manifests."""
    rejected = _rejected_in(records)
    return {"rejected": rejected, "rejected_of": _sections_in(records)} if rejected else {}
