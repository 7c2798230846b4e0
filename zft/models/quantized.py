"""Weights that are only published quantized (GPT-OSS in MXFP4, DeepSeek-V3 in FP8) are dequantized while streaming.

The arithmetic is transformers' own: its quantizer adds dequantizing steps to the weight conversions. Other methods are
refused, because nothing but inference can be done with them.
"""

from __future__ import annotations

from typing import Any

from zft.config import ZftError

DEQUANTIZABLE = ("mxfp4", "fp8")


def quant_method(config: Any) -> str | None:
    """The quantization method that a config names, or None."""
    settings = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if settings is None:
        return None
    method = settings.get("quant_method", "?") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method))


def check_quantization(folder: Any, config: Any) -> None:
    """Raises ZftError for quantized weights that cannot be turned back into full ones."""
    method = quant_method(config)
    if method is not None and method not in DEQUANTIZABLE:
        raise ZftError(
            f"{folder} holds weights quantized with {method}; full weights are needed, dequantize them first"
        )


def take_dequantizer(config: Any) -> Any:
    """transformers' quantizer in dequantizing mode, or None; the config no longer says that it is quantized."""
    if quant_method(config) is None:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    holder = config if getattr(config, "quantization_config", None) is not None else config.get_text_config()
    settings = holder.quantization_config
    settings = AutoQuantizationConfig.from_dict(settings) if isinstance(settings, dict) else settings
    settings.dequantize = True
    del holder.quantization_config
    return AutoHfQuantizer.from_config(settings, pre_quantized=True)
