"""Conversations keep the sampled tokens, and end at the limit of the model."""

from pathlib import Path

import pytest

from flowrl.data.messages import DataError, Message
from flowrl.data.template import ConversationTemplate
from flowrl.inference.chat_session import ChatSession, ContextFull
from flowrl.inference.model_source import resolve_model
from flowrl.inference.text_generator import SamplingSettings, TextGenerator, open_chat
from tests.engines import tiny
from tests.inference.byte_tokenizer import save_byte_tokenizer

KEEPS = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
REWRITES = KEEPS.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else '' }}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 128 positions whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    tiny.qwen2(vocab_size=257, eos_token_id=0, initializer_range=0.02).save_pretrained(folder)
    return save_byte_tokenizer(folder)


def open_session(model: Path, template: str = KEEPS, num_tokens: int = 10, **settings) -> ChatSession:
    source = resolve_model(str(model))
    chat = open_chat(source, ConversationTemplate(chat_template=template, end_of_assistant="<end>"))
    sampling = SamplingSettings(max_tokens=num_tokens, temperature=1.0)
    generator = TextGenerator(source, sampling, chat=chat, uses_full_context=True)
    return ChatSession(generator, max_tokens=num_tokens, **settings)


def say(session: ChatSession, text: str, **options) -> str:
    return list(session.respond(text, **options))[-1].text


def test_the_next_prompt_continues_the_sampled_tokens(model: Path) -> None:
    session = open_session(model)
    say(session, "one")
    say(session, "two")
    first, second = session.turns
    encode = session.generator.chat.encode
    sampled = list(first.response.token_ids)
    assert list(first.context_ids) == encode("[u]one<end>[a]")
    end = [] if first.response.finish_reason == "stop" else encode("<end>")
    assert list(second.context_ids) == [*first.context_ids, *sampled, *end, *encode("[u]two<end>[a]")]
    assert not session.rewrites_turns


def test_a_template_that_changes_earlier_responses_tokenizes_them_again(model: Path) -> None:
    session = open_session(model, REWRITES)
    say(session, "one")
    say(session, "two")
    assert session.rewrites_turns
    assert list(session.turns[1].context_ids) == session.generator.chat.encode("[u]one<end>[a]<end>[u]two<end>[a]")


def test_a_system_message_applies_to_the_turns_so_far(model: Path) -> None:
    session = open_session(model)
    response = say(session, "one")
    session.system = "S"
    say(session, "two")
    text = f"[s]S<end>[u]one<end>[a]{response}<end>[u]two<end>[a]"
    assert list(session.turns[1].context_ids) == session.generator.chat.encode(text)


def test_a_turn_before_another_system_message_is_tokenized_again_after_undo(model: Path) -> None:
    """The turn that was generated with the new system message is dropped, so that an outdated turn is the last one."""
    session = open_session(model, system="A")
    say(session, "one")
    session.system = "B"
    say(session, "two")
    assert session.undo() == "two"
    say(session, "three")
    start = session.generator.chat.encode("[s]B<end>[u]one<end>[a]")
    assert list(session.turns[1].context_ids[: len(start)]) == start


def test_undo_and_another_sample_give_another_response(model: Path) -> None:
    session = open_session(model)
    response = say(session, "one")
    assert session.undo() == "one" and session.undo() is None
    assert say(session, "one") == response
    session.undo()
    assert say(session, "one", sample=1) != response
    session.reset()
    assert session.messages == []


def test_an_interrupted_response_stays_in_the_conversation(model: Path) -> None:
    """The response has too many tokens to end before the first check, also on a fast machine."""
    session = open_session(model, num_tokens=100)
    last = list(session.respond("one", is_interrupted=lambda: True))[-1]
    assert last.result is not None and last.result.finish_reason == "interrupted"
    assert len(last.result.token_ids) < 100
    assert session.messages == [Message("user", "one"), Message("assistant", last.text)]
    assert say(session, "two") is not None


def test_the_limit_of_the_model_ends_a_response_and_then_the_conversation(model: Path) -> None:
    session = open_session(model)
    say(session, "x" * 115)
    assert session.is_full() and session.turns[0].response.finish_reason == "length"
    with pytest.raises(ContextFull, match="/undo"):
        say(session, "y")
    assert len(session.turns) == 1


def test_a_model_without_a_chat_template_is_rejected(model: Path) -> None:
    source = resolve_model(str(model))
    with pytest.raises(DataError, match="chat template"):
        ChatSession(TextGenerator(source, SamplingSettings()))
