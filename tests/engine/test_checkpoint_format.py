"""Checkpoint files: reading, validation and writing."""

import contextlib
import copy
import errno
import io
import os
import pickle
import random
import re
import struct
import time
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from apex_native import amp
from apex_native.optimizers import FusedAdam, FusedNovoGrad
from engine import UserError, backend, flush_folder, replacing
from engine.checkpoint import TrainingState, inspection
from engine.checkpoint import archive as archive_module
from engine.checkpoint import format as checkpoint
from engine.checkpoint.archive import read
from engine.checkpoint.inspection import check_tuples
from engine.checkpoint.restore import build_with, restore, restore_average
from engine.data.images import MAX_SIZE, ImageSpec
from engine.optim import Ema
from torch import nn
from torchvision import tv_tensors
from versioned import Versioned

NATIVE = backend.load_backend("native", "O1")


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that has taken a step."""
    model = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 40)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
    return TrainingState(model, optimizer, NATIVE)


def entries_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 1) -> dict:
    """Return all entries of a run's checkpoint."""
    rest = {"epoch": 0, "step": step, "samples": 0, "best": 0.5, "ranks": []}
    return checkpoint.collect(state_of(model, optimizer)) | rest


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another one, whose state is its own, as timm's Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups = inner, inner.param_groups

    def state_dict(self) -> dict:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.inner.load_state_dict(state)
        self.param_groups = self.inner.param_groups


def test_optimizer_around_another_one_is_restored(tmp_path: Path) -> None:
    model, inner = small()
    checkpoint.write(tmp_path / "last.pt", entries_of(model, Wrapping(inner)))
    expected = inner.state[model.weight]["exp_avg"].clone()
    inner.state[model.weight]["exp_avg"].zero_()
    entries = checkpoint.load(tmp_path / "last.pt")
    restore(tmp_path / "last.pt", entries, state_of(model, Wrapping(inner)))
    assert torch.equal(inner.state[model.weight]["exp_avg"], expected)


class AggMo(torch.optim.Optimizer):
    """An optimizer with several momenta in a dict, as those of other packages."""

    def __init__(self, parameters: Iterable) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = {0.9: parameter.grad.clone()}


class LikeReal(torch.optim.AdamW):
    """An optimizer that loads its state as real Apex's FusedAdam does."""


LikeReal.__name__, LikeReal.__module__ = "FusedAdam", "apex.optimizers.fused_adam"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    checkpoint.write(tmp_path / "step-1.pt", entries_of(*small()))
    return tmp_path / "step-1.pt"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("saved", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("loaded", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", ["FusedAdam", "AdamW", "SGD"])
def test_moments_have_the_layout_of_their_parameters_and_fused_adams_are_fp32(
    tmp_path: Path,
    kind: str,
    dtype: torch.dtype,
    saved: torch.memory_format,
    loaded: torch.memory_format,
) -> None:
    """Fused kernels assume both, where torch's assume the type of the parameter."""
    adams = ("exp_avg", "exp_avg_sq")
    make, names, moments = {
        "FusedAdam": (LikeReal, adams, torch.float32),
        "AdamW": (torch.optim.AdamW, adams, dtype),
        "SGD": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), ("momentum_buffer",), dtype),
    }[kind]
    model = nn.Conv2d(3, 4, 3).to(memory_format=saved)
    optimizer = make(model.parameters())
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    checkpoint.write(tmp_path / "last.pt", checkpoint.collect(state_of(model, optimizer)))
    expected = copy.deepcopy(optimizer.state_dict()["state"])

    model = nn.Conv2d(3, 4, 3).to(dtype, memory_format=loaded)
    optimizer = make(model.parameters())
    restore(tmp_path / "last.pt", checkpoint.load(tmp_path / "last.pt"), state_of(model, optimizer))
    for index, parameter in enumerate(model.parameters()):
        for name in names:
            moment = optimizer.state[parameter][name]
            assert moment.dtype == moments
            assert moment.stride() == parameter.stride()
            assert torch.equal(moment, expected[index][name].to(moments))


def test_versions_and_extra_state_of_modules_are_saved(tmp_path: Path) -> None:
    """By them a module tells weights that it must convert, as torchvision's MNASNet does."""
    model = nn.Sequential(Versioned(4, 4))
    model[0].count = 3
    state = TrainingState(model, torch.optim.SGD(model.parameters()), NATIVE, Ema(model, 0.9))
    rest = {"epoch": 0, "step": 0, "samples": 0, "best": 0.5, "ranks": []}
    checkpoint.write(tmp_path / "last.pt", checkpoint.to_cpu(checkpoint.collect(state)) | rest)
    expected = copy.deepcopy(model.state_dict())
    entries = checkpoint.load(tmp_path / "last.pt")
    restore(tmp_path / "last.pt", entries, state)
    restore_average(entries["ema"], state)
    built = build_with(entries["model"], lambda: nn.Sequential(Versioned(4, 4)))
    for one in (model, state.ema.module, built):
        torch.testing.assert_close(one.state_dict(), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind",
    [
        FusedNovoGrad,
        *(torch.optim.Adafactor, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam),
        *(torch.optim.RMSprop, torch.optim.Rprop, AggMo),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_any_optimizer_is_restored(tmp_path: Path, kind: type, dtype: torch.dtype) -> None:
    """Its tensors may be of other shapes and types than the parameters'."""
    model = nn.Conv2d(3, 4, 3, dtype=dtype)
    optimizer = kind(model.parameters())
    model(torch.randn(2, 3, 8, 8, dtype=dtype)).square().mean().backward()
    optimizer.step()
    checkpoint.write(tmp_path / "last.pt", entries_of(model, optimizer))
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    model = nn.Conv2d(3, 4, 3, dtype=dtype)
    again = kind(model.parameters())
    restore(tmp_path / "last.pt", checkpoint.load(tmp_path / "last.pt"), state_of(model, again))
    torch.testing.assert_close(again.state_dict()["state"], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("saved", "is_alike"),
    [("Adamax", False), ("FusedLAMB", False), ("SGD", False), ("FusedAdam", True), ("", True)],
)
def test_state_of_another_optimizer_is_an_error(tmp_path: Path, saved: str, is_alike: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    entries = entries_of(model, optimizer) | {"metadata": {"optimizer": saved}}
    checkpoint.write(tmp_path / "last.pt", entries)
    loaded = checkpoint.load(tmp_path / "last.pt")
    message = f"its optimizer was {saved} and is AdamW now; start a new run with --weights"
    with contextlib.nullcontext() if is_alike else pytest.raises(UserError, match=message):
        restore(tmp_path / "last.pt", loaded, state_of(model, optimizer))
    restore(tmp_path / "last.pt", loaded, state_of(model, optimizer), is_evaluation=True)


def test_state_of_another_kind_of_optimizer_is_an_error_without_its_name(tmp_path: Path) -> None:
    """Checkpoints of version 0.9 do not name their optimizer."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.write(tmp_path / "last.pt", entries_of(model, optimizer))
    loaded = checkpoint.load(tmp_path / "last.pt")
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match="with momentum saved it, and this one has betas"):
        restore(tmp_path / "last.pt", loaded, state_of(model, other))


def test_optimizers_of_other_packages_have_a_state_of_their_own(tmp_path: Path) -> None:
    """The name of their class may be that of torch's."""
    other = type("AdamW", (torch.optim.Optimizer,), {"__module__": "elsewhere"})
    model = nn.Linear(2, 2)
    optimizer = other(model.parameters(), {"betas": (0.9, 0.99)})
    optimizer.state[model.weight]["state1"] = torch.ones(1)
    checkpoint.write(tmp_path / "last.pt", entries_of(model, optimizer))
    again = other(model.parameters(), {"betas": (0.9, 0.99)})
    restore(tmp_path / "last.pt", checkpoint.load(tmp_path / "last.pt"), state_of(model, again))
    assert again.state[model.weight]["state1"].tolist() == [1.0]


def test_tensors_of_subclasses_are_saved_as_plain_ones(tmp_path: Path) -> None:
    """Such as a mean image that torchvision's transforms have made."""
    model = nn.BatchNorm1d(3)
    model.register_buffer("picture", tv_tensors.Image(torch.ones(3, 2, 2)))
    state = state_of(model, torch.optim.SGD(model.parameters()))
    rest = {"epoch": 0, "step": 1, "samples": 0, "best": 0.5, "ranks": []}
    checkpoint.write(tmp_path / "last.pt", checkpoint.to_cpu(checkpoint.collect(state)) | rest)
    entries = checkpoint.load(tmp_path / "last.pt")
    assert type(entries["model"]["picture"]) is torch.Tensor
    restore(tmp_path / "last.pt", entries, state)


@pytest.mark.parametrize(
    "values",
    [defaultdict(int, a=1), Counter(a=1), MappingProxyType({"a": 1})],
    ids=lambda values: type(values).__name__,
)
def test_other_dicts_are_saved_as_plain_ones(tmp_path: Path, values: Mapping[str, int]) -> None:
    """A file with a defaultdict could not be read again."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.weight]["counts"] = values
    state = state_of(model, optimizer)
    rest = {"epoch": 0, "step": 1, "samples": 0, "best": 0.5, "ranks": []}
    checkpoint.write(tmp_path / "last.pt", checkpoint.to_cpu(checkpoint.collect(state)) | rest)
    saved = checkpoint.load(tmp_path / "last.pt")["optimizer"]["state"][0]["counts"]
    assert type(saved) is dict
    assert saved == {"a": 1}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}, []),
        ({"a": torch.ones(2)}, {"a": torch.zeros(2)}, ["own"]),
        ({"a": 1}, {"b": 1}, ["own"]),
        (np.ones(2), np.ones(2), ["own"]),  # which saving refuses
    ],
)
def test_settings_that_training_has_changed(
    before: object, after: object, expected: list[str]
) -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "own": after}])
    assert checkpoint.trained_settings([{"own": before}], optimizer) == expected


@pytest.mark.parametrize("seed", [2**60 + 1, torch.tensor(2**60 + 1)])
def test_state_of_an_optimizer_may_be_a_random_seed(tmp_path: Path, seed: object) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.weight]["seed"] = seed
    checkpoint.write(tmp_path / "last.pt", entries_of(model, optimizer))
    entries = checkpoint.load(tmp_path / "last.pt")
    restore(tmp_path / "last.pt", entries, state_of(model, optimizer))
    assert optimizer.state[model.weight]["seed"] == seed


@pytest.mark.parametrize("betas", [("a", "b"), (0.9,), [{}], (0.9, torch.ones(2)), "ab"])
def test_altered_settings_that_training_has_changed_are_rejected(
    tmp_path: Path, betas: object
) -> None:
    """Such as the betas of OneCycleLR, which are two numbers."""
    model, optimizer = small()
    entries = entries_of(model, optimizer) | {"metadata": {"trained_settings": ["betas"]}}
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    checkpoint.write(tmp_path / "last.pt", entries)
    restore(tmp_path / "last.pt", checkpoint.load(tmp_path / "last.pt"), state_of(model, optimizer))
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    entries["optimizer"]["param_groups"][0]["betas"] = betas
    checkpoint.write(tmp_path / "last.pt", entries)
    loaded = checkpoint.load(tmp_path / "last.pt")
    with pytest.raises(UserError, match="betas is altered"):
        restore(tmp_path / "last.pt", loaded, state_of(model, optimizer))


class LoadingByItself(nn.Sequential):
    """With a load_state_dict as of EDSR's public code, but for names that it skips."""

    skipped: tuple[str, ...] = ()

    def load_state_dict(self, state: dict, strict: bool = True) -> None:  # type: ignore[override]
        own = self.state_dict()
        for name in state.keys() - set(self.skipped):
            own[name].copy_(state[name])


class SkippingBias(LoadingByItself):
    skipped = ("0.bias",)


class WritingToParameters(nn.Sequential):
    def load_state_dict(self, state: dict, strict: bool = True) -> None:  # type: ignore[override]
        for name, parameter in self.named_parameters():
            parameter.data.copy_(state[name])


@pytest.mark.parametrize(
    ("level", "kind"),
    [("O2", LoadingByItself), ("O2", WritingToParameters), ("O1", SkippingBias)],
)
def test_state_that_the_model_loads_by_itself_is_restored_or_refused(
    tmp_path: Path, level: str, kind: type[nn.Module]
) -> None:
    def build() -> TrainingState:
        options = {"cast_model_type": torch.bfloat16} if level == "O2" else {}
        model = kind(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        return TrainingState(model, optimizer, backend.load_backend("native", level))

    state = build()
    with amp.scale_loss(state.model(torch.rand(2, 4)).float().sum(), state.optimizer) as loss:
        loss.backward()
    state.optimizer.step()
    rest = {"epoch": 0, "step": 0, "samples": 0, "best": 0.5, "ranks": []}
    checkpoint.write(tmp_path / "last.pt", checkpoint.collect(state) | rest)
    restore(tmp_path / "last.pt", checkpoint.load(tmp_path / "last.pt"), state)  # the same values
    entries, other = checkpoint.load(tmp_path / "last.pt"), build()
    if level == "O2":
        restore(tmp_path / "last.pt", entries, other)
        found, expected = (checkpoint.collect(one)["model"] for one in (other, state))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert torch.equal(other.model[0].weight, expected["0.weight"].bfloat16())
        return
    with pytest.raises(UserError, match=r"0\.bias has other values after the model's"):
        restore(tmp_path / "last.pt", entries, other)
    with pytest.raises(ValueError, match=r"0\.bias has other values after"):
        build_with(entries["model"], lambda: kind(nn.Linear(4, 4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_may_round_what_is_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = small()
    model.register_buffer("mask", torch.tensor([-torch.inf, -1e9]))
    checkpoint.write(tmp_path / "last.pt", entries_of(model, optimizer))
    half = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.AdamW(half.parameters())
    restore(tmp_path / "last.pt", checkpoint.load(tmp_path / "last.pt"), state_of(half, optimizer))
    assert torch.equal(half.weight, model.weight.to(dtype))


def test_lazy_layers_take_the_shapes_of_the_file() -> None:
    weights = nn.Linear(3, 2).state_dict()
    model = build_with(weights, lambda: nn.LazyLinear(2))
    assert torch.equal(model(torch.eye(3)), weights["weight"].T + weights["bias"])


@pytest.mark.parametrize("error", [RuntimeError, UserError])  # the latter from a task.py
def test_models_that_compute_with_values_are_built(error: type[Exception]) -> None:
    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        if model.weight.is_meta:
            raise error("Tensor.item() cannot be called on meta tensors")
        return model

    weights = nn.Linear(3, 2).state_dict()
    assert torch.equal(build_with(weights, build).weight, weights["weight"])


def test_buffers_many_times_larger_than_the_weights_are_not_allocated() -> None:
    """They are not in the file, and an altered size of the images may need any amount."""

    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        model.register_buffer("index", torch.empty(2**50, dtype=torch.uint8), persistent=False)
        return model

    with pytest.raises(RuntimeError, match=f"its buffers take {2**50} bytes"):
        build_with(nn.Linear(3, 2).state_dict(), build)


def test_a_checkpoint_of_many_parameters_is_restored(tmp_path: Path) -> None:
    """In its pickle, the names of the moments are stored once, and occur for each parameter."""
    model = nn.ParameterList(torch.ones(1) for _ in range(1000))
    optimizer = FusedAdam(model.parameters())
    sum(model).backward()
    optimizer.step()
    checkpoint.write(tmp_path / "last.pt", entries_of(model, optimizer))
    again = FusedAdam(model.parameters())
    restore(tmp_path / "last.pt", checkpoint.load(tmp_path / "last.pt"), state_of(model, again))
    assert len(again.state) == 1000


@pytest.mark.parametrize("has_own_form", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "resumed"),
    [
        ({"opt_level": "O4"}, {"opt_level": "O1"}, 2.0**16),
        ({"opt_level": "O1"}, {"opt_level": "O4"}, 1.0),
        ({"opt_level": "O1"}, {"opt_level": "O1", "loss_scale": 128.0}, 128.0),
        ({"opt_level": "O1"}, {"opt_level": "O2"}, 2.0**10),
    ],
    ids=["to_dynamic", "to_static", "to_another", "dynamic"],
)
def test_the_loss_scale_is_restored_only_if_both_are_dynamic(
    whole: Path, before: dict, after: dict, resumed: float, has_own_form: bool
) -> None:
    def initialized(options: dict) -> tuple[nn.Module, torch.optim.Optimizer]:
        return amp.initialize(*small(), verbosity=0, **options)

    model = initialized(before)
    if before["opt_level"] == "O1":
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 7}})
    entries = entries_of(*model)
    if not has_own_form:  # but that of Apex
        del entries["scale_is_dynamic"]
    checkpoint.write(whole, entries)
    restore(whole, checkpoint.load(whole), state_of(*initialized(after)))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == resumed


@pytest.mark.parametrize(
    ("saved", "is_loaded"), [("dynamic", False), (128.0, True), (256.0, False)]
)
def test_a_static_loss_scale_of_real_apex_is_not_overwritten(
    whole: Path, saved: object, is_loaded: bool
) -> None:
    """Its load_state_dict accepts any scale; the count of steps is restored."""
    options = {"opt_level": "O1", "loss_scale": saved, "verbosity": 0}
    checkpoint.write(whole, entries_of(*amp.initialize(*small(), **options)))
    amp_state = mock.Mock(loss_scalers=[mock.Mock(dynamic=False)])
    amp_state.opt_properties.master_weights = False
    apex = mock.Mock(amp=mock.Mock(_amp_state=amp_state))
    apex.amp.state_dict.return_value = {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}}
    real = backend.ApexBackend(apex, "")
    restore(whole, checkpoint.load(whole), TrainingState(*small(), real))
    assert apex.amp.load_state_dict.called == is_loaded


def test_a_truncated_file_is_rejected(whole: Path) -> None:
    """Truncate at every 512 bytes."""
    data = whole.read_bytes()
    for length in (1, *range(0, len(data), 512), len(data) - 1):
        whole.write_bytes(data[:length])
        with pytest.raises(UserError, match="torn"):
            checkpoint.load(whole)


def test_a_flipped_bit_is_detected_or_has_no_effect(whole: Path) -> None:
    """Flip one at every 512 bytes, and all over the archive's directory, which is at the end."""
    data, state = whole.read_bytes(), checkpoint.load(whole)
    del state["origin"]
    found = 0
    directory = data.index(b"PK\x01\x02")
    for position in [*range(0, directory, 512), *range(directory, len(data), 3)]:
        altered = bytearray(data)
        altered[position] ^= 1 << position % 8
        whole.write_bytes(altered)
        try:
            again = checkpoint.load(whole)
        except UserError:
            found += 1
        else:
            assert again.pop("origin") == {}
            torch.testing.assert_close(again, state, rtol=0, atol=0)
    assert found > 30


def test_a_tensor_marked_as_a_directory_is_rejected(whole: Path) -> None:
    """torch reads nothing of it, and keeps what was in memory before."""
    data = whole.read_bytes()
    entries = re.finditer(rb"PK\x01\x02", data)
    places = [entry.start() + 38 for entry in entries]  # of the attributes
    assert len(places) > 6
    for place in places:
        altered = bytearray(data)
        altered[place] ^= 0x10
        whole.write_bytes(altered)
        with pytest.raises(UserError, match="torn"):
            checkpoint.load(whole)


def test_a_compressed_archive_is_rejected(whole: Path) -> None:
    with zipfile.ZipFile(whole, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(10_000_000))
    with pytest.raises(UserError, match="unpacks to more"):
        checkpoint.load(whole)


def test_an_archive_in_which_torch_reads_other_tensors_than_zipfile_is_rejected(tmp_path) -> None:
    path = tmp_path / "weights.pt"
    files = []
    for value in (1.0, 2.0):
        torch.save({"weight": torch.full((3,), value)}, path)
        files.append(path.read_bytes())
    # zipfile finds the last directory, and torch the one whose position the end states.
    path.write_bytes(files[0][: files[0].rindex(b"PK\6\6")] + files[1])
    assert torch.load(path, weights_only=True)["weight"].tolist() == [1, 1, 1]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.read("weights/data/0") == struct.pack("<3f", 2, 2, 2)
    with pytest.raises(UserError, match="torn"):
        archive_module.read(path)


@pytest.mark.parametrize("kind", ["comment", "extra field", "compressed"])
def test_an_archive_that_torch_did_not_write_is_rejected(tmp_path, kind) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.randn(300)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for expected in ("read", kind):
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in parts.items():
                part = zipfile.ZipInfo(name)
                if expected == "extra field":
                    part.extra = struct.pack("<2H", 0x7075, 0)  # other names, for some readers
                if expected == "compressed":
                    part.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(part, content)
            if expected == "comment":
                archive.comment = b"PK"
        if expected == "read":
            assert torch.equal(archive_module.read(path)["weight"], torch.load(path)["weight"])
    with pytest.raises(UserError, match="torn"):
        archive_module.read(path)


def test_a_pickle_is_checked_in_front_of_an_archive(tmp_path) -> None:
    """As torch 1.5 wrote; zipfile only looks for an archive at the end of a file."""
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(3)}, path)
    other = path.read_bytes()
    torch.save({"weight": bytearray(3)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes() + other)
    assert zipfile.is_zipfile(path)
    with pytest.raises(UserError, match=r"holds _codecs\.encode"):
        archive_module.read(path)


def test_a_tensor_of_more_dimensions_than_torch_computes_with_is_rejected(tmp_path) -> None:
    path = tmp_path / "weights.pt"
    model = {"weight": torch.zeros(1).reshape([1] * 65)}
    torch.save({"model": model, "optimizer": {}}, path)
    with pytest.raises(UserError, match="has 65 dimensions"):
        checkpoint.load(path)


class Call:
    """A call of `function` in a pickle."""

    def __init__(self, function: Callable, *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple:
        return self.call


def rebuild(storage: Call) -> Call:
    """Return the call that makes a tensor of three elements of a storage."""
    return Call(torch._utils._rebuild_tensor_v2, storage, 0, (3,), (1,), False, OrderedDict())


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "torch 1.5"])
@pytest.mark.parametrize(
    "value",
    [
        Call(torch.FloatTensor, 3),
        Call(torch.Tensor, 3),
        rebuild(Call(torch.storage.TypedStorage, 3)),
        Call(torch._tensor._rebuild_from_type_v2, torch.FloatTensor, torch.Tensor, (3,), {}),
    ],
    ids=["FloatTensor", "Tensor", "storage", "indirect"],
)
def test_a_tensor_that_is_not_stored_is_rejected(tmp_path: Path, value, is_archive: bool) -> None:
    """torch would allocate any number of bytes for it, and leave them uninitialized."""
    path = tmp_path / "weights.pt"
    torch.save({"weight": value}, path, _use_new_zipfile_serialization=is_archive)
    assert torch.load(path, weights_only=True)["weight"].shape == (3,)
    with pytest.raises(UserError, match="it holds torch.*(Tensor|Storage|_v2), which can't be r"):
        archive_module.read(path)


def test_a_storage_that_is_not_in_a_file_of_torch_1_5_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert archive_module.read(path)["weight"].tolist() == [1, 1, 1]
    before, _, _ = path.read_bytes().rpartition(b"\x80\x02]")  # a list of the storages' keys
    path.write_bytes(before + pickle.dumps([], protocol=2))
    assert torch.load(path, weights_only=True)["weight"].shape == (3,)
    with pytest.raises(UserError, match="torn"):
        archive_module.read(path)


def append_items(pickled: bytes) -> bytes:
    """Add an instruction that stores an item in the last tensor, which is no dict."""
    return pickled[:-2] + b"(K\x01K\x01u" + pickled[-2:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # 300 elements become 65,535, of the same record.
        (lambda pickled: {"data.pkl": pickled.replace(b"M\x2c\x01", b"M\xff\xff")}, "torn"),
        (lambda pickled: {"data.pkl": append_items(pickled)}, "holds torch._utils._rebuild"),
        # torch ignores the case of names, and takes either of two.
        (lambda pickled: {"data.pkl": pickled, "DATA.PKL": pickled}, "torn"),
        (lambda pickled: {"DATA.PKL": append_items(pickled)}, "holds torch._utils._rebuild"),
    ],
    ids=["storage", "items", "names", "capitals"],
)
def test_what_can_crash_old_torch_is_rejected_before_torch_loads_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[bytes], dict[str, bytes]],
    message: str,
) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(300)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    pickled = parts.pop("weights/data.pkl")
    parts |= {f"weights/{name}": part for name, part in change(pickled).items()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load is called"))
    with pytest.raises(UserError, match=message):
        read(path)


def test_nan_is_neither_written_nor_read(whole: Path) -> None:
    model, optimizer = small()
    average = {"bias": torch.zeros(40)}
    for tensor in (model.bias.data, optimizer.state[model.bias]["exp_avg"], average["bias"]):
        before = whole.read_bytes()
        kept, tensor[3] = tensor[3].item(), float("nan")
        entries = entries_of(model, optimizer) | {"ema": average}
        with pytest.raises(FloatingPointError, match="not finite"):
            checkpoint.write(whole, entries)
        assert whole.read_bytes() == before
        torch.save(entries, whole.with_name("bad.pt"))
        with pytest.raises(UserError, match="not finite"):
            checkpoint.load(whole.with_name("bad.pt"))
        tensor[3] = kept


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_of_other_types_is_not_read(whole: Path, dtype: torch.dtype) -> None:
    entries = checkpoint.load(whole)
    entries["model"]["bias"] = torch.full((40,), float("nan")).to(dtype)
    torch.save(entries, whole)
    with pytest.raises(UserError, match="not finite"):
        checkpoint.load(whole)


class Attributed:
    """Pickled as an OrderedDict with attributes."""

    def __init__(self, content: dict, **attributes: object) -> None:
        self.content, self.attributes = content, attributes

    def __reduce__(self) -> tuple:
        return OrderedDict, (), self.attributes, None, iter(self.content.items())


@pytest.mark.parametrize("name", ["items", "values", "keys", "get"])
@pytest.mark.parametrize("attribute", [5, OrderedDict])
def test_attributes_do_not_hide_what_a_dict_holds(
    whole: Path, name: str, attribute: object
) -> None:
    entries = checkpoint.load(whole)
    entries["model"]["bias"] = torch.full((40,), float("nan"))
    parts = {key: Attributed(entries[key], **{name: attribute}) for key in ("model", "metadata")}
    torch.save(Attributed(entries | parts, **{name: attribute}), whole)
    with pytest.raises(UserError, match="model.bias is not finite"):
        checkpoint.load(whole)


def test_state_dicts_keep_the_versions_of_modules_alone(whole: Path) -> None:
    entries = checkpoint.load(whole)
    metadata = {"": {"version": 2, "assign_to_params_buffers": True}, "a": {"version": "x"}, "b": 1}
    entries["model"] = Attributed(entries["model"], _metadata=metadata)
    torch.save(entries, whole)
    model = checkpoint.load(whole)["model"]
    assert model._metadata == {"": {"version": 2}}
    torch.save({"model": model, "optimizer": {}}, whole)
    assert checkpoint.load(whole)["model"]._metadata == {"": {"version": 2}}


@pytest.mark.parametrize("target", ["/dev/zero", "fifo"])
def test_a_file_without_an_end_is_rejected(tmp_path: Path, target: str) -> None:
    path = tmp_path / "last.pt"
    if target == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    with pytest.raises(UserError, match="no regular file"):
        checkpoint.load(path)


NAN = float("nan")
INVALID_IMAGES = [
    *(
        [1],
        None,
        {"pixels": 1},
        {1: 2},
        {"interpolation": "\x1b[31mX"},
        {"interpolation": torch.ones(2)},
    ),
    *({"size": size} for size in (-3, 0, 2**13, 10**400, 32.0, True, "x", None, [32])),
    *({"eval_size": size} for size in (-3, 0, 10**6, 32.0, "x")),
    *({"crop_fraction": value} for value in (0.0, -0.5, 1e-320, 1.5, NAN, 10**400, "1", None)),
    {"size": 100, "crop_fraction": 0.01},  # resized to 10,000 pixels
    *({"mean": value} for value in (0.5, (), (0.5, 0.5), (0.5, 0.5, NAN), "abc", None)),
    *({"std": value} for value in (0.5, (), (1.0, 1.0, "1"), (1.0, 1.0, 10**400))),
]


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"state": [1]}},
        {"optimizer": {"state": {0: [1]}}},
        {"epoch": -1},
        {"samples": "many"},
        {"best": None},
        {"ranks": 2},
        {"best": float("nan")},
        {"best": float("inf")},
        {"amp": [1]},
        {"amp": {"loss_scaler0": {"loss_scale": float("nan"), "unskipped": 0}}},
        {"amp": {"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}}},
        *(
            {"amp": {"loss_scaler0": {"loss_scale": 1.0, "unskipped": unskipped}}}
            for unskipped in ("%9d", -1, 2**31, 0.5, None)
        ),
        {"run_id": "' or ''"},
        {"run_id": 1},
        {"history": {}},
        {"history": [{"epoch": 1}]},
        {"history": [{"epoch": 1, "step": "1"}]},
        {"history": [{"epoch": 1, "step": 1, "val_loss": [1]}]},
        {"history": [{"epoch": 1, "step": 1, "a\x1b[2J": 1.0}]},
        {"samples": 64, "ranks": []},
        {"history": [{"epoch": -1, "step": 1}]},
        {"history": [{"epoch": 1, "step": -1}]},
        {"history": [{"epoch": 1, "step": 1, f"m{index}": 1.0} for index in range(3200)]},
        {"pending_row": {"epoch": 1, "step": 1}},
        {"metadata": [1]},
        {"metadata": {"arch": 18}},
        {"metadata": {"classes": "ab"}},
        {"metadata": {"classes": ["a", 1]}},
        {"metadata": {"classes": ["a"] * 10_001}},  # of a model with 1,640 weights
        {"metadata": {"samples": 40}},
        {"metadata": {"by_shard": torch.zeros(3)}},
        {"metadata": {"samples": {"train": "text"}}},
        {"metadata": {"samples": {"val": torch.zeros(3)}}},
        *({"metadata": {"model_options": {"image": image}}} for image in INVALID_IMAGES),
        {"metadata": {"fingerprints": ["val"]}},
        {"metadata": {"fingerprints": {"val": "0a"}}},
        {"metadata": {"fingerprints": {"val": {"labels": torch.ones(2)}}}},
        {"model": {"weight": torch.zeros(1).expand(10**6, 10**6)}},
    ],
)
def test_invalid_values_are_rejected(whole: Path, change: dict) -> None:
    torch.save(checkpoint.load(whole) | change, whole)
    with pytest.raises(UserError, match="use another one"):
        checkpoint.load(whole)


@pytest.mark.parametrize("value", [bytearray(5), b"latin"])
def test_bytes_are_rejected(whole: Path, value: bytes) -> None:
    """A file could hold the call bytearray(2**40) instead."""
    torch.save(checkpoint.load(whole) | {"metadata": {"about": value}}, whole)
    with pytest.raises(UserError, match=r"it holds _codecs\.encode, which can't be read without"):
        checkpoint.load(whole)


def test_texts_may_look_like_calls(whole: Path) -> None:
    """Such as the names of classes in someone else's data."""
    names = [f"c{module}\n" for module in ("builtins\nbytearray", "_codecs\nencode")]
    torch.save(checkpoint.load(whole) | {"metadata": {"classes": names}}, whole)
    assert checkpoint.load(whole)["metadata"]["classes"] == names


@pytest.mark.parametrize(
    ("weight", "function"),
    [
        (torch.zeros(9, device="meta"), "_rebuild_meta_tensor_no_storage"),
        (torch.eye(3).to_sparse(), "_rebuild_sparse_tensor"),
    ],
)
def test_tensors_without_values_of_their_own_are_rejected(
    whole: Path, weight: torch.Tensor, function: str
) -> None:
    torch.save(checkpoint.load(whole) | {"model": {"weight": weight}}, whole)
    message = rf"it holds torch\._utils\.{function}, which can't be read without the risk"
    with pytest.raises(UserError, match=message):
        checkpoint.load(whole)


@pytest.mark.parametrize(
    ("missing", "note"),
    [
        ([], ""),
        ([1], ", without the optimizer's moments of 1 of 2 parameters"),
        ([0, 1], ", without the optimizer's moments of 2 of 2 parameters"),
    ],
)
def test_missing_moments_are_reported(whole: Path, missing: list[int], note: str) -> None:
    entries = checkpoint.load(whole)
    for index in missing:
        del entries["optimizer"]["state"][index]
    assert restore(whole, entries, state_of(*small())) == note
    assert restore(whole, entries | {"step": 0}, state_of(*small())) == ""


def test_options_of_images_are_read(whole: Path) -> None:
    spec = ImageSpec(96, "bicubic", 1.0, [0, 0, 0], [1, 1, 1], eval_size=MAX_SIZE)
    for image in ({}, {"size": 32}, ImageSpec()._asdict(), spec._asdict()):
        metadata = {"model_options": {"image": image, "width": 8}}
        torch.save(checkpoint.load(whole) | {"metadata": metadata}, whole)
        assert checkpoint.load(whole)["metadata"] == metadata


@pytest.mark.parametrize("part", ["weight", "moment"])
def test_another_shape_is_rejected(whole: Path, part: str) -> None:
    """Reject one that could be broadcast, too."""
    model, optimizer = small()
    entries = entries_of(model, optimizer)
    if part == "weight":
        entries["model"]["bias"] = torch.ones(1)
    else:
        entries["optimizer"]["state"][0]["exp_avg"] = torch.ones(1)
    checkpoint.write(whole, entries)
    with pytest.raises(UserError, match="does not fit"):
        restore(whole, checkpoint.load(whole), state_of(model, optimizer))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("part", ["weight", "moment", "average"])
def test_another_type_is_rejected(whole: Path, part: str, dtype: torch.dtype) -> None:
    """torch would convert it without a warning; it does so between floats."""
    model, optimizer = small()
    state = TrainingState(model, optimizer, NATIVE, Ema(model, 0.9))
    for one in (torch.float16, torch.float64, dtype):
        entries = entries_of(model, optimizer) | {"ema": dict(state.ema.module.state_dict())}
        moments = entries["optimizer"]["state"][0]
        for values, name, where in (
            (entries["model"], "weight", "weight"),
            (moments, "exp_avg", "moment"),
            (entries["ema"], "weight", "average"),
        ):
            if where == part:
                values[name] = values[name].to(one)
        checkpoint.write(whole, entries)
        loaded = checkpoint.load(whole)
        if one != dtype:
            restore(whole, loaded, state)
            restore_average(loaded["ema"], state)
    with pytest.raises((UserError, ValueError), match=f" is {dtype}, not torch.float32"):
        restore(whole, loaded, state)
        restore_average(loaded["ema"], state)


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW])
def test_a_parameter_that_occurs_twice_is_rejected(tmp_path: Path, kind: type) -> None:
    """It would get moments of another shape, behind which the fused kernels write."""
    model = nn.Linear(40, 40)
    optimizer = kind(model.parameters())
    model(torch.ones(2, 40)).mean().backward()
    optimizer.step()
    entries = entries_of(model, optimizer)
    entries["optimizer"]["param_groups"][0]["params"] = [1, 1]
    checkpoint.write(tmp_path / "twice.pt", entries)
    entries = checkpoint.load(tmp_path / "twice.pt")
    with pytest.raises(UserError, match="does not fit .*a parameter twice"):
        restore(tmp_path / "twice.pt", entries, state_of(model, optimizer))


def test_a_tensor_with_attributes_is_rejected(whole: Path) -> None:
    """They hide methods, such as that which the search for nan calls."""
    entries = torch.load(whole, weights_only=True)
    bias = nn.Parameter(entries["model"]["bias"])
    bias.isnan = 1  # type: ignore[method-assign, assignment]
    entries["model"]["bias"] = bias
    torch.save(entries, whole)
    with pytest.raises(UserError, match="use another one"):
        checkpoint.load(whole)


def test_metadata_of_version_0_9_is_read(whole: Path) -> None:
    metadata = {"arch": "resnet18", "metric": "val_accuracy", "classes": ["cat", "dog"]}
    for name in ("about", "metadata"):  # as version 0.9 called it, and as it is called now
        torch.save(entries_of(*small()) | {name: metadata}, whole)
        entries = checkpoint.load(whole)
        assert entries["metadata"] == metadata
        assert "about" not in entries


@pytest.mark.parametrize("version", [10**9, "new"])
def test_a_newer_format_is_rejected(whole: Path, version: object) -> None:
    assert torch.load(whole, weights_only=True)["format_version"] == checkpoint.FORMAT_VERSION
    torch.save(torch.load(whole, weights_only=True) | {"format_version": version}, whole)
    with pytest.raises(UserError, match="its format .* is newer than"):
        checkpoint.load(whole)


def test_a_failed_write_leaves_the_previous_file(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = whole.read_bytes()

    def fill(state: object, file: object) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", fill)
    with pytest.raises(OSError, match="No space"):
        checkpoint.write(whole, entries_of(*small()))
    assert [path.name for path in whole.parent.iterdir()] == ["step-1.pt"]
    assert whole.read_bytes() == before


def test_a_killed_writer_leaves_the_previous_file(whole: Path) -> None:
    before = whole.read_bytes()
    if os.fork() == 0:
        with replacing(whole) as temporary:
            temporary.write_bytes(b"half")
            os._exit(0)
    os.wait()
    assert whole.read_bytes() == before
    with replacing(whole) as temporary:  # replaces the incomplete file, too
        temporary.write_bytes(b"new")
    assert whole.read_bytes() == b"new"


def test_folder_that_can_not_be_flushed_costs_no_descriptor(tmp_path, monkeypatch):
    """Some shared file systems can't flush one."""
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(22, "Invalid argument")))
    before = os.listdir("/proc/self/fd")
    flush_folder(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_link_in_the_place_of_the_temporary_file_is_not_followed(whole: Path) -> None:
    """Whoever can write to a folder may put it there at any time."""
    precious = whole.with_name("precious")
    precious.write_text("precious")
    temporary = whole.with_name(whole.name + ".tmp")
    temporary.symlink_to(precious)
    before = whole.read_bytes()
    with pytest.raises(OSError, match="was replaced by something else"), replacing(whole) as path:
        temporary.unlink()
        temporary.symlink_to(precious)
        path.write_bytes(b"new")
    assert precious.read_text() == "precious"
    assert whole.read_bytes() == before and not whole.is_symlink()


def in_the_form_of_apexs_example(model: nn.Module, optimizer: object, prefix: str) -> dict:
    """Return what NVIDIA's examples/imagenet/main_amp.py saves after three epochs."""
    return {
        "epoch": 3,
        "arch": "resnet50",
        "state_dict": {prefix + name: value for name, value in model.state_dict().items()},
        "best_prec1": torch.tensor(71.5),
        "optimizer": optimizer.state_dict(),
    }


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("fits", [True, False])
def test_checkpoint_of_apexs_example_is_restored(whole: Path, prefix: str, fits: bool) -> None:
    """Its optimizer is left out if it is of another kind or has other groups."""
    theirs, adam = small()
    sgd = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    saved = adam if fits else sgd
    torch.save(in_the_form_of_apexs_example(theirs, saved, prefix), whole)
    ours, optimizer = small()
    optimizer = torch.optim.AdamW(ours.parameters(), weight_decay=0.25)
    entries = checkpoint.load(whole)
    restore(whole, entries, state_of(ours, optimizer))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert (entries["epoch"], entries["step"], entries["samples"]) == (3, None, 0)
    taken = "optimizer, epoch; it has no loss scale"
    if not fits:
        taken = "epoch; it has no loss scale and no fitting optimizer"
    expected = f", a checkpoint of another script: its weights, {taken}"
    assert checkpoint.describe_origin(entries["origin"]) == expected
    assert bool(optimizer.state) == fits
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    ours(torch.ones(1, 40)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("history", [0.1, 0.2]),
        ("results", {"acc1": torch.tensor(1.0)}),
        ("metadata", "ResNet"),
        ("run_id", "my-run-7"),
        ("scores", [0.5, 0.9]),
        ("weights", {"fc": 1.0}),
        ("pending_row", 1),
        ("ema", {"fc": torch.tensor(float("nan"))}),
    ],
)
def test_other_entries_of_another_script_are_not_used(
    whole: Path, name: str, value: object
) -> None:
    model, optimizer = small()
    saved = in_the_form_of_apexs_example(model, optimizer, "")
    torch.save(saved, whole)
    expected = checkpoint.load(whole).keys()
    torch.save(saved | {name: value}, whole)
    entries = checkpoint.load(whole)
    assert entries.keys() == expected and entries.get(name) in (None, [], {})


def nested(depth: int, width: int) -> list:
    """Return a list of `width` times the same list, and so on."""
    value: list = []
    for _ in range(depth):
        value = [value] * width
    return value


def overlapping() -> list:
    """Return lists, each of which holds the one before it deeply."""
    values = [nested(90, 1)]
    for _ in range(50):
        value = values[-1]
        for _ in range(90):
            value = [value]
        values.append(value)
    return values


def in_itself() -> list:
    value: list = []
    value.append({"a": (value,)})
    return value


@pytest.mark.parametrize(
    "value",
    [in_itself(), nested(40, 2), nested(9, 10), nested(300, 1), overlapping()],
    ids=["cycle", "halves", "tenths", "deep", "overlapping"],
)
@pytest.mark.parametrize("key", ["ranks", "model", "other"])
def test_structures_that_can_not_be_visited_are_rejected(
    whole: Path, value: list, key: str
) -> None:
    torch.save(checkpoint.load(whole) | {key: {"a": value}}, whole)
    began = time.monotonic()
    with pytest.raises(UserError, match="its structure is altered"):
        checkpoint.load(whole)
    assert time.monotonic() - began < 5


def nested_tuples(depth: int, width: int) -> tuple:
    value: tuple = ()
    for _ in range(depth):
        value = (value,) * width
    return value


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "torch 1.5"])
@pytest.mark.parametrize("place", [lambda key: {key: 1}, lambda key: {"a": {key}}])
@pytest.mark.parametrize(("depth", "width"), [(18, 2), (5, 10), (300, 1)])
def test_nested_tuples_are_rejected_before_they_are_hashed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    width: int,
    place: Callable[[tuple], dict],
    is_archive: bool,
) -> None:
    """A few more levels would take hours."""
    path = tmp_path / "nested.pt"
    value = place(nested_tuples(depth, width))
    torch.save(value, path, _use_new_zipfile_serialization=is_archive)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load is called"))
    monkeypatch.setattr(
        "engine.checkpoint.inspection.check_storages", lambda *_: pytest.fail("it is unpickled")
    )
    with pytest.raises(UserError, match="its structure is altered"):
        read(path)


@pytest.mark.parametrize("protocol", [2, 5])
def test_tuples_in_lists_dicts_and_one_another_are_accepted(protocol: int) -> None:
    """Also random-number states, and one large tuple that occurs many times."""
    states = [{"python": random.Random(seed).getstate()} for seed in range(20)]
    pairs = {(number, ("a", number)): (0.9, (0.99, number)) for number in range(400)}
    values = [states, pairs, [tuple(range(1000))] * 100, [nested_tuples(20, 1)]]
    check_tuples(io.BytesIO(pickle.dumps(values, protocol)))


@pytest.mark.parametrize(
    "opcodes",
    [
        b"q\x00h\x00\x86" * 60,
        b"2\x86" * 60,
        b"".join(b"\x94h%c\x86" % index for index in range(1, 60)),
        b"q\x00(h\x00h\x00h\x00t" * 60,
    ],
    ids=["BINPUT", "DUP", "MEMOIZE", "TUPLE"],
)
def test_tuples_can_not_be_nested_by_other_opcodes(opcodes: bytes) -> None:
    """Also by those that Python's pickler does not write."""
    pickled = b"\x80\x02)q\x00" + opcodes + b"."
    with pytest.raises(RecursionError):
        check_tuples(io.BytesIO(pickled))


@pytest.mark.parametrize("is_archive", [True, False])
def test_large_number_of_a_memo_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_archive: bool
) -> None:
    """Python's unpickler would make an array with so many places."""
    path = tmp_path / "sparse.pt"
    torch.save({"a": 1}, path, _use_new_zipfile_serialization=is_archive)
    start = b"\x80\x02Nr\xff\xff\xff\x7f0"
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, part in parts.items():
                archive.writestr(name, start + part[2:] if name.endswith("data.pkl") else part)
    else:
        path.write_bytes(start + path.read_bytes()[2:])
    monkeypatch.setattr(
        "engine.checkpoint.inspection.check_storages", lambda *_: pytest.fail("it is unpickled")
    )
    monkeypatch.setattr(
        "engine.checkpoint.inspection.check_old_storages", lambda *_: pytest.fail("it is unpickled")
    )
    with pytest.raises(UserError, match="its structure is altered"):
        read(path)


def test_archive_of_many_pickles_is_rejected(tmp_path: Path) -> None:
    """Each is compared with all parts of the archive."""
    torch.save({"a": 1}, tmp_path / "many.pt")
    with zipfile.ZipFile(tmp_path / "many.pt", "a") as archive:
        for number in range(archive_module.MAX_PICKLES):
            archive.writestr(f"many/{number}.pkl", b"N.")
    with pytest.raises(UserError, match="it is torn, or not a checkpoint"):
        read(tmp_path / "many.pt")


def test_file_without_content_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "sparse.pt").touch()
    os.truncate(tmp_path / "sparse.pt", 2**43)  # bytes, which take no space on the disk
    with pytest.raises(UserError, match="it is torn, or not a checkpoint"):
        read(tmp_path / "sparse.pt")


def test_many_names_of_classes_are_rejected() -> None:
    names = b"".join(b"ca\nb%d\n0" % number for number in range(inspection.MAX_NAMES + 1))
    inspection.check_storages(b"\x80\x02" + names[:70] + b"N.", {})
    with pytest.raises(pickle.UnpicklingError, match="too many names"):
        inspection.check_storages(b"\x80\x02" + names + b"N.", {})


def tuple_of_hash(number: int) -> tuple[int, ...]:
    """Return a tuple for each number below 1024, all with one hash: that of -1 is that of -2."""
    return tuple(-1 - (number >> bit & 1) for bit in range(10))


@pytest.mark.parametrize(
    "key",
    [lambda number: number * (2**61 - 1), lambda number: -number * (2**61 - 1), tuple_of_hash],
    ids=["integers", "negative", "tuples"],
)
@pytest.mark.parametrize("is_archive", [True, False])
def test_many_keys_that_may_have_one_hash_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: Callable[[int], Any], is_archive: bool
) -> None:
    """To make a dict of some 10,000 of them takes minutes."""
    content = {key(number): number for number in range(1000)}
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=is_archive)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load is called"))
    with pytest.raises(UserError, match="its structure is altered"):
        read(tmp_path / "x.pt")


EXPANDED = torch.zeros(1).expand(1000)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        *((function, (EXPANDED,)) for function in (set, Counter, torch.Size, OrderedDict)),
        (
            torch._utils._rebuild_device_tensor_from_cpu_tensor,
            (EXPANDED, torch.float64, "cpu", False),
        ),
        (
            torch._utils._rebuild_sparse_tensor,
            (torch.sparse_coo, (EXPANDED[None].long(), EXPANDED)),
        ),
        (set, ([tuple_of_hash(number) for number in range(1000)],)),
        (Counter, ([tuple_of_hash(number) for number in range(1000)],)),
        (OrderedDict, ([(tuple_of_hash(number), 0) for number in range(1000)],)),
        (dict, ()),
    ],
)
@pytest.mark.parametrize("is_archive", [True, False])
def test_calls_that_take_any_memory_or_time_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Any],
    arguments: tuple,
    is_archive: bool,
) -> None:
    content = {"model": {}, "a": Call(function, *arguments)}
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=is_archive)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load is called"))
    with pytest.raises(UserError, match="it is torn|which can't be read without the risk"):
        read(tmp_path / "x.pt")


@pytest.mark.parametrize("is_nested", [True, False])
def test_long_text_that_occurs_often_is_refused(tmp_path: Path, is_nested: bool) -> None:
    """Two bytes name it once more; to log or save it that often takes any memory."""
    texts = ["\x1b" * 100_000] * 100
    torch.save({"options": [texts] * 5 if is_nested else texts * 5}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="its structure is altered"):
        read(tmp_path / "x.pt")
    torch.save({"options": texts, "weight": torch.zeros(300_000)}, tmp_path / "x.pt")
    assert read(tmp_path / "x.pt")["options"] == texts  # ten times as long as the file


@pytest.mark.parametrize("kind", [lambda one: complex(one, 1), lambda one: torch.Size([one])])
def test_many_results_of_calls_as_keys_are_refused(tmp_path: Path, kind: Callable) -> None:
    torch.save({kind(number): 0 for number in range(1000)}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="its structure is altered"):
        read(tmp_path / "x.pt")


@pytest.mark.parametrize("is_archive", [True, False])
def test_types_of_common_checkpoints_are_read(tmp_path: Path, is_archive: bool) -> None:
    """Such as the Counter of a MultiStepLR, and the OrderedDict of a file of Python 2."""
    content = {
        "scheduler": {"milestones": Counter([30, 60, 60]), "names": {"a", "b"}},
        "state_dict": nn.BatchNorm2d(3).state_dict() | {"p": nn.Parameter(torch.ones(2))},
        "values": [torch.Size([1, 2]), torch.device("cpu"), 1 + 2j, torch.float16, torch.strided],
        "old": Call(OrderedDict, [["a", 1], ["b", 2]]),
    }
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=is_archive)
    loaded = read(tmp_path / "x.pt")
    assert loaded["scheduler"] == content["scheduler"] and loaded["values"] == content["values"]
    assert list(loaded["old"].items()) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("number", [10**400, -(10**400), 2**63, -1])
@pytest.mark.parametrize("key", ["epoch", "step", "samples", "best"])
def test_huge_and_negative_numbers_are_rejected(whole: Path, key: str, number: int) -> None:
    if (key, number) == ("best", -1):
        pytest.skip("a metric may be negative")
    torch.save(checkpoint.load(whole) | {key: number}, whole)
    with pytest.raises(UserError, match="use another one"):
        checkpoint.load(whole)
