from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith import config
from tinsmith.errors import ConfigError
from tinsmith_checkpointer.config import CheckpointerConfig
from tinsmith_gateway.config import GatewayConfig


def load(text: str, tmp_path: Path, **environ: str) -> config.Config:
    path = tmp_path / "tinsmith.toml"
    path.write_text(text)
    return config.load(path, environ)


def error_of(text: str, tmp_path: Path, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, tmp_path, **environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_file_or_environment_everything_has_its_default():
    loaded = config.load(None, {})

    assert loaded.bus.url == "nats://127.0.0.1:4222"
    assert [model.name for model in loaded.models] == [config.DEFAULT_MODEL]
    assert loaded.section(GatewayConfig) == GatewayConfig()
    assert loaded.origins == {}


def test_the_file_sets_keys_of_a_service(tmp_path):
    loaded = load("[gateway]\nport = 9000\n", tmp_path)

    assert loaded.section(GatewayConfig).port == 9000
    assert loaded.origins == {"gateway.port": str(tmp_path / "tinsmith.toml")}


def test_the_environment_wins_over_the_file(tmp_path):
    loaded = load("[gateway]\nport = 9000\n", tmp_path, TINSMITH_GATEWAY__PORT="9001")

    assert loaded.section(GatewayConfig).port == 9001
    assert loaded.origins["gateway.port"] == "TINSMITH_GATEWAY__PORT"


def test_the_file_can_be_named_by_the_environment(tmp_path):
    path = tmp_path / "named.toml"
    path.write_text("[logs]\nlevel = 'debug'\n")

    assert config.load(None, {"TINSMITH_CONFIG": str(path)}).logs.level == "debug"


def test_the_broker_has_a_variable_of_its_own():
    assert config.load(None, {"TINSMITH_NATS_URL": "nats://far:4222"}).bus.url == "nats://far:4222"


@pytest.mark.parametrize(
    ("variable", "text", "read"),
    [
        ("TINSMITH_GATEWAY__PORT", "8123", lambda c: c.section(GatewayConfig).port == 8123),
        ("TINSMITH_BUS__CONNECT_TIMEOUT_S", "2", lambda c: c.bus.connect_timeout_s == 2.0),
        ("TINSMITH_BUS__TOKEN", "123", lambda c: c.bus.token == "123"),
        (
            "TINSMITH_GATEWAY__COMPRESS_TRAINING_REQUESTS",
            "true",
            lambda c: c.section(GatewayConfig).compress_training_requests is True,
        ),
        (
            "TINSMITH_GATEWAY__API_KEYS",
            '["tml-a", "tml-b"]',
            lambda c: c.section(GatewayConfig).api_keys == ("tml-a", "tml-b"),
        ),
        ("TINSMITH_MODELS", '[{name = "a"}]', lambda c: c.models[0].name == "a"),
        ("TINSMITH_MODELS", '[{"name": "a"}]', lambda c: c.models[0].name == "a"),
        ("TINSMITH_DATA_DIR", "/d", lambda c: c.data_dir == Path("/d")),
    ],
)
def test_a_variable_is_read_as_its_key_wants_it(variable, text, read):
    assert read(config.load(None, {variable: text}))


def test_a_misspelt_key_names_the_file_and_the_right_one(tmp_path):
    message = error_of("[gateway]\nprot = 9000\n", tmp_path)

    assert message.startswith(f"{tmp_path / 'tinsmith.toml'}: gateway.prot: ")
    assert "did you mean 'port'?" in message


def test_a_misspelt_section_names_the_right_one(tmp_path):
    assert "did you mean 'gateway'?" in error_of("[gatewai]\nport = 9000\n", tmp_path)


def test_a_misspelt_key_in_a_model_is_found(tmp_path):
    message = error_of("[[models]]\nname = 'a'\ndtpe = 'float32'\n", tmp_path)

    assert "models[0].dtpe" in message
    assert "did you mean 'dtype'?" in message


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("TINSMITH_GATEWAY__PROT", "'port'"),
        ("TINSMITH_GATEWAI__PORT", "'gateway'"),
        ("TINSMITH_DATADIR", "TINSMITH_DATA_DIR"),
        ("TINSMITH_NATS_UR", "TINSMITH_NATS_URL"),
    ],
)
def test_a_misspelt_variable_names_the_right_one(variable, meant):
    with pytest.raises(ConfigError, match=rf"^{variable}: .*did you mean {meant}\?"):
        config.load(None, {variable: "1"})


def test_variables_that_a_cluster_injects_are_left_alone():
    assert config.load(None, {"TINSMITH_GATEWAY_PORT": "tcp://10.0.0.1:8400"}).origins == {}


@pytest.mark.parametrize(
    ("text", "key", "value", "accepted"),
    [
        ("[gateway]\nport = 'x'", "gateway.port", '"x"', "an integer from 0 to 65535"),
        ("[gateway]\nport = 70000", "gateway.port", "70000", "an integer from 0 to 65535"),
        ("[logs]\nlevel = 'loud'", "logs.level", '"loud"', 'one of "debug", "error"'),
        ("[bus]\nurl = ''", "bus.url", '""', "a non-empty string"),
        ("[bus]\nurl = 4222", "bus.url", "4222", "a non-empty string"),
        ("[bus]\nconnect_timeout_s = 0", "connect_timeout_s", "0", "from more than 0 to 60"),
        ("[gateway]\napi_keys = 'k'", "gateway.api_keys", '"***"', "a list, each item a string"),
        ("[[models]]\nname = 'a'\ncontext_length = 0", "context_length", "0", "of at least 1"),
        ("data_dir = 3", "data_dir", "3", "a path"),
        ("models = 'a'", "models", '"a"', "a list"),
        ("models = ['a']", "models[0]", '"a"', "a table"),
        ("bus = 3", "bus", "3", "a table"),
        ("[checkpointer]\nmax_parts = true", "max_parts", "true", "an integer of at least 1"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_accepted(text, key, value, accepted, tmp_path):
    message = error_of(text, tmp_path)

    assert f"{key} = {value}: must be " in message
    assert accepted in message


def test_a_wrong_list_in_a_variable_says_how_to_write_one():
    with pytest.raises(ConfigError, match=r'written as \["a", "b"\]'):
        config.load(None, {"TINSMITH_GATEWAY__API_KEYS": "tml-a"})


def test_a_secret_is_not_repeated_in_an_error():
    with pytest.raises(ConfigError) as caught:
        config.load(None, {"TINSMITH_GATEWAY__API_KEYS": "tml-very-secret"})

    assert "very-secret" not in str(caught.value)


def test_a_model_needs_a_name(tmp_path):
    assert "required key 'name'" in error_of("[[models]]\npath = '/x'\n", tmp_path)


def test_two_models_of_one_name_are_refused(tmp_path):
    text = "[[models]]\nname = 'a'\n[[models]]\nname = 'a'\n"

    assert "'a' is listed 2 times" in error_of(text, tmp_path)


def test_a_file_that_is_not_toml_is_named_with_the_line(tmp_path):
    assert "not valid TOML" in error_of("[gateway\n", tmp_path)
    assert "line 1" in error_of("[gateway\n", tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file"):
        config.load(tmp_path / "absent.toml", {})


def test_a_folder_is_no_configuration(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.load(tmp_path, {})


def test_an_open_path_takes_the_cached_copy(tmp_path):
    cached = tmp_path / "models" / "org--small"
    cached.mkdir(parents=True)

    loaded = load("[[models]]\nname = 'org/small'\n", tmp_path, TINSMITH_CACHE=str(tmp_path))

    assert loaded.models[0].path == str(cached)


def test_an_open_path_without_cached_copy_stays_open(tmp_path):
    loaded = load("[[models]]\nname = 'org/small'\n", tmp_path, TINSMITH_CACHE=str(tmp_path))

    assert loaded.models[0].path == ""


def test_the_default_model_is_the_first(tmp_path):
    loaded = load("[[models]]\nname = 'a'\n[[models]]\nname = 'b'\n", tmp_path)

    assert loaded.model("").name == "a"
    assert loaded.model("b").name == "b"


def test_an_unknown_model_names_those_there_are(tmp_path):
    loaded = load("[[models]]\nname = 'a'\n[[models]]\nname = 'b'\n", tmp_path)

    with pytest.raises(ConfigError, match=r"'c' is not configured; .* 'a', 'b'"):
        loaded.model("c")


def test_a_section_given_by_a_program_is_found():
    made = config.Config(sections=(CheckpointerConfig(max_parts=3),))

    assert made.section(CheckpointerConfig).max_parts == 3


@pytest.mark.parametrize("name", ["laptop-cpu", "split"])
def test_the_shipped_files_load(name):
    shipped = Path(__file__).parents[3] / "deploy" / "config" / f"{name}.toml"

    assert config.load(shipped, {}).section(GatewayConfig).port == 8400
