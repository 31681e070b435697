"""What engine.checkpoint makes of a file, for optimizers that are not apex_native's too."""

import copy
import errno
import os
import re
import time
import zipfile
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from apex_native import amp
from engine import checkpoint
from engine.errors import UserError
from engine.files import link, replacing


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has taken a step."""
    model = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 40)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 1) -> dict:
    """All that the checkpoint of a run holds."""
    rest = {"epoch": 0, "step": step, "samples": 2, "best": 0.5, "ranks": []}
    return checkpoint.collect(model, optimizer, amp) | rest


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    checkpoint.write(tmp_path / "step-1.pt", state_of(*small()))
    return tmp_path / "step-1.pt"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("saved", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("loaded", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_moments_lie_as_their_parameters_do_and_adams_are_fp32(
    tmp_path: Path,
    kind: str,
    dtype: torch.dtype,
    saved: torch.memory_format,
    loaded: torch.memory_format,
) -> None:
    """Fused kernels take both for granted. Real Apex's FusedAdam loads as torch's AdamW does."""
    make, names, moments = {
        "Adam": (torch.optim.AdamW, ("exp_avg", "exp_avg_sq"), torch.float32),
        "SGD": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), ("momentum_buffer",), dtype),
    }[kind]
    model = nn.Conv2d(3, 4, 3).to(memory_format=saved)
    optimizer = make(model.parameters())
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    checkpoint.write(tmp_path / "last.pt", checkpoint.collect(model, optimizer, amp))
    expected = copy.deepcopy(optimizer.state_dict()["state"])

    model = nn.Conv2d(3, 4, 3).to(dtype, memory_format=loaded)
    optimizer = make(model.parameters())
    checkpoint.restore(tmp_path / "last.pt", model, optimizer, amp)
    for index, parameter in enumerate(model.parameters()):
        for name in names:
            moment = optimizer.state[parameter][name]
            assert moment.dtype == moments
            assert moment.stride() == parameter.stride()
            assert torch.equal(moment, expected[index][name].to(moments))


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
def test_a_scale_goes_on_only_where_both_are_dynamic(
    whole: Path, before: dict, after: dict, resumed: float, has_own_form: bool
) -> None:
    def initialized(options: dict) -> tuple[nn.Module, torch.optim.Optimizer]:
        return amp.initialize(*small(), verbosity=0, **options)

    model = initialized(before)
    if before["opt_level"] == "O1":
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 7}})
    state = state_of(*model)
    if not has_own_form:  # but that of Apex
        del state["scale_is_dynamic"]
    checkpoint.write(whole, state)
    checkpoint.restore(whole, *initialized(after), amp)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == resumed


def test_a_static_scale_of_real_apex_is_not_overwritten(whole: Path) -> None:
    """Its load_state_dict takes any scale."""
    state = amp.initialize(*small(), opt_level="O1", verbosity=0)
    checkpoint.write(whole, state_of(*state))
    scalers = [mock.Mock(dynamic=False)]
    apexs = mock.Mock(_amp_state=mock.Mock(loss_scalers=scalers))
    checkpoint.restore(whole, *small(), apexs)
    assert not apexs.load_state_dict.called


def test_a_torn_file_is_refused(whole: Path) -> None:
    """At each half of a kilobyte."""
    data = whole.read_bytes()
    for length in (1, *range(0, len(data), 512), len(data) - 1):
        whole.write_bytes(data[:length])
        with pytest.raises(UserError, match="torn"):
            checkpoint.load(whole)


def test_an_altered_bit_is_found_or_alters_nothing(whole: Path) -> None:
    """At each 512 bytes, and all over the archive's directory, which is at the end."""
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
            assert again.pop("origin") == ""
            torch.testing.assert_close(again, state, rtol=0, atol=0)
    assert found > 30


def test_a_tensor_that_is_marked_as_a_folder_is_refused(whole: Path) -> None:
    """Of which torch reads nothing, and takes what was in memory before."""
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


def test_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    for step in (30, 4, 20):  # a run that went back writes lower numbers than before
        path = tmp_path / f"step-{step}.pt"
        checkpoint.write(path, state_of(*small(), step))
        os.utime(path, ns=(time.time_ns(),) * 2)
        link(path, tmp_path / "last.pt")
    said = []
    assert checkpoint.newest(tmp_path, said.append).samefile(tmp_path / "step-20.pt")
    assert not said
    for damaged in (20, 4):
        with (tmp_path / f"step-{damaged}.pt").open("r+b") as file:  # and so last.pt
            file.seek(9000)
            file.write(b"altered")
    assert checkpoint.newest(tmp_path, said.append) == tmp_path / "step-30.pt"
    assert [line.split(": ")[1] for line in said] == [
        str(tmp_path / name) for name in ("last.pt", "step-4.pt")
    ]
    (tmp_path / "step-30.pt").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint in"):
        checkpoint.newest(tmp_path, said.append)
    assert checkpoint.newest(tmp_path / "elsewhere", said.append) is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for age, step in enumerate((50, 7, 60, 8)):
        (tmp_path / f"step-{step}.pt").touch()
        os.utime(tmp_path / f"step-{step}.pt", ns=(age, age))
    (tmp_path / "step-by-step.pt").touch()
    checkpoint.prune(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-60.pt", "step-8.pt"} | {
        "step-by-step.pt"
    }


def test_an_archive_that_grows_is_refused(whole: Path) -> None:
    with zipfile.ZipFile(whole, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(10_000_000))
    with pytest.raises(UserError, match="unpacks to more"):
        checkpoint.load(whole)


def test_nan_is_neither_written_nor_read(whole: Path) -> None:
    model, optimizer = small()
    average = {"bias": torch.zeros(40)}
    for tensor in (model.bias.data, optimizer.state[model.bias]["exp_avg"], average["bias"]):
        before = whole.read_bytes()
        kept, tensor[3] = tensor[3].item(), float("nan")
        state = state_of(model, optimizer) | {"ema": average}
        with pytest.raises(ValueError, match="not finite"):
            checkpoint.write(whole, state)
        assert whole.read_bytes() == before
        torch.save(state, whole.with_name("bad.pt"))
        with pytest.raises(UserError, match="not finite"):
            checkpoint.load(whole.with_name("bad.pt"))
        tensor[3] = kept


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
        {"amp": [1]},
        {"amp": {"loss_scaler0": {"loss_scale": float("nan"), "unskipped": 0}}},
        {"amp": {"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}}},
        {"model": {"weight": torch.zeros(1).expand(10**6, 10**6)}},
        {"model": {"weight": torch.zeros(9, device="meta")}},
        {"model": {"weight": torch.eye(3).to_sparse()}},
    ],
)
def test_what_is_no_state_of_a_run_is_refused(whole: Path, change: dict) -> None:
    torch.save(checkpoint.load(whole) | change, whole)
    with pytest.raises(UserError, match="use another one"):
        checkpoint.load(whole)


@pytest.mark.parametrize("part", ["weight", "moment"])
def test_another_shape_is_refused(whole: Path, part: str) -> None:
    """One that could be stretched to fit, too."""
    model, optimizer = small()
    state = state_of(model, optimizer)
    if part == "weight":
        state["model"]["bias"] = torch.ones(1)
    else:
        state["optimizer"]["state"][0]["exp_avg"] = torch.ones(1)
    checkpoint.write(whole, state)
    with pytest.raises(UserError, match="does not fit"):
        checkpoint.restore(whole, model, optimizer, amp)


def test_a_file_that_can_not_be_written_leaves_the_one_before(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = whole.read_bytes()

    def fill(state: object, file: object) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", fill)
    with pytest.raises(OSError, match="No space"):
        checkpoint.write(whole, state_of(*small()))
    assert [path.name for path in whole.parent.iterdir()] == ["step-1.pt"]
    assert whole.read_bytes() == before


def test_a_killed_writer_leaves_the_file_before(whole: Path) -> None:
    before = whole.read_bytes()
    if os.fork() == 0:
        with replacing(whole) as temporary:
            temporary.write_bytes(b"half")
            os._exit(0)
    os.wait()
    assert whole.read_bytes() == before
    with replacing(whole) as temporary:  # what was left is in nobody's way
        temporary.write_bytes(b"new")
    assert whole.read_bytes() == b"new"
