"""Layer norms and GradScaler of ``apex.transformer``, for data parallelism."""

from typing import Any

import torch
from apex_native.normalization import FusedLayerNorm as PlainFusedLayerNorm
from apex_native.normalization import MixedFusedLayerNorm as PlainMixedFusedLayerNorm
from torch import nn

from .layers import FastLayerNorm as PlainFastLayerNorm


class _Marked(nn.Module):
    """Mixin that sets an attribute, which Megatron reads, on a module and its parameters."""

    def __init__(self, *args: Any, sequence_parallel_enabled: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for part in (self, *self.parameters()):
            part.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]


class FusedLayerNorm(_Marked, PlainFusedLayerNorm):
    """FusedLayerNorm whose parameters have the attribute `sequence_parallel_enabled`."""


class MixedFusedLayerNorm(_Marked, PlainMixedFusedLayerNorm):
    """MixedFusedLayerNorm whose parameters have the attribute `sequence_parallel_enabled`."""


class FastLayerNorm(_Marked, PlainFastLayerNorm):
    """FastLayerNorm whose parameters have the attribute `sequence_parallel_enabled`."""


class GradScaler(torch.amp.GradScaler):
    """Gradient scaler that agrees among model-parallel processes, of which there is one."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(
            "cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
