"""Attention of Apex's contrib compared with its formula in float64."""

import math

import pytest
import torch
from apex_native.extras.attention import (
    EncdecMultiheadAttn,
    SelfMultiheadAttn,
    fast_mask_softmax_dropout_func,
)

L, S, N, HEADS, DIM = 5, 4, 3, 2, 8  # queries, keys, batch, heads, features
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def attention(q, k, v, scores_to_add):
    """Return the context (length, N, features) of q, k and v (length, N, heads, features)."""
    scores = torch.einsum("lnhd,snhd->nhls", q, k) / math.sqrt(q.shape[-1]) + scores_to_add
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("nhls,snhd->lnhd", weights, v).flatten(2)


def layer_norm(x, gamma, beta):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma + beta


def masked_scores(kind, mask):
    """Return what a mask adds to the scores (N, heads, L, S)."""
    if kind is None:
        return 0.0
    added = mask.double().cpu()
    if kind != "additive":
        added = torch.where(added > 0, -math.inf, 0.0)
    return added if kind == "time" else added[:, None, None, :]


def make_mask(kind, length, source, dtype):
    """Return a mask that leaves each query a key, and the name of its argument."""
    if kind == "additive":
        return torch.randn(N, source).to(dtype), "key_padding_mask"
    if kind == "time":
        return torch.ones(length, source).triu(1).to(torch.uint8), "attn_mask"
    mask = torch.zeros(N, source, dtype=torch.uint8)
    mask[1, 2:] = 1
    return mask, "key_padding_mask"


def expected_self(module, query, added):
    """Return the formula's output for the parameters of `module`, in float64."""
    named = {name: p.detach().double().cpu() for name, p in module.named_parameters()}
    gamma = named.get("lyr_nrm_gamma_weights", named.get("lyr_nrm.weight"))
    beta = named.get("lyr_nrm_beta_weights", named.get("lyr_nrm.bias"))
    x = query if gamma is None else layer_norm(query, gamma, beta)
    parts = []
    for index, part in enumerate("qkv"):
        if module.separate_qkv_params:
            weight, bias = named[f"{part}_weight"], named.get(f"{part}_bias")
        else:  # rows: head, then query, key and value
            weight = named["in_proj_weight"].view(HEADS, 3, -1, DIM)[:, index].reshape(DIM, DIM)
            bias = named.get("in_proj_bias")
            bias = bias if bias is None else bias.view(HEADS, 3, -1)[:, index].flatten()
        projected = x @ weight.T + (0 if bias is None or not module.uses_bias else bias)
        parts.append(projected.view(L, N, HEADS, -1))
    output = attention(*parts, added) @ named["out_proj_weight"].T
    if module.uses_bias:
        output = output + named["out_proj_bias"]
    return output if gamma is None else output + query


def test_parameters_are_in_the_order_of_apex():
    """The state of an optimizer has them by number."""
    own = SelfMultiheadAttn(DIM, HEADS, bias=True, include_norm_add=True, separate_qkv_params=True)
    first = ["q_weight", "k_weight", "v_weight", "out_proj_weight", "q_bias", "k_bias", "v_bias"]
    last = ["out_proj_bias", "lyr_nrm_gamma_weights", "lyr_nrm_beta_weights"]
    assert [name for name, _ in own.named_parameters()] == first + last
    own = SelfMultiheadAttn(DIM, HEADS, bias=True)
    first = ["in_proj_weight", "out_proj_weight", "in_proj_bias", "out_proj_bias"]
    assert [name for name, _ in own.named_parameters()] == first
    own = EncdecMultiheadAttn(DIM, HEADS, bias=True, impl="default")
    first = ["in_proj_weight_q", "in_proj_weight_kv", "out_proj_weight"]
    last = ["in_proj_bias_q", "in_proj_bias_kv", "out_proj_bias"]
    assert [name for name, _ in own.named_parameters()] == first + last


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", [None, "padding", "time", "additive"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("impl", "separate"), [("fast", False), ("default", True)])
def test_self_attention(device, dtype, kind, norm, impl, separate):
    if kind == "additive" and norm:
        pytest.skip("refused, as by Apex")
    options = {"include_norm_add": norm, "impl": impl, "separate_qkv_params": separate}
    module = SelfMultiheadAttn(DIM, HEADS, bias=True, mask_additive=kind == "additive", **options)
    for name, parameter in module.named_parameters():
        if "bias" in name or "nrm" in name:
            torch.nn.init.normal_(parameter)
    module = module.to(device, dtype)
    query = torch.randn(L, N, DIM).to(device, dtype).requires_grad_()
    mask, argument = make_mask(kind, L, L, dtype)
    masks = {argument: mask.to(device)} if kind else {}
    output, weights = module(query, query, query, is_training=False, **masks)
    assert weights is None
    assert output.dtype == dtype
    wide = query.detach().double().cpu().requires_grad_()
    expected = expected_self(module, wide, masked_scores(kind, mask))
    limit = TOLERANCES[dtype]
    torch.testing.assert_close(output.double().cpu(), expected, rtol=limit, atol=3 * limit)
    grad = torch.randn_like(expected)
    output.backward(grad.to(output))
    expected.backward(grad)
    torch.testing.assert_close(query.grad.double().cpu(), wide.grad, rtol=limit, atol=6 * limit)


@pytest.mark.parametrize("kind", [None, "padding", "time"])
@pytest.mark.parametrize(("impl", "norm"), [("fast", False), ("fast", True), ("default", True)])
def test_encoder_decoder_attention(device, kind, impl, norm):
    bias = impl == "default"
    module = EncdecMultiheadAttn(DIM, HEADS, bias=bias, include_norm_add=norm, impl=impl)
    for name, parameter in module.named_parameters():
        if "bias" in name or "nrm" in name:
            torch.nn.init.normal_(parameter)
    module = module.to(device)
    query, key = torch.randn(L, N, DIM), torch.randn(S, N, DIM)
    mask, argument = make_mask(kind, L, S, torch.float32)
    masks = {argument: mask.to(device)} if kind else {}
    output, _ = module(query.to(device), key.to(device), None, is_training=False, **masks)
    named = {name: p.detach().double().cpu() for name, p in module.named_parameters()}
    x = query = query.double()
    if norm:
        gamma = named.get("lyr_nrm_gamma_weights", named.get("lyr_nrm.weight"))
        beta = named.get("lyr_nrm_beta_weights", named.get("lyr_nrm.bias"))
        x = layer_norm(query, gamma, beta)
    q = x @ named["in_proj_weight_q"].T + named.get("in_proj_bias_q", 0)
    kv = key.double() @ named["in_proj_weight_kv"].T + named.get("in_proj_bias_kv", 0)
    k, v = kv.view(S, N, HEADS, 2, -1).unbind(dim=3)
    added = masked_scores(kind, mask)
    expected = attention(q.view(L, N, HEADS, -1), k, v, added) @ named["out_proj_weight"].T
    expected = expected + named.get("out_proj_bias", 0) + (query if norm else 0)
    torch.testing.assert_close(output.double().cpu(), expected, rtol=1e-5, atol=2e-5)


def test_dropout_follows_the_argument_and_not_the_mode():
    module = SelfMultiheadAttn(DIM, HEADS, dropout=0.5, include_norm_add=True)
    query = torch.randn(L, N, DIM)
    module.train()
    first, second = (module(query, is_training=False)[0] for _ in range(2))
    assert torch.equal(first, second)
    module.eval()
    first, second = (module(query, is_training=True)[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_initial_weights_have_the_range_of_three_square_ones():
    limit = math.sqrt(6 / (2 * 64))
    weight = SelfMultiheadAttn(64, 4).in_proj_weight
    assert 0.95 * limit < weight.abs().max() <= limit
    weight = EncdecMultiheadAttn(64, 4).in_proj_weight_kv
    assert 0.95 * limit < weight.abs().max() <= limit


@pytest.mark.parametrize("is_additive", [False, True])
def test_mask_softmax_dropout(is_additive):
    scores = torch.randn(N * HEADS, L, S)
    mask, _ = make_mask("additive" if is_additive else "padding", L, S, torch.float32)
    found = fast_mask_softmax_dropout_func(False, HEADS, scores, mask, is_additive, 0.5)
    added = masked_scores("additive" if is_additive else "padding", mask)
    expected = (scores.double().view(N, HEADS, L, S) + added).exp()
    expected = (expected / expected.sum(-1, keepdim=True)).view(N * HEADS, L, S)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    dropped = fast_mask_softmax_dropout_func(True, HEADS, scores, mask, is_additive, 0.5)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept].double(), 2 * expected[kept], rtol=1e-5, atol=1e-6)
    assert 0.2 < kept[expected > 0].double().mean() < 0.8


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"embed_dim": 9}, "divisible"),
        ({"impl": "slow"}, "Unsupported impl: slow"),
        ({"mask_additive": True}, "without bias"),
        ({"mask_additive": True, "include_norm_add": True}, "layer norm"),
    ],
)
def test_unsupported_arguments_raise_as_in_apex(arguments, reason):
    with pytest.raises(AssertionError, match=reason):
        SelfMultiheadAttn(**{"embed_dim": DIM, "num_heads": HEADS, **arguments})


def test_two_masks_raise_and_so_does_a_bias_of_the_fast_implementation():
    ones = torch.ones(L, L)
    with pytest.raises(AssertionError, match="should not be both defined"):
        SelfMultiheadAttn(DIM, HEADS)(torch.randn(L, L, DIM), key_padding_mask=ones, attn_mask=ones)
    with pytest.raises(AssertionError, match="does not support biases"):
        EncdecMultiheadAttn(DIM, HEADS, bias=True)
