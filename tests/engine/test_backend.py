"""Adapter of real Apex, for which a fake of release 25.05 stands in, and of apex_native."""

import contextlib
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import fake_apex
import numpy as np
import pytest
import torch
import torch.distributed as dist
from apex_native import amp
from apex_native.parallel import DistributedDataParallel
from engine import UserError, backend
from engine.backend import ApexBackend, Backend, unwrap
from engine.checkpoint import TrainingState
from engine.checkpoint import format as checkpoint
from engine.checkpoint.restore import restore
from engine.monitoring.meter import NanCounter
from processes import Processes
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

LEVELS = ("O0", "O1", "O2", "O3")
HALF = {"cast_model_type": torch.float16}  # on the CPU, too


def native() -> Backend:
    return backend.load_backend("native", "O1")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def initialized(name: str, level: str) -> tuple[Backend, nn.Module, torch.optim.Optimizer]:
    """Return an adapter, and a model and optimizer that its ``amp`` has initialized."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    if name == "apex":
        real = ApexBackend(fake_apex.create(level), "real Apex")
        return real, *real.apex.amp.initialize(model, optimizer)
    half = HALF if level in ("O2", "O3") else {}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **half)
    return native(), model, optimizer


@pytest.fixture(params=["apex", "apex_native"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# Loss scale and settings


@pytest.mark.parametrize("level", LEVELS)
def test_properties_of_a_level(name: str, level: str) -> None:
    adapter, *_ = initialized(name, level)
    properties = adapter.amp_properties()
    assert adapter.name == name
    assert properties.opt_level == level
    types = {"O0": torch.float32, "O1": None, "O2": torch.float16, "O3": torch.float16}
    assert properties.cast_model_type == types[level]
    assert bool(properties.keep_batchnorm_fp32) == (level == "O2")
    assert bool(properties.master_weights) == (level == "O2")
    assert adapter.has_dynamic_loss_scale() == (level in ("O1", "O2"))
    assert float(adapter.loss_scale()) == (2.0**16 if level in ("O1", "O2") else 1.0)


@pytest.mark.parametrize("level", LEVELS)
def test_functions_are_called_without_casts(name: str, level: str) -> None:
    """Apex has none to disable but at O1, and fails there."""
    adapter, *_ = initialized(name, level)
    product = adapter.without_casts(torch.mm, torch.eye(3), torch.eye(3))
    assert product.dtype == torch.float32
    if name == "apex" and level == "O1":
        adapter.apex.amp.disable_casts.assert_called_once()


Pair = namedtuple("Pair", ["image", "text"])


def test_half_outputs_are_converted_and_others_kept() -> None:
    half, double = torch.ones(2).half(), torch.ones(2).double()
    found = backend.in_fp32({"out": [half, double], "pair": Pair(half.bfloat16(), None)})
    assert [tensor.dtype for tensor in found["out"]] == [torch.float32, torch.float64]
    assert found["pair"].image.dtype == torch.float32 and found["pair"].text is None
    assert backend.in_fp32(found["out"])[0] is found["out"][0]


class ModelOutput(OrderedDict):
    """As that of transformers, whose items are attributes, too."""

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass(frozen=True)
class Scores:
    logits: torch.Tensor
    cached: torch.Tensor = field(init=False)  # not set


class Attributes(dict):
    """Dict whose items are its attributes."""

    def __init__(self, **items: object) -> None:
        super().__init__(items)
        self.__dict__ = self


def test_nan_is_noticed_in_outputs_of_data_classes() -> None:
    counter = NanCounter(torch.device("cpu"))
    for value in (1.0, math.nan):
        counter.update([Scores(torch.tensor([value])), torch.tensor(value)])
    assert counter.compute() == 1  # batch


def test_outputs_of_dict_and_data_classes_are_converted_in_a_copy() -> None:
    output, scores = ModelOutput(), Scores(torch.ones(2).half())
    output["logits"] = torch.ones(2).bfloat16()
    attributes = Attributes(logits=torch.ones(2).half())
    shape, values = torch.ones(2).shape, np.ones(2)
    found, found_scores, found_attributes, *same = backend.in_fp32(
        [output, scores, attributes, shape, values]
    )
    assert found_attributes.logits is found_attributes["logits"]
    assert found_attributes.logits.dtype == torch.float32
    assert attributes.logits.dtype == torch.float16
    assert same[0] is shape and same[1] is values
    assert type(found) is ModelOutput
    assert found.logits is found["logits"] and found.logits.dtype == torch.float32
    assert found_scores.logits.dtype == torch.float32
    assert (output.logits.dtype, scores.logits.dtype) == (torch.bfloat16, torch.float16)


def test_outputs_of_other_classes_are_left_under_the_casts(capsys) -> None:
    """Their half tensors would be summed in half."""
    adapter, *_ = initialized("apex_native", "O4")
    types = []

    def update(outputs: object, targets: torch.Tensor) -> None:
        types.append(torch.mm(targets, targets).dtype)

    for outputs in (SimpleNamespace(logits=torch.ones(2)), torch.ones(2)):
        for _ in range(2):
            adapter.update_metrics(update, outputs, torch.eye(2))
    assert types == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert capsys.readouterr().err.count("hold a SimpleNamespace, which is not converted") == 1


def test_the_loss_scale_is_saved_and_restored(name: str) -> None:
    adapter, *_ = initialized(name, "O1")
    adapter.apex.amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 7}})
    assert float(adapter.loss_scale()) == 2.0**10
    assert adapter.apex.amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 7}
    }


def test_the_loss_scale_of_apex_native_stays_on_the_device() -> None:
    adapter, *_ = initialized("apex_native", "O1")
    assert isinstance(adapter.loss_scale(), torch.Tensor)


# Masters


def halves_of(model: nn.Module) -> set[torch.Tensor]:
    return {p for p in model.parameters() if p.dtype == torch.float16}


def test_apex_creates_its_lazy_masters_when_they_are_needed() -> None:
    adapter, model, optimizer = initialized("apex", "O2")
    parameters = set(model.parameters())
    assert adapter.trained_parameters(optimizer) == parameters
    assert not optimizer._amp_stash.lazy_init_called  # by a query
    masters = adapter.master_weights(optimizer)
    assert masters.keys() == halves_of(model) and len(masters) == 4
    for half, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.half(), half)
    assert adapter.master_weights(optimizer) == masters  # the same ones
    held = {tensor for group in optimizer.param_groups for tensor in group["params"]}
    assert held == {*masters.values(), *(parameters - halves_of(model))}


@pytest.mark.parametrize("level", LEVELS)
def test_trained_parameters_are_those_of_the_model(name: str, level: str) -> None:
    adapter, model, optimizer = initialized(name, level)
    for _ in range(2):
        assert adapter.trained_parameters(optimizer) >= set(model.parameters())
        masters = adapter.master_weights(optimizer)
        assert masters.keys() == (halves_of(model) if level == "O2" else set())
        assert all(master.dtype == torch.float32 for master in masters.values())


def test_the_fp32_state_has_the_master_of_a_shared_parameter_under_all_names(name: str) -> None:
    adapter, model, optimizer = initialized(name, "O2")
    model.append(model[0])
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        adapter.master_weights(optimizer)[model[0].weight].fill_(1.0 + 2.0**-20)
    state = adapter.fp32_state_dict(model, optimizer)
    assert (state["0.weight"] == 1.0 + 2.0**-20).all()
    assert torch.equal(state["3.weight"], state["0.weight"])


def test_a_parameter_that_is_not_trained_is_missing(name: str) -> None:
    adapter, model, optimizer = initialized(name, "O2")
    other = nn.Parameter(torch.zeros(1))
    assert other not in adapter.trained_parameters(optimizer)


def test_an_optimizer_without_amp_has_no_masters(name: str) -> None:
    adapter, *_ = initialized(name, "O1")
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    assert adapter.master_weights(optimizer) == {}
    assert adapter.trained_parameters(optimizer) == set(model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_the_fp32_state_has_the_values_of_the_masters(name: str, level: str) -> None:
    adapter, model, optimizer = initialized(name, level)
    small = 2.0**-20  # which fp16 would round to nothing beside 1
    with torch.no_grad():
        for half, master in adapter.master_weights(optimizer).items():
            half.fill_(1.0)
            master.fill_(1.0 + small)
    state = adapter.fp32_state_dict(model, optimizer)
    assert state.keys() == network().state_dict().keys()
    if level == "O2":
        assert state["0.weight"].dtype == torch.float32
        assert (state["0.weight"] == 1.0 + small).all()
        assert not state["0.weight"].requires_grad

    expected = {key: value.float() + 2 * small for key, value in network().state_dict().items()}
    adapter.load_fp32_state_dict(model, optimizer, expected)
    loaded = adapter.fp32_state_dict(model, optimizer)
    for key, value in model.named_parameters():
        assert torch.equal(value, expected[key].to(value.dtype))
        assert torch.equal(loaded[key].to(value.dtype), value)
        if level == "O2":
            assert torch.equal(loaded[key], expected[key])


def test_model_that_is_saved_by_other_names_is_loaded() -> None:
    adapter = backend.load_backend("native", "O2")
    model = nn.Sequential(checkpoint_wrapper(network()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **HALF)
    saved = adapter.fp32_state_dict(model, optimizer)
    expected = {name: value.mul(1 + 2.0**-20).to(value.dtype) for name, value in saved.items()}
    assert "0.0.weight" in expected  # the parameter's name has the wrapper's, too
    adapter.load_fp32_state_dict(model, optimizer, expected)
    loaded = adapter.fp32_state_dict(model, optimizer)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [("apex", "apex"), ("apex", "apex_native"), ("apex_native", "apex")],
)
def test_a_checkpoint_fits_either_backend(
    tmp_path: Path, saved_by: str, loaded_by: str, level: str
) -> None:
    """Masters exist before the moments are loaded, which would be rounded to fp16 otherwise.

    At O3 there are none, and those of torch's AdamW are fp16.
    """
    dtype = torch.float16 if level == "O3" else torch.float32
    adapter, model, optimizer = initialized(saved_by, level)
    adapter.master_weights(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.3)
    optimizer.step()
    entries = checkpoint.collect(TrainingState(model, optimizer, adapter))
    path = tmp_path / "last.pt"
    checkpoint.write(path, entries)
    assert entries["scale_is_dynamic"] == (level in ("O1", "O2"))

    adapter, model, optimizer = initialized(loaded_by, level)
    restore(path, checkpoint.load(path), TrainingState(model, optimizer, adapter))
    again = checkpoint.collect(TrainingState(model, optimizer, adapter))
    moments = [entries["optimizer"]["state"], again["optimizer"]["state"]]
    for index, expected in moments[0].items():
        for moment in ("exp_avg", "exp_avg_sq"):
            assert moments[1][index][moment].dtype == dtype
            assert torch.equal(moments[1][index][moment], expected[moment])
    for key, value in entries["model"].items():
        assert torch.equal(again["model"][key].float(), value.float())
    assert again["amp"] == entries["amp"]


# Private attributes of real Apex, for which there is no public way


def without_amp_state(apex: ModuleType, optimizer: torch.optim.Optimizer) -> None:
    del apex.amp._amp_state


def without_properties(apex: ModuleType, optimizer: torch.optim.Optimizer) -> None:
    del apex.amp._amp_state.opt_properties


def without_lazy_init(apex: ModuleType, optimizer: torch.optim.Optimizer) -> None:
    del optimizer._amp_lazy_init


def without_masters(apex: ModuleType, optimizer: torch.optim.Optimizer) -> None:
    optimizer._amp_lazy_init = lambda: None


@pytest.mark.parametrize(
    "change", [without_amp_state, without_properties, without_lazy_init, without_masters]
)
def test_an_apex_without_its_private_attributes_is_an_error(change: Callable) -> None:
    adapter, model, optimizer = initialized("apex", "O2")
    change(adapter.apex, optimizer)
    with pytest.raises(UserError, match="this Apex has no .*; use --backend native"):
        adapter.fp32_state_dict(model, optimizer)


def test_an_apex_without_its_scalers_is_an_error() -> None:
    adapter, *_ = initialized("apex", "O2")
    del adapter.apex.amp._amp_state.loss_scalers
    with pytest.raises(UserError, match="this Apex has no loss_scalers"):
        adapter.has_dynamic_loss_scale()


@pytest.mark.gpu
@pytest.mark.apex
@pytest.mark.parametrize("level", LEVELS)
def test_real_apex_has_the_private_attributes(level: str) -> None:
    if problem := backend.problem_with_apex(level):
        pytest.skip(problem.reason)
    processes = Processes("nccl", 1)  # Apex changes torch's functions for good
    try:
        [(found_level, types)] = processes(attributes_of_real_apex, level)
    finally:
        processes.stop()
    assert found_level == level
    assert types == ({torch.float32} if level == "O2" else set())


def attributes_of_real_apex(level: str) -> tuple[str, set[torch.dtype]]:
    adapter = backend.load_backend("apex", level)
    model = network().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model, optimizer = adapter.apex.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert adapter.has_dynamic_loss_scale() == (level in ("O1", "O2"))
    masters = adapter.master_weights(optimizer)
    assert masters.keys() == (halves_of(model) if level == "O2" else set())
    assert adapter.trained_parameters(optimizer) >= set(model.parameters())
    matrix = torch.eye(3, device="cuda")
    assert torch.mm(matrix, matrix).dtype == (torch.float16 if level == "O1" else torch.float32)
    assert adapter.without_casts(torch.mm, matrix, matrix).dtype == torch.float32
    properties = adapter.amp_properties()
    return properties.opt_level, {master.dtype for master in masters.values()}


# Communication


class ApexWrapper(nn.Module):
    """Gradient averaging as Apex's DistributedDataParallel switches it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.averages = module, True

    def disable_allreduce(self) -> None:
        self.averages = False

    def enable_allreduce(self) -> None:
        self.averages = True


def averages_within(kind: str, enabled: bool) -> tuple[bool, bool]:
    """Return whether a wrapped model averages gradients in ``gradient_sync`` and after it."""
    wrappers = {
        "apex": ApexWrapper,
        "apex_native": DistributedDataParallel,
        "torch": nn.parallel.DistributedDataParallel,
    }
    model = wrappers[kind](nn.Linear(2, 1))

    def averages() -> bool:
        return getattr(model, "averages", None) or getattr(
            model, "require_backward_grad_sync", False
        )

    with contextlib.suppress(KeyError), native().gradient_sync(model, enabled):
        within = averages()
        raise KeyError  # an error restores it, too
    return within, averages()


@pytest.mark.parametrize("kind", ["apex", "apex_native", "torch"])
def test_gradients_are_averaged_only_where_enabled(two_processes: Processes, kind: str) -> None:
    assert two_processes(averages_within, kind, True) == [(True, True)] * 2
    assert two_processes(averages_within, kind, False) == [(False, True)] * 2


def synced_without_a_wrapper() -> bool:
    with native().gradient_sync(nn.Linear(2, 1), False):
        return True


def test_one_process_needs_no_wrapper(one_process: Processes) -> None:
    assert one_process(synced_without_a_wrapper) == [True]


def chosen_format(package: str, choice: bool | None) -> tuple | str:
    """Return what ``memory_format`` chooses and warns of, or its error."""
    kind = ApexBackend if package == "apex" else Backend
    said: list[str] = []
    try:
        adapter = kind(ModuleType(package), "")
        return adapter.memory_format(choice, said.append) == torch.channels_last, said
    except UserError as error:
        return str(error)


def test_real_apex_supports_channels_last_in_one_process_only(
    one_process: Processes, two_processes: Processes
) -> None:
    for processes in (one_process, two_processes):
        assert processes(chosen_format, "apex_native", True)[0] == (True, [])
        assert processes(chosen_format, "apex_native", None)[0] == (True, [])
        for package in ("apex", "apex_native"):
            assert processes(chosen_format, package, False)[0] == (False, [])
    assert one_process(chosen_format, "apex", True) == [(True, [])]
    assert one_process(chosen_format, "apex", None) == [(True, [])]
    (is_channels_last, [said]), _ = two_processes(chosen_format, "apex", None)
    assert is_channels_last is False and said.startswith("NCHW, because real Apex's DDP")
    assert "--channels-last" in two_processes(chosen_format, "apex", True)[1]


def group_sizes(size: int) -> int:
    with mock.patch("torch.distributed.new_subgroups", wraps=dist.new_subgroups) as create:
        group = native().syncbn_group(size, timeout_s=7200)
    assert all(call.kwargs["timeout"] == timedelta(seconds=7260) for call in create.mock_calls)
    return dist.get_world_size(group)


def test_syncbn_groups_divide_the_processes(two_processes: Processes) -> None:
    for size, expected in ((0, 2), (1, 1), (2, 2)):
        assert two_processes(group_sizes, size) == [expected] * 2
    with pytest.raises(AssertionError, match="--sync-bn-group 3 must divide 2 processes"):
        two_processes(group_sizes, 3)


def tuned(delay: bool) -> tuple[list[bool], bool]:
    """Return which models average at once, and whether torch cuts graphs at buckets."""
    models = [DistributedDataParallel(nn.Linear(2, 1), delay_allreduce=delay)]
    models += [nn.parallel.DistributedDataParallel(nn.Linear(2, 1)), nn.Linear(2, 1)]
    with mock.patch.object(torch._dynamo.config, "optimize_ddp", True):
        for model in models:
            native().tune_communication(model, compress=False, cuda_graphs=True)
        cuts = torch._dynamo.config.optimize_ddp
    return [getattr(model, "averages_at_once", False) for model in models], cuts


@pytest.mark.parametrize("delay", [False, True])
def test_cuda_graphs_are_whole_and_average_at_once(two_processes: Processes, delay: bool) -> None:
    assert two_processes(tuned, delay) == [([not delay, False, False], False)] * 2


def test_torch_has_the_switch_for_cuda_graphs() -> None:
    """It is in a module with a private name; setting an unknown name raises AttributeError."""
    with (
        mock.patch.object(torch._dynamo.config, "optimize_ddp", True),
        pytest.raises(AttributeError),
    ):
        torch._dynamo.config.no_such_switch = True
    assert torch._dynamo.config.optimize_ddp in (True, "ddp_optimizer")


def compressed() -> list[bool]:
    """Return whether models in DDP and in none get a hook that compresses."""
    with mock.patch.object(nn.parallel.DistributedDataParallel, "register_comm_hook") as register:
        for model in (nn.Linear(2, 1), nn.parallel.DistributedDataParallel(nn.Linear(2, 1))):
            native().tune_communication(model, compress=True, cuda_graphs=False)
    return [call.args[1].__name__ for call in register.call_args_list]


def test_gradients_in_ddp_can_be_compressed(two_processes: Processes) -> None:
    assert two_processes(compressed) == [["bf16_compress_hook"]] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_are_not_compressed(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 1).to(dtype)
    with pytest.raises(UserError, match="--compress-gradients: .* leave it out"):
        native().tune_communication(model, compress=True, cuda_graphs=False)
    native().tune_communication(model, compress=False, cuda_graphs=False)


# Wrappers, and the choice


def unwrapped() -> list[bool]:
    module = nn.Linear(2, 1)
    wrapped = [
        module,
        nn.DataParallel(module),
        nn.parallel.DistributedDataParallel(module),
        DistributedDataParallel(module),
        type("Wrapper", (ApexWrapper,), {"__module__": "apex.parallel.distributed"})(module),
    ]
    return [unwrap(model) is module for model in wrapped]


def test_wrappers_are_removed(two_processes: Processes) -> None:
    assert two_processes(unwrapped) == [[True] * 5] * 2
    model = ApexWrapper(nn.Linear(2, 1))  # a model with a submodule called module
    assert unwrap(model) is model


def test_the_backend_says_what_it_is_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native().reason == "apex_native, as requested"
    problem = mock.Mock(return_value=backend.Problem("there is a reason"))
    monkeypatch.setattr(backend, "problem_with_apex", problem)
    chosen = backend.load_backend("auto", "O2", compiled=True)
    assert (chosen.name, chosen.reason) == (
        "apex_native",
        "apex_native, because there is a reason",
    )
    problem.assert_called_once_with("O2", compiled=True)
    with pytest.raises(UserError, match="--backend apex: there is a reason; use --backend native"):
        backend.load_backend("apex", "O2")


class NormWithActivation(nn.BatchNorm2d):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).relu()


class SyncedByApex(nn.BatchNorm2d):
    pass


def test_apex_does_not_drop_what_the_class_of_a_norm_adds(capsys: pytest.CaptureFixture) -> None:
    def convert(model: nn.Module, process_group: object) -> nn.Module:
        for name, part in [*model.named_modules()]:
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                model.set_submodule(name, SyncedByApex(part.num_features))
        return model

    adapter = ApexBackend(
        SimpleNamespace(parallel=SimpleNamespace(convert_syncbn_model=convert)), ""
    )
    own = nn.Sequential(NormWithActivation(4))
    model = nn.Sequential(nn.BatchNorm2d(4), own, nn.SyncBatchNorm(4))
    kinds = [type(part) for part in adapter.convert_syncbn_model(model, None)]
    assert kinds == [SyncedByApex, nn.Sequential, SyncedByApex]
    assert type(own[0]) is NormWithActivation
    assert "warning: not converted to SyncBN: 1.0 with a forward pass" in capsys.readouterr().err


def test_converted_norms_keep_their_mode_and_stay_frozen() -> None:
    """Apex makes new ones, in training mode."""

    def convert(model: nn.Module, process_group: object) -> nn.Module:
        model[1] = nn.BatchNorm2d(4)
        return model

    parallel = SimpleNamespace(convert_syncbn_model=convert)
    backend = Backend(SimpleNamespace(parallel=parallel), "")
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    model[1].eval()
    model[1].weight.requires_grad_(False)
    converted = backend.convert_syncbn_model(model, None)
    assert [module.training for module in converted.modules()] == [True, True, False]
    assert [one.requires_grad for one in converted.parameters()] == [True, True, False, True]
