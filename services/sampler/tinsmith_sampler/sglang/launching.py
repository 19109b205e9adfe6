"""How an SGLang server is started: its interpreter, its arguments, its environment.

The same on a machine with GPUs and without; ``boot`` puts in place what it lacks without.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tinsmith import paths
from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = "0.5.23"
KEY_VARIABLE = "TINSMITH_SGLANG_KEY"
FOLDER_VARIABLE = "TINSMITH_SGLANG_FOLDER"
LOADER = "tinsmith_sglang_boot.weights.apply"
ADAPTERS_PER_BATCH = 8
ENVIRONMENT = ".venv-sglang"  # what ``make sglang`` builds

_SERVE = Path(__file__).with_name("boot") / "serve.py"
_ASK_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangOptions:
    """What the operator chooses for a server that we start."""

    python: Path  # the interpreter of an environment that has SGLang
    model_path: str  # a folder in Hugging Face format, or a hub id
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    threads: int = 1  # of torch, on a CPU
    max_rows: int = 32  # rows that decode together
    cache_tokens: int = 32_768  # tokens in the key-value cache, of all rows together
    context_length: int | None = None  # None: that of the model
    max_adapters: int = 16
    max_lora_rank: int = 128
    lora_targets: tuple[str, ...] = ("all",)  # last names of layers that adapters may change
    is_whole: bool = False  # its weights are replaced, and there are no adapters
    routed_experts: bool = False  # of a mixture of experts: whether requests may ask for them
    extra: tuple[str, ...] = ()  # further arguments; they win over ours

    @property
    def is_cpu(self) -> bool:
        """Whether it computes on the CPU."""
        return self.device == "cpu"


def default_python() -> Path:
    """Our own interpreter where SGLang is installed beside us, else that of ``make sglang``."""
    try:
        version("sglang")
    except PackageNotFoundError:
        return Path(sys.prefix).parent / ENVIRONMENT / "bin" / "python"
    return Path(sys.executable)


def check_python(python: Path) -> None:
    """ConfigError unless it is an interpreter with the SGLang that we speak to. Takes a moment."""
    ask = "from importlib.metadata import version; print(version('sglang'))"
    remedy = f"run `make sglang`, or set it to a Python that has sglang=={VERSION}"
    try:
        answer = subprocess.run(
            [str(python), "-c", ask], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except OSError as error:
        raise ConfigError(
            f"sampler.sglang_python: {python} cannot be run ({error.strerror}); {remedy}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"sampler.sglang_python: {python} does not answer within {_ASK_S:g} s; {remedy}"
        ) from error
    if answer.returncode:
        raise ConfigError(f"sampler.sglang_python: {python} has no SGLang; {remedy}")
    check_version(answer.stdout.strip(), f"sampler.sglang_python: {python} has")


def check_version(found: str, told: str) -> None:
    """ConfigError unless it is the one version whose answers we know; ``told`` begins it."""
    if found != VERSION:
        raise ConfigError(
            f"{told} SGLang {found}, but Tinsmith speaks to {VERSION} alone: releases change what "
            f"calls mean; install sglang=={VERSION} there"
        )


def command(options: SglangOptions, port: int) -> list[str]:
    """The command line of a server on that port of this machine."""
    # -P: the folder of the file is no place to import from.
    return [str(options.python), "-P", str(_SERVE), *arguments(options, port)]


def arguments(options: SglangOptions, port: int) -> list[str]:
    """SGLang's own arguments."""
    named = {
        "--model-path": options.model_path,
        "--dtype": options.dtype,
        "--device": options.device,
        "--host": "127.0.0.1",
        "--port": port,
        # Else both are taken from the share of all memory that happens to be free.
        "--max-total-tokens": options.cache_tokens,
        "--max-running-requests": options.max_rows,
    }
    if options.is_whole:
        named["--custom-weight-loader"] = LOADER
    else:  # no --max-loaded-loras: beyond it the server would drop adapters that we count on
        named["--max-lora-rank"] = options.max_lora_rank
        named["--max-loras-per-batch"] = min(options.max_adapters, ADAPTERS_PER_BATCH)
    if options.context_length is not None:
        named["--context-length"] = options.context_length
    if options.is_cpu:
        named |= {"--attention-backend": "torch_native", "--lora-backend": "torch_native"}
    flags = [
        "--enable-deterministic-inference",  # without it seeds are ignored
        "--enable-metrics",
        "--incremental-streaming-output",
    ]
    if options.is_cpu:
        flags.append("--sleep-on-idle")  # else its scheduler takes a core while nothing is asked
    if options.routed_experts:
        flags.append("--enable-return-routed-experts")
    if not options.is_whole:
        # Named, since "all" takes in experts: on a CPU the first pass through them ends the server.
        flags += ["--enable-lora", "--lora-target-modules", *options.lora_targets]
    pairs = (str(part) for pair in named.items() for part in pair)
    return [*pairs, *flags, *options.extra]


def environment(
    options: SglangOptions, key: str, folder: Path, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Its environment: ours, and what it is told in no other way.

    ``key`` is its API key, here because command lines are for all to read; ``folder`` is for its
    sockets, which it does not remove, and for changes of its weights.
    """
    ours = ("TINSMITH_", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in environ.items() if not name.startswith(ours)}
    # A server that fails would first wait more than a minute for dumps of itself.
    for dump in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        kept.setdefault(dump, "false")
    told = {
        KEY_VARIABLE: key,
        FOLDER_VARIABLE: str(folder),
        "TMPDIR": str(folder),
        "PYTHONUNBUFFERED": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",  # at temperature 1, whatever is drawn at
    }
    if options.is_cpu:
        told |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # Else it takes all cores, and its threads spin while they wait.
            "OMP_NUM_THREADS": str(options.threads),
            # The first requests would wait a minute for a C++ compiler, or fail without one.
            "TORCHDYNAMO_DISABLE": "1",
        }
    # What is compiled would go to TMPDIR, and be compiled anew at each start.
    kept.setdefault("TORCHINDUCTOR_CACHE_DIR", str(paths.cache_dir(environ) / "torchinductor"))
    return {**kept, **told}
