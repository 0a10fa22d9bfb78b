"""Conversations as tokens, by a chat template; which of the tokens are answers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from spantrain.config.files.text_files import read_text
from spantrain.core.records import Record
from spantrain.core.units import ChatForm
from spantrain.errors import ConfigError
from spantrain.models.data.conversations import ASSISTANT, CHAT_TEMPLATES, Conversation
from spantrain.models.data.text import IntArray

_AT_ONCE = 512
_GENERATION = "endgeneration"
"""In a template that marks answers itself."""
_REMEDY = "give --chat-template with a template that has {% generation %} around answers, or --train-on all"


class _Bytes:
    template: str | None = None
    """The tokenizer's own; None: it has none."""
    names: Mapping[str, Any] = {}
    """What templates call the special tokens."""
    padding = 0
    """The number behind the end of a sample."""

    def encode(self, texts: Sequence[str]) -> Iterator[tuple[IntArray, IntArray]]:
        """Return the numbers of each text, here UTF-8, and the character at which each begins."""
        for text in texts:
            lengths = [len(character.encode()) for character in text]
            yield (
                np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32),
                np.repeat(np.arange(len(text)), lengths),
            )


class _Tokens:
    """A tokenizer's folder as transformers wrote it, or its one file."""

    def __init__(self, file: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        if not file.is_file():
            raise ConfigError(f"tokenizer {file}: does not exist on this machine; copy it to every machine of the run")
        try:
            if file.name == "tokenizer.json" and (file.parent / "tokenizer_config.json").is_file():
                made = PreTrainedTokenizerFast.from_pretrained(str(file.parent), local_files_only=True)
            else:
                made = PreTrainedTokenizerFast(tokenizer_file=str(file))
            self.template: str | None = made.get_chat_template() if made.chat_template else None
        except Exception as error:
            raise ConfigError(f"tokenizer {file}: transformers cannot read it: {error}") from error
        self._tokenizer: Any = made
        self.names = made.special_tokens_map
        padding = made.eos_token_id if made.pad_token_id is None else made.pad_token_id
        self.padding = 0 if padding is None else int(padding)

    def encode(self, texts: Sequence[str]) -> Iterator[tuple[IntArray, IntArray]]:
        """Return tokens; the template has written all special ones that are wanted."""
        found = self._tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
        )
        for numbers, places in zip(found["input_ids"], found["offset_mapping"], strict=True):
            yield np.asarray(numbers, dtype=np.int32), np.asarray([start for start, _ in places], dtype=np.int64)


class Rendered(Record):
    """One conversation."""

    where: str
    tokens: IntArray
    counted: np.typing.NDArray[np.bool_]
    """Which tokens are learnt."""


class Renderer:
    """Writes conversations by a template, and finds the answers in what was written."""

    def __init__(self, form: ChatForm, tokenizer: str) -> None:
        """Take `ModelSpec.tokenizer`, and the template that is asked for.

        Raises:
            ConfigError: the tokenizer cannot be read, or there is no template.
        """
        self._encoder: _Bytes | _Tokens = _Tokens(Path(tokenizer)) if tokenizer else _Bytes()
        self._all = form.train_on == "all"
        self.padding = self._encoder.padding
        """The number behind the end of a sample."""
        if form.template in CHAT_TEMPLATES:
            template: str | None = CHAT_TEMPLATES[form.template]
        elif form.template:
            template = read_text(Path(form.template), remedy="give --chat-template a Jinja file")
        else:
            template = self._encoder.template
        if template is None:
            what = f"tokenizer {tokenizer} has no chat template" if tokenizer else "without a tokenizer there is none"
            known = ", ".join(CHAT_TEMPLATES)
            raise ConfigError(f"chat template: {what}; give --chat-template with a Jinja file, or one of {known}")
        self._template = template

    def rendered(self, conversations: Iterable[Conversation]) -> Iterator[Rendered]:
        """Yield the tokens of each conversation.

        Raises:
            ConfigError: the template refuses one, or has no answers in it, or hides where they are.
        """
        remaining = iter(conversations)
        while some := list(islice(remaining, _AT_ONCE)):
            written = [self._written(one) for one in some]
            encoded = self._encoder.encode([text for text, _ in written])
            for one, (text, answers), (tokens, starts) in zip(some, written, encoded, strict=True):
                counted = np.full(len(tokens), self._all)
                for lo, hi in answers:
                    counted |= (starts >= lo) & (starts < hi)
                if not counted.any():
                    raise ConfigError(f"{one.where}: nothing of it is learnt: {_no_answer(one, text)}")
                counted[0] = False  # nothing comes before it to tell it from
                yield Rendered(where=one.where, tokens=tokens, counted=counted)

    def _written(self, one: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and from where to where answers are."""
        if self._all:
            return self._render(one, len(one.messages)), []
        if _GENERATION in self._template:
            text, marks = self._call(one, len(one.messages), return_assistant_tokens_mask=True)
            return text, [(lo, hi) for lo, hi in marks[0] if hi > lo]
        text = self._render(one, len(one.messages))
        places = [
            number
            for number, message in enumerate(one.messages)
            if message["role"] == ASSISTANT and number >= one.answers_from
        ]
        return text, [self._answer(one, text, number) for number in places]

    def _answer(self, one: Conversation, text: str, number: int) -> tuple[int, int]:
        """Return where the answer of a message is: from what invites it to the end of its turn."""
        before = self._render(one, number, add_generation_prompt=True)
        upto = self._render(one, number + 1)
        if text.startswith(before) and text.startswith(upto) and len(upto) > len(before):
            return len(before), len(upto)
        # A template that writes earlier turns otherwise than the last: look for the words, and what ends a turn.
        words = str(one.messages[number].get("content", "")).strip()
        ending = upto.rpartition(words)[2] if words else ""
        lo = len(before) if text.startswith(before) else -1
        found = text.find(words + ending, lo) if lo >= 0 and words and ending else -1
        if found < 0:
            raise ConfigError(f"{one.where}: the template does not show where messages[{number}] is; {_REMEDY}")
        return lo, found + len(words) + len(ending)

    def _render(self, one: Conversation, messages: int, **options: bool) -> str:
        return self._call(one, messages, **options)[0]

    def _call(self, one: Conversation, messages: int, **options: bool) -> tuple[str, Any]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            # In Jinja's sandbox: a template is data.
            texts, marks = render_jinja_template(
                conversations=[one.messages[:messages]],
                tools=one.tools,
                chat_template=self._template,
                **options,
                **self._encoder.names,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"{one.where}: the chat template cannot write it: {error}") from error
        return texts[0], marks


def _no_answer(one: Conversation, text: str) -> str:
    if not text:
        return "the chat template writes nothing"
    if not any(message["role"] == ASSISTANT for message in one.messages[one.answers_from :]):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in one.messages))
        return f"no message has the role {ASSISTANT} (roles: {roles}); leave it out, or give --train-on all"
    return "its answers are empty; leave it out"
