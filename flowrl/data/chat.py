"""Chat tokenization: converts conversations to token ids with a saved tokenizer and its chat template."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from flowrl.config.data.data_settings import TEMPLATE_FILE
from flowrl.data.folders.input_paths import MAX_POSITIONS, find_model_problem, read_vocabulary_size
from flowrl.data.messages import DataError, Message, Speaker
from flowrl.data.template import (
    INCLUDED,
    ConversationTemplate,
    is_jinja,
    read_chat_template,
    read_own_template,
    read_template,
    render_conversation,
    resolve_flat_stop_ids,
)
from flowrl.data.turn_layout import Span, TurnLayout, infer_end, locate_responses, make_layout, text_after

__all__ = [
    "ChatTokenizer",
    "DataError",
    "Message",
    "MissingEmbeddingError",
    "Speaker",
    "compare_vocabularies",
    "has_same_rendering",
]

_TEXT_PROBES = ("a", "0", "+")
"""Texts. Each tokenizer should know at least one of them."""

_NUM_TAG_TOKENS = 32
"""Number of tokens at the end of a prompt that are searched for tags."""

_NUM_SPACE_TOKENS = 4
"""Number of tokens at the end of a prompt that are searched for `>`. White space may follow the last tag."""

_TAG = re.compile(r"</?\w+>")
_OPENED_TAGS = re.compile(r"(?:<\w+>\s*)+\Z")

_MAX_LAYOUTS = 1000
"""Maximum number of cached layouts."""


class MissingEmbeddingError(DataError):
    """Raised if a text has a token whose id is beyond the embeddings of the model."""


class ChatTokenizer:
    """A tokenizer with a chat template. It produces the same tokens for a prompt in training and in generation.

    A tokenizer may have more ids than its model has embeddings. Every method that returns ids raises
    MissingEmbeddingError if the text contains such a token.
    """

    def __init__(
        self, path: Path | str, template: Path | ConversationTemplate | None = None, *, model: Path | None = None
    ) -> None:
        """Loads a tokenizer from a folder written by `save_pretrained`. Does not execute code in the folder.

        Args:
            path: the folder of the tokenizer, or a Hub name.
            template: a conversation template or its file. None uses the file in the folder, if there is one, and
                otherwise the tokenizer's chat template.
            model: folder of the model that receives the tokens. None uses the folder of the tokenizer.
        Raises:
            DataError: the tokenizer or its end token is missing, or the template file is invalid.
        """
        self.path = Path(path)
        self._model = self.path if model is None else model
        self._tokenizer = _load_tokenizer(self.path)
        self._source = template if isinstance(template, Path) else self.path
        if template is None and (template := read_own_template(self.path)) is not None:
            self._source = self.path / TEMPLATE_FILE
        self._settings = read_template(template) if isinstance(template, Path) else template or ConversationTemplate()
        if self.tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer in {path} has no end token; set eos_token in its tokenizer_config.json")
        self._num_embeddings = read_vocabulary_size(self._model)
        self.check_ids([self.eos_id])
        self._layouts: dict[tuple[Speaker, ...], TurnLayout | None] = {}

    def check_chat_template(self) -> None:
        """Raises DataError if there is no chat template, if a value of the template is invalid, or if the template adds
        a token for which the model has no embedding. Plain text does not need a chat template.
        """
        _ = self.template
        turns = [Message("user", "a"), Message("assistant", "a")]
        for messages, generate in ((turns[:1], True), (turns, False)):
            try:
                self.encode(self._render(self._with_system(messages), generate=generate))
            except MissingEmbeddingError as error:
                raise MissingEmbeddingError(f"the chat template of {self._source}: {error}") from error
            except DataError:
                continue  # A row with these roles reports the problem.

    @cached_property
    def _template(self) -> ConversationTemplate:
        """The template, with the path or the name of its chat template replaced by Jinja text."""
        template = self._settings
        name = template.chat_template
        if name is not None and name in INCLUDED:
            included = INCLUDED[name]
            return replace(
                template,
                chat_template=included.chat_template or "",
                system_message=template.system_message or included.system_message,
                end_of_assistant=template.end_of_assistant or included.end_of_assistant,
            )
        if name is not None and not is_jinja(name):
            path = Path(name)
            if path.is_file():
                name = read_chat_template(path, self._source)
            elif path.is_dir() or path.name != name:
                name = _default_template(_load_tokenizer(path))
            else:
                raise DataError(
                    f"{self._source}: chat_template {name!r} is neither Jinja text, nor a file, a model, or an "
                    f"included template ({', '.join(INCLUDED)})"
                )
        if not (text := name or _default_template(self._tokenizer)):
            raise DataError(
                f"the tokenizer in {self.path} has no chat template; add a chat_template.jinja to the folder, or set "
                f"chat_template in a conversation template file (docs/data.md)"
            )
        return replace(template, chat_template=text)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a response."""
        return int(self._tokenizer.eos_token_id)

    def __len__(self) -> int:
        return len(self._tokenizer)

    @property
    def num_ids(self) -> int:
        """Largest token id, plus 1. It exceeds the number of tokens if the vocabulary has gaps."""
        return 1 + max(self._tokenizer.get_vocab().values())

    @cached_property
    def template(self) -> ConversationTemplate:
        """The template with all values. Raises DataError if the end of the assistant's turn is unknown."""
        end = self.end_of_assistant
        end_ids = self.encode(end)
        stop_ids = self._template.stop_ids
        if self._template.is_flat:
            stop_ids = resolve_flat_stop_ids(stop_ids[0], end_ids, self._source)
        strings = tuple(tuple(self.encode(text)) for text in self._template.stop_strings)
        for text, ids in zip((end, *self._template.stop_strings), (end_ids, *strings), strict=True):
            if not ids:
                raise DataError(
                    f"conversation template {self._source}: {text!r} ends a response, but the tokenizer in {self.path} "
                    f"has no tokens for it: set end_of_assistant and stop_strings to texts that a model can generate"
                )
        if unknown := [token for ids in stop_ids for token in ids if token >= len(self)]:
            raise DataError(
                f"conversation template {self._source}: stop_ids has the token {unknown[0]}, which is not in the "
                f"vocabulary of {self.path}: use ids from 0 to {len(self) - 1}"
            )
        return replace(
            self._template,
            end_of_assistant=end,
            stop_ids=tuple(dict.fromkeys((tuple(end_ids), *stop_ids, *strings))),
            is_flat=False,
        )

    @cached_property
    def stop_ids(self) -> tuple[tuple[int, ...], ...]:
        """Stop sequences of the conversation template, except EOS. Empty without a chat template."""
        if not self._has_chat_template:
            return ()
        return tuple(ids for ids in self.template.stop_ids if ids != (self.eos_id,))

    @cached_property
    def end_sequences(self) -> tuple[tuple[int, ...], ...]:
        """Token sequences that end a response: those of the conversation template, and EOS."""
        end = (tuple(self.encode(self.end_of_assistant)),) if self._has_chat_template else ()
        return (*self.stop_ids, (self.eos_id,), *end)

    @property
    def _has_chat_template(self) -> bool:
        return bool(self._settings.chat_template or _default_template(self._tokenizer))

    @property
    def _rendering(self) -> tuple[str | None, ...]:
        """Values that determine the text of a conversation."""
        return self._template.chat_template, self._template.system_message, self.end_of_assistant

    @cached_property
    def end_of_assistant(self) -> str:
        """Text that ends a turn of the assistant. Raises DataError if it is unknown."""
        if self._template.end_of_assistant is not None:
            return self._template.end_of_assistant
        eos = str(self._tokenizer.eos_token)
        special = [str(token) for token in self._tokenizer.added_tokens_decoder.values()]
        return infer_end(self._render_turns, eos, special) or eos

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without special tokens that the text does not contain."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        self.check_ids(ids)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, as `encode` does. Does not check that the model has their embeddings."""
        if self._backend is None:
            return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises MissingEmbeddingError if the model has no embedding for an id."""
        if self._num_embeddings is None or (largest := max(ids, default=-1)) < self._num_embeddings:
            return
        raise MissingEmbeddingError(
            f"token {self._tokenizer.convert_ids_to_tokens(largest)!r} of the tokenizer in {self.path} has the id "
            f"{largest}, but the model in {self._model} has embeddings for the ids 0 to {self._num_embeddings - 1}: "
            f"remove the token from the text or the template, or use the tokenizer of the model"
        )

    def encode_text(self, text: str, spans: Sequence[Span] = ()) -> tuple[list[int], list[bool]]:
        """Returns the token ids of plain text, which has no chat template, and a mask of the tokens in the spans.

        The ids begin with the tokens that the tokenizer puts before a text, such as BOS, unless the text already begins
        with them. No end token is appended, because the text may continue.
        """
        ids, mask = self.encode_spans(text, spans)
        before = list(self.text_prefix)
        self.check_ids(before)
        if ids[: len(before)] == before:
            return ids, mask
        return [*before, *ids], [*(False for _ in before), *mask]

    @cached_property
    def text_prefix(self) -> tuple[int, ...]:
        """Token ids that the tokenizer puts before plain text, such as BOS. Most tokenizers have one or none."""
        for probe in (*_TEXT_PROBES, str(self._tokenizer.eos_token)):
            own, ids = self.encode(probe), self._tokenizer.encode(probe)
            starts = range(len(ids) - len(own) + 1) if own else ()
            if (start := next((start for start in starts if ids[start : start + len(own)] == own), None)) is not None:
                return tuple(ids[:start])
        return ()

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of a conversation, followed by the chat template's generation prompt."""
        return self.encode(self.render_prompt(messages))

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Returns the text of a conversation, followed by the chat template's generation prompt."""
        return self._render(self._with_system(messages), generate=True)

    def encode_example(self, messages: Sequence[Message], first: int = 0) -> tuple[list[int], list[bool]]:
        """Returns the token ids of a complete conversation and the mask of the assistant's tokens.

        Args:
            messages: the conversation.
            first: index of the first message whose tokens may be in the mask.
        Returns:
            ids: tokens of all messages.
            response_mask: one entry per token, true for tokens of assistant messages and their end tokens.
        Raises:
            DataError: the chat template omits the end of assistant messages, or renders a message differently if more
                messages follow.
        """
        return self.encode_spans(*self.locate_responses(messages, first))

    def encode_for_score(self, messages: Sequence[Message], response: str, *, is_truncated: bool = False) -> list[int]:
        """Returns the token ids of a conversation and its last response, for a model that scores the response.

        The ids end with the end of the turn, or with the response if it is truncated. The template may change the
        response and earlier messages. Without such changes, the ids are those of `encode_example`.
        """
        answered, end = [*messages, Message("assistant", response)], self.end_of_assistant
        try:
            text, ((start, stop),) = self.locate_responses(answered, len(messages))
        except DataError:
            turns = self._with_system(messages)
            text, start = self._render(self._with_system(answered), generate=False), 0
            after = text_after(turns, self._render_turns)
            has_end = end in after and text.endswith(after)
            stop = len(text) - len(after) + after.find(end) + len(end) if has_end else len(text)
        text = text[:stop].removesuffix(end) if is_truncated else text[:stop]
        return self.encode_spans(text, [(start, len(text))])[0]

    def locate_responses(self, messages: Sequence[Message], first: int = 0) -> tuple[str, list[Span]]:
        """Returns the text of a conversation, and the spans of the assistant's responses, each with its end of turn.

        The arguments and errors are those of `encode_example`.
        """
        turns = self._with_system(messages)
        first += len(turns) - len(messages)
        text = self._render(turns, generate=False)
        roles: tuple[Speaker, ...] = tuple(message.role for message in turns)
        if roles not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[roles] = self._make_layout(roles)
        layout = self._layouts[roles]
        if layout is not None:
            located = layout.locate(text, [message.content for message in turns], first)
            if located is not None:
                return located
        try:
            return text, locate_responses(self.end_of_assistant, text, turns, self._render_turns, first)
        except DataError as error:
            raise DataError(f"{self._source}: {error}") from error

    def _make_layout(self, roles: Sequence[Speaker]) -> TurnLayout | None:
        can_append = self._template.end_of_assistant is not None
        try:
            return make_layout(roles, self._render_turns, self.end_of_assistant, can_append=can_append)
        except DataError:
            return None  # `locate_responses` reports the problem of a row, if there is one.

    def with_system(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Returns messages with the system message of the conversation template, if they have none."""
        system = self._template.system_message
        if system is None or (messages and messages[0]["role"] == "system"):
            return messages
        return [{"role": "system", "content": system}, *messages]

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        system = self._template.system_message
        if system is None or (messages and messages[0].role == "system"):
            return messages
        return [Message("system", system), *messages]

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Returns the token ids of a text, and a mask of the tokens in the spans.

        Text before a response is tokenized separately, so its tokens equal those of a rollout's prompt.
        """
        bounds = [0, *(bound for span in spans for bound in span), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
        encoded = self._encode_pieces(pieces)
        ids = [token for piece in encoded for token in piece]
        mask = [index % 2 == 1 for index, piece in enumerate(encoded) for _ in piece]
        return ids, mask

    def _encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of consecutive pieces of a text."""
        if self._can_encode_parts:
            encoded = self.encode_all(pieces)
            for ids in encoded:
                self.check_ids(ids)
            return encoded
        # The tokenizer adds a space at the start of a text, so a piece is encoded together with those before it.
        encoded = []
        before: list[int] = []
        text = ""
        for piece in pieces:
            text += piece
            ids = self.encode(text)
            if not piece:
                encoded.append([])
            elif ids[: len(before)] == before:
                encoded.append(ids[len(before) :])
                before = ids
            else:
                encoded.append(self.encode(piece))
                before = [*before, *encoded[-1]]
        return encoded

    @cached_property
    def _can_encode_parts(self) -> bool:
        """Whether encoding the parts of a text separately gives the same tokens, as for byte-level tokenizers."""
        end = self.end_of_assistant if self._has_chat_template else str(self._tokenizer.eos_token)
        probes = (("a", "b c"), ("a\n", "b c"), ("]", " b"), (":", "b"), (f"a{end}", "b c"), (f"a{end}", "\nb"))
        return all(self.encode(a + b) == self.encode(a) + self.encode(b) for a, b in probes)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def decode_all(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, with special tokens."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def decode_batch(self, rows: Sequence[Sequence[int]], *, keeps_special: bool) -> list[str]:
        """Returns the text of each row of token ids, as `decode_all` (`keeps_special`) or `decode` does."""
        if self._backend is None or len(rows) < 2:
            return [(self.decode_all if keeps_special else self.decode)(ids) for ids in rows]
        return self._backend.decode_batch([list(ids) for ids in rows], skip_special_tokens=not keeps_special)

    def decode_response(self, ids: Sequence[int]) -> str:
        """Returns the text of a response, as `decode_responses` does."""
        return self.decode_responses([ids])[0]

    def decode_responses(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Returns the text of each response, without special tokens and without the stop sequence that ended it.

        Rewards, environments, saved rows and generated files contain this text.
        """
        return self.decode_batch([self.split_stop(ids)[0] for ids in responses], keeps_special=False)

    def decode_tags(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> list[str]:
        """Returns the tags that each prompt opened, followed by the text of its response with special tokens.

        Parsers of tags read this text, because a tokenizer may have a tag such as `<tool_call>` as a special token, and
        the generation prompt of a chat template may open `<think>`. The text excludes the tokens that ended the
        response, and the tokens for BOS, EOS, padding and unknown text.

        Args:
            prompts: all tokens before each response.
            responses: the responses.
            texts: `decode_responses(responses)`.
        """
        bodies = ((row, self.split_stop(ids)[0]) for row, ids in enumerate(responses))
        special = {row: self._remove_control(body) for row, body in bodies if not self._special_ids.isdisjoint(body)}
        decoded = dict(zip(special, self.decode_batch(list(special.values()), keeps_special=True), strict=True))
        tagged = [decoded.get(row, text) for row, text in enumerate(texts)]
        return [self.opened_tags(ids, text) + text for ids, text in zip(prompts, tagged, strict=True)]

    def _remove_control(self, body: list[int]) -> list[int]:
        """Returns a response without special tokens at its end that are no tags, and without tokens for BOS, EOS,
        padding and unknown text.
        """
        end = len(body)
        # The model's generation config and `rollout.stop_ids` may have further end tokens.
        while end and body[end - 1] in self._special_ids:
            if _TAG.fullmatch(self.decode_all(body[end - 1 : end]).strip()):
                break
            end -= 1
        own = self._tokenizer
        control = {own.bos_token_id, own.eos_token_id, own.pad_token_id, own.unk_token_id}
        return [token for token in body[:end] if token not in control]

    def opened_tags(self, prompt_ids: Sequence[int], text: str) -> str:
        """Returns the tags at the end of a prompt that are `<think>`, or that the text of the response closes."""
        if not self.decode_all(prompt_ids[-_NUM_SPACE_TOKENS:]).rstrip().endswith(">"):
            return ""
        match = _OPENED_TAGS.search(self.decode_all(prompt_ids[-_NUM_TAG_TOKENS:]))
        tags = re.finditer(r"<(\w+)>\s*", "" if match is None else match[0])
        # Other tags name a role, such as <assistant>. A thought can be unfinished.
        return "".join(tag[0] for tag in tags if tag[1] == "think" or f"</{tag[1]}>" in text)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """Ids of the tokens that `decode` omits."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(self._tokenizer.all_special_ids) | {token_id for token_id, token in added if token.special}

    def split_stop(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the tokens of a response without its end, and the tokens that ended it: EOS or a stop sequence."""
        for stop in self.end_sequences:
            if stop and tuple(ids[-len(stop) :]) == stop:
                return list(ids[: -len(stop)]), list(stop)
        return list(ids), []

    def max_positions(self) -> int | None:
        """Returns the maximum sequence length in the config of the model. Returns None if the config has none.

        Raises `DataError` if the model's folder has no config.
        """
        try:
            local = self._model.is_dir()
            config = AutoConfig.from_pretrained(str(self._model), local_files_only=local, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise DataError(
                f"no model config can be read from {self._model}; use a directory written by save_pretrained"
            ) from error
        sizes = config.get_text_config().to_dict()
        return next((sizes[name] for name in MAX_POSITIONS if name in sizes), None)

    def _render_turns(self, messages: Sequence[Message], generate: bool) -> str:
        return self._render(messages, generate=generate)

    def _render(self, messages: Sequence[Message], *, generate: bool) -> str:
        return self.render([{"role": turn.role, "content": turn.content} for turn in messages], generate=generate)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],  # Any: values of JSON
        *,
        generate: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Renders messages with the chat template. Returns the text without the system message of the conversation
        template, which `with_system` adds.

        Args:
            messages: the conversation. Messages may have further fields that the chat template reads.
            generate: whether the generation prompt follows.
            tools: JSON schemas of tools for the chat template.
        Raises:
            DataError: the chat template rejects the conversation.
        """
        # A template file without a chat template uses the one of the tokenizer.
        source = self.path if self._settings.chat_template is None else self._source
        return render_conversation(
            self._tokenizer, self._template.chat_template or "", messages, source, generate=generate, tools=tools
        )

    @cached_property
    def _backend(self) -> Any:  # Any: tokenizers.Tokenizer, or None
        """The tokenizer of the library `tokenizers`, whose batch calls are faster. None if its results could differ."""
        tokenizer = self._tokenizer
        # CodeLlama's tokenizer splits a text at its fill token before the call.
        if not tokenizer.is_fast or tokenizer.split_special_tokens or getattr(tokenizer, "fill_token", None):
            return None
        own, usual = type(tokenizer), PreTrainedTokenizerFast
        if own.decode is not usual.decode or own._decode is not usual._decode:  # those of speech models
            return None
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend


def has_same_rendering(policy: Path, other: Path, template: Path | None = None) -> bool:
    """Returns whether two tokenizers give a conversation the same token ids, so that a model with the tokenizer `other`
    can read the tokens of a policy. If `other` has no chat template, the policy's template is assumed.

    Args:
        policy: folder of the policy's tokenizer.
        other: folder of the other tokenizer.
        template: conversation template file of the policy. If None, the template file in
            the folder `policy` applies, or else the chat template of the tokenizer.
    Raises:
        DataError: a folder has no tokenizer, or a template is invalid.
    """
    if policy == other:
        return True
    tokenizer = _load_tokenizer(other)
    first = ChatTokenizer(policy, template)
    vocabulary, known = tokenizer.get_vocab(), first.tokenizer.get_vocab()
    if tokenizer.pad_token not in known:  # saved reward models may have an additional pad token
        vocabulary.pop(tokenizer.pad_token, None)
    if vocabulary != known:
        return False
    if not _default_template(tokenizer) and not (other / TEMPLATE_FILE).is_file():
        return True
    second = ChatTokenizer(other)
    return second._rendering == first._rendering


def _default_template(tokenizer: Any) -> str | None:  # Any: see `_load_tokenizer`
    """Returns the chat template of a tokenizer, or that named `default` if there are several."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def compare_vocabularies(first: Path, second: Path) -> str | None:
    """Returns a difference between the tokens of two tokenizers, or None if they have the same ids and tokens.

    Raises DataError if a folder has no tokenizer.
    """
    if first == second:
        return None
    ids, others = (_load_tokenizer(path).get_vocab() for path in (first, second))
    if ids == others:
        return None
    token, first_id, second_id = next(
        (token, ids.get(token, "none"), others.get(token, "none"))
        for token in [*ids, *others]
        if ids.get(token) != others.get(token)
    )
    return f"token {token!r} has the id {first_id} in {first}, and {second_id} in {second}"


def _load_tokenizer(path: Path) -> Any:  # Any: transformers types token ids too loosely
    if problem := find_model_problem(path):  # transformers would retry for a minute
        raise DataError(f"no tokenizer can be loaded from {path}: {problem}")
    try:
        # Local directories are not searched on the Hub.
        return AutoTokenizer.from_pretrained(str(path), local_files_only=path.is_dir(), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"no tokenizer can be loaded from {path}: not a local directory with tokenizer.json and "
            f"tokenizer_config.json, and not found on the Hub; give a folder written by save_pretrained"
        ) from error
    except (AttributeError, LookupError, RecursionError, TypeError) as error:  # JSON with other content
        raise DataError(
            f"no tokenizer can be loaded from {path}: its tokenizer.json has no tokenizer ({type(error).__name__}); "
            f"give a folder written by save_pretrained"
        ) from error
