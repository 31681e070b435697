"""Apex's fused optimizers, on torch's own fused kernels."""

from .fused_adam import FusedAdam

__all__ = ["FusedAdam"]
