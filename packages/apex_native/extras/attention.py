"""Attention of ``apex.contrib.multihead_attn``, on ``scaled_dot_product_attention``."""

import math

import torch
from apex_native.normalization import FusedLayerNorm
from torch import Tensor, nn
from torch.nn import functional as F

IMPLEMENTATIONS = ("fast", "default")


class _Attention(nn.Module):
    """The parts that self-attention and encoder-decoder attention share.

    ``forward`` takes its mode from the argument `is_training`, not from ``train`` and ``eval``, as
    in Apex.
    """

    out_proj_weight: Tensor
    out_proj_bias: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        include_norm_add: bool,
        impl: str,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise AssertionError("embed_dim must be divisible by num_heads")
        if impl not in IMPLEMENTATIONS:
            raise AssertionError(f"Unsupported impl: {impl} !")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.head_dim = embed_dim // num_heads
        self.bias = bias
        self.include_norm_add = include_norm_add
        self.impl = impl
        self.scaling = self.head_dim**-0.5
        # As in Apex, the fast kernels with the norm have no biases, though the module has.
        self.uses_bias = bias and not (include_norm_add and impl == "fast")

    def _add_weight(self, name: str, rows: int, gain: float = 1.0) -> None:
        weight = nn.Parameter(torch.empty(rows, self.embed_dim))
        nn.init.xavier_uniform_(weight, gain)
        self.register_parameter(name, weight)

    def _add_bias(self, name: str, rows: int) -> None:
        self.register_parameter(name, nn.Parameter(torch.zeros(rows)) if self.bias else None)

    def _add_norm(self) -> None:
        if not self.include_norm_add:
            return
        if self.impl == "fast":
            self.lyr_nrm_gamma_weights = nn.Parameter(torch.ones(self.embed_dim))
            self.lyr_nrm_beta_weights = nn.Parameter(torch.zeros(self.embed_dim))
            self.lyr_nrm = None
        else:
            self.lyr_nrm = FusedLayerNorm(self.embed_dim)

    def _normalize(self, query: Tensor) -> Tensor:
        if not self.include_norm_add:
            return query
        if self.lyr_nrm is not None:
            return self.lyr_nrm(query)
        gamma, beta = self.lyr_nrm_gamma_weights, self.lyr_nrm_beta_weights
        return F.layer_norm(query, (self.embed_dim,), gamma, beta)

    def _project(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> list[Tensor]:
        """Return `parts` tensors (N, heads, L, head_dim) of `x` (L, N, embed_dim).

        The rows of the weight are those of the first head's query, key and value, then of the next
        head's, and so on.
        """
        length, batch, _ = x.shape
        projected = F.linear(x, weight, bias if self.uses_bias else None)
        projected = projected.view(length, batch, self.num_heads, parts, self.head_dim)
        return [part.permute(1, 2, 0, 3) for part in projected.unbind(dim=3)]

    def _attend(
        self, qkv: list[Tensor], mask: Tensor | None, residual: Tensor, is_training: bool
    ) -> Tensor:
        """Return the output (L, N, embed_dim); `mask` is True where keys count, or is added."""
        dropout = self.dropout if is_training else 0.0
        query, key, value = qkv
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout
        )
        context = context.permute(2, 0, 1, 3).flatten(start_dim=2)
        bias = self.out_proj_bias if self.uses_bias else None
        output = F.linear(context, self.out_proj_weight, bias)
        if self.include_norm_add:
            output = F.dropout(output, dropout) + residual
        return output


def _attention_mask(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_additive: bool
) -> Tensor | None:
    """Return the mask of ``scaled_dot_product_attention``.

    Args:
        key_padding_mask: (N, S), 1 where a key is left out; if additive, added to the scores.
        attn_mask: (L, S), 1 where a key is left out.
        is_additive: what `key_padding_mask` is.
    """
    if key_padding_mask is not None and attn_mask is not None:
        raise AssertionError("ERROR attn_mask and key_padding_mask should not be both defined!")
    if attn_mask is not None:
        if is_additive:
            raise AssertionError("additive mask not supported for time mask")
        return ~attn_mask.bool()
    if key_padding_mask is None:
        return None
    expanded = key_padding_mask[:, None, None, :]
    return expanded if is_additive else ~expanded.bool()


class SelfMultiheadAttn(_Attention):
    """Multi-head self-attention, optionally with layer norm before and dropout and sum after.

    Both values of `impl` give the same here, but parameters have Apex's names for each: checkpoints
    load. Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017.
    """

    in_proj_weight: Tensor
    in_proj_bias: Tensor | None

    def __init__(  # noqa: PLR0913, Apex's signature
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
        separate_qkv_params: bool = False,
        mask_additive: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        if mask_additive and include_norm_add:
            raise AssertionError("additive mask not supported with layer norm")
        if mask_additive and impl == "fast" and not bias:
            raise AssertionError("additive mask not supported for fast mode without bias")
        self.separate_qkv_params = separate_qkv_params
        self.mask_additive = mask_additive
        # In Apex's order, which that of the state of an optimizer depends on.
        if separate_qkv_params:
            for part in "qkv":
                self._add_weight(f"{part}_weight", embed_dim)
        else:
            # Initialized as three weights (embed_dim, embed_dim) are.
            self._add_weight("in_proj_weight", 3 * embed_dim, gain=math.sqrt(2))
        self._add_weight("out_proj_weight", embed_dim)
        if separate_qkv_params:
            for part in "qkv":
                self._add_bias(f"{part}_bias", embed_dim)
        else:
            self._add_bias("in_proj_bias", 3 * embed_dim)
        self._add_bias("out_proj_bias", embed_dim)
        self._add_norm()

    def _input_projection(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias with the rows of query, key and value of each head in turn."""
        if not self.separate_qkv_params:
            return self.in_proj_weight, self.in_proj_bias
        shape = (self.num_heads, self.head_dim, self.embed_dim)
        weights = [getattr(self, f"{part}_weight").view(shape) for part in "qkv"]
        weight = torch.stack(weights, dim=1).reshape(3 * self.embed_dim, self.embed_dim)
        if not self.bias:
            return weight, None
        biases = [getattr(self, f"{part}_bias").view(shape[:2]) for part in "qkv"]
        return weight, torch.stack(biases, dim=1).flatten()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[Tensor, None]:
        """Return the output (L, N, embed_dim) and None, for `query` of that shape.

        Args:
            key, value, need_weights: unused, as in Apex.
            key_padding_mask: (N, L), 1 where a key is left out; added to the scores if
                `mask_additive`.
            attn_mask: (L, L), 1 where a key is left out.
            is_training: whether to use dropout.
        """
        mask = _attention_mask(key_padding_mask, attn_mask, self.mask_additive)
        weight, bias = self._input_projection()
        qkv = self._project(self._normalize(query), weight, bias, parts=3)
        return self._attend(qkv, mask, query, is_training), None


class EncdecMultiheadAttn(_Attention):
    """Multi-head attention of a decoder to an encoder's output; else as ``SelfMultiheadAttn``.

    Apex's fast kernel with the norm has another gradient of ``in_proj_weight_q``: it takes the
    query before the norm. Here, as in Apex's default implementation, it is that of the output.
    """

    in_proj_weight_q: Tensor
    in_proj_weight_kv: Tensor
    in_proj_bias_q: Tensor | None
    in_proj_bias_kv: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        if bias and impl == "fast":
            raise AssertionError("ERROR! The Fast implementation does not support biases!")
        self._add_weight("in_proj_weight_q", embed_dim)
        # Initialized as two weights (embed_dim, embed_dim) are.
        self._add_weight("in_proj_weight_kv", 2 * embed_dim, gain=math.sqrt(1.5))
        self._add_weight("out_proj_weight", embed_dim)
        self._add_bias("in_proj_bias_q", embed_dim)
        self._add_bias("in_proj_bias_kv", 2 * embed_dim)
        self._add_bias("out_proj_bias", embed_dim)
        self._add_norm()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[Tensor, None]:
        """Return the output (L, N, embed_dim) and None, for `query` (L, …) and `key` (S, …).

        Args:
            value, need_weights: unused, as in Apex; values are made of `key`.
            key_padding_mask: (N, S), 1 where a key is left out.
            attn_mask: (L, S), 1 where a key is left out.
            is_training: whether to use dropout.
        """
        mask = _attention_mask(key_padding_mask, attn_mask, is_additive=False)
        normalized = self._normalize(query)
        queries = self._project(normalized, self.in_proj_weight_q, self.in_proj_bias_q, parts=1)
        keys = self._project(key, self.in_proj_weight_kv, self.in_proj_bias_kv, parts=2)
        return self._attend([*queries, *keys], mask, query, is_training), None


def fast_mask_softmax_dropout_func(
    is_training: bool,
    heads: int,
    inputs: Tensor,
    pad_mask: Tensor | None,
    mask_additive: bool,
    dropout_prob: float,
) -> Tensor:
    """Return softmax and dropout of the scores `inputs` (N * heads, L, S).

    Args:
        pad_mask: (N, S), 1 where a key is left out; added to the scores if `mask_additive`.
    """
    scores = inputs.unflatten(0, (-1, heads))
    if pad_mask is not None:
        expanded = pad_mask[:, None, None, :]
        if mask_additive:
            scores = scores + expanded
        else:
            scores = scores.masked_fill(expanded.bool(), -math.inf)
    return F.dropout(scores.softmax(dim=-1), dropout_prob, is_training).flatten(0, 1)
