"""Put a model on the data that a user names, with a tokenizer: a `ModelSpec` in, another out (no torch needed)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spantrain.config.files.parsing import parse_json
from spantrain.config.files.text_files import is_file, read_text
from spantrain.core.units import MAX_SEQUENCE, ChatForm, ModelSpec, TensorSpec
from spantrain.errors import ConfigError
from spantrain.models.catalog.catalog import is_text, resolve_model
from spantrain.models.data import records
from spantrain.models.data.conversations import CHAT_TEMPLATES, conversation_fields
from spantrain.models.sources import DROPOUT, hf_class, hf_configuration, is_factory, objective_of, source_digest

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp"})
CHAT = "chat"
TEXT_KINDS = frozenset({"text", "jsonl", "hf"})
_BUILT_IN = ("stdlib-text", "digits", "example")
ROWS = "rows"
_KINDS = ("text", "jsonl", "hf", "images", CHAT, ROWS)
_SAVE = "save one with Tokenizer.save(...), or give the folder that transformers wrote"
_OBJECTIVES = ("next-byte", "masked-byte", "continue", "classify")
"""Those whose labels follow from text or from classes of images; other models have their own."""


def model_on_data(
    name: str,
    *,
    data: str | None = None,
    tokenizer: Path | None = None,
    sequence_length: int | None = None,
    chat: ChatForm | None = None,
    sample: object = None,
) -> ModelSpec:
    """Return the model of that name (`catalog.resolve_model`) on this data (`with_data`).

    `sample` is one of the user's own data where these are given in this process; of a function the first is taken. A
    model of the transformers library reads what is in it, if it is a dictionary, as its class does.

    Raises:
        ConfigError: there is no such model, data or tokenizer, or they do not fit each other.
    """
    if sequence_length is None or not is_factory(name):
        if data is not None and name.startswith("hf:") and Path(data).exists() and not objective_of(hf_class(name)):
            data = f"{ROWS}:{data}"
        rows = _own_rows(name, data, sample)
        spec = resolve_model(name, sequence_length=sequence_length, data_given=data is not None, rows=rows)
        return with_data(spec, data=data, tokenizer=tokenizer, chat=chat)
    spec = with_data(resolve_model(name), data=data, tokenizer=tokenizer, chat=chat)
    if spec.dataset.partition(":")[0] not in TEXT_KINDS | {CHAT}:
        raise ConfigError(
            f"model {name}: sequence length {sequence_length} cannot be used: its data says how long samples are"
        )
    if not 2 <= sequence_length <= MAX_SEQUENCE:
        raise ConfigError(f"model {name}: sequence length must be from 2 to {MAX_SEQUENCE}, got {sequence_length}")
    return replace(spec, sequence_length=sequence_length)


def _own_rows(name: str, data: str | None, sample: object) -> tuple[TensorSpec, ...]:
    kind, path = _kind_and_path(data or "")
    called = data is not None and is_factory(data) and not kind and not Path(data).exists()
    if not name.startswith("hf:") or not (sample is not None or called or (kind == ROWS and path)):
        return ()
    from spantrain.models.tracing.factory import called_data, sample_at
    from spantrain.models.tracing.transformers_classes import own_rows

    if sample is None and called:
        function = named_function(str(data), "data")
        sample = sample_at(called_data(function, held_out=False)[0], 0, f"data {function}")
    elif sample is None:
        _, sample = next(records.record_parts(Path(path))[0], ("", None))
        if sample is None:
            raise ConfigError(f"data {data}: has no rows")
    return own_rows(name, sample)


def without_dropout(spec: ModelSpec) -> ModelSpec:
    """Return the model with all its modules in evaluation mode while it trains, as those of the catalog always are."""
    return replace(spec, config={**spec.config, DROPOUT: "off"}) if spec.family in ("factory", "hf") else spec


def with_data(
    spec: ModelSpec, *, data: str | None = None, tokenizer: Path | None = None, chat: ChatForm | None = None
) -> ModelSpec:
    """Return the model on this data; what is None stays as it is.

    `data` is a path (what lies there tells its kind), `KIND:PATH` with one of `text`, `jsonl`, `hf`, `images`, `chat`
    and `rows`, `FILE.py:FUNCTION` or `package.module:function`, `stdlib-text`, `digits` or `example`. Data of a user's
    for a folder that transformers wrote is read by the tokenizer in it, unless another is given.

    Raises:
        ConfigError: it does not exist, or it is none that the model reads; the tokenizer is none, or its vocabulary
            does not fit the model's; `chat` is given and the data are no conversations.
    """
    if data is not None:
        spec = replace(spec, dataset=_dataset(spec, data))
        if tokenizer is None and not spec.tokenizer and spec.dataset.partition(":")[0] in TEXT_KINDS | {CHAT}:
            source = Path(spec.source)
            own = (source.parent if source.suffix == ".json" else source) / "tokenizer.json"
            tokenizer = own if spec.family == "hf" and is_file(own) else None
    if tokenizer is not None:
        spec = _with_tokenizer(spec, tokenizer)
    return spec if chat is None else replace(spec, chat=_checked_chat(spec, chat))


def _checked_chat(spec: ModelSpec, chat: ChatForm) -> ChatForm:
    if spec.dataset.partition(":")[0] != CHAT:
        raise ConfigError(
            f"data {spec.dataset}: a chat template, what of answers is learnt and packing belong to conversations; "
            "leave them out, or give chat:PATH"
        )
    if not chat.template or chat.template in CHAT_TEMPLATES:
        return chat
    if not is_file(Path(chat.template)):
        known = ", ".join(CHAT_TEMPLATES)
        raise ConfigError(f"chat template {chat.template}: there is no such file; give a Jinja file, or one of {known}")
    return replace(chat, template=str(Path(chat.template).resolve()))


def known_tokens(spec: ModelSpec) -> int | None:
    """Return how many tokens a model knows; None where its configuration does not say."""
    return _whole_number(spec, "vocab_size")


def class_count(spec: ModelSpec) -> int | None:
    """Return how many classes a model tells apart; None where its configuration does not say."""
    fields = _configuration(spec)
    return _whole_number(spec, "num_labels") or len(fields.get("id2label") or ()) or None


def start_token(spec: ModelSpec) -> int:
    """Return what a decoder is told before the first token: its start token, else the padding, else 0."""
    start = _whole_number(spec, "decoder_start_token_id")
    return start if start is not None else _whole_number(spec, "pad_token_id") or 0


def _whole_number(spec: ModelSpec, field: str) -> int | None:
    value = _configuration(spec).get(field)
    return value if isinstance(value, int) else None


def _configuration(spec: ModelSpec) -> Mapping[str, Any]:
    return hf_configuration(spec) if spec.family == "hf" else spec.config


def with_loss(spec: ModelSpec, function: str) -> ModelSpec:
    """Return a factory's model with a loss of its own: `FILE.py:FUNCTION` of the outputs and the labels.

    Raises:
        ConfigError: the model is no factory's, or there is no such file.
    """
    if spec.family != "factory":
        raise ConfigError(f"model {spec.name}: has its own loss; a loss function goes with a model from a function")
    source = named_function(function, "loss")
    return replace(spec, config={**spec.config, "loss": source, "loss_sha256": source_digest(source)})


def user_functions(spec: ModelSpec) -> tuple[str, ...]:
    """Return the users' functions that a worker calls: for the model, for the loss, and for the data."""
    kind, _, rest = spec.dataset.partition(":")
    data = (spec.dataset,) if rest and kind not in _KINDS else ()
    if spec.family != "factory":
        return data
    loss = spec.config.get("loss")
    return (spec.source, *((loss,) if isinstance(loss, str) else ()), *data)


def data_paths(spec: ModelSpec) -> tuple[str, ...]:
    """Return the files and folders that a worker reads: of the data, of the tokenizer, of the form of conversations."""
    kind, _, rest = spec.dataset.partition(":")
    template = spec.chat.template if spec.chat else ""
    own = template if template not in CHAT_TEMPLATES else ""
    return tuple(path for path in (rest if kind in _KINDS else "", spec.tokenizer, own) if path)


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of a path: itself, or in the folder.

    Raises:
        ConfigError: there is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not is_file(file):
        raise ConfigError(
            f"tokenizer {path}: there is no {file}; give a tokenizer.json, or a folder that holds one (transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER))"
        )
    return file


def vocabulary_size(path: Path) -> int:
    """Return how many tokens a tokenizer knows: one more than its largest.

    Raises:
        ConfigError: the file is none of the `tokenizers` library.
    """
    file = tokenizer_file(path)
    try:
        content = parse_json(read_text(file, remedy=_SAVE), str(file), remedy=_SAVE)
        vocabulary = content["model"]["vocab"]
        # Most models map tokens to numbers; a unigram model lists tokens with scores, in order.
        known = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [int(token["id"]) for token in content.get("added_tokens", ())]
        return max((*map(int, known), *added)) + 1
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"tokenizer {file}: not a file of the tokenizers library ({error!r}); {_SAVE}") from error


def _with_tokenizer(spec: ModelSpec, path: Path) -> ModelSpec:
    if spec.objective == "classify":
        raise ConfigError(f"model {spec.name}: tokenizer {path} cannot be used: this model reads images; leave it out")
    size, limit = vocabulary_size(path), known_tokens(spec)
    if limit is not None and size > limit:
        raise ConfigError(
            f"tokenizer {path}: its vocabulary has {size} tokens, but {spec.name} has {limit}: larger numbers have no "
            "row in its embedding; take a tokenizer of at most as many, or a model of at least as many"
        )
    return replace(spec, tokenizer=str(tokenizer_file(path).resolve()))


def _dataset(spec: ModelSpec, data: str) -> str:
    """Return the data as `ModelSpec.dataset` names it."""
    if data == ("stdlib-text" if spec.objective == "classify" else "digits") and spec.objective in _OBJECTIVES:
        wanted, found = ("images", "text") if data == "stdlib-text" else ("text", "images")
        raise ConfigError(
            f"model {spec.name}: data {data} cannot be used: this model reads {wanted}, and this is {found}"
        )
    if data in _BUILT_IN:
        return data
    kind, rest = _kind_and_path(data)
    path = Path(rest)
    if not rest:
        raise ConfigError(f"data {data!r}: names no path; write PATH or KIND:PATH (for this folder: text:.)")
    if not kind and not path.exists():
        if ":" in data:
            return named_function(data, "data")
        raise ConfigError(
            f"data {data}: does not exist; give a text file or folder, a file of rows (.jsonl, .json, .parquet), a "
            "folder that `datasets` saved, "
            f"images:FOLDER, FILE.py:FUNCTION, or one of {', '.join(_BUILT_IN)}"
        )
    if not path.exists():
        raise ConfigError(f"data {data}: {path} does not exist")
    kind = kind or _kind_of(path, spec)
    reads_images = spec.objective == "classify"
    if reads_images and kind in ("text", "jsonl", CHAT):
        raise ConfigError(f"model {spec.name}: data {data} cannot be used: this model reads images, and this is {kind}")
    if kind == ROWS and not spec.rows:
        raise ConfigError(f"model {spec.name}: data {data} cannot be used: rows are read by classes of hf:FOLDER")
    if kind == "images" and not reads_images and spec.objective in _OBJECTIVES:
        raise ConfigError(f"model {spec.name}: data {data} cannot be used: this model reads text, and these are images")
    if kind == "hf" and not records.is_saved_set(path):
        raise ConfigError(
            f"data {data}: {path} holds no data set that `datasets` saved: wanted "
            f"{' or '.join(records.SAVED_SET_FILES)} in it; write one with Dataset.save_to_disk, or give "
            "images:FOLDER or text:FOLDER"
        )
    pictures = path.glob("*/**/*") if path.is_dir() else ()
    if kind == "images" and not any(file.suffix.lower() in IMAGE_SUFFIXES for file in pictures):
        raise ConfigError(
            f"model {spec.name}: data {data} has no images: wanted a folder for each class, with pictures in it "
            f"({', '.join(sorted(IMAGE_SUFFIXES))})"
        )
    return f"{kind}:{path.resolve()}"


def _kind_and_path(data: str) -> tuple[str, str]:
    """Return the kind of `KIND:PATH`, empty where none is written (a folder may be called `text`), and the path."""
    kind, colon, path = data.partition(":")
    return (kind, path) if colon and kind in _KINDS else ("", data)


def _kind_of(path: Path, spec: ModelSpec) -> str:
    """Return what lies at a path; of rows the first one tells."""
    if records.is_saved_set(path):
        return CHAT if conversation_fields(dict.fromkeys(records.saved_columns(path), "")) else "hf"
    is_rows = path.is_file() and path.suffix in (".jsonl", ".ndjson", ".parquet")
    if is_text(spec) and records.record_files(path):
        try:
            _, row = next(records.record_parts(path)[0], ("", {}))
        except ConfigError:
            if is_rows:
                raise
            return "text"
        if conversation_fields(row) and not any(name in row for name in (*records.TEXT_FIELDS, *records.TOKEN_FIELDS)):
            return CHAT
        is_rows = is_rows or any(name in row for name in (*records.TEXT_FIELDS, *records.TOKEN_FIELDS))
    if is_rows:
        return "jsonl"
    return "text" if path.is_file() or is_text(spec) else "images"


def named_function(source: str, what: str) -> str:
    """Return a user's function with its file as an absolute path; a module's stays as it is.

    Raises:
        ConfigError: it is written otherwise, or there is no such file; `what` it is for begins the message.
    """
    file, _, function = source.rpartition(":")
    if not file or not function.isidentifier():
        raise ConfigError(f"{what} {source}: {function!r} is no name of a function; write FILE.py:FUNCTION")
    if not file.endswith(".py"):
        return source
    if not is_file(Path(file)):
        raise ConfigError(f"{what} {source}: {file} does not exist; write FILE.py:FUNCTION")
    return f"{Path(file).resolve()}:{function}"


_DIGITS = 64


def with_own_functions(spec: ModelSpec, own: Sequence[str]) -> ModelSpec:
    """Return the model with this program's functions in the place of those that it names.

    A plan, a checkpoint or an order was written by others, and what it names would be executed. So a function in it is
    only taken as a question for one of those that this program was started with: the same name in a file of the same
    name. Where the file lies may differ between machines; what a model's and a loss's file holds is compared with the
    plan's, and what data is read with the other machines' (their digests).

    Raises:
        ConfigError: the program was not started with such a function; or the model says nothing of the file that its
            function, or its loss, was in.
    """
    loss, digest = spec.config.get("loss"), spec.config.get("loss_sha256")
    digests = ((spec.source, spec.source_sha256), *([(loss, digest)] if loss is not None else []))
    for what, sha256 in digests if spec.family == "factory" else ():
        if not isinstance(sha256, str) or len(sha256) != _DIGITS:
            raise ConfigError(f"model {spec.name}: the SHA-256 of {what}'s file is not known; profile and plan again")
    for named in user_functions(spec):
        found = next((function for function in own if _key(function) == _key(named)), None)
        if found is None:
            raise ConfigError(
                f"this run calls {named}, which this program was not started with; start it with --function "
                f"{_key(named)} if you trust that file"
            )
        if named == spec.source and spec.family == "factory":
            spec = replace(spec, source=found)
        elif named == spec.dataset:
            spec = replace(spec, dataset=found)
        else:
            spec = replace(spec, config={**spec.config, "loss": found})
    return spec


def _key(function: str) -> str:
    """Return what is compared: `FILE.py:FUNCTION` without the folder, or `package.module:function`.

    >>> _key("/home/one/data.py:samples")
    'data.py:samples'
    """
    file, _, name = function.rpartition(":")
    return f"{Path(file).name}:{name}"
