"""Bodies to token ids: what is tokenised, how texts begin, and what is not even tried."""

import json
from typing import Any

import pytest
from tiny_vocabulary import byte_fallback_tokenizer, write_model

from headrace.errors import InputError
from headrace.gateway.front.chat import ChatTemplate
from headrace.gateway.front.intake import Intake
from headrace.gateway.front.openai_errors import Refused
from headrace.gateway.front.vocabulary import Vocabulary, load_vocabulary

BOS = 1


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    """Of a model whose tokenizer puts BOS before a text, and whose template does so itself."""
    directory = write_model(tmp_path_factory.mktemp("model"), byte_fallback_tokenizer(), eos="</s>")
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    return Intake(model="mill", vocabulary=load_vocabulary(directory), template=template)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "mill", **fields}).encode()


def test_a_plain_text_begins_as_the_tokenizer_has_it_and_token_ids_as_the_client_has_them(intake: Intake) -> None:
    _, (text, token_ids) = intake.take_completion(body(prompt=["the", [7]]), 100)
    assert text.token_ids == (BOS, *intake.vocabulary.encode("the", with_specials=False))
    assert token_ids.token_ids == (7,)
    assert (text.field, token_ids.field) == ("prompt[0]", "prompt[1]")


def test_a_template_that_begins_with_bos_gets_no_second_one(intake: Intake) -> None:
    _, (prompt,) = intake.take_chat(body(messages=[{"role": "user", "content": "the"}]), 100)
    assert prompt.token_ids[0] == BOS and prompt.token_ids.count(BOS) == 1


def test_an_empty_text_that_still_begins_with_bos_is_a_prompt(intake: Intake) -> None:
    _, (prompt,) = intake.take_completion(body(prompt=""), 100)
    assert prompt.token_ids == (BOS,)


def test_only_who_wants_the_prompt_back_gets_its_text(intake: Intake) -> None:
    _, (prompt,) = intake.take_completion(body(prompt="the"), 100)
    assert prompt.echo == ""
    _, prompts = intake.take_completion(body(prompt=["the", [BOS, 4, 5]], echo=True), 100)
    assert [prompt.echo for prompt in prompts] == ["the", "the mill"]


def test_a_text_that_cannot_fit_is_not_tokenised(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 10 * intake.vocabulary.longest_token
    intake.take_completion(body(prompt="x" * most), 10)
    monkeypatch.setattr(Vocabulary, "encode", None)
    with pytest.raises(InputError, match=f"never more than {most} characters; has {most + 1}"):
        intake.take_completion(body(prompt="x" * (most + 1)), 10)
    with pytest.raises(InputError, match="^messages: must be at most 10 tokens"):
        intake.take_chat(body(messages=[{"role": "user", "content": "x" * most}]), 10)


def test_the_model_is_looked_at_before_the_prompt(intake: Intake) -> None:
    with pytest.raises(Refused, match="^model: must be 'mill', the only model here, is 'other'"):
        intake.take_completion(body(model="other", prompt=[10**9]), 10)


def test_of_token_ids_that_are_too_many_no_more_is_decoded_for_an_echo_than_could_be_served(intake: Intake) -> None:
    _, (prompt,) = intake.take_completion(body(prompt=[7] * 1000, echo=True), 3)
    assert len(prompt.token_ids) == 1000  # refused where both numbers are known
    assert prompt.echo == intake.vocabulary.decode([7] * 3)
