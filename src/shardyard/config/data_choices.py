"""Choices of data without the code that does them: one row for each ``data.format``.

It also has the chat templates, the share of hidden text, and the deal of a mixture's samples.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

PLAIN_TEXT = "shardyard.data.work_units:PlainText"
SENTENCES = "shardyard.data.sentence_pairs:SentenceText"
RECORDS = "shardyard.data.premasked:Record"
TOKEN_IDS = "shardyard.data.token_ids"


@dataclass(frozen=True, kw_only=True)
class DataFormat:
    """Reading of files, and encoding of a document."""

    encoder: str
    """module:class of its ``data.work_units.Encoder``."""
    whole_row: str | None = None
    """Function that makes text of a whole row of a file: module:function (row, place) -> text.

    None: the text is that under ``data.text_key``.
    """
    row_name: str | None = None
    """Function that names the kind of a row: module:function (row, place) -> name."""
    only: tuple[str, ...] = ()
    """Rows in ``data.formats`` of files that no other ``data.format`` takes. Where there are some,
    it takes no others, except rows for ``whole_row``.
    """
    holds_ids: bool = False
    """Whether files hold ids of a tokenizer, which has to be there already."""
    holds_samples: bool = False
    """Whether a record of the files is a sample as a task reads it."""
    holds_pairs: bool = False
    """Whether a row is a pair of answers, which are kept whole and apart."""
    text: str | None = None
    """Kind that a file of plain text is read as; None: it is one document."""
    settings: tuple[str, ...] = ()
    """Settings of ``data`` that only this format reads."""
    options: tuple[str, ...] = ()
    """Format settings that its encoder is made with, and that its tokens depend on."""
    ignores: tuple[str, ...] = ()
    """Settings without a meaning in this format."""
    unknown: str | None = None
    """Row in ``data.formats`` for a file of unknown suffix; None: it is rejected."""


DATA_FORMATS: dict[str, DataFormat] = {
    "by_suffix": DataFormat(encoder=PLAIN_TEXT),
    "text": DataFormat(encoder=PLAIN_TEXT, unknown="text"),
    "sentences": DataFormat(encoder=SENTENCES),
    "documents": DataFormat(encoder=SENTENCES, text="documents", unknown="documents"),
    "bert_h5": DataFormat(encoder=RECORDS, only=("bert_h5",), holds_ids=True, holds_samples=True),
    "token_ids": DataFormat(
        encoder=f"{TOKEN_IDS}:TokenIds",
        whole_row=f"{TOKEN_IDS}:row_text",
        only=("ids_bin", "ids_npy", "ids_datatrove", "ids_mds"),
        settings=("id_type", "id_rows"),
        options=("id_type", "id_rows"),
        ignores=("text_key", "bos"),
        holds_ids=True,
    ),
    "chat": DataFormat(
        encoder="shardyard.data.chat:Dialogue",
        whole_row="shardyard.data.conversations:dialogue_text",
        row_name="shardyard.data.conversations:chat_rows_name",
        settings=("keys", "chat_template", "loss_on", "loss_share", "max_rejected"),
        options=("loss_on",),
        ignores=("text_key", "bos"),
    ),
    "preference_pairs": DataFormat(
        encoder="shardyard.data.preference.rows:AnswerPair",
        whole_row="shardyard.data.preference.rows:pair_text",
        settings=("keys", "chat_template", "max_rejected"),
        ignores=("text_key", "bos"),
        holds_pairs=True,
    ),
}
"""``data.format`` -> its row."""


# Rows of dialogues by their keys, for those who read them and those who recognise them.

CHAT_ROWS: dict[str, frozenset[str]] = {
    "messages": frozenset({"messages"}),
    "prompt and completion": frozenset({"prompt", "completion"}),
    "alpaca": frozenset({"instruction", "output"}),
    "sharegpt": frozenset({"conversations"}),
    "question and answer": frozenset({"question", "answer"}),
    "prompt and response": frozenset({"prompt", "response"}),
    "instruction and response": frozenset({"instruction", "response"}),
    "input and output": frozenset({"input", "output"}),
}
"""Name -> the keys that make a row one of it. Those behind sharegpt count only if no other does."""

_PLAIN_ROWS = tuple(CHAT_ROWS)[4:]

CHAT_KEYS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output",
    "question", "answer", "response", "context", "system", "tools",
)  # fmt: skip
"""Keys of a row that data.keys maps others to."""

ID_KEYS = ("input_ids", "tokens", "token_ids")
"""Keys of a row, or columns, that hold ids: as datasets, llm-foundry and others name them."""

PREFERENCE_KEYS = ("chosen", "rejected")
"""Keys of the two answers of a pair."""

TURN_KEYS = ("role", "content", "from", "value")
"""Keys of a message or turn that data.keys maps others to."""


def chat_rows_of(keys: Collection[str]) -> list[str]:
    """Names of the chat rows that these keys are of."""
    found = [name for name, needed in CHAT_ROWS.items() if needed <= set(keys)]
    return [name for name in found if name not in _PLAIN_ROWS] or found


# Chat templates that ``data.chat_template`` knows by name, for models that come without one.
#
# Written by us to the published forms; the model's own, where it has one, is the better choice.

TEMPLATE_SUFFIX = ".jinja"
"""End of a ``data.chat_template`` that is a file."""


def is_template_file(chat_template: str) -> bool:
    """Whether data.chat_template is a file, and not the name of a known template."""
    return chat_template.endswith(TEMPLATE_SUFFIX)


CHAT_TEMPLATES: dict[str, str] = {
    # The markers become tokens where the tokenizer has them, else they are words that are learnt.
    "chatml": """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}""",
    # Touvron et al. 2023, arXiv:2307.09288, and the reference code's [INST] and <<SYS>>.
    "llama-2": """\
{% set said = namespace(system='') %}
{% for message in messages %}
{% if message['role'] == 'system' and loop.first %}
{% set said.system = '<<SYS>>\n' + message['content'].strip() + '\n<</SYS>>\n\n' %}
{% elif message['role'] == 'user' %}
{{ bos_token + '[INST] ' + said.system + message['content'].strip() + ' [/INST]' }}
{%- set said.system = '' %}
{% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'].strip() + ' ' + eos_token }}
{%- else %}
{{ raise_exception('it knows a first message of system, and user and assistant alone') }}
{%- endif %}
{% endfor %}""",
    # Taori et al. 2023, github.com/tatsu-lab/stanford_alpaca
    "alpaca": """\
{% for message in messages %}
{% if message['role'] == 'system' %}
{{ message['content'] + '\n\n' }}
{%- elif message['role'] == 'user' %}
{{ '### Instruction:\n' + message['content'] + '\n\n' }}
{%- elif message['role'] == 'assistant' %}
{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}
{%- else %}
{{ raise_exception('it knows messages of system, user and assistant alone') }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '### Response:\n' }}
{%- endif %}""",
}
"""Name -> template, as transformers takes it."""


# How much of a text is hidden, for those who hide it and those who plan for it.
#
# Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1.

MASKED_SHARE = 0.15
"""Share of a text's tokens that a masked language model predicts."""

TILE = 64
"""Predicted tokens are computed in multiples of it: matrix products work in tiles, and one size
serves steps that hide a few more or less."""


def predicted_rows(tokens: int) -> int:
    """Tokens that the head computes of so many, where they hide as many as on average."""
    return TILE * max(1, round(tokens * MASKED_SHARE / TILE))


# How samples are dealt to the sources of a mixture: in whole numbers, a cycle at a time.

SLOTS = 1000
"""Samples in a cycle: shares are exact to a thousandth in each of them."""


def slots_of(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a cycle, by largest remainder: their sum is ``SLOTS``.

    Of equal remainders the source named first gets the sample.
    """
    total = math.fsum(weights)
    exact = [weight / total * SLOTS for weight in weights]
    slots = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: slots[index] - exact[index])
    for place in by_remainder[: SLOTS - sum(slots)]:
        slots[place] += 1
    return slots
