"""What an SGLang 0.5.23 server is told and what it says: the JSON of its HTTP API.

A vocabulary of its own that stays in this folder. The server ignores top-level fields it does not
know and refuses sampling fields it does not know; these structs have none of either.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

LogprobItem = tuple[float | None, int, str | None]
"""(log-probability, token, text); the first of a prompt has none. Minus infinity is None as well,
since JSON has no word for it."""

PauseMode = Literal["abort", "retract", "in_place"]
"""``retract``: requests wait and their keys and values are computed anew. ``in_place``: they keep
them. ``abort``: they end with what they have."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """``sampling_params``. All are always sent: the server's defaults come from the model's folder.

    ``sampling_seed`` has no default, since a server with deterministic inference takes 42 for a
    missing one: all unseeded requests would draw the same.
    """

    sampling_seed: int  # [0, 2**63)
    max_new_tokens: int  # 0: nothing is drawn, the prompt is scored
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = False
    no_stop_trim: bool = True
    n: int = 1

    def __post_init__(self) -> None:
        if self.ignore_eos and self.stop_token_ids:
            msg = "ignore_eos: the server would ignore stop_token_ids too; set one of them"
            raise ValueError(msg)


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``/generate``: one prompt, one continuation.

    ``rid`` and ``lora_path`` are names of the client's caller; it sends others for them.
    Log-probabilities of the prompt are asked for with ``logprob_start_len`` 0: with k the server
    leaves out that of token k as well.
    """

    rid: str  # what ``abort`` takes
    input_ids: list[int]
    sampling_params: Sampling
    lora_path: str | None = None
    return_logprob: bool = True
    logprob_start_len: int = -1  # -1: none of the prompt
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    stream: bool = False


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a continuation ended; an aborted one is answered with status 200 too."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | list[int] | None = None  # of "stop": the token or the string
    message: str | None = None  # of "abort"


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a continuation were drawn from these weights."""

    version: str
    start: int
    end: int


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """``meta_info`` of an answer. While one streams, the reason is None."""

    id: str
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | None = None
    weight_versions: list[VersionSpan] | None = None
    num_retractions: int = 0
    input_token_logprobs: list[LogprobItem] | None = None
    output_token_logprobs: list[LogprobItem] | None = None
    input_top_logprobs: list[list[LogprobItem] | None] | None = None
    output_top_logprobs: list[list[LogprobItem] | None] | None = None
    input_token_ids_logprobs: list[list[LogprobItem] | None] | None = None
    output_token_ids_logprobs: list[list[LogprobItem] | None] | None = None
    routed_experts: str | None = None  # base64 of int32 [prompt + output - 1 - start, layers, k]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/generate`` answers; one of a stream has only what is new since the one before."""

    output_ids: list[int]  # the token that ended it included
    meta_info: Meta


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``/model_info``."""

    model_path: str
    weight_version: str | None = None


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``/server_info``: its version, and the options it was started with that matter to us."""

    version: str
    max_total_num_tokens: int | None = None
    context_length: int | None = None
    max_req_input_len: int | None = None
    dtype: str | None = None
    device: str | None = None
    enable_deterministic_inference: bool = False
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    max_loras_per_batch: int | None = None
    max_loaded_loras: int | None = None
    enable_return_routed_experts: bool = False
    enable_metrics: bool = False
    skip_tokenizer_init: bool = False
    incremental_streaming_output: bool = False
    startup_time: dict[str, Any] = {}  # what its start took: no two starts take the same
    tp_size: int = 1


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``/load_lora_adapter_from_tensors``.

    It has no ``expected_checksums``: wrong ones end the server. Whoever fetches an adapter checks
    its bytes.
    """

    lora_name: str
    config_dict: dict[str, Any]  # PEFT's adapter_config.json
    serialized_named_tensors: list[str]  # one for each rank
    pinned: bool = False


class UpdateTensors(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``/update_weights_from_tensor``."""

    serialized_named_tensors: list[str]  # one for each rank
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class RankChecksums(msgspec.Struct, frozen=True, kw_only=True):
    """Of the tensors of one rank, by the server's own names of them."""

    checksums: dict[str, str]


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/weights_checker`` answers to ``checksum``."""

    ranks: list[RankChecksums] = []
