"""Parameter groups, schedule, micro-batches, frozen parts, and the average of the weights."""

import copy
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from apex_native import amp
from engine import UserError, backend, distributed, optim
from processes import Processes
from self_initializing import SelfInitializing
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import weight_norm
from versioned import Versioned


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 4))


# Batches


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [[0], [1], [2]]), (2, [[0, 1], [2]]), (4, [[0, 1, 2]])]
)
def test_micro_batches_are_grouped_by_step(size: int, expected: list) -> None:
    assert list(optim.micro_batches(iter(range(3)), size)) == expected


def test_micro_batches_are_loaded_when_they_are_needed() -> None:
    loaded = []
    groups = optim.micro_batches((loaded.append(index) for index in range(9)), 2)
    assert loaded == []
    next(groups)
    assert loaded == [0, 1]


@pytest.mark.parametrize(
    ("batch_size", "gpus", "last"), [(8, 8, 1), (5, 4, 1), (64, 2, 32), (7, 0, 7)]
)
def test_smallest_replica_batch_is_that_of_the_last_gpu(
    monkeypatch: pytest.MonkeyPatch, batch_size: int, gpus: int, last: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert optim.smallest_replica_batch(batch_size) == last
    assert last == len(torch.arange(batch_size).chunk(max(1, gpus))[-1])  # as DataParallel does


# Parameter groups and learning rates


def test_param_groups_hold_the_trained_parameters() -> None:
    model = network()
    model[1].weight.requires_grad_(False)
    [group] = optim.param_groups(model, 0.1, decay_weights_only=False)
    assert group == {"params": [model[1].bias, model[3].weight, model[3].bias], "lr": 0.1}
    weights, others = optim.param_groups(model, 0.1, decay_weights_only=True)
    assert weights == {"params": [model[3].weight], "lr": 0.1}
    assert others == {"params": [model[1].bias, model[3].bias], "lr": 0.1, "weight_decay": 0.0}


def test_scale_lr_scales_all_groups() -> None:
    parameters = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.01)]
    optimizer = torch.optim.SGD(parameters)
    assert optim.scale_lr(optimizer, 4) == "learning rate 0.1 × 4 = 0.4 (--scale-lr)"
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.04])


def test_lr_factor_in_steps() -> None:
    options = {"schedule": "step", "epochs": 9, "warmup_epochs": 2.0}
    rates = [optim.lr_factor(epoch, **options) for epoch in (0.5, 2, 2.9, 3, 5.9, 6, 8.9)]
    assert rates == pytest.approx([0.25, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_lr_factor_without_a_schedule() -> None:
    options = {"schedule": "none", "epochs": 9, "warmup_epochs": 0.0}
    assert [optim.lr_factor(epoch, **options) for epoch in (0, 0.1, 5, 9)] == [1, 1, 1, 1]


def test_lr_factor_of_the_cosine() -> None:
    """From 1 after the warm-up over 0.5 half way to 0 at the end."""
    options = {"schedule": "cosine", "epochs": 10, "warmup_epochs": 2.0}
    rates = [optim.lr_factor(epoch, **options) for epoch in (1, 2, 4, 6, 8, 10, 11)]
    assert rates == pytest.approx([0.5, 1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6)


# The average of the weights


def test_the_average_is_of_fp32_masters() -> None:
    model = network()
    ema = optim.Ema(model, 0.9)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)  # fp16 can't hold such steps
    half = {"cast_model_type": torch.float16}  # on the CPU, too
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **half)
    for parameter in amp.master_params(optimizer):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = backend.load_backend("native", "O2").fp32_state_dict(model, optimizer)
    masters = {master.data_ptr() for master in amp.master_params(optimizer)}
    assert {tensor.data_ptr() for tensor in state.values()} == masters  # without copies
    ema.update(state, 10**6)
    for name, average in ema.module.state_dict().items():
        expected = 0.9 * before[name] + 0.1 * (before[name].half().float() - 1e-5)
        torch.testing.assert_close(average, expected, rtol=0, atol=1e-7)


def test_complex_weights_are_averaged() -> None:
    model = nn.ParameterList([torch.zeros(2, dtype=torch.complex64), torch.zeros(2)])
    ema = optim.Ema(model, 0.9)
    ema.update({"0": torch.full((2,), 1 + 2j), "1": torch.ones(2)}, 10**6)
    averages = [value.tolist() for value in ema.module.state_dict().values()]
    assert averages[0] == pytest.approx([0.1 + 0.2j] * 2)
    assert averages[1] == pytest.approx([0.1] * 2)


def test_masks_that_are_parameters_stay_infinite() -> None:
    model = nn.ParameterList([torch.tensor([0.0, -torch.inf]), torch.zeros(2)])
    ema = optim.Ema(model, 0.9)
    ema.update({"0": torch.tensor([0.0, -torch.inf]), "1": torch.tensor([1.0, torch.inf])}, 10**6)
    averages = [value.tolist() for value in ema.module.state_dict().values()]
    assert averages[0] == [0.0, -torch.inf]
    assert averages[1] == [pytest.approx(0.1), torch.inf]  # a trained weight


def test_weights_that_hooks_save_in_another_form_are_averaged() -> None:
    model = nn.Linear(2, 3, bias=False)

    def transpose(_: object, state: dict, prefix: str, *__: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].T.clone()

    model.register_state_dict_post_hook(transpose)
    model.register_load_state_dict_pre_hook(transpose)
    ema = optim.Ema(model, 0.9)
    before = model.weight.detach().clone()
    ema.update({"weight": before.T + 1}, 10**6)
    torch.testing.assert_close(ema.module.weight, before + 0.1)


def test_weights_that_the_loop_has_changed_are_saved_and_averaged() -> None:
    """As by clamp_(), which the next step takes over into the masters."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    half = {"cast_model_type": torch.float16}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **half)
    with amp.scale_loss(model(torch.ones(2, 48)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    with torch.no_grad():
        model[1].weight.clamp_(-0.01, 0.01)
    state = backend.load_backend("native", "O2").fp32_state_dict(model, optimizer)
    assert state["1.weight"].abs().max() <= 0.0101 and state["3.weight"].abs().max() > 0.1


def test_tied_weights_are_averaged_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    ema = optim.Ema(model, 0.9)
    before = model[0].weight.detach().clone()
    ema.update({name: torch.zeros(2, 2) for name in model.state_dict()}, 10**6)
    torch.testing.assert_close(ema.module[0].weight, 0.9 * before)


@pytest.mark.parametrize(("step", "kept"), [(0, 0.1), (8, 0.5), (80, 0.9), (10**6, 0.9)])
def test_the_first_updates_have_a_lower_decay(step: int, kept: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    ema = optim.Ema(model, 0.9)
    ema.module.weight.fill_(1.0)
    ema.update({"weight": torch.zeros(1, 1)}, step)
    assert ema.module.weight.item() == pytest.approx(kept)


def test_statistics_are_averaged_and_counters_are_copied() -> None:
    model = nn.BatchNorm1d(2)
    ema = optim.Ema(model, 0.9)
    model.running_mean.fill_(1.0)
    model.num_batches_tracked.fill_(7)
    ema.update(model.state_dict(), 10**6)
    torch.testing.assert_close(ema.module.running_mean, torch.full((2,), 0.1))
    assert ema.module.num_batches_tracked == 7
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())


# Frozen parts and eval mode


class WithConstants(nn.Linear):
    """A layer with a constant of shared memory, a view, and a state that is no tensor."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        self.register_buffer("grid", torch.arange(3.0).expand(4, 3), persistent=False)
        self.register_buffer("view", torch.full((6,), value)[::2])
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("count", torch.tensor(int(value), dtype=torch.int16))

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


def test_views_are_averaged_and_masks_and_extra_states_are_not() -> None:
    model = WithConstants(1.0)
    ema = optim.Ema(model, 0.5)
    model.view.fill_(2.0)
    ema.update(model.state_dict(), 100)
    assert torch.equal(ema.module.view, torch.full((3,), 1.5))
    assert torch.equal(ema.module.mask, model.mask)
    model.mask.zero_()  # no longer infinite
    ema.update(model.state_dict(), 100)
    assert torch.equal(ema.module.mask, torch.zeros(2))
    model.mask.fill_(2.0)
    ema.update(model.state_dict(), 100)
    assert torch.equal(ema.module.mask, torch.ones(2))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_the_average_keeps_the_types_of_buffers_that_amp_has_cast(kind: torch.dtype) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("grid", torch.zeros(2, dtype=kind))
    ema = optim.Ema(model, 0.5)
    ema.update(model.state_dict() | {"grid": torch.ones(2)}, 100)
    assert torch.equal(ema.module.grid, torch.full((2,), 0.5, dtype=kind))


def test_the_average_has_the_extra_state_of_the_model() -> None:
    """It has no mean, and may count the steps or hold a scale that the forward pass uses."""
    model = nn.Sequential(Versioned(2, 2))
    ema = optim.Ema(model, 0.5)
    before = copy.deepcopy(model[0].weight.detach())
    model[0].count = 3
    nn.init.zeros_(model[0].weight)
    ema.update(model.state_dict(), 100)
    assert ema.module[0].count == 3
    assert torch.equal(ema.module[0].weight, before / 2)


def buffers_after_a_broadcast() -> list[torch.Tensor]:
    model = WithConstants(float(dist.get_rank()))
    nn.init.constant_(model.bias.requires_grad_(False), dist.get_rank())
    nn.init.constant_(model.weight, dist.get_rank())
    model.register_buffer("hidden", torch.full((2,), float(dist.get_rank())), persistent=False)
    distributed.broadcast_buffers(model)
    assert model.hidden.eq(dist.get_rank()).all()  # such as a recurrent state of its own
    assert model.weight.eq(dist.get_rank()).all()  # trained
    average = nn.Linear(2, 2).requires_grad_(False)  # as of Ema, the same in all processes
    nn.init.constant_(average.weight, dist.get_rank())
    distributed.broadcast_buffers(average)
    assert average.weight.eq(dist.get_rank()).all()
    return [model.grid.contiguous(), model.view.contiguous(), model.count, model.bias]


def masters_after_a_broadcast_of_other_weights() -> bool:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", verbosity=0, cast_model_type=torch.float16
    )
    masters = [one.clone() for one in amp.master_params(optimizer)]
    with torch.no_grad():
        model.weight.fill_(1.0)
    distributed.broadcast_buffers(model)
    return all(map(torch.equal, masters, amp.master_params(optimizer)))


def test_masters_stay_when_an_owner_validates_other_weights(two_processes: Processes) -> None:
    """Such as averaged ones, which it takes out again."""
    assert two_processes(masters_after_a_broadcast_of_other_weights) == [True, True]


def broadcast_buffers_with_other_names() -> float:
    norm = nn.BatchNorm1d(1)
    nn.init.constant_(norm.running_mean, dist.get_rank())
    distributed.broadcast_buffers(nn.Sequential(checkpoint_wrapper(norm)))
    return norm.running_mean.item()


def test_buffers_that_are_saved_by_other_names_are_broadcast(two_processes: Processes) -> None:
    assert two_processes(broadcast_buffers_with_other_names) == [0.0, 0.0]


def broadcast_sparse_buffer() -> bool:
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.eye(3).to_sparse())
    distributed.broadcast_buffers(model)
    return model.edges.is_sparse


def test_sparse_buffers_are_constants(two_processes: Processes) -> None:
    """Such as the adjacency matrix of a graph network."""
    assert two_processes(broadcast_sparse_buffer) == [True, True]


def test_views_and_types_without_a_collective_are_broadcast(two_processes: Processes) -> None:
    """The memory beside a buffer that is a view stays as it is."""
    for grid, view, count, bias in two_processes(buffers_after_a_broadcast):
        assert count == 0
        assert torch.equal(bias, torch.zeros(2))  # a frozen parameter
        assert torch.equal(grid, torch.arange(3.0).expand(4, 3))
        assert torch.equal(view, torch.zeros(3))


def test_a_frozen_part_computes_as_in_validation() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2))
    said = optim.freeze(model, ["0"])
    assert said == "28 of 38 parameters are frozen"
    before = copy.deepcopy(model[0].state_dict())
    with optim.eval_mode(model):
        assert not model.training
    assert model.training
    images = 5 * torch.randn(8, 4)
    model(images).sum().backward()
    torch.testing.assert_close(model[0].state_dict(), before, rtol=0, atol=0)
    with pytest.raises(UserError, match="no such part; it has 0, 1"):
        optim.freeze(model, ["layer1"])
    with pytest.raises(UserError, match="nothing is left to train in the model"):
        optim.freeze(model, ["1"])


def test_one_of_two_encoders_can_be_frozen() -> None:
    model = nn.ModuleDict({"images": nn.Linear(4, 2), "texts": nn.Linear(4, 2)})
    assert optim.freeze(model, ["images"]) == "10 of 20 parameters are frozen"
    with pytest.raises(UserError, match="--freeze images texts: nothing is left to train"):
        optim.freeze(model, ["images", "texts"])


@pytest.fixture
def amp_off_after() -> Iterator[None]:
    yield
    amp.initialize(nn.Identity(), enabled=False)


@pytest.mark.usefixtures("amp_off_after")
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_frozen_parameters_have_the_same_names_at_every_level(opt_level: str) -> None:
    """The state dict of a half model has fp32 copies in their place."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    optim.freeze(model, ["0", "1"])
    model = amp.initialize(model, opt_level=opt_level, verbosity=0)
    assert optim.frozen_parameters(model) == ["0.weight", "0.bias", "1.weight", "1.bias"]


class FrozenNorms(nn.Sequential):
    """Model whose batch norms stay in eval mode, as detection models have them."""

    def train(self, mode: bool = True) -> "FrozenNorms":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def test_training_begins_as_the_model_defines_it() -> None:
    warnings: list[str] = []
    model = FrozenNorms(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    optim.begin_training_mode(model, warnings.append)
    assert [module.training for module in model.modules()] == [True, True, False]
    assert warnings == []
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    optim.begin_training_mode(model, warnings.append)
    assert all(module.training for module in model.modules())
    assert warnings[0].startswith("build_model returned 3 of 3 modules in eval mode")


def test_model_of_torch_compile_is_an_error() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="add --compile instead, or call model.compile()"):
        optim.begin_training_mode(torch.compile(model), pytest.fail)
    model.compile()
    optim.begin_training_mode(model, pytest.fail)


def test_eval_mode_restores_each_submodule() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()
    with pytest.raises(KeyError), optim.eval_mode(model):
        assert not any(module.training for module in model.modules())
        raise KeyError  # an error restores them, too
    assert [module.training for module in model.modules()] == [True, True, False, False]


class Merging(nn.Linear):
    """Layer that merges a weight into another one in eval mode, as those of LoRA."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.low_rank = nn.Parameter(torch.ones(2, 2))
        self.is_merged = False

    def train(self, mode: bool = True) -> "Merging":
        if self.is_merged == mode:
            self.weight.data += -self.low_rank.data if mode else self.low_rank.data
            self.is_merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_eval_mode_ends_by_the_modules_own_way_into_training(is_frozen: bool) -> None:
    model = nn.Sequential(Merging())
    nn.init.zeros_(model[0].weight)
    model[0].train(not is_frozen)
    with optim.eval_mode(model):
        assert model[0].is_merged and model[0].weight.eq(1).all()
    assert model[0].is_merged == is_frozen and model[0].weight.eq(is_frozen).all()
    assert model[0].training != is_frozen


def test_preserved_state_is_that_before_the_body() -> None:
    constant = nn.Module()
    constant.register_buffer("ones", torch.ones(()).expand(2), persistent=False)
    layer = SelfInitializing()
    model = nn.Sequential(layer, constant)
    with pytest.raises(KeyError), optim.state_preserved(model):
        assert layer(torch.tensor([0.0, 2.0])).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
        raise KeyError  # an error restores it, too
    assert (layer.mean, layer.deviation, layer.is_initialized) == (0, 1, False)
    assert layer(torch.tensor([1.0, 3.0])).mean() == 0
    assert (layer.mean, layer.is_initialized) == (2, True)


class Growing(nn.Module):
    """Model that makes its last layer when it knows the size of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.last = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.last is None:
            self.last = nn.Linear(inputs.shape[1], 2)
        return self.last(inputs)


def test_layers_that_a_model_makes_are_kept_where_state_is_preserved() -> None:
    model = Growing()
    with optim.state_preserved(model):
        expected = model(torch.ones(1, 3))
    assert torch.equal(model(torch.ones(1, 3)), expected)
    assert len([*model.parameters()]) == 2


def test_lazy_modules_may_be_initialized_where_state_is_preserved() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with optim.state_preserved(model):
        expected = model.eval()(torch.ones(1, 3))
    assert torch.equal(model(torch.ones(1, 3)), expected)
    assert model[0].in_features == 3


def test_a_scheduler_that_is_made_before_the_schedule_is_an_error() -> None:
    """Its constructor divides the learning rates, for the whole training."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert optim.base_lrs(optimizer.param_groups) == [0.1]
    assert optim.base_lrs([{"lr": 0.1, "lr_scale": 0.5}, {"lr": 0.1}]) == [0.05, 0.1]
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    with pytest.raises(UserError, match="a scheduler of torch has changed the learning rates"):
        optim.base_lrs(optimizer.param_groups)


def test_sgd_is_fused_on_gpus_but_for_sharded_weights() -> None:
    """Torch 2.15 has no fused SGD for DTensor, which would be an error at the first step."""
    on_gpu = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(is_cuda=True)]))
    assert optim.has_fused_sgd(on_gpu)
    on_gpu.set_requires_gradient_sync = None
    assert not optim.has_fused_sgd(on_gpu)
    assert not optim.has_fused_sgd(torch.nn.Linear(1, 1))


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), torch.tensor(2.0)  # no buffer


class WithTeacher(WithConstant):
    """With another model in a list, which keeps it out of the checkpoint."""

    def __init__(self, has_teacher: bool = True) -> None:
        super().__init__()
        self.scale, self.layers = 2.0, [self.layer, self.layer.weight]
        if has_teacher:
            self.teachers = {"first": [nn.Linear(2, 2)]}


def test_a_tensor_that_is_no_buffer_is_not_left_on_the_meta_device() -> None:
    model = optim.build_empty(WithConstant)
    assert model.scale == 2.0 and model.layer.weight.is_meta
    assert optim.build_on_meta(WithConstant).scale.is_meta
    model = optim.build_empty(WithTeacher)
    assert model.layer.weight.is_meta and not model.teachers["first"][0].weight.is_meta
    built = []
    optim.build_empty(lambda: built.append(1) or WithTeacher(has_teacher=False))
    assert len(built) == 1  # on the meta device, without memory


class WithPermutation(nn.Linear):
    """Layer with a random permutation, which reads a value, or has a constant that is no buffer."""

    def __init__(self, reads_value: bool) -> None:
        super().__init__(2, 2)
        self.order = random.sample(range(100), 100)
        self.scale = self.weight.std().item() if reads_value else torch.tensor(2.0)


@pytest.mark.parametrize("reads_value", [False, True])
def test_random_parts_of_empty_models_are_those_of_rank_0(reads_value: bool) -> None:
    random.seed(0)
    expected = WithPermutation(reads_value).order
    random.seed(0)
    assert optim.build_empty(lambda: WithPermutation(reads_value)).order == expected


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_weights_of_convolutions_get_the_format(layout: torch.memory_format) -> None:
    conv = weight_norm(nn.Conv2d(2, 4, 3))
    model = nn.Sequential(nn.Conv3d(2, 2, 3), conv, nn.Linear(2, 2), nn.Conv2d(4, 2, 1))
    parameters = list(model.parameters())
    optim.place(model, torch.device("cpu"), layout)
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert model[1].parametrizations.weight.original1.is_contiguous(memory_format=layout)
    assert model[0].weight.is_contiguous()
    # is_contiguous holds for a 1 × 1 kernel in either format; DDP compares strides.
    assert model[3].weight.stride() == torch.empty(2, 4, 1, 1, memory_format=layout).stride()
