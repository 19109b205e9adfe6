"""Tells the cookbook of models that are not in its tables: their tokenizer, renderer, attributes.

Its tokenizers have a registry, which is used. Its table of models has none, so the one function
that reads the table is wrapped: a name that the table lacks is described by its tokenizer.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tinker_cookbook import model_info, renderers, tokenizer_utils
from tinker_cookbook.exceptions import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHAT_RENDERERS = ("qwen3_instruct", "llama3")
"""ChatML and Llama 3: formats of many models that the cookbook does not list."""
PLAIN_RENDERER = "role_colon"
_CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 4 + 5?"},
    {"role": "assistant", "content": "9"},
    {"role": "user", "content": "And 2 + 2?"},
)
_log = logging.getLogger(__name__)


def register(tokenizers: Mapping[str, str]) -> None:
    """Make known where the tokenizers of models are (folder or hub id), and models themselves."""
    for name, source in tokenizers.items():
        tokenizer_utils.register_tokenizer(name, partial(_tokenizer, source))
    model_info.get_model_attributes = partial(_attributes, model_info.get_model_attributes)


@cache
def _tokenizer(source: str) -> Any:  # noqa: ANN401 - transformers gives it no type
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


def _attributes(listed: Callable[[str], Any], model_name: str) -> Any:  # noqa: ANN401 - theirs
    """What the cookbook lists, or what the tokenizer tells of an unlisted model."""
    try:
        return listed(model_name)
    except (ConfigurationError, KeyError):
        return _described(model_name)


@cache
def _described(model_name: str) -> Any:  # noqa: ANN401 - theirs
    organization, _, rest = model_name.rpartition("/")
    renderer = fitting_renderer(tokenizer_utils.get_tokenizer(model_name))
    _log.info("model %s is not in the cookbook's table: renderer %s", model_name, renderer)
    return model_info.ModelAttributes(
        organization=organization,
        version_str=rest,
        size_str=rest,
        is_chat=renderer != PLAIN_RENDERER,
        recommended_renderers=(renderer,),
    )


def fitting_renderer(tokenizer: Any) -> str:  # noqa: ANN401 - as above
    """The renderer whose tokens are those of the tokenizer's own chat template.

    ``role_colon``, which suits any tokenizer, when there is no template or none that fits.
    """
    if not getattr(tokenizer, "chat_template", None):
        return PLAIN_RENDERER
    text = tokenizer.apply_chat_template(list(_CHAT), add_generation_prompt=True, tokenize=False)
    expected = tokenizer.encode(text, add_special_tokens=False)
    for name in CHAT_RENDERERS:
        if _prompt(name, tokenizer) == expected:
            return name
    _log.warning("no renderer fits the chat template; %s is used", PLAIN_RENDERER)
    return PLAIN_RENDERER


def _prompt(renderer: str, tokenizer: Any) -> list[int] | None:  # noqa: ANN401 - as above
    """None when the renderer wants special tokens that the tokenizer lacks."""
    try:
        made = renderers.get_renderer(renderer, tokenizer).build_generation_prompt(list(_CHAT))
    except (AssertionError, KeyError, ValueError):
        return None
    return list(made.to_ints())
