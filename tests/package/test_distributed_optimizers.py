"""Optimizers that shard their state equal the plain ones on the averaged gradients."""

from operator import methodcaller

import pytest
import torch
import torch.distributed as dist
from apex_native.extras.distributed_optimizers import DistributedFusedAdam, DistributedFusedLAMB
from apex_native.optimizers import FusedAdam, FusedLAMB
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

STEPS = 4
OPTIONS = {
    DistributedFusedAdam: (FusedAdam, {"lr": 0.05, "weight_decay": 0.1}),
    DistributedFusedLAMB: (FusedLAMB, {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-8}),
}

OVERLAP = {DistributedFusedAdam: "overlap_grad_sync", DistributedFusedLAMB: "overlap_reductions"}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3))


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(7, 6, generator=generator) for _ in range(2 * STEPS)]


def parameters_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_distributed(cls, accumulate, overlap, max_norm):
    """Return the parameters after some steps, the norms that were clipped, and the moments here."""
    model = build()
    options = {**OPTIONS[cls][1], OVERLAP[cls]: overlap}
    if cls is DistributedFusedLAMB:
        options["max_grad_norm"] = max_norm
    optimizer = cls(model.parameters(), **options)
    norms = []
    data = batches(dist.get_rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        if accumulate and cls is DistributedFusedAdam:
            with optimizer.no_sync():
                model(data[2 * step]).square().sum().backward()
        elif accumulate:
            optimizer.set_is_accumulation_step(True)
            model(data[2 * step]).square().sum().backward()
            optimizer.set_is_accumulation_step(False)
        model(data[2 * step + 1]).square().sum().backward()
        if cls is DistributedFusedAdam and max_norm:
            norms.append(optimizer.clip_grad_norm(max_norm).item())
        optimizer.step()
    own = sum(len(state) for state in optimizer.optim.state.values())
    return parameters_of(model), norms, own, optimizer.state_dict()


def train_plain(cls, accumulate, max_norm):
    """Return the parameters after the same steps of one process, and the norms."""
    plain, options = OPTIONS[cls]
    if plain is FusedLAMB:
        options = {**options, "max_grad_norm": max_norm}
    model = build()
    optimizer = plain(model.parameters(), **options)
    norms = []
    data = [batches(rank) for rank in range(2)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in (2 * step, 2 * step + 1) if accumulate else (2 * step + 1,):
            sum(model(data[rank][part]).square().sum() / 2 for rank in range(2)).backward()
        if plain is FusedAdam and max_norm:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return parameters_of(model), norms, optimizer.state_dict()


@pytest.mark.parametrize("cls", OPTIONS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_two_processes_equal_one(two_package_processes, cls, accumulate, overlap):
    results = two_package_processes(train_distributed, cls, accumulate, overlap, 0.5)
    expected, norms, state = train_plain(cls, accumulate, 0.5)
    for parameters, own_norms, _, _ in results:
        torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-5)
        assert own_norms == pytest.approx(norms, rel=1e-4)
    assert torch.equal(results[0][0], results[1][0])
    assert not norms or min(norms) > 0.5  # gradients were clipped
    gathered = results[0][3]
    assert results[1][3] == {}
    assert gathered["state"].keys() == state["state"].keys()
    for index, moments in state["state"].items():
        torch.testing.assert_close(
            gathered["state"][index]["exp_avg"], moments["exp_avg"], rtol=1e-3, atol=1e-5
        )
    held = [own for _, _, own, _ in results]
    total = sum(len(moments) for moments in state["state"].values())
    assert sum(held) == total and max(held) < total


def train_parameters_that_come_later(cls, way):
    model = build()
    later = [*model.parameters()][2:]
    parts = ([*model.parameters()][:2], later) if way == "add" else (model.parameters(),)
    for parameter in later if way == "unfreeze" else ():
        parameter.requires_grad_(False)
    optimizer = cls(parts[0], **OPTIONS[cls][1])
    for part in parts[1:]:
        optimizer.add_param_group({"params": part})
    for parameter in later:
        parameter.requires_grad_()
    for batch in batches(dist.get_rank()):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
    return parameters_of(model)


@pytest.mark.parametrize("cls", OPTIONS)
def test_gradients_of_parameters_that_come_later_are_averaged(two_package_processes, cls):
    expected, *_ = two_package_processes(train_parameters_that_come_later, cls, "none")
    for way in ("add", "unfreeze"):
        for parameters in two_package_processes(train_parameters_that_come_later, cls, way):
            torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-5)


def resume_after(cls, stop, dtype):
    """Return the parameters of a run, and of one that is saved and resumed in other objects."""
    results = []
    for resumes in (False, True):
        model = build().to(dtype)
        optimizer = cls(model.parameters(), **OPTIONS[cls][1])
        for step, batch in enumerate(batches(dist.get_rank())):
            if resumes and step == stop:
                saved = optimizer.state_dict(gather_on_root=False)
                weights = model.state_dict()
                model = build().to(dtype)
                model.load_state_dict(weights)
                optimizer = cls(model.parameters(), lr=1.0)
                optimizer.load_state_dict(saved)
            optimizer.zero_grad()
            model(batch.to(dtype)).square().sum().backward()
            optimizer.step()
        results.append(parameters_of(model))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", OPTIONS)
def test_resumed_run_is_the_same(two_package_processes, cls, dtype):
    for plain, resumed in two_package_processes(resume_after, cls, 3, dtype):
        assert torch.equal(plain, resumed)


def train_vector(cls, dtype):
    """Return parameters in `dtype`, and their masters, after steps that bf16 would round away."""
    parameter = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = cls([parameter], lr=1e-3, weight_decay=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
    states = optimizer.state_dict(gather_on_root=False)["state"][0]
    return parameter.detach(), states.get("master"), states["exp_avg"]


@pytest.mark.parametrize("cls", OPTIONS)
def test_half_parameters_have_fp32_masters(two_package_processes, cls):
    expected, _, moment = two_package_processes(train_vector, cls, torch.float32)[0]
    for half, master, own in two_package_processes(train_vector, cls, torch.bfloat16):
        torch.testing.assert_close(master, expected, rtol=0, atol=1e-7)
        torch.testing.assert_close(own, moment, rtol=1e-2, atol=0)
        assert torch.equal(half, master.bfloat16()) and half[0] < 1


def assigned_vector(cls):
    """Return parameters after writing to them and their gradients, and a step without change."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    parameter.sum().backward()
    optimizer = cls([parameter], lr=1e-3)
    optimizer.step()
    parameter.detach().fill_(3.0)
    optimizer.param_groups[0]["lr"] = 0.0
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("cls", OPTIONS)
def test_half_parameters_and_gradients_can_be_assigned(two_package_processes, cls):
    for parameter in two_package_processes(assigned_vector, cls):
        assert torch.equal(parameter, torch.full_like(parameter, 3.0))


def resume_of_adamw():
    """Return the types of a state of torch's AdamW, and the parameters after some steps with it."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    parameter.sum().backward()
    plain = torch.optim.AdamW([parameter], lr=1e-3)
    plain.step()
    optimizer = DistributedFusedAdam([parameter], lr=1e-3)
    optimizer.load_state_dict(plain.state_dict())
    before = parameter.detach().clone()
    for _ in range(STEPS):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    dtypes = {value.dtype for state in optimizer.optim.state.values() for value in state.values()}
    return dtypes, len(optimizer.state), (parameter < before).all().item()


def test_state_of_half_parameters_from_torch_becomes_fp32(two_package_processes):
    (own, *same), (other, *_) = two_package_processes(resume_of_adamw)
    assert own | other == {torch.float32}
    assert same == [0, True]


def gradients_after_step(cls):
    """Return the gradients of all parameters, which the step clipped or unscaled."""
    parameters = [nn.Parameter(torch.ones(size)) for size in (2, 3, 4)]
    options = {} if cls is DistributedFusedAdam else {"max_grad_norm": 0.5}
    optimizer = cls(parameters, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(sum(parameter.sum() for parameter in parameters)).backward()
    if cls is DistributedFusedAdam:
        optimizer.clip_grad_norm(64.0 * 0.5)
    scaler.step(optimizer)
    return torch.cat([parameter.grad for parameter in parameters])


@pytest.mark.parametrize("cls", OPTIONS)
def test_gradients_are_clipped_and_unscaled_on_all_processes(two_package_processes, cls):
    for grads in two_package_processes(gradients_after_step, cls):
        torch.testing.assert_close(grads, torch.full((9,), 0.5 / 3))


def scaled_vector(cls, unscales):
    """Return the moments after a step with scaled gradients, too small for fp16 without a scale."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = cls([parameter], eps=1e-12)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=unscales is None)
    (parameter.float() * 2.0**16 * 3e-8).sum().backward()
    if unscales:
        unscales(optimizer)
    else:
        scaler.scale(torch.ones(()))  # makes the scale
    scaler.step(optimizer)
    return optimizer.state_dict(gather_on_root=False)["state"][0]["exp_avg"]


@pytest.mark.parametrize(
    ("cls", "unscales"),
    [
        (DistributedFusedAdam, None),
        (DistributedFusedLAMB, None),
        (DistributedFusedAdam, methodcaller("unscale_grads", torch.tensor(2.0**-16))),
        (DistributedFusedLAMB, methodcaller("set_global_scale", 2.0**16)),
    ],
)
def test_unscaled_fp16_gradients_do_not_underflow(two_package_processes, cls, unscales):
    for moments in two_package_processes(scaled_vector, cls, unscales):
        torch.testing.assert_close(moments, torch.full((4,), 3e-9), rtol=1e-3, atol=0)


def clip_twice(resets):
    """Return the norm of clipped gradients, and that of the next ones."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = DistributedFusedAdam([parameter])
    norms = []
    for clips in (True, False):
        parameter.grad = None
        (parameter * 4.0).sum().backward()
        if clips:
            optimizer.clip_grad_norm(1.0)
        norms.append(optimizer.grad_norm().item())
        resets(optimizer)
    return norms


@pytest.mark.parametrize("resets", [methodcaller("zero_grad"), methodcaller("step")])
def test_clipping_ends_with_the_step(two_package_processes, resets):
    for norms in two_package_processes(clip_twice, resets):
        assert norms == pytest.approx([1.0, 4.0])


def scaled_steps(cls, overlap):
    """Return whether a step with an inf on one process changed parameters, and a sound one."""
    model = build()
    optimizer = cls(model.parameters(), **OPTIONS[cls][1], **{OVERLAP[cls]: overlap})
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    data = batches(dist.get_rank())
    changes = []
    for is_bad in (True, False):
        before = parameters_of(model)
        optimizer.zero_grad()
        factor = float("inf") if is_bad and dist.get_rank() == 1 else 1.0
        scaler.scale(factor * model(data[0]).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        changes.append(not torch.equal(before, parameters_of(model)))
    return changes, scaler.get_scale(), parameters_of(model)


@pytest.mark.parametrize("cls", OPTIONS)
@pytest.mark.parametrize("overlap", [False, True])
def test_gradscaler_skips_a_step_on_all_processes(two_package_processes, cls, overlap):
    results = two_package_processes(scaled_steps, cls, overlap)
    (first, scale, one), (second, other_scale, two) = results
    assert first == second == [False, True]
    assert scale == other_scale == 32.0
    plain, options = OPTIONS[cls]
    options = options | ({"max_grad_norm": torch.inf} if plain is FusedLAMB else {})
    model = build()
    optimizer = plain(model.parameters(), **options)
    sum(model(batches(rank)[0]).square().sum() / 2 for rank in range(2)).backward()
    optimizer.step()
    torch.testing.assert_close(one, parameters_of(model), rtol=1e-4, atol=1e-5)
    assert torch.equal(one, two)


def scaled_step_after_no_sync():
    """Step with gradients that were not averaged when GradScaler checked them, and then were."""
    model = build()
    optimizer = DistributedFusedAdam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with optimizer.no_sync():
        scaler.scale(model(batches(dist.get_rank())[0]).square().sum()).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer.grad_sync\(\)"):
        scaler.step(optimizer)
    scaler.update()
    optimizer.grad_sync()
    scaler.step(optimizer)
    return parameters_of(model)


def test_gradscaler_refuses_gradients_of_no_sync(two_package_processes):
    one, two = two_package_processes(scaled_step_after_no_sync)
    assert torch.equal(one, two) and not torch.equal(one, parameters_of(build()))


def overflow_unscaled_before_averaging(averages):
    """Return whether a step was refused whose gradients of one process overflowed."""
    model = build()
    optimizer = DistributedFusedAdam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    factor = float("inf") if dist.get_rank() == 1 else 1.0
    with optimizer.no_sync():
        scaler.scale(factor * model(batches(0)[0]).square().sum()).backward()
    scaler.unscale_(optimizer)
    averages(optimizer)
    with pytest.raises(RuntimeError, match=r"call optimizer.grad_sync\(\) before"):
        scaler.step(optimizer)
    return torch.equal(parameters_of(model), parameters_of(build()))


@pytest.mark.parametrize(
    "averages",
    [
        methodcaller("clip_grad_norm", 1.0),
        methodcaller("grad_norm"),
        methodcaller("grad_sync"),
    ],
)
def test_gradients_averaged_after_unscale_raise_on_all_processes(two_package_processes, averages):
    assert two_package_processes(overflow_unscaled_before_averaging, averages) == [True, True]


def devices_after_loading():
    """Return the types of the devices of a state, loaded for a parameter on an imitated GPU."""
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.ones(shape, device="cuda")) for shape in ((2, 2), ())]
        optimizer = DistributedFusedAdam(parameters)
        groups = [{**group, "params": [0, 1]} for group in optimizer.param_groups]
        state = {
            index: {
                "step": torch.ones(()),
                **{name: torch.zeros(parameter.shape) for name in ("exp_avg", "exp_avg_sq")},
            }
            for index, parameter in enumerate(parameters)
        }
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        own = optimizer.optim.state.values()
        return [value.device.type for state in own for value in state.values()]


def test_loaded_state_is_on_the_device_of_the_parameter(two_package_processes):
    assert two_package_processes(devices_after_loading) == [["cuda"] * 3] * 2


def manual_scale(overflows):
    model = build()
    optimizer = DistributedFusedLAMB(model.parameters(), **OPTIONS[DistributedFusedLAMB][1])
    optimizer.set_global_scale(128.0)
    before = parameters_of(model)
    loss = 128.0 * model(batches(dist.get_rank())[0]).square().sum()
    (loss * float("inf") if overflows else loss).backward()
    optimizer.complete_reductions()
    optimizer.step()
    return before, parameters_of(model)


def test_lamb_divides_by_the_global_scale_and_skips_overflows(two_package_processes):
    before, after = two_package_processes(manual_scale, True)[0]
    assert torch.equal(before, after)
    model = build()
    options = OPTIONS[DistributedFusedLAMB][1]
    optimizer = FusedLAMB(model.parameters(), **options, max_grad_norm=torch.inf)
    sum(model(batches(rank)[0]).square().sum() / 2 for rank in range(2)).backward()
    optimizer.step()
    after = two_package_processes(manual_scale, False)[0][1]
    torch.testing.assert_close(after, parameters_of(model), rtol=1e-4, atol=1e-5)


def refusals():
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(NotImplementedError, match="average_grad_sync"):
        DistributedFusedAdam(parameters, average_grad_sync=False)
    with pytest.raises(NotImplementedError, match="with_scaled_states"):
        DistributedFusedAdam(parameters, with_scaled_states=True)
    with pytest.raises(TypeError, match="momentum"):
        DistributedFusedLAMB(parameters, momentum=0.9)
    optimizer = DistributedFusedAdam(parameters, bucket_cap_mb=5, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(NotImplementedError, match="2-norm"):
        optimizer.clip_grad_norm(1.0, norm_type=1.0)
    scale = torch.tensor(0.5)
    parameters[0].sum().backward()
    found = optimizer.unscale_grads(scale)
    parameters[0].grad.fill_(torch.inf)
    return parameters[0].grad.tolist(), [*found.values(), *optimizer.unscale_grads(scale).values()]


def test_arguments_without_an_equivalent_raise(two_package_processes):
    for _, found in two_package_processes(refusals):
        assert [value.item() for value in found] == [0.0, 1.0]
