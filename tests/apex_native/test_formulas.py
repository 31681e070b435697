"""Optimizers compared with their formulas, in float64 for one tensor at a time."""

import copy

import pytest
import torch
from amp_helpers import same
from apex_native import amp
from apex_native.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from apex_native.parallel.LARC import LARC
from torch import Tensor, nn

SHAPES = ((3, 4), (5,), (2, 1, 3))
STEPS = 5


def gradients(seed: int = 1) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(STEPS)]


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def trained(make, dtype: torch.dtype = torch.float32, device="cpu", **options) -> list[Tensor]:
    """Return the parameters after steps of `make(parameters, **options)`."""
    parameters = [nn.Parameter(tensor.to(device, dtype)) for tensor in start()]
    optimizer = make(parameters, **options)
    for grads in gradients():
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.to(device, dtype)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in parameters]


def expected(rule, **options) -> list[Tensor]:
    """Return the tensors after steps of `rule(p, g, state, step, all_gradients, **options)`."""
    values, states = [tensor.double() for tensor in start()], [{} for _ in SHAPES]
    for step, grads in enumerate(gradients(), 1):
        every = [grad.double() for grad in grads]
        values = [
            rule(value, grad, state, step, every, **options)
            for value, grad, state in zip(values, every, states, strict=True)
        ]
    return values


def agree(optimizer, rule, device: torch.device, **options) -> None:
    values = trained(optimizer, device=device, **options)
    for value, reference in zip(values, expected(rule, **options), strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-5, atol=1e-6)


def sgd(
    p, g, state, step, every, *, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False,
    wd_after_momentum=False,
):  # fmt: skip
    if not wd_after_momentum:
        g = g + weight_decay * p
    if momentum:
        first = "m" not in state
        state["m"] = g if first else momentum * state["m"] + (1 - dampening) * g
        g = g + momentum * state["m"] if nesterov else state["m"]
    if wd_after_momentum:
        g = g + weight_decay * p
    return p - lr * g


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True},
    ],
)
def test_sgd(device, options):
    agree(FusedSGD, sgd, device, lr=0.1, **options)


def test_sgd_equals_torch():
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    for ours, theirs in zip(
        trained(FusedSGD, **options), trained(torch.optim.SGD, **options), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"momentum": -1.0}, {"nesterov": True}])
def test_sgd_invalid_values_raise(bad):
    with pytest.raises(ValueError, match="FusedSGD"):
        FusedSGD([nn.Parameter(torch.zeros(1))], **{"lr": 0.1} | bad)


def lamb(
    p, g, state, step, every, *, lr=1e-3, bias_correction=True, weight_decay=0.01,
    adam_w_mode=True, grad_averaging=True, max_grad_norm=1.0, use_nvlamb=False,
):  # fmt: skip
    norm = torch.cat([grad.flatten() for grad in every]).norm()
    g = g / max(norm / max_grad_norm, 1)
    if not adam_w_mode:
        g = g + weight_decay * p
    state["m"] = 0.9 * state.get("m", 0) + (0.1 if grad_averaging else 1) * g
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * g * g
    c1, c2 = (1 - 0.9**step, 1 - 0.999**step) if bias_correction else (1, 1)
    u = state["m"] / c1 / ((state["v"] / c2).sqrt() + 1e-6)
    if adam_w_mode:
        u = u + weight_decay * p
    ratio = p.norm() / u.norm() if weight_decay or use_nvlamb else 1
    return p - lr * ratio * u


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias_correction": False},
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "use_nvlamb": True},
        {"adam_w_mode": False, "weight_decay": 0.1},
        {"grad_averaging": False, "max_grad_norm": 100.0},
    ],
)
def test_lamb(device, options):
    agree(FusedLAMB, lamb, device, lr=0.05, **options)


def novograd(
    p, g, state, step, every, *, lr=1e-3, bias_correction=True, weight_decay=0.0,
    reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False,
):  # fmt: skip
    norm = g.norm() if norm_type == 2 else g.abs().max()
    before = state.get("v", 0 * norm if init_zero else norm)
    if norm_type == 2:
        state["v"] = (0.999 * before**2 + 0.001 * norm**2).sqrt()
    else:
        state["v"] = 0.999 * before + 0.001 * norm
    c1, c2 = (1 - 0.9**step, (1 - 0.999**step) ** 0.5) if bias_correction else (1, 1)
    denominator = state["v"] / c2 + 1e-8
    if reg_inside_moment:
        g = g / denominator + weight_decay * p
    state["m"] = 0.9 * state.get("m", 0) + (0.1 if grad_averaging else 1) * g
    if reg_inside_moment:
        return p - lr * state["m"] / c1
    return p - lr * (state["m"] / c1 / denominator + weight_decay * p)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "reg_inside_moment": True},
        {"bias_correction": False, "grad_averaging": False},
        {"norm_type": 0},
        {"init_zero": True},
    ],
)
def test_novograd(device, options):
    agree(FusedNovoGrad, novograd, device, lr=0.05, **options)


def adagrad(p, g, state, step, every, *, lr=1e-2, weight_decay=0.0, adagrad_w_mode=False):
    if not adagrad_w_mode:
        g = g + weight_decay * p
    state["h"] = state.get("h", 0) + g * g
    update = g / (state["h"].sqrt() + 1e-10)
    return p - lr * (update + (weight_decay * p if adagrad_w_mode else 0))


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"adagrad_w_mode": True}])
def test_adagrad(device, options):
    agree(FusedAdagrad, adagrad, device, lr=0.05, **{"weight_decay": 0.1} | options)


def larc(p, g, state, step, every, *, lr, weight_decay, trust_coefficient=0.02, clip=True):
    rate = trust_coefficient * p.norm() / (g.norm() + weight_decay * p.norm() + 1e-8)
    rate = min(rate / lr, 1) if clip else rate
    if p.norm() == 0 or g.norm() == 0:
        return p - lr * g
    return p - lr * (g + weight_decay * p) * rate


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("trust_coefficient", [0.02, 10.0])
def test_larc(device, clip, trust_coefficient):
    def make(parameters, **options):
        inner = torch.optim.SGD(parameters, lr=0.1, weight_decay=options["weight_decay"])
        return LARC(inner, trust_coefficient=trust_coefficient, clip=clip)

    options = {"lr": 0.1, "weight_decay": 0.05}
    values = trained(make, device=device, **options)
    references = expected(larc, trust_coefficient=trust_coefficient, clip=clip, **options)
    for value, reference in zip(values, references, strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-5, atol=1e-6)


def test_copy_of_larc_after_initialize_steps_the_copy():
    model = nn.Linear(2, 2)
    larc = LARC(torch.optim.SGD(model.parameters(), lr=0.1))
    larc.warmup = 3
    model, optimizer = amp.initialize(model, larc, verbosity=0)
    copied_model, copied = copy.deepcopy((model, optimizer))
    assert copied.warmup == 3
    before = [parameter.clone() for parameter in model.parameters()]
    copied_model(torch.ones(1, 2)).sum().backward()
    copied.step()
    assert same(before, [*model.parameters()]) and not same(before, [*copied_model.parameters()])


def test_larc_ignores_zero_norms():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    larc = LARC(torch.optim.SGD([parameter], lr=9.0))
    larc.param_groups = [larc.param_groups[0] | {"lr": 0.1, "weight_decay": 0.5}]
    larc.step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.1))


@pytest.mark.parametrize("inner", [FusedAdam, torch.optim.SGD])
def test_larc_with_amp_skips_overflows_and_accepts_a_scheduler(inner):
    model = nn.Linear(3, 1)
    optimizer = LARC(inner(model.parameters(), lr=0.1))
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = model.weight.detach().clone()
    for factor, moves in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(2, 3)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert torch.equal(model.weight, before) != moves
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("kind", [FusedSGD, FusedLAMB, FusedNovoGrad, FusedAdagrad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_resumed_optimizer_is_bit_identical(kind, dtype):
    options = {"lr": 0.05} | ({"momentum": 0.9} if kind is FusedSGD else {})

    def after_one_step(parameters, **options):
        optimizer = kind(parameters, **options)
        for parameter, grad in zip(parameters, gradients(7)[0], strict=True):
            parameter.grad = grad.to(dtype)
        optimizer.step()
        return optimizer

    def resumed(parameters, **options):
        state = after_one_step(parameters, **options).state_dict()
        optimizer = kind(parameters, **options)
        optimizer.load_state_dict(state)
        return optimizer

    undisturbed, other = (trained(make, dtype, **options) for make in (after_one_step, resumed))
    for one, two in zip(undisturbed, other, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kind", [FusedSGD, FusedLAMB, FusedNovoGrad, FusedAdagrad])
@pytest.mark.parametrize("set_grad_none", [None, True, False])
def test_set_grad_none(kind, set_grad_none):
    parameter = nn.Parameter(torch.ones(2))
    given = {} if set_grad_none is None else {"set_grad_none": set_grad_none}
    optimizer = kind([parameter], lr=0.1, **given)
    parameter.grad = torch.ones(2)
    optimizer.zero_grad()
    drops = kind is not FusedSGD if set_grad_none is None else set_grad_none
    assert (parameter.grad is None) == drops
    assert drops or not parameter.grad.any()


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_amsgrad_raises(kind):
    with pytest.raises(RuntimeError, match="AMSGrad"):
        kind([nn.Parameter(torch.zeros(1))], amsgrad=True)
