from __future__ import annotations

import tomllib
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from tinsmith import config
from tinsmith.config_docs import field_docs, render, toml


class Sample(config.Section, frozen=True, kw_only=True):
    """A section."""

    first: Annotated[int, Meta(ge=0)] = 0
    """One line that goes
    on in another."""
    second: str = ""


def test_the_rendered_configuration_is_toml_that_loads_to_the_same(tmp_path):
    path = tmp_path / "shown.toml"
    environ = {
        "TINSMITH_DATA_DIR": str(tmp_path),
        "TINSMITH_GATEWAY__PORT": "8123",
        "TINSMITH_MODELS": '[{name = "a", path = "/x"}, {name = "b", context_length = 7}]',
    }
    loaded = config.load(None, environ)

    path.write_text(render(loaded, has_docs=True))

    again = config.load(path, {})
    assert again.models == loaded.models
    assert render(again).splitlines()[0] == render(loaded).splitlines()[0]
    assert again.blobs.url == loaded.blobs_url


def test_every_value_that_was_set_names_its_source(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[logs]\nlevel = 'debug'\n")

    shown = render(config.load(path, {"TINSMITH_GATEWAY__PORT": "8123"}))

    assert f'level = "debug"  # {path}' in shown
    assert "port = 8123  # TINSMITH_GATEWAY__PORT" in shown


def test_secrets_are_masked():
    environ = {
        "TINSMITH_NATS_URL": "nats://user:pass@host:4222",
        "TINSMITH_BUS__PASSWORD": "hidden-a",
        "TINSMITH_BUS__TOKEN": "hidden-b",
        "TINSMITH_GATEWAY__API_KEYS": '["tml-hidden-c"]',
    }

    shown = render(config.load(None, environ))

    assert "hidden" not in shown
    assert "pass@" not in shown
    assert tomllib.loads(shown)["gateway"]["api_keys"] == ["***"]


def test_the_docstring_under_a_field_documents_it():
    assert field_docs(Sample) == {"first": "One line that goes on in another."}


def test_every_field_of_every_section_is_documented():
    sections = [config.BusConfig, config.BlobsConfig, config.LogsConfig, config.ModelConfig]
    sections += [point.load() for point in config.service_sections().values()]

    for section in sections:
        assert set(section.__struct_fields__) == set(field_docs(section)), section


VALUES = st.recursive(
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_a_value_in_toml_notation_reads_as_itself(value):
    assert tomllib.loads(f"v = {toml(value)}")["v"] == value


def test_what_toml_cannot_say_is_refused():
    with pytest.raises(TypeError, match="no notation"):
        toml({1, 2})
