"""A Hugging Face folder as a model and a decoder, or one line that says why it cannot be served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import structlog
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.quantizers.auto import AutoQuantizationConfig

from tinsmith.errors import StartupError
from tinsmith_sampler import attention, experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from tinsmith.model_files import ModelFiles, Quantization
    from tinsmith_sampler.stopping import Decode

_log = structlog.get_logger(__name__)


def load_model(
    files: ModelFiles, *, dtype: torch.dtype, device: str, quantization: Quantization
) -> PreTrainedModel:
    """The frozen model, its attention ours; StartupError for one that would come out wrong."""
    attention.register()
    config = files.loader_form(str(dtype).removeprefix("torch."), quantization)
    form: dict[str, object] = {}
    if config is not None:
        form["quantization_config"] = AutoQuantizationConfig.from_dict(config)
    if quantization != "none":
        form["device_map"] = {"": device}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(files.folder), dtype=dtype, attn_implementation=attention.NAME, **form
        )
    except (OSError, ValueError) as problem:
        raise StartupError(f"model: {files.folder} cannot be loaded: {problem}") from problem
    reason = _unsupported(model, model.config.get_text_config())
    if reason is not None:
        raise StartupError(
            f"model: {type(model).__name__} {reason}, which the torch engine lacks; "
            "serve it with SGLang"
        )
    model.requires_grad_(False)  # noqa: FBT003  torch's signature
    if quantization == "none":
        model.to(torch.device(device))  # type: ignore[arg-type]  # its decorator hides the signature
    else:  # layers of bitsandbytes are there, and may not be moved
        _round_experts(model, quantization)
    model.eval()  # type: ignore[no-untyped-call]
    return cast("PreTrainedModel", model)


def make_dense(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Turn quantised layers into ordinary ones with the same values.

    A decoding pass reads every weight for a few rows: making them dense each time would cost more
    than the pass. So only the values are those of the quantised base, the memory is not.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and not module.weight.is_floating_point():
            dense = torch.nn.Linear(1, 1, bias=False)
            dense.in_features, dense.out_features = module.in_features, module.out_features
            dense.weight = torch.nn.Parameter(
                _dequantised(module.weight).to(dtype), requires_grad=False
            )
            dense.bias = module.bias
            model.set_submodule(name, dense)


def _round_experts(model: PreTrainedModel, quantization: Quantization) -> None:
    """Give experts, which bitsandbytes leaves alone, the values that the trainer's codes have."""
    from bitsandbytes.nn import Int8Params, Params4bit

    for module in model.modules():
        for matrix in (experts.GATE_UP, experts.DOWN):
            weight = getattr(module, matrix, None)
            if not isinstance(weight, torch.nn.Parameter):
                continue
            is_transposed = cast("Any", module).is_transposed
            for W_OI in weight.data.transpose(1, 2) if is_transposed else weight.data:
                held = W_OI.cpu().contiguous()
                codes = (
                    Params4bit(held, quant_type="nf4", compress_statistics=True)
                    if quantization == "nf4"
                    else Int8Params(held, requires_grad=False)
                )
                W_OI.copy_(_dequantised(codes.to(weight.device)))


def _dequantised(weight: Any) -> torch.Tensor:  # noqa: ANN401 - of bitsandbytes' two kinds
    if weight.dtype == torch.int8:  # the largest magnitude of a row is stored as 127
        scales: torch.Tensor = weight.SCB
        return weight.data * (scales[:, None] / 127)  # type: ignore[no-any-return]
    from bitsandbytes.functional import dequantize_4bit

    dense: torch.Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return dense


def load_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, or None if there is none; only stop strings need it."""
    try:
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(path))
    except (OSError, ValueError) as problem:
        _log.warning("no_tokenizer", model=path, reason=str(problem))
        return None


def decoder(tokenizer: PreTrainedTokenizerBase | None) -> Decode | None:
    """Token ids to text, special tokens included."""
    return None if tokenizer is None else lambda ids: cast("str", tokenizer.decode(ids))


def eos_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """What ends a text: the model's EOS tokens and the tokenizer's."""
    generation = getattr(model, "generation_config", None)
    configured = None if generation is None else generation.eos_token_id
    of_model = [configured] if isinstance(configured, int) else configured or []
    of_tokenizer = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(of_model if of_tokenizer is None else [*of_model, of_tokenizer])


def _unsupported(model: PreTrainedModel, config: PretrainedConfig) -> str | None:
    """What this model has that the engine would compute wrongly."""
    kinds = set(getattr(config, "layer_types", None) or [])
    unknown = kinds - {"full_attention", "sliding_attention"}
    rope = str(getattr(config, "rope_parameters", None))  # of all layers, or of each kind
    if not getattr(model, "_supports_attention_backend", False):
        return "has an attention of its own"
    if unknown:
        return f"has layers of kind {sorted(unknown)}"
    for changing in ("dynamic", "longrope"):
        if f"'{changing}'" in rope:
            return f"has {changing} rotary embeddings, which change with the longest row of a pass"
    return None
