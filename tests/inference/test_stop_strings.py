"""Stop strings that span tokens, characters of several tokens, and the text that is settled."""

import pytest

from flowrl.data.chat import ChatTokenizer
from flowrl.inference.stop_strings import StopStrings
from tests.inference.byte_tokenizer import save_byte_tokenizer


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A tokenizer in which every byte is a token."""
    return ChatTokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def test_a_stop_string_that_spans_tokens_is_found_at_its_last_token(chat: ChatTokenizer) -> None:
    ids = chat.encode("one two three two")
    match = StopStrings(chat, ["three", "two"]).find(ids)
    assert match is not None and (match.num_tokens, match.text) == (7, "one ")
    assert StopStrings(chat, ["four"]).find(ids) is StopStrings(chat, []).find(ids) is None


def test_a_stop_string_may_have_characters_of_several_tokens(chat: ChatTokenizer) -> None:
    ids = chat.encode("aé€b")
    assert len(ids) == 7
    match = StopStrings(chat, ["€"]).find(ids)
    assert match is not None and (match.num_tokens, match.text) == (6, "aé")
    assert StopStrings(chat, ["€"]).find(ids[:5]) is None


def test_of_overlapping_strings_the_one_that_is_complete_first_ends_the_text(chat: ChatTokenizer) -> None:
    match = StopStrings(chat, ["bcd", "c"]).find(chat.encode("abcd"))
    assert match is not None and (match.num_tokens, match.text) == (3, "ab")


def test_a_text_is_cut_before_the_string_that_begins_first(chat: ChatTokenizer) -> None:
    stops = StopStrings(chat, ["bcd", "c"])
    assert [stops.cut(text) for text in ("abcd", "ac", "ab", "")] == ["a", "a", "ab", ""]
    assert StopStrings(chat, []).cut("ab") == "ab"


def test_special_tokens_can_be_stop_strings(chat: ChatTokenizer) -> None:
    ids = [*chat.encode("ab"), chat.eos_id, *chat.encode("c")]
    match = StopStrings(chat, ["<end>"]).find(ids)
    assert match is not None and (match.num_tokens, match.text) == (3, "ab")
    skipped = StopStrings(chat, ["bc"]).find(ids)
    assert skipped is not None and skipped.text == "a"


@pytest.mark.parametrize("text", ["abcabd", "ab", "xaab", "aabc"])
def test_settled_text_is_a_start_of_the_text_before_the_stop_string(chat: ChatTokenizer, text: str) -> None:
    stops, ids = StopStrings(chat, ["abd"]), chat.encode(text)
    match = stops.find(ids)
    end = text if match is None else match.text
    settled = [stops.settled_text(ids[:n]) for n in range(len(ids) + (match is None))]
    assert all(end.startswith(part) for part in settled)
    assert settled == sorted(settled, key=len)


def test_an_incomplete_character_is_not_settled(chat: ChatTokenizer) -> None:
    ids = chat.encode("a€")
    assert [StopStrings(chat, []).settled_text(ids[:n]) for n in (1, 2, 3, 4)] == ["a", "a", "a", "a€"]


def test_the_search_of_new_tokens_finds_strings_that_began_before(chat: ChatTokenizer) -> None:
    ids, stops = chat.encode("x" * 500 + "stop" + "y" * 500), StopStrings(chat, ["stop"])
    assert [stops.can_contain(ids[:n], n - 1) for n in (503, 504)] == [False, True]
    assert not stops.can_contain(ids, 1000)
