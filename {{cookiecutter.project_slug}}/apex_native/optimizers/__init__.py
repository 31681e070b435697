"""Apex's fused optimizers, on torch's own fused and foreach kernels."""

from .elementwise import FusedAdagrad, FusedAdam, FusedSGD
from .layerwise import FusedLAMB, FusedNovoGrad
