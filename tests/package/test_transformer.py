"""Names of apex.transformer: softmax by its formula, micro-batches, groups of data parallelism."""

import math

import pytest
import torch
import torch.distributed as dist
from apex_native.extras import fused_softmax, transformer_layers
from apex_native.extras import transformer_microbatches as microbatches
from apex_native.extras import transformer_parallel_state as parallel_state
from apex_native.extras.fused_softmax import (
    FusedScaleMaskSoftmax,
    GenericFusedScaleMaskSoftmax,
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
)
from apex_native.extras.transformer_enums import AttnMaskType
from groups_in_processes import use_groups

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPE = (2, 2, 8, 24)


def softmax(scores):
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def compare(function, reference, scores):
    """Compare probabilities and gradients with those of `reference` in float64."""
    own = scores.requires_grad_()
    wide = scores.detach().double().cpu().requires_grad_()
    found, expected = function(own), reference(wide)
    assert found.dtype == own.dtype
    options = {"rtol": 4 * TOLERANCES[own.dtype], "atol": 2 * TOLERANCES[own.dtype]}
    torch.testing.assert_close(found.double().cpu(), expected, **options)
    grad = torch.randn_like(expected)
    found.backward(grad.to(found))
    expected.backward(grad)
    torch.testing.assert_close(own.grad.double().cpu(), wide.grad, **options)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_masked_softmax_gives_zeros_where_all_is_masked(device, dtype):
    mask = torch.rand(SHAPE[0], 1, *SHAPE[2:]) < 0.3
    mask[0, 0, 3] = True
    scores = torch.randn(SHAPE).to(device, dtype)

    def reference(wide):
        probabilities = softmax((0.5 * wide).masked_fill(mask, -1e4))
        return probabilities * ~mask.all(-1, keepdim=True)

    compare(lambda own: scaled_masked_softmax(own, mask.to(device), 0.5), reference, scores)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_causal_softmax_leaves_out_later_positions(device, dtype):
    scores = torch.randn(2, 2, 8, 8).to(device, dtype)
    later = torch.ones(8, 8).triu(1).bool()
    compare(
        lambda own: scaled_upper_triang_masked_softmax(own, None, 2.0),
        lambda wide: softmax((2.0 * wide).masked_fill(later, -math.inf)),
        scores,
    )
    with pytest.raises(AssertionError, match="self attention"):
        scaled_upper_triang_masked_softmax(torch.zeros(1, 1, 2, 3), None, 1.0)


def build(kind=AttnMaskType.padding, fused=True, half=True, scale=0.5, in_fp32=True):
    """Return the module, whose mask function leaves -100 where the mask is set."""
    return FusedScaleMaskSoftmax(
        half,
        False,
        kind,
        fused,
        lambda scores, mask: scores.masked_fill(mask, -100.0),
        in_fp32,
        scale,
    )


@pytest.mark.parametrize(
    ("shape", "is_fused"),
    [(SHAPE, True), ((2, 2, 6, 24), False), ((2, 2, 8, 16), False), ((1, 3, 8, 24), False)],
)
def test_module_uses_the_kernel_for_the_shapes_of_apex(shape, is_fused):
    module = build()
    assert module.is_kernel_available(None, *shape) is is_fused
    assert build(fused=False).is_kernel_available(None, *shape) is False
    assert build(half=False).is_kernel_available(None, *shape) is False
    mask = torch.zeros(shape[0], 1, *shape[2:], dtype=torch.bool)
    mask[0, 0, 0] = True  # a row as a whole, which only the kernel turns into zeros
    scores = torch.randn(shape).half()
    found = module(scores, mask)
    assert found.dtype == torch.float16
    assert (found[0, 0, 0] == 0).all().item() is is_fused
    expected = softmax((0.5 * scores.double()).masked_fill(mask, -100.0))
    torch.testing.assert_close(found[0, 0, 1:].double(), expected[0, 0, 1:], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("in_fp32", [True, False])
def test_module_without_fusion_applies_the_mask_function(in_fp32):
    module = build(fused=False, in_fp32=in_fp32, scale=3.0 if in_fp32 else None)
    mask = torch.zeros(SHAPE, dtype=torch.bool)
    mask[..., 5] = True
    scores = torch.randn(SHAPE).half()
    expected = softmax((scores.double() * (3.0 if in_fp32 else 1.0)).masked_fill(mask, -100.0))
    torch.testing.assert_close(module(scores, mask).double(), expected, rtol=4e-3, atol=2e-3)


def test_generic_module_has_a_kernel_for_any_shape():
    module = GenericFusedScaleMaskSoftmax(True, False, True, None, True, None)
    scores = torch.randn(1, 3, 5, 7).half()
    mask = torch.zeros(1, 1, 5, 7, dtype=torch.bool)
    expected = fused_softmax.scaled_masked_softmax(scores, mask, 1.0)
    assert torch.equal(module(scores, mask), expected)


def test_contradictory_arguments_of_the_module_raise():
    with pytest.raises(RuntimeError, match="same time"):
        FusedScaleMaskSoftmax(True, True, AttnMaskType.causal, True, None, True, None)
    with pytest.raises(RuntimeError, match="fp32 when scaled"):
        build(in_fp32=False)
    with pytest.raises(ValueError, match="attn_mask_type"):
        build(kind="causal")


def test_constant_number_of_microbatches():
    calculator = microbatches.build_num_microbatches_calculator(0, None, 24, 2, 3)
    calculator.update(1000, True)
    assert (calculator.get(), calculator.get_current_global_batch_size()) == (4, 24)
    with pytest.raises(AssertionError, match=r"\(25\) is not divisible"):
        microbatches.ConstantNumMicroBatches(25, 2, 3)


def test_ramp_up_of_the_batch_size():
    calculator = microbatches.build_num_microbatches_calculator(0, ["4", "4", "100"], 16, 2, 2)
    sizes = []
    for consumed in (0, 33, 34, 66, 67, 99, 100, 101):
        calculator.update(consumed, True)
        sizes.append(calculator.get_current_global_batch_size())
        assert calculator.get() == sizes[-1] // 4
    assert sizes == [4, 4, 8, 8, 12, 12, 16, 16]
    odd = microbatches.RampupBatchsizeNumMicroBatches(2, 2, 100, 8, 2, 2)
    with pytest.raises(AssertionError, match=r"batch size \(2\) is not divisible"):
        odd.update(0, True)
    with pytest.raises(AssertionError, match=r"interval \(12\)"):
        microbatches.RampupBatchsizeNumMicroBatches(4, 5, 100, 16, 2, 2)


@pytest.fixture
def global_calculator(monkeypatch):
    monkeypatch.setattr(microbatches._Global, "calculator", None)


def test_global_calculator(global_calculator):
    with pytest.raises(AssertionError, match="not initialized"):
        microbatches.get_num_microbatches()
    microbatches.setup_microbatch_calculator(0, None, 12, 3, 1)
    with pytest.raises(AssertionError, match="already initialized"):
        microbatches.setup_microbatch_calculator(0, None, 12, 3, 1)
    assert microbatches.get_num_microbatches() == 4
    assert microbatches.get_micro_batch_size() == 3
    batch = [torch.arange(12), torch.arange(24).view(12, 2)]
    first, second = microbatches.get_kth_microbatch(batch, 2)
    assert first.tolist() == [6, 7, 8]
    assert second.tolist() == [[12, 13], [14, 15], [16, 17]]
    assert microbatches.get_kth_microbatch(None, 0) is None
    with pytest.raises(AssertionError, match="no micro-batch 4"):
        microbatches.get_kth_microbatch(batch, 4)


def test_wrappers_are_removed_from_models():
    plain = torch.nn.Linear(1, 1)
    wrapped = torch.nn.DataParallel(torch.nn.DataParallel(plain))
    classes = (torch.nn.DataParallel,)
    assert microbatches.unwrap_model(wrapped, classes) is plain
    assert microbatches.unwrap_model([wrapped, plain], classes) == [plain, plain]
    assert microbatches.unwrap_model(wrapped) is wrapped


@pytest.mark.parametrize(("rank", "texts"), [(None, "ab"), (0, "a"), (1, ""), (2, "b")])
def test_messages_of_the_first_and_the_last_rank(monkeypatch, capsys, rank, texts):
    monkeypatch.setattr(dist, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    microbatches.print_rank_0("a")
    microbatches.print_rank_last("b")
    assert capsys.readouterr().out.split() == list(texts)


def test_groups_of_data_parallelism(two_package_processes):
    first, second = two_package_processes(use_groups)
    assert first == (3, 1, (0, 0, 0, None), 2, 0)
    assert second == (3, 2, (1, 0, 0, None), 2, 1)


def test_model_parallel_state_needs_a_process_group():
    with pytest.raises(AssertionError, match="init_process_group"):
        parallel_state.initialize_model_parallel()


@pytest.mark.parametrize("name", ["FusedLayerNorm", "MixedFusedLayerNorm", "FastLayerNorm"])
def test_layer_norms_carry_the_attribute_of_sequence_parallelism(name):
    layer = getattr(transformer_layers, name)(6, sequence_parallel_enabled=True)
    assert layer.sequence_parallel_enabled
    assert layer.weight.sequence_parallel_enabled and layer.bias.sequence_parallel_enabled
    x = torch.randn(3, 6)
    torch.testing.assert_close(layer(x), torch.nn.functional.layer_norm(x, (6,)))
    assert not getattr(transformer_layers, name)(6).weight.sequence_parallel_enabled
