"""apex_native compared with real Apex on a GPU: outputs, gradients, and weights after some steps.

A case takes a function that finds a name of Apex, in real Apex or in apex_native, and returns
tensors. Cases whose extension of Apex is not installed are skipped.
"""

from functools import partial
from itertools import chain, product

import pytest
import torch
import torch.distributed as dist
from extras_path import find_in_native

pytestmark = [pytest.mark.apex, pytest.mark.gpu]
# The greatest norm of the difference, relative to that of Apex's tensor.
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PRODUCT_LIMIT = 1e-3  # of matrix products in fp32: Apex lets cuBLAS choose TF32
NORMS = "apex.normalization.fused_layer_norm"
SOFTMAX = "apex.transformer.functional.fused_softmax"
STEPS = 5
# With several chunks, Apex's norm of an update lacks parts of a parameter that spans some of them.
LAMB_BUFFERS = {
    "dwu_group_size": 2,
    "dwu_num_blocks": 1,
    "dwu_num_chunks": 1,
    "dwu_num_ar_pg": 1,
    "full_ar": True,
}


def find_in_apex(module, name):
    return getattr(pytest.importorskip(module), name)


def leaves(dtype, *shapes, seed=0):
    """Return the same random tensors in each call."""
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"generator": generator, "device": "cuda"}
    return [torch.randn(shape, **options).to(dtype).requires_grad_() for shape in shapes]


def differentiate(output, inputs):
    """Return `output` and the gradients of `inputs` for a random gradient of `output`."""
    (grad,) = leaves(output.dtype, output.shape, seed=1)
    return [output, *torch.autograd.grad(output, inputs, grad.detach())]


def norm(find, dtype, name, parameters):
    x, *affine = leaves(dtype, (64, 768), *[(768,)] * parameters)
    return differentiate(find(NORMS, name)(x, *affine, (768,)), [x, *affine])


def mixed_norm(find, dtype, name, parameters):
    """Take an input in fp32: Apex refuses a half one with weights in fp32."""
    (x,) = leaves(torch.float32, (64, 768))
    affine = leaves(dtype, *[(768,)] * parameters)
    return differentiate(find(NORMS, name)(x, *affine, (768,)), [x, *affine])


def cross_entropy(find, dtype, smoothing, half_to_float):
    (logits,) = leaves(dtype, (64, 1000))
    labels = torch.arange(64, device="cuda") * 7 % 1000
    loss = find("apex.contrib.xentropy", "SoftmaxCrossEntropyLoss").apply
    return differentiate(loss(logits, labels, smoothing, 0, half_to_float), [logits])


def focal(find, dtype, smoothing):
    (logits,) = leaves(dtype, (4, 100, 16))
    labels = torch.arange(400, device="cuda").view(4, 100) % 18 - 2
    positive = torch.tensor([20.0], device="cuda")
    loss = find("apex.contrib.focal_loss.focal_loss", "focal_loss")
    output = loss(logits, labels, positive, 16, 0.25, 2.0, smoothing)
    return [output, *torch.autograd.grad(output, [logits], torch.ones_like(output))]


def masked_softmax(find, dtype):
    pytest.importorskip("scaled_masked_softmax_cuda")  # which Apex imports when it is called
    (scores,) = leaves(dtype, (2, 4, 64, 64))
    mask = torch.rand(2, 1, 64, 64, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[0, 0, 5] = True  # a row that is masked as a whole
    output = find(SOFTMAX, "scaled_masked_softmax")(scores, mask.cuda(), 0.25)
    return differentiate(output, [scores])


def causal_softmax(find, dtype):
    pytest.importorskip("scaled_upper_triang_masked_softmax_cuda")
    (scores,) = leaves(dtype, (2, 4, 64, 64))
    output = find(SOFTMAX, "scaled_upper_triang_masked_softmax")(scores, None, 0.25)
    return differentiate(output, [scores])


def on_gpu(module, dtype):
    """Return a module and its parameters, which have the same random values in each call."""
    module = module.cuda().to(dtype)
    parameters = list(module.parameters())
    values = leaves(dtype, *(parameter.shape for parameter in parameters))
    with torch.no_grad():
        for own, value in zip(parameters, values, strict=True):
            own.copy_(value * 0.1)
    return module, parameters


def mlp(find, dtype, bias, activation):
    layers = find("apex.mlp", "MLP")([64, 128, 32], bias=bias, activation=activation)
    layers, parameters = on_gpu(layers, dtype)
    (x,) = leaves(dtype, (32, 64))
    return differentiate(layers(x), [x, *parameters])


def dense(find, dtype, name, sizes):
    layer, parameters = on_gpu(find("apex.fused_dense", name)(*sizes), dtype)
    (x,) = leaves(dtype, (32, sizes[0]))
    return differentiate(layer(x), [x, *parameters])


def fast_norm(find, dtype):
    layer, parameters = on_gpu(find("apex.contrib.layer_norm", "FastLayerNorm")(768), dtype)
    (x,) = leaves(dtype, (64, 768))
    return differentiate(layer(x), [x, *parameters])


def group_norm(find, dtype, size, **options):
    """Take 512 channels, of the channels-last images that Apex's kernels are for."""
    layer = find("apex.contrib.group_norm", "GroupNorm")(32, 512, **options)
    layer, parameters = on_gpu(layer, dtype)
    x = leaves(dtype, (2, 512, size, size))[0].detach()
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    return differentiate(layer(x), [x, *parameters])


def self_attention(find, dtype, mask=None, **options):
    cls = find("apex.contrib.multihead_attn", "SelfMultiheadAttn")
    layer, parameters = on_gpu(cls(128, 4, **options), dtype)
    (x,) = leaves(dtype, (16, 4, 128))
    output, _ = layer(x, x, x, **attention_mask(mask, dtype))
    return differentiate(output, [x, *parameters])


def encoder_attention(find, dtype, mask=None, **options):
    cls = find("apex.contrib.multihead_attn", "EncdecMultiheadAttn")
    layer, parameters = on_gpu(cls(128, 4, **options), dtype)
    query, key = leaves(dtype, (16, 4, 128), (16, 4, 128))
    output, _ = layer(query, key, key, **attention_mask(mask, dtype))
    if options == {"impl": "fast", "include_norm_add": True}:
        # Apex's gradient of in_proj_weight_q multiplies with the query before the norm.
        del parameters[0]
    return differentiate(output, [query, key, *parameters])


def attention_mask(kind, dtype):
    """Return the mask argument: of the future, of padding, or of padding and added."""
    if kind == "future":
        return {"attn_mask": torch.ones(16, 16, device="cuda").triu(1).byte()}
    if kind is None:
        return {}
    padding = (torch.arange(16) >= torch.tensor([[16], [9], [12], [15]])).byte().cuda()
    if kind == "added":
        padding = (
            torch.zeros(padding.shape, device="cuda").masked_fill(padding.bool(), -1e4).to(dtype)
        )
    return {"key_padding_mask": padding}


def clip(find, dtype, norm_type):
    tensors = leaves(dtype, (50, 30), (7,), (3, 4, 5))
    for tensor in tensors:
        tensor.grad = tensor.detach().clone()
    total = find("apex.contrib.clip_grad", "clip_grad_norm_")(tensors, 2.0, norm_type)
    return [total.float(), *(tensor.grad for tensor in tensors)]  # the type of Apex's norm varies


def optimizer(find, dtype, name, **options):
    tensors = leaves(dtype, (50, 30), (7,), (3, 4, 5))
    parameters = [torch.nn.Parameter(tensor.detach().clone()) for tensor in tensors]
    own = find("apex.optimizers", name)(parameters, lr=1e-2, **options)
    for number in range(STEPS):
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.grad = (tensor.detach().roll(number, 0) * (number + 1)).to(dtype)
        own.step()
    return parameters


def multi_tensor(find, dtype, name, lists, arguments=()):
    tensors = [leaf.detach() for leaf in leaves(dtype, *[(50, 30), (7,)] * lists)]
    found = torch.zeros(1, dtype=torch.int32, device="cuda")
    grouped = [tensors[2 * index : 2 * index + 2] for index in range(lists)]
    if lists == 4:  # the second moments of Adam and LAMB
        grouped[3] = [tensor.square() for tensor in grouped[3]]
    values = [value.cuda() if isinstance(value, torch.Tensor) else value for value in arguments]
    apply = find("apex.multi_tensor_apply", "multi_tensor_applier")
    output = apply(find("amp_C", name), found, grouped, *values)
    outputs = output if isinstance(output, tuple) else ()
    others = [value for value in values if isinstance(value, torch.Tensor)]
    return [*tensors, *outputs, *others, found]


def fp16_optimizer(find, dtype):
    """Train with dynamic loss scaling, through an overflow."""
    (weight,) = leaves(dtype, (16, 16))
    weight = torch.nn.Parameter(weight.detach().clone())
    inner = torch.optim.SGD([weight], lr=1e-2, momentum=0.9)
    kind = find("apex.fp16_utils", "FP16_Optimizer")
    own = kind(inner, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**10})
    for number in range(STEPS):
        own.zero_grad()
        factor = 1e4 if number == 2 else 1.0
        own.backward((weight * factor).float().square().mean())
        own.step()
    return [weight, torch.tensor(float(own.loss_scale))]


# Types: those that Apex's kernel takes.
HALF = (torch.float16, torch.bfloat16)
ALL = (torch.float32, *HALF)
FLOAT, FP16 = (torch.float32,), (torch.float16,)
NARROW = (*FLOAT, *FP16)
WD = {"weight_decay": 0.1}
CASES = {
    "fused_layer_norm": (partial(norm, name="fused_layer_norm", parameters=0), ALL),
    "layer_norm": (partial(norm, name="fused_layer_norm_affine", parameters=2), ALL),
    "fused_rms_norm": (partial(norm, name="fused_rms_norm", parameters=0), ALL),
    "rms_norm": (partial(norm, name="fused_rms_norm_affine", parameters=1), ALL),
    "mixed_layer_norm": (
        partial(mixed_norm, name="mixed_dtype_fused_layer_norm_affine", parameters=2),
        ALL,
    ),
    "mixed_rms_norm": (
        partial(mixed_norm, name="mixed_dtype_fused_rms_norm_affine", parameters=1),
        ALL,
    ),
    "cross_entropy": (partial(cross_entropy, smoothing=0.0, half_to_float=False), FLOAT),
    "smooth_cross_entropy": (partial(cross_entropy, smoothing=0.1, half_to_float=False), FLOAT),
    "half_cross_entropy": (partial(cross_entropy, smoothing=0.1, half_to_float=True), FP16),
    "focal_loss": (partial(focal, smoothing=0.0), NARROW),
    "smooth_focal_loss": (partial(focal, smoothing=0.1), NARROW),
    "masked_softmax": (masked_softmax, HALF),
    "causal_softmax": (causal_softmax, HALF),
    "mlp": (partial(mlp, bias=True, activation="relu"), NARROW),
    "mlp_sigmoid": (partial(mlp, bias=False, activation="sigmoid"), NARROW),
    "dense": (partial(dense, name="FusedDense", sizes=(64, 32)), HALF),
    "dense_gelu": (partial(dense, name="FusedDenseGeluDense", sizes=(64, 128, 32)), HALF),
    "clip_grad": (partial(clip, norm_type=2.0), ALL),
    "clip_grad_max": (partial(clip, norm_type=float("inf")), ALL),
    "adamw": (partial(optimizer, name="FusedAdam", **WD), ALL),
    "adam": (partial(optimizer, name="FusedAdam", adam_w_mode=False, **WD), ALL),
    "sgd": (partial(optimizer, name="FusedSGD", momentum=0.9, nesterov=True, **WD), NARROW),
    "sgd_wd_after_momentum": (
        partial(optimizer, name="FusedSGD", momentum=0.9, wd_after_momentum=True, **WD),
        FLOAT,
    ),
    "lamb": (partial(optimizer, name="FusedLAMB", **WD), FLOAT),
    # Clipped gradients are so small that Apex's second moments in fp16 are subnormal.
    "half_lamb": (partial(optimizer, name="FusedLAMB", max_grad_norm=0.0, **WD), FP16),
    "nvlamb": (partial(optimizer, name="FusedLAMB", use_nvlamb=True, weight_decay=0.0), FLOAT),
    "novograd": (partial(optimizer, name="FusedNovoGrad", **WD), NARROW),
    "novograd_max": (
        partial(optimizer, name="FusedNovoGrad", norm_type=0, reg_inside_moment=True, **WD),
        NARROW,
    ),
    "adagrad": (partial(optimizer, name="FusedAdagrad", **WD), NARROW),
    "scale": (partial(multi_tensor, name="multi_tensor_scale", lists=2, arguments=[0.5]), ALL),
    "axpby": (
        partial(multi_tensor, name="multi_tensor_axpby", lists=3, arguments=[0.5, -2.0, -1]),
        NARROW,
    ),
    "l2norm": (partial(multi_tensor, name="multi_tensor_l2norm", lists=1, arguments=[True]), ALL),
    "multi_tensor_adam": (
        partial(
            multi_tensor,
            name="multi_tensor_adam",
            lists=4,
            arguments=[1e-2, 0.9, 0.99, 1e-8, 3, 1, 1, 0.1],
        ),
        FLOAT,
    ),
    "multi_tensor_sgd": (
        partial(
            multi_tensor,
            name="multi_tensor_sgd",
            lists=3,
            arguments=[0.1, 0.9, 0.0, 1e-2, True, False, False, 0.5],
        ),
        FLOAT,
    ),
    "multi_tensor_lamb": (
        partial(
            multi_tensor,
            name="multi_tensor_lamb",
            lists=4,
            arguments=[1e-2, 0.9, 0.99, 1e-6, 3, 1, 0.1, 1, 1, torch.tensor([3.0]), 1.0, False],
        ),
        FLOAT,
    ),
    "multi_tensor_novograd": (
        partial(
            multi_tensor,
            name="multi_tensor_novograd",
            lists=3,
            arguments=[torch.tensor([2.0, 3.0]), 1e-2, 0.9, 0.99, 1e-8, 3, 1, 0.1, 1, 1, 2],
        ),
        FLOAT,
    ),
    "fp16_optimizer": (fp16_optimizer, FP16),
}
PRODUCTS = {"mlp", "mlp_sigmoid", "dense", "dense_gelu"}
CASES |= {
    "fast_layer_norm": (fast_norm, ALL),
    "group_norm": (partial(group_norm, size=16), ALL),
    "group_norm_silu": (partial(group_norm, size=16, act="silu"), ALL),
    "group_norm_two_passes": (partial(group_norm, size=48, act="silu"), ALL),
}
for kind, attention in {"self": self_attention, "encoder": encoder_attention}.items():
    for impl, norm_add, mask in product(
        ("default", "fast"), (False, True), (None, "future", "padding")
    ):
        name = f"{kind}_attention_{impl}_{norm_add}_{mask}"
        options = {"impl": impl, "include_norm_add": norm_add, "mask": mask}
        CASES[name] = (partial(attention, **options), FP16 if impl == "fast" else NARROW)
        PRODUCTS.add(name)
for impl, mask in product(("default", "fast"), (None, "padding", "added")):
    name = f"self_attention_{impl}_bias_{mask}"
    options = {"impl": impl, "bias": True, "mask": mask, "mask_additive": mask == "added"}
    CASES[name] = (partial(self_attention, **options), FP16 if impl == "fast" else NARROW)
    PRODUCTS.add(name)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, case in CASES.items() for dtype in case[1]]
)
def test_same_as_real_apex(name, dtype):
    case, _ = CASES[name]
    expected, found = case(find_in_apex, dtype), case(find_in_native, dtype)
    limit = max(LIMITS[dtype], PRODUCT_LIMIT if name in PRODUCTS else 0)
    assert len(found) == len(expected)
    for own, theirs in zip(found, expected, strict=True):
        assert own.shape == theirs.shape
        assert own.dtype == theirs.dtype
        difference = (own.double() - theirs.double()).norm()
        assert difference <= limit * theirs.double().norm(), f"{difference:.3g}"


def train_distributed(name, in_apex):
    """Return the parameters of this rank after some steps with an optimizer that shards its state.

    Apex's LAMB needs the private calls of Apex's own test around the backward pass.
    """
    find = find_in_apex if in_apex else find_in_native
    is_lamb = name == "DistributedFusedLAMB"
    scale = 1024.0 if is_lamb else 1.0  # of the loss: Apex's LAMB has gradients in fp16
    module = f"apex.contrib.optimizers.distributed_fused_{'lamb' if is_lamb else 'adam'}"
    options = {"max_grad_norm": 1.0, **LAMB_BUFFERS} if is_lamb else {}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)).cuda()
    cls = find(module, name)
    optimizer = cls(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6, **options)
    for number in range(STEPS):
        (x,) = leaves(torch.float32, (32, 128), seed=2 * number + dist.get_rank())
        optimizer.zero_grad()
        loss = scale * model(x).square().mean()
        if is_lamb and in_apex:
            optimizer._lazy_init_stage1()
        loss.backward()
        if is_lamb and in_apex:
            optimizer._lazy_init_stage2()
            optimizer._lr = torch.tensor(1e-2, device="cuda")
        if is_lamb:
            optimizer.complete_reductions()
            optimizer.set_global_scale(torch.tensor(scale, device="cuda"))
        else:
            optimizer.clip_grad_norm(0.5)
        optimizer.step()
    torch.cuda.synchronize()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["DistributedFusedAdam", "DistributedFusedLAMB"])
def test_optimizers_that_shard_are_the_same_as_real_apex(two_gpus, name):
    for extension in ("amp_C", "fused_adam_cuda", "distributed_adam_cuda", "distributed_lamb_cuda"):
        pytest.importorskip(extension)
    expected = two_gpus(train_distributed, name, True)
    found = two_gpus(train_distributed, name, False)
    # Apex's LAMB sends gradients and parameters in fp16.
    limit = LIMITS[torch.float16] if name == "DistributedFusedLAMB" else 2e-5
    for own, theirs in zip(chain(*found), chain(*expected), strict=True):
        assert (own - theirs).norm() <= limit * theirs.norm()
