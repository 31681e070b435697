"""FusedAdam with the arguments and the formula that it had until August 2019."""

import inspect

import pytest
import torch
from apex_native import optimizers
from apex_native.extras import contrib_adam, old_adam
from apex_native.extras.fused_fp16_optimizer import FP16_Optimizer
from apex_native.extras.multi_tensor import multi_tensor_applier
from torch import nn

SHAPES = ((3, 4), (5,), (2, 1, 3))
STEPS = 4


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def trained(kind, device, **options):
    """Return the parameters after steps; the last tensor is a group of its own."""
    parameters = [nn.Parameter(tensor.to(device)) for tensor in tensors(0)]
    optimizer = kind([{"params": parameters[:2]}, {"params": parameters[2:]}], **options)
    for step in range(STEPS):
        for parameter, grad in zip(parameters, tensors(step + 1), strict=True):
            parameter.grad = grad.to(device)
        optimizer.step()
    return parameters


def clips(grads, limit):
    """Return the divisors of the gradients, whose first two are of one group."""
    groups = [grads[:2], grads[2:]]
    norms = [torch.cat([grad.flatten() for grad in group]).norm() for group in groups]
    first, second = (max((norm + 1e-6) / limit, 1) if limit else 1 for norm in norms)
    return [first, first, second]


def expected(lr, weight_decay, inside=False, limit=0.0, bias_correction=True, eps=1e-3):
    """Return the results of contrib's formula in float64."""
    values = [tensor.double() for tensor in tensors(0)]
    means, squares = ([torch.zeros_like(value) for value in values] for _ in range(2))
    for step in range(1, STEPS + 1):
        grads = [grad.double() for grad in tensors(step)]
        for index, divisor in enumerate(clips(grads, limit)):
            grad = grads[index] / divisor
            means[index] = 0.9 * means[index] + 0.1 * grad
            squares[index] = 0.999 * squares[index] + 0.001 * grad * grad
            root = (squares[index] + eps).sqrt() if inside else squares[index].sqrt() + eps
            update = means[index] / root + weight_decay * values[index]
            rate = lr * ((1 - 0.999**step) ** 0.5 / (1 - 0.9**step) if bias_correction else 1)
            values[index] = values[index] - rate * update
    return values


CASES = [
    {},
    {"inside": True},
    {"limit": 1.0},
    {"bias_correction": False, "limit": 0.5},
    {"limit": 1000.0},
]


@pytest.mark.parametrize("case", CASES)
def test_contrib_adam_equals_its_formula(device, case):
    options = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}
    values = trained(
        contrib_adam.FusedAdam,
        device,
        eps_inside_sqrt=case.get("inside", False),
        max_grad_norm=case.get("limit", 0.0),
        bias_correction=case.get("bias_correction", True),
        **options,
    )
    for value, reference in zip(values, expected(0.05, 0.1, **case), strict=True):
        torch.testing.assert_close(value.double().cpu(), reference, rtol=1e-5, atol=1e-6)


def test_max_grad_norm_of_todays_class_equals_contrib_without_bias_correction(device):
    options = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3, "bias_correction": False}
    values = trained(old_adam.FusedAdam, device, max_grad_norm=0.5, **options)
    references = expected(0.05, 0.1, bias_correction=False, limit=0.5)
    # torch's kernel for CUDA has 1 - 0.999 in fp32, which alone changes these values by 3.8e-6.
    atol = 5e-6 if device.type == "cuda" else 1e-6
    for value, reference in zip(values, references, strict=True):
        torch.testing.assert_close(value.double().cpu(), reference, rtol=1e-5, atol=atol)


def test_without_max_grad_norm_it_is_todays_class(device):
    options = {"lr": 0.05, "weight_decay": 0.1}
    pairs = zip(
        trained(old_adam.FusedAdam, device, **options),
        trained(optimizers.FusedAdam, device, **options),
        strict=True,
    )
    assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("kind", [old_adam.FusedAdam, contrib_adam.FusedAdam])
def test_resumed_run_is_bit_identical(kind):
    def step(parameters, optimizer, seed):
        for parameter, grad in zip(parameters, tensors(seed), strict=True):
            parameter.grad = grad
        optimizer.step()

    parameters = [nn.Parameter(tensor) for tensor in tensors(0)]
    optimizer = kind(parameters, max_grad_norm=0.5)
    step(parameters, optimizer, 1)
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = kind(copies, max_grad_norm=0.5)
    resumed.load_state_dict(optimizer.state_dict())
    for own, stepped in ((parameters, optimizer), (copies, resumed)):
        step(own, stepped, 2)
    assert all(torch.equal(one, two) for one, two in zip(parameters, copies, strict=True))


@pytest.mark.parametrize("kind", [old_adam.FusedAdam, contrib_adam.FusedAdam])
def test_fine_tuning_of_bert_clips_unscaled_gradients(kind):
    """With FP16_Optimizer, the limit is for gradients without the loss scale."""
    results = []
    for scale in (1.0, 256.0):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).bfloat16()
        inner = kind(model.parameters(), lr=0.1, bias_correction=False, max_grad_norm=1.0)
        optimizer = FP16_Optimizer(inner, static_loss_scale=scale)
        for _ in range(3):
            optimizer.backward(model(torch.ones(3, 4).bfloat16()).sum())
            optimizer.step()
            optimizer.zero_grad()
        results.append(optimizer.masters)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("kind", [old_adam.FusedAdam, contrib_adam.FusedAdam])
def test_grad_scaler_unscales_before_gradients_are_clipped(kind):
    results = []
    for is_scaled in (False, True):
        value = nn.Parameter(torch.ones(4))
        optimizer = kind([value], lr=0.1, max_grad_norm=1.0)
        scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)
        for step in range(1, 4):
            optimizer.zero_grad()
            scaler.scale(value.sum() * 0.1 * step).backward()  # below the limit without the scale
            scaler.step(optimizer)
            scaler.update()
        results.append([value.detach(), optimizer.state[value]["exp_avg"]])
    torch.testing.assert_close(*results)


def test_only_a_class_that_clips_waits_for_the_overflow():
    """Otherwise its kernel skips the step, as in projects."""
    value = nn.Parameter(torch.ones(4))
    makers = [lambda: old_adam.FusedAdam([value]), lambda: OwnStep([value])]
    makers += [lambda: old_adam.FusedAdam([value], max_grad_norm=1.0)]
    found = [getattr(make(), "_step_supports_amp_scaling", False) for make in makers]
    assert found == [True, False, False]
    assert not getattr(contrib_adam.FusedAdam([value]), "_step_supports_amp_scaling", False)


class OwnStep(old_adam.FusedAdam):
    """As fairseq's, which steps by the kernel of the class that it extends."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            parameters = group["params"]
            for parameter in parameters:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter].setdefault(name, torch.zeros_like(parameter))
            moments = [
                [self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq")
            ]
            multi_tensor_applier(
                self.multi_tensor_adam,
                self._dummy_overflow_buf,
                [[p.grad for p in parameters], parameters, *moments],
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"],
                self.adam_w_mode,
                1 if group["bias_correction"] else 0,
                group["weight_decay"],
            )


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_subclass_steps_by_the_kernel_of_fused_adam(device, adam_w_mode):
    options = {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": adam_w_mode}
    own, usual = trained(OwnStep, device, **options), trained(old_adam.FusedAdam, device, **options)
    torch.testing.assert_close(own, usual)
    assert not torch.equal(own[0], tensors(0)[0].to(device))


def own_steps(resumes):
    """Return the parameters after steps, before each of which the state may be loaded anew."""
    parameters = [nn.Parameter(tensor) for tensor in tensors(0)]
    optimizer = OwnStep(parameters, lr=0.1)
    for step in range(STEPS):
        if resumes:
            state = optimizer.state_dict()
            assert state["param_groups"][0].get("step", 0) == step
            parameters = [nn.Parameter(parameter.detach()) for parameter in parameters]
            optimizer = OwnStep(parameters, lr=0.1)
            optimizer.load_state_dict(state)
        for parameter, grad in zip(parameters, tensors(step + 1), strict=True):
            parameter.grad = grad
        optimizer.step()
    return parameters


def test_subclass_with_a_step_of_its_own_resumes():
    assert all(map(torch.equal, own_steps(resumes=True), own_steps(resumes=False)))


def test_arguments_that_inspect_finds_are_apexs():
    found = [inspect.signature(kind) for kind in (old_adam.FusedAdam, optimizers.FusedAdam)]
    assert found[0] == found[1]
