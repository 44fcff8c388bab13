"""Turn pairs of answers into token ids: two documents next to each other, the preferred first."""

from collections.abc import Mapping
from typing import ClassVar

from shardyard.data.byte_ranges import TextSection
from shardyard.data.chat import Dialogue, parsed_row
from shardyard.data.tokenizer import TextEncoder
from shardyard.data.work_units import Column, Encoded
from shardyard.errors import RejectedRowError
from shardyard.io.files import parse_json


class AnswerPair:
    """Two dialogues of a chat template that begin alike; what is learnt are the answers."""

    columns: ClassVar[Mapping[str, Column]] = Dialogue.columns

    def __init__(self, tokenizer: TextEncoder) -> None:
        self._dialogue = Dialogue(tokenizer, loss_on="answers")

    @staticmethod
    def words(section: TextSection) -> str:
        """Return the words of both dialogues without speakers, to train a tokenizer on."""
        pair = parse_json(section.text)
        messages = [*pair["prompt"], *pair["chosen"], *pair["rejected"]]
        return "\n".join(message.get("content") or "" for message in messages)

    def encode(self, section: TextSection) -> list[Encoded]:
        """The preferred dialogue, and the rejected one.

        Raises:
            RejectedRowError: The template rejects one, or changes what came before an answer.
            SourceError: It holds characters that are used here.
        """
        pair = parsed_row(section)
        return [self._one(section, pair, key) for key in ("chosen", "rejected")]

    def _one(self, section: TextSection, pair: Mapping[str, list[dict[str, str]]], key: str,
             ) -> Encoded:  # fmt: skip
        messages = [*pair["prompt"], *pair[key]]
        found = self._dialogue.encode_messages(messages, pair.get("tools"), section.location)
        if len(found) > 1:
            reason = (
                f"the chat template changes earlier turns once there are later ones, so the "
                f"{len(found)} answers of {key!r} are no one text. Keep the last answer."
            )
            raise RejectedRowError(reason, section.location)
        return found[0]
