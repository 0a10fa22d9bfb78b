"""Conversations in rows of people's files, by the fields that they are in (no torch needed)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spantrain.config.files.problems import shortened
from spantrain.errors import ConfigError
from spantrain.models.data.records import Fields, Record, record_parts

ASSISTANT = "assistant"
_ROLES: Mapping[str, str] = MappingProxyType(
    {
        "human": "user",
        "user": "user",
        "gpt": ASSISTANT,
        "bing": ASSISTANT,
        "chatgpt": ASSISTANT,
        "assistant": ASSISTANT,
        "model": ASSISTANT,
        "system": "system",
        "function": "tool",
        "observation": "tool",
        "tool": "tool",
    }
)
"""ShareGPT's names of who speaks, and what templates call them."""
CHAT_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "chatml": (
            "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
        "plain": (
            "{{ bos_token or '' }}{% for message in messages %}{{ message['content'] }}"
            "{% if message['role'] == 'assistant' %}{{ eos_token or '' }}{% endif %}{% endfor %}"
        ),
    }
)
"""Those known by name, for tokenizers without one of their own."""

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What was said, in order."""

    where: str
    """File and line, for messages."""
    messages: list[Message]
    """Each with `role` and `content`, and whatever else its template reads."""
    answers_from: int = 0
    """The first message whose text may be an answer that is learnt."""
    tools: Any = None
    """Functions that are offered, as templates take them."""


def conversation_fields(row: Fields) -> tuple[str, ...]:
    """Return the fields of a row that a conversation is in; none if there is no conversation in it.

    >>> conversation_fields({"instruction": "Add.", "input": "1 2", "output": "3"})
    ('instruction', 'output')
    """
    return next((fields for fields in _FORMS if all(row.get(name) is not None for name in fields)), ())


def conversation_parts(path: Path) -> tuple[tuple[str, ...], list[list[Conversation]]]:
    """Return the fields that conversations are in, and all of them; or those to train on, and those held out.

    Raises:
        ConfigError: a row holds none, or is not like the first one.
    """
    parts = record_parts(path)
    first = next(parts[0], None)
    if first is None:
        raise ConfigError(f"data {path}: has no conversations")
    parts[0] = chain([first], parts[0])
    where, row = first
    fields = conversation_fields(row)
    if not fields:
        wanted = "; ".join(map(" and ".join, _FORMS))
        raise ConfigError(f"{where}: has {', '.join(row) or 'no fields'}, wanted one of: {wanted}")
    return fields, [list(_read(fields, part)) for part in parts]


def _read(fields: tuple[str, ...], rows: Iterator[Record]) -> Iterator[Conversation]:
    for where, row in rows:
        for name in fields:
            if row.get(name) is None:
                raise ConfigError(f"{where}: has no {name!r} like the first row; give it, or leave the row out")
        yield _FORMS[fields](where, row)


def _of_messages(where: str, row: Fields) -> Conversation:
    messages = _messages(where, "messages", row["messages"])
    return Conversation(where=where, messages=messages, tools=row.get("tools") or None)


def _of_turns(where: str, row: Fields) -> Conversation:
    turns = _listed(where, "conversations", row["conversations"])
    messages = []
    for number, turn in enumerate(turns):
        field = f"conversations[{number}]"
        if "role" in turn:
            messages.append(_message(where, field, turn))
            continue
        speaker = _text(where, f"{field}.from", turn.get("from"))
        if speaker not in _ROLES:
            known = ", ".join(_ROLES)
            raise ConfigError(f"{where}: {field}.from is {shortened(repr(speaker))}; wanted one of {known}")
        messages.append({"role": _ROLES[speaker], "content": _text(where, f"{field}.value", turn.get("value"))})
    return Conversation(where=where, messages=messages)


def _of_pair(where: str, row: Fields) -> Conversation:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list):
        before = _messages(where, "prompt", prompt)
        return Conversation(
            where=where,
            messages=[*before, *_messages(where, "completion", completion)],
            answers_from=len(before),
            tools=row.get("tools") or None,
        )
    return _asked(where, _text(where, "prompt", prompt), _text(where, "completion", completion))


def _of_instruction(where: str, row: Fields) -> Conversation:
    instruction, answer = (_text(where, name, row[name]) for name in ("instruction", "output"))
    given = row.get("input")
    if given:
        instruction = f"{instruction}\n\n{_text(where, 'input', given)}"
    return _asked(where, instruction, answer)


def _asked(where: str, question: str, answer: str) -> Conversation:
    messages = [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
    return Conversation(where=where, messages=messages)


def _messages(where: str, field: str, value: Any) -> list[Message]:
    listed = _listed(where, field, value)
    return [_message(where, f"{field}[{number}]", message) for number, message in enumerate(listed)]


def _listed(where: str, field: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        got = shortened(repr(value))
        raise ConfigError(
            f"{where}: {field} is {got}; wanted a list of messages, one at least; mend it or leave it out"
        )
    return value


def _message(where: str, field: str, message: Message) -> Message:
    _text(where, f"{field}.role", message.get("role"))
    if not message.get("tool_calls"):
        _text(where, f"{field}.content", message.get("content"))
    return {name: value for name, value in message.items() if value is not None}


def _text(where: str, field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {field} is {shortened(repr(value))}; wanted text; mend the row or leave it out")
    return value


_FORMS: Mapping[tuple[str, ...], Callable[[str, Fields], Conversation]] = MappingProxyType(
    {
        ("messages",): _of_messages,
        ("conversations",): _of_turns,
        ("prompt", "completion"): _of_pair,
        ("instruction", "output"): _of_instruction,
    }
)
"""What reads a row, by the fields that are looked for; of those that a row has, the first count."""
