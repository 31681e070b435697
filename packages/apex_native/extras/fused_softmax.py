"""Scaled and masked softmax of ``apex.transformer.functional``, compiled where there is a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .compiled import compute
from .transformer_enums import AttnMaskType

MASKED = -10000.0  # score of a masked position, as in Apex's kernels
MAX_LENGTH = 16384  # of the sequences that Apex's kernels take


def _softmax(inputs: Tensor, scale: float) -> Tensor:
    return (inputs.float() * scale).softmax(dim=-1).to(inputs.dtype)


def _masked_softmax(inputs: Tensor, is_masked: Tensor, scale: float) -> Tensor:
    scores = (inputs.float() * scale).masked_fill(is_masked, MASKED)
    is_empty = scores.amax(dim=-1, keepdim=True) == MASKED  # as in Apex's kernel
    return scores.softmax(dim=-1).masked_fill(is_empty, 0.0).to(inputs.dtype)


def _causal_softmax(inputs: Tensor, scale: float) -> Tensor:
    later = torch.ones(inputs.shape[-2:], dtype=torch.bool, device=inputs.device).triu(1)
    scores = (inputs.float() * scale).masked_fill(later, float("-inf"))
    return scores.softmax(dim=-1).to(inputs.dtype)


def scaled_softmax(inputs: Tensor, scale: float) -> Tensor:
    """Return the softmax over the last dimension of ``scale * inputs``, of the type of `inputs`."""
    return compute(_softmax, inputs, scale)


def scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the softmax of ``scale * inputs`` without the positions where `mask` is 1.

    Args:
        inputs: (N, heads, L, S).
        mask: bool or uint8 (N or 1, 1, L, S). A row that is masked as a whole gives zeros.
    """
    if mask is None:
        return scaled_softmax(inputs, scale)
    return compute(_masked_softmax, inputs, mask.bool(), scale)


generic_scaled_masked_softmax = scaled_masked_softmax


def scaled_upper_triang_masked_softmax(inputs: Tensor, _: object, scale: float) -> Tensor:
    """Return the causal softmax of ``scale * inputs`` (N, heads, L, L)."""
    if inputs.size(-2) != inputs.size(-1):
        raise AssertionError("causal mask is only for self attention")
    return compute(_causal_softmax, inputs, scale)


FUSED: dict[AttnMaskType, Callable[..., Tensor]] = {
    AttnMaskType.causal: scaled_upper_triang_masked_softmax,
    AttnMaskType.padding: scaled_masked_softmax,
}


class FusedScaleMaskSoftmax(nn.Module):
    """Scale, mask and softmax of attention scores (N, heads, L, S).

    Where Apex has a kernel for the shape, and the scores are fp16 or bf16, the result is that of
    ``scaled_masked_softmax`` or, with a causal mask, ``scaled_upper_triang_masked_softmax``, which
    ignores `mask`. Elsewhere `mask_func` is applied to the scaled scores.

    Args:
        mask_func: returns masked scores for scores and mask.
        softmax_in_fp32: whether the softmax of half scores is in fp32; needed with `scale`.
        scale: factor of the scores, or None.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise RuntimeError("both fp16 and bf16 flags cannot be active at the same time.")
        if scale is not None and not softmax_in_fp32:
            raise RuntimeError("softmax should be in fp32 when scaled")
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        if scaled_masked_softmax_fusion:
            if attn_mask_type not in FUSED:
                raise ValueError("Invalid attn_mask_type.")
            self.fused_softmax_func = FUSED[attn_mask_type]

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Return the probabilities for the scores `input`."""
        if input.dim() != 4:
            raise AssertionError("FusedScaleMaskSoftmax takes scores (N, heads, L, S)")
        if self.is_kernel_available(mask, *input.size()):
            return self.forward_fused_softmax(input, mask)
        return self.forward_torch_softmax(input, mask)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Return whether scores (b, np, sq, sk) have one of the shapes of Apex's kernels."""
        is_fused = self.scaled_masked_softmax_fusion and self.input_in_float16
        if not (is_fused and 16 < sk <= MAX_LENGTH and sq % 4 == sk % 4 == b * np % 4 == 0):
            return False
        rows = b * np if self.attn_mask_type == AttnMaskType.causal else sq
        return rows % self.get_batch_per_block(sq, sk, b, np) == 0

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Return the probabilities as Apex's kernels compute them."""
        scale = self.scale if self.scale is not None else 1.0
        return self.fused_softmax_func(input, mask, scale)

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Return the probabilities, masked by `mask_func`."""
        is_widened = self.input_in_float16 and self.softmax_in_fp32
        scores = input.float() if is_widened else input
        if self.scale is not None:
            scores = scores * self.scale
        if mask is not None:
            scores = self.mask_func(scores, mask)
        probabilities = scores.softmax(dim=-1)
        if not is_widened:
            return probabilities
        return probabilities.half() if self.input_in_fp16 else probabilities.bfloat16()

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """Return the number of rows of `sk` scores that a block of Apex's kernels handles.

        A block has 128 threads, a warp 32 of them, which handles two rows of up to 128 scores.
        """
        elements = 1 << (sk - 1).bit_length()
        threads_of_row = min(elements, 32)
        return 128 // threads_of_row * (2 if elements <= 128 else 1)


class GenericFusedScaleMaskSoftmax(FusedScaleMaskSoftmax):
    """FusedScaleMaskSoftmax for padding masks and scores of any length."""

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__(
            input_in_fp16,
            input_in_bf16,
            AttnMaskType.padding,
            scaled_masked_softmax_fusion,
            mask_func,
            softmax_in_fp32,
            scale,
        )

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Return whether `scaled_masked_softmax_fusion` is set: any shape has a kernel."""
        return bool(self.scaled_masked_softmax_fusion) and sk > 0
