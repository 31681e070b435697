"""Casts for functions of the user's own, and where casts end."""

import threading
import types

import pytest
import torch
from apex_native import amp
from torch import nn
from torch.utils.data import DataLoader

HALF = torch.bfloat16  # the type of O4, on any device


@pytest.fixture(autouse=True)
def cpu_with_bfloat16(monkeypatch):
    """Let any CPU compute in bfloat16, which one without the instructions for it emulates."""
    monkeypatch.setattr("apex_native.amp.frontend.half_type", lambda dtype, device: HALF)


def seen(*tensors):
    """Return the types of the arguments."""
    return [tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize(
    ("decorate", "given", "expected"),
    [
        (amp.half_function, torch.float32, HALF),
        (amp.bfloat16_function, torch.float32, HALF),
        (amp.float_function, HALF, torch.float32),
        (amp.promote_function, HALF, HALF),
    ],
)
def test_decorated_function_is_cast_at_o4_only(decorate, given, expected):
    function = decorate(seen)
    tensor = torch.ones(2, dtype=given)
    assert function(tensor, 3, "word") == [given]  # before initialize
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    assert function(tensor, 3, "word") == [expected]
    with amp.disable_casts():
        assert function(tensor) == [given]
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    assert function(tensor) == [given]


@pytest.mark.parametrize(
    ("decorate", "given", "expected"),
    [
        (amp.half_function, torch.float32, HALF),
        (amp.float_function, HALF, torch.float32),
        (amp.promote_function, HALF, HALF),
    ],
)
@pytest.mark.parametrize("is_disabled", [False, True])
def test_casts_without_initialize_are_those_of_torchs_autocast(
    monkeypatch, decorate, given, expected, is_disabled
):
    """As in a package whose main file has been migrated, and others not."""
    monkeypatch.setattr(amp._amp_state, "level", None)
    if is_disabled:
        amp.initialize(nn.Linear(1, 1), opt_level="O1", enabled=False, verbosity=0)
    tensor = torch.ones(2, dtype=given)
    with torch.autocast("cpu", HALF):
        assert decorate(seen)(tensor) == [expected]
        assert decorate(torch.is_autocast_enabled)("cpu") is False
        with amp.disable_casts():
            assert not torch.is_autocast_enabled("cpu")
            assert decorate(seen)(tensor) == [given]
        assert torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cuda", True)  # which torch.autocast does on a GPU only
    try:
        with amp.disable_casts():
            assert not torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_promote_function_uses_the_widest_type():
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    function = amp.promote_function(lambda tensors, other: seen(*tensors, other))
    half, single = torch.ones(1, dtype=HALF), torch.ones(1)
    assert function([half, half], half) == [HALF] * 3
    assert function([half, half], single) == [torch.float32] * 3
    assert function([half, torch.ones(1, dtype=torch.float16)], half) == [torch.float32] * 3
    assert function([torch.ones(1, dtype=torch.int64)], half) == [torch.int64, HALF]
    of_mapping = amp.promote_function(lambda tensor, named: seen(tensor, named["a"]))
    assert of_mapping(half, {"a": single}) == [torch.float32] * 2
    double = torch.ones(1, dtype=torch.float64)
    assert of_mapping(3, {"a": double}) == [torch.float64]


@pytest.mark.parametrize("decorate", [amp.half_function, amp.promote_function])
def test_tensors_on_another_device_are_not_cast(decorate):
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    function = decorate(lambda tensors, other: seen(*tensors, other))
    here, elsewhere = torch.ones(1, dtype=HALF), torch.ones(1, device="meta")
    expected = HALF if decorate is amp.half_function else torch.float32
    assert function([here, elsewhere], other=elsewhere) == [expected, torch.float32, torch.float32]


class Target:
    """A target whose method `to` casts all that it holds."""

    def __init__(self, labels):
        self.labels = labels

    def to(self, dtype):
        return Target(self.labels.to(dtype))


@pytest.mark.parametrize(
    "decorate",
    [amp.half_function, amp.bfloat16_function, amp.float_function, amp.promote_function],
)
def test_objects_with_a_method_to_are_not_cast(decorate):
    """As in Apex, whose casts of inputs of models are the only ones that call it."""
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    function = decorate(lambda targets, x: targets[0].labels)
    assert function([Target(torch.arange(2))], torch.ones(2)).dtype == torch.int64


@pytest.mark.parametrize("name", ["half", "float", "promote", "bfloat16"])
def test_register_half_function(name):
    module = types.SimpleNamespace(function=seen)
    register = getattr(amp, f"register_{name}_function")
    register(module, "function")
    assert module.function is seen
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    mixed = torch.ones(1, dtype=HALF), torch.ones(1)
    expected = HALF if name in ("half", "bfloat16") else torch.float32
    assert module.function(*mixed) == [expected] * 2
    with pytest.raises(ValueError, match="no function absent"):
        register(module, "absent")


def test_register_float_function():
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    assert layer(x).dtype == HALF
    assert amp.float_function(layer.forward)(x).dtype == torch.float32


def test_casts_apply_to_the_thread_that_called_initialize():
    """Unlike Apex's, which are of the process."""
    layer = torch.nn.Linear(2, 2)
    amp.initialize(layer, opt_level="O4", verbosity=0)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.is_autocast_enabled("cpu")))
    thread.start()
    thread.join()
    assert seen == [False]


class Product(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.ones(2, 2) @ torch.ones(2, 2)


def test_data_loader_workers_compute_without_casts():
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == HALF
    (batch,) = DataLoader(Product(), batch_size=2, num_workers=1)
    assert batch.dtype == torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_permanent_overflow_raises_and_names_the_gradient(level):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model[0].weight.register_hook(lambda grad: grad * float("nan"))

    def train():
        for _ in range(100):
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    with pytest.raises(FloatingPointError, match=r"32 backward passes.* that of 0\.weight"):
        train()
