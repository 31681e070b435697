"""apex_native.optimizers: FusedAdam against torch, against its formula, and its checkpoints."""

import copy
import functools
import pickle

import pytest
import torch
from amp_helpers import BF16, FP16, FP32, same
from apex_native import amp
from apex_native.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from torch import nn

SHAPES = ((3, 4), (5,), (2, 3, 2, 2), ())


def parameters(dtype=FP32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(tensor.to(device, dtype)) for tensor in made]


def gradients(steps, dtype=FP32):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def steps(optimizer, all_gradients):
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in all_gradients:
        for parameter, gradient in zip(own, step, strict=True):
            is_late = gradient is None
            parameter.grad = None if is_late else gradient.to(parameter.device, parameter.dtype)
        optimizer.step()


def adam(values, all_gradients, lr, betas, eps, weight_decay, adam_w_mode, bias_correction):
    """Return the parameters after steps of the formula, in fp64."""
    values = [value.detach().double() for value in values]
    m, v = ([torch.zeros_like(value) for value in values] for _ in range(2))
    for t, step in enumerate(all_gradients, 1):
        for i, gradient in enumerate(step):
            g = gradient.double()
            if not adam_w_mode:
                g = g + weight_decay * values[i]
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g**2
            m_hat = m[i] / (1 - betas[0] ** t) if bias_correction else m[i]
            v_hat = v[i] / (1 - betas[1] ** t) if bias_correction else v[i]
            update = m_hat / (v_hat.sqrt() + eps)
            if adam_w_mode:
                update = update + weight_decay * values[i]
            values[i] = values[i] - lr * update
    return values


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_formula(device, adam_w_mode, bias_correction, weight_decay):
    options = {
        "lr": 0.01,
        "betas": (0.8, 0.95),
        "eps": 1e-3,
        "weight_decay": weight_decay,
        "adam_w_mode": adam_w_mode,
        "bias_correction": bias_correction,
    }
    own = parameters(device=device)
    expected = adam(parameters(), gradients(6), **options)
    steps(FusedAdam(own, **options), gradients(6))
    for parameter, value in zip(own, expected, strict=True):
        torch.testing.assert_close(parameter.cpu().double(), value, rtol=1e-5, atol=1e-6)


def test_defaults_equal_apex():
    own = parameters()
    expected = adam(parameters(), gradients(3), 1e-3, (0.9, 0.999), 1e-8, 0.0, True, True)
    steps(FusedAdam(own), gradients(3))
    for parameter, value in zip(own, expected, strict=True):
        torch.testing.assert_close(parameter.double(), value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("adam_w_mode", "torchs"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)]
)
@pytest.mark.parametrize("late", [0, 2])
def test_fused_adam_equals_torch(adam_w_mode, torchs, late):
    """Also if a parameter has its first gradient `late` steps after the others."""
    own, others = parameters(), parameters()
    options = {"lr": 0.01, "weight_decay": 0.1}
    grads = list(gradients(6))
    for step in grads[:late]:
        step[0] = None
    steps(FusedAdam(own, adam_w_mode=adam_w_mode, **options), grads)
    steps(torchs(others, **options), grads)
    for one, other in zip(own, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_learning_rate_of_fused_sgd_may_be_that_of_its_groups():
    """As Horovod's DistributedOptimizer constructs it."""
    optimizer = FusedSGD([{"params": [nn.Parameter(torch.ones(2))], "lr": 0.5}])
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="required optimization parameter lr"):
        FusedSGD([nn.Parameter(torch.ones(2))])


def test_param_groups_have_their_own_settings():
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = FusedAdam([{"params": [a]}, {"params": [b], "lr": 0.5}], lr=0.1)
    steps(optimizer, [[torch.ones(2), torch.ones(2)]])
    torch.testing.assert_close(a, torch.full((2,), 0.9))
    torch.testing.assert_close(b, torch.full((2,), 0.5))


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_half_parameters_have_fp32_moments(device, dtype):
    """Each step starts at the rounded weights, as Apex's kernel does, but no moment is rounded."""
    own, exact = parameters(dtype, device), [p.detach().float() for p in parameters(dtype)]
    optimizer = FusedAdam(own, lr=0.01)
    reference = FusedAdam([nn.Parameter(tensor) for tensor in exact], lr=0.01)
    for step in gradients(4, dtype):
        steps(optimizer, [step])
        steps(reference, [step])
        for one, other in zip(own, reference.param_groups[0]["params"], strict=True):
            other.data.copy_(other.to(dtype))
            torch.testing.assert_close(one.cpu().float(), other, rtol=1e-2, atol=1e-3)
    for one, other in zip(own, reference.param_groups[0]["params"], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[one][name]
            assert moment.dtype == FP32
            torch.testing.assert_close(moment.cpu(), reference.state[other][name])


def test_mixed_parameter_types():
    own = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (FP32, FP16, BF16, FP32)]
    steps(FusedAdam(own, lr=0.5), [[torch.ones(2)] * 4])
    for parameter in own:
        torch.testing.assert_close(parameter.float(), torch.full((2,), 0.5))


def test_parameters_without_gradient_are_unchanged():
    own = parameters()
    optimizer = FusedAdam(own)
    own[1].grad = torch.ones(5)
    optimizer.step()
    assert same([own[0], *own[2:]], [parameters()[0], *parameters()[2:]])
    assert not torch.equal(own[1], parameters()[1])
    assert list(optimizer.state) == [own[1]]


def test_closure():
    (parameter,) = own = [nn.Parameter(torch.ones(1))]
    optimizer = FusedAdam(own, lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (3 * parameter).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    torch.testing.assert_close(parameter, torch.tensor([0.5]))


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "master_weights"])
def test_unsupported_options_raise(option):
    with pytest.raises(RuntimeError, match="AMSGrad" if option == "amsgrad" else option):
        FusedAdam(parameters(), **{option: True})


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_gradscaler_with_unscaling_in_the_kernel(device, adam_w_mode):
    parameters = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    options = {"weight_decay": 0.1, "adam_w_mode": adam_w_mode}
    optimizers = [FusedAdam([parameter], **options) for parameter in parameters]
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale((parameters[0] * 0.1).sum()).backward()
    scaler.step(optimizers[0])
    (parameters[1] * 0.1).sum().backward()
    optimizers[1].step()
    states = [optimizer.state[p] for optimizer, p in zip(optimizers, parameters, strict=True)]
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(states[0][name], states[1][name])
    torch.testing.assert_close(parameters[0], parameters[1])


class OwnStep(FusedAdam):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad


class OwnSettings(FusedAdam):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._step_supports_amp_scaling = False


def test_subclasses_may_state_whether_they_skip():
    given = [nn.Parameter(torch.ones(3))]
    kinds = (FusedAdam, OwnStep, OwnSettings, pickle.loads(pickle.dumps(FusedAdam)))
    found = [kind(given)._step_supports_amp_scaling for kind in kinds]
    assert found == [True, False, False, True]


def test_gradscaler_skips_the_step_of_a_subclass(device):
    """A step of its own does not use the kernel that skips on the device."""
    parameter = nn.Parameter(torch.ones(3, device=device))
    scaler, optimizer = torch.amp.GradScaler(device.type), OwnStep([parameter], lr=0.5)
    for factor, expected in ((float("inf"), 1.0), (1.0, 0.5)):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == [expected] * 3


@pytest.mark.parametrize("make", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copied_optimizer_steps_identically(make):
    parameter = nn.Parameter(torch.ones(3))
    for kind in (FusedAdam, FusedSGD, FusedLAMB, FusedNovoGrad, FusedAdagrad):
        optimizer = make(kind([parameter], lr=0.1))
        (copied,) = optimizer.param_groups[0]["params"]
        copied.grad = torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()
        assert (copied < 1).all()


def test_sparse_gradients_raise():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        FusedAdam(embedding.parameters()).step()


@pytest.mark.parametrize(
    ("options", "arguments", "dropped"),
    [
        ({}, {}, True),
        ({"set_grad_none": False}, {}, False),
        ({}, {"set_to_none": False}, False),
        ({"set_grad_none": False}, {"set_to_none": True}, True),
    ],
)
def test_zero_grad(options, arguments, dropped):
    own = parameters()
    optimizer = FusedAdam(own, **options)
    steps(optimizer, gradients(1))
    optimizer.zero_grad(**arguments)
    for parameter in own:
        assert (parameter.grad is None) == dropped
        assert dropped or not parameter.grad.any()


# Checkpoints


def apexs_form(state):
    """Return the state in Apex's form: one step count for each group."""
    for moments in state["state"].values():
        del moments["step"]
    return state


def torchs_form(state):
    """Return the state in torch's form: a step count for each parameter alone."""
    for group in state["param_groups"]:
        del group["step"]
    return state


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("form", [copy.deepcopy, apexs_form, torchs_form])
def test_resume_is_bit_identical(form, dtype):
    data = list(gradients(6, dtype))
    own = parameters(dtype)
    optimizer = FusedAdam(own, lr=0.01, weight_decay=0.1)
    steps(optimizer, data[:3])
    state = copy.deepcopy(optimizer.state_dict())
    assert [group["step"] for group in state["param_groups"]] == [3]

    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    other = FusedAdam(resumed)
    other.load_state_dict(form(state))
    for one in (optimizer, other):
        steps(one, data[3:])
    assert same(own, resumed)
    assert other.state_dict()["param_groups"][0]["step"] == 6


def test_groups_have_the_count_of_steps():
    """Schedulers read it, such as those of NVIDIA's BERT."""
    own = parameters()
    groups = [{"params": own[:2]}, {"params": own[2:]}]
    optimizer = FusedAdam(groups)
    for count in range(1, 4):
        steps(optimizer, gradients(1))
        assert [group["step"] for group in optimizer.param_groups] == [count, count]
    for other in (FusedAdam(copy.deepcopy(groups)), copy.deepcopy(optimizer)):
        other.load_state_dict(optimizer.state_dict())
        steps(other, gradients(1))
        assert [group["step"] for group in other.param_groups] == [4, 4]


def test_group_without_gradients_keeps_its_count():
    """torch's functions for sharded checkpoints expect each setting of a group in its state."""
    optimizer = FusedAdam([{"params": parameters()}, {"params": parameters()}])
    for _ in range(2):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    saved = optimizer.state_dict()
    assert [group["step"] for group in saved["param_groups"]] == [2, 2]
    optimizer.load_state_dict(saved)
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_groups_do_not_count_skipped_steps(device, level):
    model = nn.Linear(2, 2).to(device)
    optimizer = FusedAdam(model.parameters())
    options = {"opt_level": level, "loss_scale": "dynamic", "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    for factor, count in ((1, 1), (torch.inf, 1), (1, 2), (1, 3)):
        with amp.scale_loss(
            model(torch.ones(1, 2, device=device)).sum() * factor, optimizer
        ) as loss:
            loss.backward()
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == count
        assert optimizer.state_dict()["param_groups"][0]["step"] == count
        optimizer.zero_grad()


def test_step_count_of_a_state_continued_by_apex():
    """Apex counts in the group, and hands a parameter's count back as it was loaded."""
    own = parameters()
    optimizer = FusedAdam(own)
    steps(optimizer, gradients(3))
    state = optimizer.state_dict()
    state["param_groups"][0]["step"] = 5
    optimizer.load_state_dict(state)
    assert {state["step"].item() for state in optimizer.state.values()} == {5.0}


def test_step_count_of_a_state_continued_by_torch():
    """torch counts for each parameter, and hands a group's count back as it was loaded."""
    own = parameters()
    optimizer, torchs = FusedAdam(own), torch.optim.AdamW(own)
    steps(optimizer, gradients(3))
    torchs.load_state_dict(optimizer.state_dict())
    steps(torchs, gradients(2))
    optimizer.load_state_dict(torchs.state_dict())
    assert {state["step"].item() for state in optimizer.state.values()} == {5.0}


@pytest.mark.parametrize(
    ("optimizer", "torchs", "option"),
    [
        (FusedAdam, torch.optim.AdamW, "amsgrad"),
        (FusedAdam, torch.optim.AdamW, "maximize"),
        (FusedAdagrad, torch.optim.Adagrad, "maximize"),
        (functools.partial(FusedSGD, lr=0.1), torch.optim.SGD, "maximize"),
    ],
)
def test_states_of_unsupported_options_are_rejected(optimizer, torchs, option):
    own = parameters()
    torchs = torchs(own, **{option: True})
    steps(torchs, gradients(1))
    with pytest.raises(RuntimeError, match=f"cannot continue a state with {option}=True"):
        optimizer(own).load_state_dict(torchs.state_dict())


def test_novograd_continues_a_state_of_apex():
    """Apex keeps the norms in the group: of its fp16 parameters, then of those in fp32."""
    own = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (FP32, FP16, FP32, FP32)]
    optimizer = FusedNovoGrad(own)
    for number, parameter in enumerate(own[:3], 1):  # the last one has no gradient
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    norms = [state["state"][index].pop("exp_avg_sq") for index in range(3)]
    state["param_groups"][0]["exp_avg_sq"] = [norms[1][None], torch.stack([norms[0], norms[2]])]

    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    other = FusedNovoGrad(resumed)
    other.load_state_dict(state)
    for one in (optimizer, other):
        for parameter in one.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        one.step()
    assert same(own, resumed)

    state["param_groups"][0]["exp_avg_sq"][0] = torch.ones(2)
    with pytest.raises(ValueError, match="longer"):
        other.load_state_dict(state)


def by_name(optimizer, saved):
    """Match the states of parameters by names, as torch's documentation does."""
    own, theirs = optimizer.param_groups[0], saved["param_groups"][0]
    states = dict(zip(theirs["param_names"], saved["state"].values(), strict=True))
    return saved | {"state": dict(enumerate(states[name] for name in own["param_names"]))}


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB])
def test_hooks_change_what_is_loaded(kind, dtype):
    named = [(name, nn.Parameter(torch.ones(2, dtype=dtype))) for name in "ab"]
    optimizer = kind(named)
    for number, (_, parameter) in enumerate(named):
        parameter.grad = torch.full_like(parameter, 1 + number / 3)
    optimizer.step()
    other = kind(named[::-1])
    other.register_load_state_dict_pre_hook(by_name)
    other.load_state_dict(optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        assert all(torch.equal(other.state[p][name], optimizer.state[p][name]) for _, p in named)
    other.register_load_state_dict_post_hook(lambda one: one.state.clear())
    other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_each_parameter_has_its_step_count():
    own = parameters()
    optimizer = FusedAdam(own)
    steps(optimizer, gradients(2))
    optimizer.zero_grad()
    own[0].grad = torch.ones_like(own[0])
    optimizer.step()
    other = FusedAdam(own)
    other.load_state_dict(optimizer.state_dict())
    assert [other.state[parameter]["step"].item() for parameter in own] == [3.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("fused", [False, True])
def test_state_converts_to_and_from_torch_adamw(fused):
    def torchs(p):
        return torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=fused)

    def ours(p):
        return FusedAdam(p, lr=0.01, weight_decay=0.1)

    data, expected = list(gradients(6)), parameters()
    steps(ours(expected), data)
    for first, second in ((torchs, ours), (ours, torchs)):
        own = parameters()
        optimizer = first(own)
        steps(optimizer, data[:3])
        resumed = [nn.Parameter(parameter.detach().clone()) for parameter in own]
        other = second(resumed)
        other.load_state_dict(optimizer.state_dict())
        steps(other, data[3:])
        for one, wanted in zip(resumed, expected, strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("to", [torch.contiguous_format, torch.channels_last])
def test_state_loads_into_another_memory_format(to):
    """A run on GPUs in channels_last may be resumed on a CPU in NCHW."""
    ((first, second), weight) = torch.randn(2, 2, 3, 2, 2), torch.randn(2, 3, 2, 2)
    results = []
    for formats in ((torch.contiguous_format,) * 2, (torch.channels_last, to)):
        own, state = weight, None
        for memory_format, gradient in zip(formats, (first, second), strict=True):
            parameter = nn.Parameter(own.detach().clone(memory_format=memory_format))
            optimizer = FusedAdam([parameter], lr=0.01)
            if state:
                optimizer.load_state_dict(state)
            steps(optimizer, [[gradient.clone(memory_format=memory_format)]])
            own, state = parameter, optimizer.state_dict()
        results.append(own)
    torch.testing.assert_close(*results)


def transposed(tensor):
    return tensor.mT.contiguous().mT


def with_gaps(tensor):
    return torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]


KINDS = [
    FusedAdam,
    FusedLAMB,
    FusedNovoGrad,
    FusedAdagrad,
    functools.partial(FusedSGD, momentum=0.9),
]


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("layout", [transposed, with_gaps])
@pytest.mark.parametrize("changed", ["parameter", "gradient", "both", "later"])
@pytest.mark.parametrize("kind", KINDS)
def test_elements_are_found_in_any_layout(device, kind, changed, layout, dtype):
    """A view of a larger tensor, or a gradient with other strides than the parameter."""
    data = list(gradients(4, dtype))
    for shape_index in (0, 2):
        expected, own = (nn.Parameter(parameters(dtype, device)[shape_index]) for _ in range(2))
        optimizer = kind([expected], lr=0.01)
        steps(optimizer, [[step[shape_index]] for step in data])
        if changed in ("parameter", "both"):
            own.data = layout(own.data)
        optimizer = kind([own], lr=0.01)
        for number, step in enumerate(data):
            if changed == "later" and number == 2:  # as model.to(memory_format=...) does
                own.data = layout(own.data)
            gradient = step[shape_index].to(device, copy=True)
            own.grad = layout(gradient) if changed in ("gradient", "both") else gradient
            optimizer.step()
        torch.testing.assert_close(own, expected)


LAYOUTS = {
    "contiguous": (torch.clone, []),
    "channels_last": (lambda x: x[0].to(memory_format=torch.channels_last), []),
    "channels_last_3d": (lambda x: x.to(memory_format=torch.channels_last_3d), []),
    "transposed": (transposed, ["meta"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_compared_without_memory(monkeypatch, layout):
    arrange, expected = LAYOUTS[layout]
    parameter = nn.Parameter(arrange(torch.randn(2, 3, 4, 5, 6)))
    optimizer = FusedAdam([parameter], lr=0.01)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made, empty_like = [], torch.empty_like

    def record(*arguments, **options):
        made.append(empty_like(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty_like", record)
    optimizer.step()
    assert [tensor.device.type for tensor in made] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_learning_rate_may_be_a_tensor(device, kind):
    runs = []
    for lr in (0.25, torch.tensor(0.25), torch.tensor(0.25, device=device)):
        runs.append(parameters(device=device))
        steps(kind(runs[-1], lr=lr, weight_decay=0.1), gradients(3))
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])
    assert not same(runs[0], parameters(device=device))


@pytest.mark.parametrize("kind", KINDS)
def test_moments_of_another_shape_are_rejected(kind):
    """The fused kernels would write behind them. torch itself does not compare the shapes."""
    optimizer = kind(parameters(), lr=0.1)
    steps(optimizer, gradients(1))
    for change in ({"params": [1, 1, 2, 3]}, {"params": [1, 0, 2, 3]}):
        state = optimizer.state_dict()
        state["param_groups"][0] |= change
        with pytest.raises(ValueError, match=r"is \(5,\), not \(3, 4\)"):
            optimizer.load_state_dict(state)


def test_loaded_state_is_a_copy():
    own = parameters()
    optimizer = FusedAdam(own)
    steps(optimizer, gradients(1))
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    other = FusedAdam(parameters())
    other.load_state_dict(state)
    steps(other, gradients(2))
    for index, moments in before["state"].items():
        assert same(moments.values(), state["state"][index].values())
