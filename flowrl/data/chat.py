"""Between conversations and tokens: a saved tokenizer and its chat template."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from flowrl.config.user_errors import UserError

Speaker = Literal["system", "user", "assistant"]


class DataError(UserError):
    """A dataset or a tokenizer is not what a run needs."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Speaker
    content: str


class ChatTokenizer:
    """A tokenizer with a chat template.

    A conversation is tokenised turn by turn: the tokens of a prompt in training are those that generation sees,
    whatever stands after it.
    """

    def __init__(self, path: Path | str) -> None:
        """Loads a folder written by `save_pretrained`. Code in the folder is never run.

        Raises:
            DataError: the folder has no tokenizer, or one without a chat template or without an end token.
        """
        self.path = Path(path)
        self._tokenizer = _load_tokenizer(self.path)
        if not self.tokenizer.chat_template:
            raise DataError(f"the tokenizer in {path} has no chat template; add a chat_template.jinja to the folder")
        if self.tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer in {path} has no end token; set eos_token in its tokenizer_config.json")

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def eos_id(self) -> int:
        """The token that ends a response."""
        return int(self._tokenizer.eos_token_id)

    @property
    def pad_id(self) -> int:
        """The token that fills up a rectangle; the end token where the tokenizer has none of its own."""
        return self.eos_id if self._tokenizer.pad_token_id is None else int(self._tokenizer.pad_token_id)

    def __len__(self) -> int:
        """Number of tokens, special ones included."""
        return len(self._tokenizer)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to where the assistant begins to answer."""
        return self._encode(self._render(messages, generate=True))

    def encode_example(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """The tokens of a whole conversation, and which of them the assistant wrote.

        Returns:
            ids: every token.
            response_mask: as long as `ids`; true for what the assistant says and the end token after it.
        Raises:
            DataError: the chat template does not end the assistant's turn with the end token, or writes earlier turns
                in another way once more turns follow, so that the assistant's part cannot be told.
        """
        ids: list[int] = []
        mask: list[bool] = []
        done = ""
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt = self._render(messages[:number], generate=True)
            answered = self._render(messages[: number + 1], generate=False)
            before = self._encode(self._rest(prompt, done))
            said = self._encode(self._rest(answered, prompt))
            if self.eos_id not in said:
                end = self._tokenizer.eos_token
                raise DataError(f"the chat template in {self.path} does not end what the assistant says with {end!r}")
            # Some templates write a line break after the end token; the assistant does not.
            num_trained = len(said) - said[::-1].index(self.eos_id)
            ids += before + said
            mask += [False] * len(before) + [True] * num_trained + [False] * (len(said) - num_trained)
            done = answered
        after = self._encode(self._rest(self._render(messages, generate=False), done))
        return ids + after, mask + [False] * len(after)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, without the special ones."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def max_positions(self) -> int | None:
        """The longest sequence that the model beside the tokenizer takes, where its config says so.

        Raises:
            DataError: there is no model config.
        """
        try:
            local = self.path.is_dir()
            config = AutoConfig.from_pretrained(str(self.path), local_files_only=local, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise DataError(
                f"no model config can be read from {self.path}; give a folder written by save_pretrained"
            ) from error
        stated = config.get_text_config().to_dict()
        return next((stated[name] for name in ("max_position_embeddings", "n_positions") if name in stated), None)

    def _render(self, messages: Sequence[Message], *, generate: bool) -> str:
        turns = [asdict(message) for message in messages]
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generate)
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _rest(self, text: str, start: str) -> str:
        if not text.startswith(start):
            raise DataError(
                f"the chat template in {self.path} changes earlier turns when another follows, so what the assistant "
                f"said cannot be told from the rest; train on conversations with one answer, or use another template"
            )
        return text[len(start) :]


def read_vocabulary(path: Path) -> dict[str, int]:
    """Returns token -> id of a saved tokenizer. Raises DataError if the folder has none."""
    return _load_tokenizer(path).get_vocab()


def _load_tokenizer(path: Path) -> Any:  # Any: transformers types token ids too loosely
    try:
        # A local directory is never looked up on the Hub.
        return AutoTokenizer.from_pretrained(str(path), local_files_only=path.is_dir(), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"no tokenizer can be loaded from {path}: not a local directory with tokenizer.json and "
            f"tokenizer_config.json, and not found on the Hub; give a folder written by save_pretrained"
        ) from error
