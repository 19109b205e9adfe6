"""transformers' loader: a frozen model with every weight from its files, dense or quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinsmith.errors import StartupError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from tinsmith.model_files import ModelFiles, Quantization


def load(
    files: ModelFiles, dtype: torch.dtype, quantization: Quantization, device: torch.device
) -> PreTrainedModel:
    """The model on its device, in evaluation mode, attention as fast as its family allows.

    Raises:
        StartupError: the weights are damaged, incomplete, or in a form that is not known.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.auto import AutoQuantizationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    source = str(files.folder)
    form: dict[str, object] = {}
    # A mixture is quantised afterwards: see ``quantising``.
    while_loading: Quantization = "none" if files.has_experts else quantization
    config = files.loader_form(str(dtype).removeprefix("torch."), while_loading)
    if config is not None:
        form["quantization_config"] = AutoQuantizationConfig.from_dict(config)
    if while_loading != "none":  # bitsandbytes quantises where the weights are to be
        form["device_map"] = {"": device}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True, **form
        )
    except (OSError, ValueError, SafetensorError, RuntimeError) as exc:
        raise StartupError(f"model: {source} cannot be loaded: {exc}") from exc
    model, loading = loaded
    absent = sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"])))
    if absent:
        raise StartupError(
            f"model: the weights in {source} lack {len(absent)} tensors of the architecture in "
            f"its config.json, such as {absent[0]}; get a complete copy"
        )
    frozen: PreTrainedModel = model.eval().requires_grad_(requires_grad=False)
    if quantization == "none":
        frozen.to(device)  # type: ignore[arg-type]  # its decorator hides the signature
        return frozen
    from tinsmith_trainer import quantising
    from tinsmith_trainer.frozen import keep_layout

    if while_loading == "none":  # else layers of bitsandbytes are there, and may not be moved
        quantising.quantise(frozen, quantization, device)
    keep_layout(frozen)
    return frozen
