"""A model's chat template: from messages to text, as transformers renders it, without transformers.

Templates come from model folders, so they run in Jinja's sandbox, on plain values of JSON, within
the bounds of ``template_bounds.py``. In addition to Jinja's own they have what transformers 5 gives
them (its ``utils/chat_template_utils.py``).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from shardyard.config.data_choices import TEMPLATE_SUFFIX
from shardyard.data.conversations import REASONING
from shardyard.data.template_bounds import (
    BoundedEnvironment,
    BoundsError,
    bounded_memory,
    join_pieces,
    weighed,
)
from shardyard.errors import RequestError
from shardyard.io.files import parse_json

TEMPLATE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

TODAY = (2024, 7, 26)
"""Date that a template takes for today, so that equal dialogues give equal tokens on every
day. It is the day that Llama 3's own template falls back to.
"""

Messages = Sequence[Mapping[str, Any]]


class RenderError(Exception):
    """A template did not render; says why in its own words."""


class ChatTemplate:
    """Renders dialogues by the template in a tokenizer's files."""

    def __init__(self, files: Mapping[str, bytes], *, name: str) -> None:
        """Args:
            files: Of a tokenizer, by name.
            name: What messages call it.

        Raises:
            RequestError: There is no template in them, or none that Jinja can read.
        """
        self._name = name
        sources = _sources(files)
        if "default" not in sources:
            raise RequestError(
                f"data.format=chat: {name} has no chat template: neither {TEMPLATE}, nor a "
                f"chat_template in {_CONFIG}. Set data.chat_template to a known one, such as "
                f"chatml, or to a file of your own: data.chat_template=FILE{TEMPLATE_SUFFIX}."
            )
        self.source = "\n".join(sources.values())
        self._file = TEMPLATE if TEMPLATE in files else _CONFIG
        self._environment = _environment()
        try:
            with bounded_memory():
                self._templates = {
                    key: self._environment.from_string(source) for key, source in sources.items()
                }
        except BoundsError as error:
            raise self._unbounded(error) from error
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise RequestError(
                f"data.format=chat: the chat template of {name} is not a template that Jinja can "
                f"read ({error}). Fetch it again, or fix it."
            ) from error
        self._named = _named_tokens(files)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of messages.

        Args:
            add_generation_prompt: End with what comes before an answer.

        Raises:
            RenderError: The template rejected them, or failed.
            RequestError: It needs a token that the tokenizer does not name, or takes more steps,
                time or memory than a template may.
        """
        has_own = tools is not None and "tool_use" in self._templates
        template = self._templates["tool_use" if has_own else "default"]
        self._environment.begin()
        try:
            with bounded_memory():
                return join_pieces(
                    template.generate(
                        messages=[_with_reasoning(message) for message in messages],
                        tools=tools,
                        documents=None,
                        add_generation_prompt=add_generation_prompt,
                        **self._named,
                    )
                )
        except BoundsError as error:
            raise self._unbounded(error) from error
        except jinja2.UndefinedError as error:
            lacking = [each for each in _NAMED_TOKENS if str(error) == f"'{each}' is undefined"]
            if not lacking:
                raise RenderError(str(error)) from error
            raise RequestError(
                f"data.format=chat: the chat template of {self._name} writes {lacking[0]}, and no "
                f"such token is named there. Set {lacking[0]} in {_CONFIG} next to the template to "
                "one of the tokenizer's special tokens, or choose another template with "
                "data.chat_template."
            ) from error
        except Exception as error:
            raise RenderError(str(error) or type(error).__name__) from error

    def _unbounded(self, error: BoundsError) -> RequestError:
        return RequestError(
            f"data.format=chat: the chat template of {self._name} (in {self._file}) {error}. "
            "Read it before you use this model, or choose another template with "
            "data.chat_template."
        )


def _sources(files: Mapping[str, bytes]) -> dict[str, str]:
    """Templates by name; the file before what tokenizer_config.json holds, as in transformers."""
    config = parse_json(files[_CONFIG]) if _CONFIG in files else {}
    declared = config.get("chat_template")
    if isinstance(declared, list):  # several, of which one is for dialogues with tools
        sources = {each["name"]: each["template"] for each in declared}
    else:
        sources = {} if declared is None else {"default": declared}
    if TEMPLATE in files:
        sources["default"] = files[TEMPLATE].decode()
    return sources


def _named_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Tokens that a template knows by their roles."""
    tokens: dict[str, str] = {}
    for name in (_CONFIG, "special_tokens_map.json"):
        declared = parse_json(files[name]) if name in files else {}
        for key in _NAMED_TOKENS:
            token = declared.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                tokens[key] = token
    return tokens


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its thoughts under each name that templates read."""
    thoughts = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if thoughts is None:
        return dict(message)
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks answers for other tools; what is in it is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)  # what it sets is unknown behind it


class _Dict:
    """``dict`` without the attributes of Python's class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` that takes no name with an underscore in front: those are Python's own."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *others = args
        attributes = dict(*others, **values)
        for name in attributes:
            _reject_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _reject_private(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)
        weighed(self)


def _reject_private(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise, strftime_now=_strftime, dict=_Dict(), namespace=_Namespace
    )
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    """JSON as it is: Jinja's own filter escapes what HTML could take for a tag."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime(form: str) -> str:
    from datetime import datetime

    return datetime(*TODAY).strftime(form)
