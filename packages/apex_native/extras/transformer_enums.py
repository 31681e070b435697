"""Enums of ``apex.transformer``."""

import enum


class LayerType(enum.Enum):
    """Part of a transformer that a layer belongs to."""

    encoder = 1
    decoder = 2


class AttnType(enum.Enum):
    """Source of the keys and values of an attention."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """Kind of the mask of an attention."""

    padding = 1
    causal = 2


class ModelType(enum.Enum):
    """Parts of a transformer."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
