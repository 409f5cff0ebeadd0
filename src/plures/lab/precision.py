"""Which precision a device trains fastest in."""

from typing import Literal

import torch


def resolve(precision: str, device: torch.device) -> Literal["no", "bf16", "fp16"]:
    """Turn "auto" into bf16 where the device multiplies in it, and into full precision elsewhere.

        resolve("auto", torch.device("cpu"))

    A processor without such instructions can compute in bf16, too, but many times more slowly.
    """
    if precision != "auto":
        return precision  # type: ignore[return-value]
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    if device.type == "cpu":
        return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "no"
    return "no"
