"""What a check is given, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from tinsmith.config import service_sections
from tinsmith.logbook.installation import bus_config
from tinsmith.logs import redact_text
from tinsmith.model_state import ModelState, state_of
from tinsmith.paths import DataDir

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.config import BusConfig, Config, ModelConfig, Section

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    check: str
    level: Level
    says: str
    remedy: str = ""


def ok(check: str, says: str) -> Finding:
    """As it should be."""
    return Finding(check=check, level="ok", says=redact_text(says))


def warn(check: str, says: str, remedy: str) -> Finding:
    """It works, or may, and could be better."""
    return Finding(check=check, level="warn", says=redact_text(says), remedy=redact_text(remedy))


def fail(check: str, says: str, remedy: str) -> Finding:
    """Something will not work."""
    return Finding(check=check, level="fail", says=redact_text(says), remedy=redact_text(remedy))


@dataclass(frozen=True)
class Subject:
    """The machine and the installation that are looked at."""

    config: Config
    environ: Mapping[str, str]

    @property
    def data(self) -> DataDir:
        """Its data folder."""
        return DataDir(self.config.data_dir)

    @property
    def bus(self) -> BusConfig:
        """The broker that a service or a command of this machine would use."""
        return bus_config(self.config)

    @property
    def is_up(self) -> bool:
        """Whether a ``tinsmith up`` runs in the data folder."""
        return self.data.up_file.exists()

    @property
    def has_own_broker(self) -> bool:
        """Whether ``tinsmith up`` starts the broker."""
        return "bus.url" not in self.config.origins

    @cached_property
    def models(self) -> list[tuple[ModelConfig, ModelState]]:
        """The configured models, and what lies here of them."""
        return [(model, state_of(model, self.environ)) for model in self.config.models]

    def setting(self, section: str, key: str, model: ModelConfig | None = None) -> Any:  # noqa: ANN401 - any setting
        """A value of the configuration, by name; that of one model where it has its own."""
        options: dict[str, Any] = {} if model is None else getattr(model, section)
        if key in options:
            return options[key]
        type_ = cast("type[Section]", service_sections()[section].load())
        return getattr(self.config.section(type_), key)
