"""Checks of the models: files, tokenizer, and the interpreter of SGLang where it computes."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.doctor.finding import fail, ok, warn
from tinsmith.logbook.text import size

if TYPE_CHECKING:
    from tinsmith.config import ModelConfig
    from tinsmith.doctor.finding import Finding, Subject
    from tinsmith.model_state import ModelState

ASK_S = 15.0
SGLANG_ENVIRONMENT = ".venv-sglang"
"""Made by ``make sglang`` beside our own."""
_ASK = "from importlib.metadata import version; print(version('sglang'))"


def models(subject: Subject) -> list[Finding]:
    """One finding for each."""
    return [_model(model, state) for model, state in subject.models]


def _model(model: ModelConfig, state: ModelState) -> Finding:
    check = f"model {model.name}"
    if state.folder is None:
        return warn(
            check,
            state.wrong,
            "without a network: copy its folder here, and set path in [[models]] to it",
        )
    if state.wrong:
        return fail(check, state.wrong, "copy it anew, or set path in [[models]]")
    context, own = model.context_length, state.context_length
    if context is not None and own is not None and context > own:
        return warn(
            check,
            f"context_length is {context}, and the model is made for {own}",
            "lower it, or know that what lies beyond is extrapolated",
        )
    if not state.has_tokenizer:
        return warn(
            check,
            f"{state.folder} has no tokenizer",
            "copy tokenizer.json there, or set tokenizer_id, or clients must bring their own",
        )
    return ok(check, f"{size(state.stored_bytes)} in {state.folder}")


def sglang(subject: Subject) -> Finding | None:
    """The interpreter that SGLang runs in; None where nothing asks for it."""
    wanted = [
        m for m in subject.config.models if subject.setting("sampler", "engine", m) == "sglang"
    ]
    if not wanted:
        return None
    if url := subject.setting("sampler", "sglang_url", wanted[0]):
        return ok("sglang", f"a server of its own: {url}")
    named = str(subject.setting("sampler", "sglang_python", wanted[0]))
    python = Path(named).expanduser() if named else _default_python()
    remedy = "run 'make sglang', or set sampler.sglang_python"
    try:
        said = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail("sglang", f"{python} cannot be asked ({type(error).__name__})", remedy)
    found, needed = said.stdout.strip(), _needed()
    if said.returncode:
        return fail("sglang", f"{python} has no SGLang", remedy)
    if needed and found != needed:
        return fail("sglang", f"{python} has SGLang {found}, and {needed} is needed", remedy)
    return ok("sglang", f"{found} in {python}")


def _default_python() -> Path:
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return Path(sys.prefix).parent / SGLANG_ENVIRONMENT / "bin" / "python"
    return Path(sys.executable)


def _needed() -> str:
    """The one version that Tinsmith speaks to, as its own package says."""
    for requirement in metadata.requires("tinsmith") or ():
        if match := re.match(r"sglang==([\d.]+)", requirement):
            return match[1]
    return ""
