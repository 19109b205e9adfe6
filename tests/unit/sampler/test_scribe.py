"""Prompts of texts and conversations, and who has to do without them."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith.messages.texts import ChatMessage, RenderChat, SpellTokens, TokenizeText
from tinsmith.testing import tiny_model
from tinsmith_sampler.scribe import Scribe

TALK = RenderChat(
    messages=(
        ChatMessage(role="user", content="Hello!"),
        ChatMessage(role="assistant", content="I am well."),
        ChatMessage(role="user", content="user\n<|im_end|> \u20ac"),
    )
)
PICKY = "{{ raise_exception('roles must alternate') }}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_model.build(tmp_path_factory.mktemp("model")))


@pytest.fixture
def scribe(tmp_path, tokenizer):
    def with_template(template=tiny_model.CHAT_TEMPLATE, *, context_length=2048):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        return Scribe(str(tmp_path), context_length)

    return with_template


async def test_a_conversation_is_written_out_up_to_where_its_answer_begins(scribe, tokenizer):
    rendered = await scribe().render(TALK)
    text = tokenizer.decode(np.frombuffer(rendered.tokens, "<i4"))

    assert text == "".join(
        f"<|im_start|>{one.role}\n{one.content}<|im_end|>\n" for one in TALK.messages
    ) + ("<|im_start|>assistant\n")


async def test_a_template_that_refuses_is_the_callers_to_know_about(scribe):
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await scribe(PICKY).render(TALK)


async def test_without_a_template_there_are_completions(scribe):
    plain = scribe(None)
    with pytest.raises(NotSupported, match="no chat template"):
        await plain.render(TALK)

    assert (await plain.tokenize(TokenizeText(text="Hello!"))).tokens


async def test_more_than_the_context_is_refused_with_its_length(scribe):
    with pytest.raises(InvalidRequest, match=r"tokens are over the model's context of 4;"):
        await scribe(context_length=4).tokenize(TokenizeText(text="sea " * 20))


async def test_without_a_tokenizer_only_tokens_can_be_sent(tmp_path):
    mute = Scribe(str(tmp_path), 100)
    for asking in (mute.render(TALK), mute.tokenize(TokenizeText(text="a"))):
        with pytest.raises(NotSupported, match="without a tokenizer"):
            await asking
    with pytest.raises(NotSupported, match="without a tokenizer"):
        await mute.spell(SpellTokens(tokens=b"\0\0\0\0"))
