"""Apex's training calls on torch alone.

``apex_native`` answers to the names that NVIDIA's Apex had until May 2025 (``amp``, ``parallel``,
``optimizers``, ``normalization``) and gives the same training, on CUDA and on the CPU. It depends
on torch only, so this folder can be copied into any project::

    from apex_native import amp, normalization, optimizers, parallel

Behaviour follows Apex at tag 25.05; each docstring says where it differs, and why.
"""

from . import amp, normalization, optimizers, parallel

__all__ = ["amp", "normalization", "optimizers", "parallel"]
