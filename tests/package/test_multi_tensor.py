"""amp_C and apex_C compared with written-out formulas in float64, one tensor at a time."""

import math

import pytest
import torch
import torch.distributed as dist
from apex_native import optimizers
from apex_native.extras import flat, multi_tensor_optimizers
from apex_native.extras.mixed_precision_lamb import FusedMixedPrecisionLamb
from apex_native.extras.multi_tensor import (
    multi_tensor_applier,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
)
from torch import nn

SHAPES = ((3, 4), (5,), (2, 1, 3))
HALF = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float64: 1e-12}


def random(seed, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]


def flag(device="cpu"):
    return torch.zeros(1, dtype=torch.int32, device=device)


def close(tensors, references, dtype=torch.float32):
    for tensor, reference in zip(tensors, references, strict=True):
        limit = TOLERANCE[dtype]
        torch.testing.assert_close(tensor.double().cpu(), reference.cpu(), rtol=limit, atol=limit)


def wide(tensors):
    return [tensor.double() for tensor in tensors]


@pytest.mark.parametrize("source", HALF)
@pytest.mark.parametrize("target", HALF)
def test_scale(device, source, target):
    inputs, outputs = random(0, source, device), random(1, target, device)
    found = flag(device)
    multi_tensor_applier(multi_tensor_scale, found, [inputs, outputs], 0.5)
    close(outputs, [0.5 * x for x in wide(inputs)], max(source, target, key=TOLERANCE.get))
    assert found.item() == 0


@pytest.mark.parametrize("two", [torch.tensor(2.0), torch.tensor([2.0])])  # as l2norm returns it
def test_factors_may_be_tensors(two):
    tensors, others = random(0), random(1)
    expected = [2 * x for x in wide(tensors)]
    multi_tensor_applier(multi_tensor_scale, flag(), [tensors, tensors], two)
    close(tensors, expected)
    expected = [2 * x + 2 * y for x, y in zip(wide(tensors), wide(others), strict=True)]
    multi_tensor_applier(multi_tensor_axpby, flag(), [tensors, others, tensors], two, two, -1)
    close(tensors, expected)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", HALF)
def test_non_finite_elements_set_the_flag(device, bad, dtype):
    x, y, found = random(0, dtype, device), random(1, dtype, device), flag(device)
    x[1][2] = bad
    multi_tensor_applier(multi_tensor_axpby, found, [x, y, y], 1.0, 1.0, 1)
    assert found.item() == 0
    for argument in (0, -1):
        found.zero_()
        out = random(2, dtype, device)
        multi_tensor_applier(multi_tensor_axpby, found, [x, y, out], 1.0, 1.0, argument)
        assert found.item() == 1
    found.zero_()
    multi_tensor_applier(multi_tensor_scale, found, [x, x], 1.0)
    assert found.item() == 1
    found.zero_()
    multi_tensor_applier(multi_tensor_l2norm, found, [x], False)
    assert found.item() == 1


def test_flag_stays_set():
    found = torch.ones(1, dtype=torch.int32)
    multi_tensor_applier(multi_tensor_scale, found, [random(0), random(1)], 1.0)
    assert found.item() == 1


@pytest.mark.parametrize("dtype", HALF)
def test_axpby(device, dtype):
    x, y, out = random(0, dtype, device), random(1, torch.float32, device), random(2, dtype, device)
    multi_tensor_applier(multi_tensor_axpby, flag(device), [x, y, out], 0.5, -2.0, 0)
    close(out, [0.5 * a - 2 * b for a, b in zip(wide(x), wide(y), strict=True)], dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_l2norm(device, dtype):
    tensors = random(0, dtype, device)
    total, each = multi_tensor_applier(multi_tensor_l2norm, flag(device), [tensors], True)
    reference = torch.stack([x.square().sum().sqrt() for x in wide(tensors)])
    assert total.shape == (1,)
    assert total.dtype == each.dtype == torch.float32
    close([total, each], [reference.square().sum().sqrt().reshape(1), reference])
    assert multi_tensor_applier(multi_tensor_l2norm, flag(device), [tensors])[1].numel() == 0


def adam(g, p, m, v, lr, b1, b2, eps, step, mode, bias_correction, wd):
    g = g + wd * p if mode == 0 else g
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    c1, c2 = (1 - b1**step, 1 - b2**step) if bias_correction else (1, 1)
    update = m / c1 / ((v / c2).sqrt() + eps) + (wd * p if mode == 1 else 0)
    return g, p - lr * update, m, v


def adagrad(g, p, h, lr, eps, mode, wd):
    g = g + wd * p if mode == 0 else g
    h = h + g * g
    return g, p - lr * (g / (h.sqrt() + eps) + (wd * p if mode == 1 else 0)), h


def sgd(g, p, m, wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale):
    g = g * scale
    g = g if wd_after_momentum else g + wd * p
    if momentum:
        m = g if first_run else momentum * m + (1 - dampening) * g
        g = g + momentum * m if nesterov else m
    return g, p - lr * (g + wd * p if wd_after_momentum else g), m


def lamb(g, p, m, v, lr, b1, b2, eps, step, bias, wd, averaging, mode, norm, limit, nvlamb=None):
    g = g / max(norm.double().cpu() / limit, 1)
    g = g + wd * p if mode == 0 else g
    m, v = b1 * m + (1 - b1 if averaging else 1) * g, b2 * v + (1 - b2) * g * g
    c1, c2 = (1 - b1**step, 1 - b2**step) if bias else (1, 1)
    u = m / c1 / ((v / c2).sqrt() + eps) + (wd * p if mode == 1 else 0)
    ratio = p.norm() / u.norm() if wd or nvlamb else 1
    return u, p - lr * ratio * u, m, v


NORM = torch.tensor([3.0])
OPTIMIZER_CASES = [
    *(("adam", (0.1, 0.9, 0.99, 1e-6, 3, mode, c, 0.1)) for mode in (0, 1) for c in (0, 1)),
    *(("adagrad", (0.1, 1e-6, mode, 0.1)) for mode in (0, 1)),
    ("sgd", (0.1, 0.0, 0.0, 0.1, False, True, False, 1.0)),
    ("sgd", (0.1, 0.9, 0.5, 0.1, False, True, False, 0.5)),
    ("sgd", (0.1, 0.9, 0.5, 0.1, False, False, False, 0.5)),
    ("sgd", (0.1, 0.9, 0.0, 0.1, True, False, False, 2.0)),
    ("sgd", (0.1, 0.9, 0.0, 0.1, True, False, True, 1.0)),
    ("lamb", (0.1, 0.9, 0.99, 1e-6, 3, 1, 0.1, 1, 1, NORM, 1.0)),
    ("lamb", (0.1, 0.9, 0.99, 1e-6, 3, 0, 0.1, 0, 0, NORM, 5.0, False)),
    ("lamb", (0.1, 0.9, 0.99, 1e-6, 3, 1, 0.0, 1, 1, NORM, 1.0, False)),
    ("lamb", (0.1, 0.9, 0.99, 1e-6, 3, 1, 0.0, 1, 1, NORM, 1.0, True)),
]


@pytest.mark.parametrize(("name", "arguments"), OPTIMIZER_CASES)
@pytest.mark.parametrize("dtype", [*HALF, torch.float64])
def test_optimizers_equal_their_formulas(device, name, arguments, dtype):
    count = 4 if name in ("adam", "lamb") else 3
    lists = [random(seed, dtype, device) for seed in range(count)]
    for tensors in lists[2:] if name != "sgd" else []:
        torch._foreach_abs_(tensors)  # second moments are not negative
    expected = [
        globals()[name](*(tensor.double().cpu() for tensor in tensors), *arguments)
        for tensors in zip(*lists, strict=True)
    ]
    function = getattr(multi_tensor_optimizers, f"multi_tensor_{name}")
    own = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    multi_tensor_applier(function, flag(device), lists, *own)
    for index, references in enumerate(zip(*expected, strict=True)):
        if index or name == "lamb":  # the gradients are overwritten by LAMB only
            close(lists[index], references, dtype)


def test_gradients_are_left_alone_except_by_lamb():
    for name, arguments in OPTIMIZER_CASES:
        lists = [random(seed) for seed in range(4 if name in ("adam", "lamb") else 3)]
        lists[2:] = [torch._foreach_abs(tensors) for tensors in lists[2:]]
        before = [grad.clone() for grad in lists[0]]
        function = getattr(multi_tensor_optimizers, f"multi_tensor_{name}")
        multi_tensor_applier(function, flag(), lists, *arguments)
        same = all(torch.equal(one, two) for one, two in zip(lists[0], before, strict=True))
        assert same == (name != "lamb"), (name, arguments)


def test_sgd_writes_half_copies_and_obeys_the_flag():
    lists = [random(0), random(1), random(2), random(3, torch.float16)]
    arguments = (0.0, 0.9, 0.0, 0.1, False, True, False, 1.0)
    before = [tensor.clone() for tensor in lists[1]]
    stop = torch.ones(1, dtype=torch.int32)
    multi_tensor_applier(multi_tensor_optimizers.multi_tensor_sgd, stop, lists, *arguments)
    assert all(torch.equal(one, two) for one, two in zip(lists[1], before, strict=True))
    multi_tensor_applier(multi_tensor_optimizers.multi_tensor_sgd, flag(), lists, *arguments)
    assert not torch.equal(lists[1][0], before[0])
    for value, copy in zip(lists[1], lists[3], strict=True):
        assert torch.equal(value.half(), copy)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("norm_type", [0, 2])
@pytest.mark.parametrize("averaging", [0, 1])
@pytest.mark.parametrize("bias_correction", [0, 1])
def test_novograd_equals_its_formula(device, mode, norm_type, averaging, bias_correction):
    lr, b1, b2, eps, step, wd = 0.1, 0.9, 0.98, 1e-6, 3, 0.1
    lists = [random(seed, device=device) for seed in range(3)]
    norms = torch.tensor([0.5, 1.0, 2.0], device=device)
    expected, expected_norms = [], []
    for g, p, m, old in zip(*map(wide, lists), norms.double(), strict=True):
        if norm_type == 2:
            norm = (b2 * old**2 + (1 - b2) * g.square().sum()).sqrt()
        else:
            norm = b2 * old + (1 - b2) * g.abs().max()
        c1, c2 = (1 - b1**step, (1 - b2**step) ** 0.5) if bias_correction else (1, 1)
        denominator = norm / c2 + eps
        added = g / denominator + wd * p if mode == 0 else g
        m = b1 * m + (1 - b1 if averaging else 1) * added
        update = m / c1 if mode == 0 else m / c1 / denominator + wd * p
        expected.append((p - lr * update, m))
        expected_norms.append(norm)
    multi_tensor_applier(
        multi_tensor_optimizers.multi_tensor_novograd,
        flag(device), lists, norms, lr, b1, b2, eps, step, bias_correction, wd, averaging, mode,
        norm_type,
    )  # fmt: skip
    close(lists[1], [value for value, _ in expected])
    close(lists[2], [mean for _, mean in expected])
    close(norms, expected_norms)


def test_flatten_and_unflatten():
    tensors = random(0)
    joined = flat.flatten(tensors)
    assert joined.shape == (sum(tensor.numel() for tensor in tensors),)
    joined += 1
    for part, tensor in zip(flat.unflatten(joined, tensors), tensors, strict=True):
        assert torch.equal(part, tensor + 1)
    assert flat.unflatten(joined, tensors)[0].data_ptr() == joined.data_ptr()


def test_flat_dist_call_reduces_each_type_once_and_averages(monkeypatch):
    calls = []

    def all_reduce(tensor, *arguments):
        calls.append((tensor.dtype, tensor.shape, arguments))
        tensor.mul_(6)  # the sum of three processes with one, two and three times this one's

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    tensors = [torch.ones(2, 2), torch.ones(3, dtype=torch.float64), torch.full((2,), 5.0)]
    flat.flat_dist_call(tensors, dist.all_reduce, ["sum"])
    expected = [(torch.float32, (6,), ("sum",)), (torch.float64, (3,), ("sum",))]
    assert calls == expected
    values = [torch.full((2, 2), 2.0), torch.full((3,), 2.0).double(), torch.full((2,), 10.0)]
    assert all(torch.equal(one, two) for one, two in zip(tensors, values, strict=True))
    flat.flat_dist_call(tensors, lambda tensor: tensor.zero_())  # others are not divided
    assert not any(tensor.any() for tensor in tensors)


def lamb_steps(make, dtype, steps=3, scale=None):
    parameters = [nn.Parameter(tensor) for tensor in random(0, dtype)]
    optimizer = make(parameters)
    for step in range(steps):
        for parameter, grad in zip(parameters, random(step + 1), strict=True):
            parameter.grad = (grad * (scale or 1)).to(dtype)
        if scale:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(1)
        optimizer.step()
    return parameters, optimizer


OPTIONS = {"lr": 0.05, "weight_decay": 0.1}


@pytest.mark.parametrize("scale", [None, 64.0])
def test_mixed_precision_lamb_steps_as_lamb_on_fp32(scale):
    """Half parameters follow masters that start at their values and get their gradients."""
    half, optimizer = lamb_steps(
        lambda p: FusedMixedPrecisionLamb(p, reduced_precision_dtype=torch.bfloat16, **OPTIONS),
        torch.bfloat16,
        scale=scale,
    )
    masters = [nn.Parameter(tensor.float()) for tensor in random(0, torch.bfloat16)]
    plain = optimizers.FusedLAMB(masters, **OPTIONS)
    for step in range(3):
        for master, grad in zip(masters, random(step + 1), strict=True):
            master.grad = grad.bfloat16().float()
        plain.step()
    for parameter, master in zip(half, masters, strict=True):
        torch.testing.assert_close(optimizer.state[parameter]["master"], master.detach())
        assert torch.equal(parameter, optimizer.state[parameter]["master"].bfloat16())


def test_mixed_precision_lamb_on_fp32_is_lamb():
    ours, _ = lamb_steps(lambda p: FusedMixedPrecisionLamb(p, **OPTIONS), torch.float32)
    theirs, _ = lamb_steps(lambda p: optimizers.FusedLAMB(p, **OPTIONS), torch.float32)
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


def test_mixed_precision_lamb_resumes_exactly_and_counts_from_step():
    def make(parameters):
        return FusedMixedPrecisionLamb(
            parameters, step=7, reduced_precision_dtype=torch.bfloat16, **OPTIONS
        )

    parameters, optimizer = lamb_steps(make, torch.bfloat16)
    assert optimizer.param_groups[0]["step"] == 10
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = make(copies)
    resumed.load_state_dict(optimizer.state_dict())
    for stepped, own in ((optimizer, parameters), (resumed, copies)):
        for parameter, grad in zip(own, random(9), strict=True):
            parameter.grad = grad.bfloat16()
        stepped.step()
    for one, two in zip(parameters, copies, strict=True):
        assert torch.equal(optimizer.state[one]["master"], resumed.state[two]["master"])


def test_mixed_precision_lamb_saves_tensors_that_scripts_write_to():
    _, optimizer = lamb_steps(lambda p: FusedMixedPrecisionLamb(p, **OPTIONS), torch.float32)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["lr"].item() == OPTIONS["lr"]  # exactly
    saved["param_groups"][0]["step"].zero_()  # as the second phase of BERT
    saved["param_groups"][0]["lr"].fill_(0.25)
    optimizer.load_state_dict(saved)
    assert [optimizer.param_groups[0][name] for name in ("lr", "step")] == [0.25, 0]


def test_mixed_precision_lamb_skips_under_the_grad_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FusedMixedPrecisionLamb([parameter], 0.1, reduced_precision_dtype=torch.bfloat16)
    for factor, scale, moves in ((math.inf, 8.0, False), (1.0, 8.0, True)):
        parameter.grad = None
        scaler.scale(parameter.float().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(parameter.detach(), torch.ones(3).bfloat16()) != moves
        assert scaler.get_scale() == scale
    assert optimizer.param_groups[0]["step"] == 1


def test_mixed_precision_lamb_continues_from_a_checkpoint_of_apex():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = FusedMixedPrecisionLamb([parameter], 0.1, reduced_precision_dtype=torch.bfloat16)
    saved = optimizer.state_dict()
    means = {"exp_avg": torch.full((4,), 1 / 3), "exp_avg_sq": torch.ones(4)}
    groups = [{**saved["param_groups"][0], "lr": torch.tensor(0.1), "step": torch.tensor([3])}]
    optimizer.load_state_dict({"state": {0: means}, "param_groups": groups})
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    assert state["master"].dtype == torch.float32 and (state["master"] < 1).all()
    torch.testing.assert_close(state["exp_avg"], means["exp_avg"] * 0.9)
