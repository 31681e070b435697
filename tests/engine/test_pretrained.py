"""Pretrained weights: from files, from torchvision, for a whole model or one of its children."""

import sys
import zipfile
from pathlib import Path
from unittest import mock
from urllib.error import URLError

import pytest
import torch
import torchvision
from engine import UserError
from engine.checkpoint import pretrained
from torch import nn
from versioned import Versioned


@pytest.fixture(autouse=True)
def safe_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide an older version of torch, which adds a warning to each message."""
    monkeypatch.setattr(torch, "__version__", "2.10.0")


def load_pretrained(model: nn.Module, source: str, arch: str, *known: object) -> str:
    classes, build_model = known or ([], mock.Mock())
    return pretrained.load_pretrained(model, source, arch, classes, build_model)


def test_weights_for_other_classes_are_loaded_except_for_the_head(tmp_path: Path) -> None:
    file = str(tmp_path / "weights.pt")
    ten, four = (torchvision.models.resnet18(num_classes=count) for count in (10, 4))
    torch.save({"model": nn.DataParallel(ten).state_dict()}, file)
    said = load_pretrained(four, file, "resnet18")
    assert said == f"weights of {file}, but for fc.weight, fc.bias: 10 classes there, 4 here"
    torch.testing.assert_close(four.conv1.weight, ten.conv1.weight, rtol=0, atol=0)
    torch.save({"model": four.state_dict(), "ema": ten.state_dict()}, file)  # predict.py's choice
    said = f"moving average of the {said}"
    assert load_pretrained(four, file, "resnet18").startswith(said)
    with pytest.raises(UserError, match="another model than --arch resnet34"):
        load_pretrained(torchvision.models.resnet34(num_classes=4), file, "resnet34")
    narrow, wide = map(torchvision.models.get_model, ("shufflenet_v2_x0_5", "shufflenet_v2_x1_0"))
    torch.save(narrow.state_dict(), file)  # of the same names
    with pytest.raises(UserError, match="another model"):
        load_pretrained(wide, file, "shufflenet_v2_x1_0")


def test_files_without_counters_of_batch_norms_are_loaded(tmp_path: Path) -> None:
    file = str(tmp_path / "weights.pt")
    theirs, ours = (torchvision.models.resnet18(num_classes=4) for _ in range(2))
    state = theirs.state_dict()
    torch.save({n: v for n, v in state.items() if "num_batches_tracked" not in n}, file)
    assert load_pretrained(ours, file, "resnet18") == f"weights of {file}"
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("wrappers", [[], ["module"], ["module", "_orig_mod"], ["model"]])
def test_versions_of_modules_in_a_file_are_heeded(tmp_path: Path, wrappers: list[str]) -> None:
    """torchvision's MNASNet refuses weights without one."""
    file = str(tmp_path / "weights.pt")
    theirs, ours = (torchvision.models.mnasnet0_5(num_classes=4) for _ in range(2))
    wrapped = theirs
    for wrapper in wrappers:
        wrapped = nn.ModuleDict({wrapper: wrapped})
    torch.save({"model_state_dict": wrapped.state_dict()}, file)
    assert load_pretrained(ours, file, "mnasnet0_5") == f"weights of {file}"
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_names_of_a_child_are_no_prefix(tmp_path: Path) -> None:
    """Many encoders keep their layers in an attribute `model`."""
    theirs, ours = (nn.ModuleDict({"model": nn.Linear(2, 2)}) for _ in range(2))
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    both = nn.ModuleDict({"encoder": ours, "head": nn.Linear(3, 3)})
    load_pretrained(both, str(tmp_path / "weights.pt"), "own")
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    torch.save(nn.ModuleDict({"model": theirs}).state_dict(), tmp_path / "lightning.pt")
    fresh = nn.ModuleDict({"model": nn.Linear(2, 2)})
    load_pretrained(fresh, str(tmp_path / "lightning.pt"), "own")
    torch.testing.assert_close(fresh.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_extra_state_of_modules_is_loaded(tmp_path: Path) -> None:
    theirs, ours = (nn.Sequential(Versioned(2, 2)) for _ in range(2))
    theirs[0].count = 3
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    load_pretrained(ours, str(tmp_path / "weights.pt"), "own")
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def with_hidden_layer(num_classes: int) -> nn.Module:
    """Return a model in which another layer has as many outputs as there are classes."""
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, num_classes))


@pytest.mark.parametrize("key", ["metadata", "about"])  # "about" of version 0.9
@pytest.mark.parametrize(
    ("classes", "note", "rows"),
    [
        (["cat", "dog", "owl"], "", [0, 1, 2]),
        (["owl", "cat", "dog"], ", with the rows of 2.weight, 2.bias in the order", [2, 0, 1]),
        (
            ["cat", "dog", "zebra"],
            ", but for 2.weight, 2.bias: other classes (only in the checkpoint: owl; only in the "
            "data: zebra)",
            None,
        ),
        (["cat", "dog"], ", but for 2.weight, 2.bias: 3 classes there, 2 here", None),
    ],
    ids=["same", "order", "names", "count"],
)
def test_head_fits_the_names_of_the_classes(
    tmp_path: Path, key: str, classes: list[str], note: str, rows: list[int] | None
) -> None:
    file = str(tmp_path / "last.pt")
    theirs, ours = with_hidden_layer(3), with_hidden_layer(len(classes))
    before = ours[2].weight.clone()
    torch.save({"model": theirs.state_dict(), key: {"classes": ["cat", "dog", "owl"]}}, file)
    said = load_pretrained(ours, file, "net", classes, with_hidden_layer)
    assert said.startswith(f"weights of {file}{note}")
    torch.testing.assert_close(ours[0].weight, theirs[0].weight, rtol=0, atol=0)
    expected = before if rows is None else theirs[2].weight[rows]
    torch.testing.assert_close(ours[2].weight, expected, rtol=0, atol=0)


def with_classes_as_inputs(num_classes: int) -> nn.Module:
    """Return a model whose last layer takes the classes, as the upsampling of an FCN."""
    return nn.Sequential(nn.Linear(2, num_classes), nn.Linear(num_classes, num_classes))


def test_head_with_classes_among_its_inputs_is_not_permuted(tmp_path: Path) -> None:
    file, model = str(tmp_path / "last.pt"), with_classes_as_inputs(3)
    torch.save({"model": model.state_dict(), "metadata": {"classes": ["a", "b", "c"]}}, file)
    said = load_pretrained(model, file, "net", ["c", "a", "b"], with_classes_as_inputs)
    names = "0.weight, 0.bias, 1.weight, 1.bias"
    assert said.endswith(f", but for {names}: other classes (in another order)")


def test_other_classes_of_a_model_that_does_not_depend_on_them_are_logged(tmp_path: Path) -> None:
    file, model = str(tmp_path / "last.pt"), with_hidden_layer(2)
    torch.save({"model": model.state_dict(), "metadata": {"classes": ["cat", "dog"]}}, file)
    said = load_pretrained(model, file, "net", ["cat", "owl"], lambda _: with_hidden_layer(2))
    assert said.endswith(
        "; its classes are others (only in the checkpoint: dog; only in the data: owl)"
    )


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(8, 4))
        self.log_scale = nn.Parameter(torch.randn(1))
        self.head = nn.Linear(4, 6)


def two_encoders(seed: int = 0, outputs: int = 6) -> nn.ModuleDict:
    torch.manual_seed(seed)
    image_encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, outputs))
    return nn.ModuleDict({"image_encoder": image_encoder, "text_encoder": TextEncoder()})


@pytest.mark.parametrize("key", ["model", "ema"])
def test_weights_of_the_whole_model(tmp_path: Path, key: str) -> None:
    file, theirs, ours = str(tmp_path / "last.pt"), two_encoders(1), two_encoders()
    torch.save({"model": two_encoders(2).state_dict(), key: theirs.state_dict()}, file)
    kind = "moving average of the weights" if key == "ema" else "weights"
    assert load_pretrained(ours, file, "net") == f"{kind} of {file}"
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["image_encoder", "text_encoder"])
def test_weights_of_one_child(tmp_path: Path, name: str) -> None:
    file, theirs, ours = str(tmp_path / "last.pt"), two_encoders(1), two_encoders()
    torch.save(theirs[name].state_dict(), file)
    assert load_pretrained(ours, file, "net") == f"weights of {file} for {name}"
    for child in ours:
        expected = theirs if child == name else two_encoders()
        states = (one[child].state_dict() for one in (ours, expected))
        torch.testing.assert_close(*states, rtol=0, atol=0)


def test_weights_of_one_child_for_other_classes(tmp_path: Path) -> None:
    file, theirs, ours = str(tmp_path / "last.pt"), two_encoders(1, outputs=10), two_encoders()
    torch.save(theirs["image_encoder"].state_dict(), file)
    said = load_pretrained(ours, file, "net")
    assert said == (
        f"weights of {file} for image_encoder, but for 2.weight, 2.bias: 10 classes there, 6 here"
    )
    torch.testing.assert_close(ours["image_encoder"][0].weight, theirs["image_encoder"][0].weight)


def test_weights_that_fit_several_children_are_ambiguous(tmp_path: Path) -> None:
    file = str(tmp_path / "last.pt")
    twins = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    torch.save(nn.Linear(2, 2).state_dict(), file)
    with pytest.raises(UserError, match=r"another model than --arch net .*does not fit"):
        load_pretrained(twins, file, "net")


def test_a_tensor_that_is_not_of_a_last_layer_must_fit(tmp_path: Path) -> None:
    """A position embedding of another length is no head, though its first dimension differs."""
    file, theirs, ours = str(tmp_path / "last.pt"), two_encoders(1), two_encoders()
    shorter = {"text_encoder.position": theirs["text_encoder"].position[:5]}
    state = theirs.state_dict()
    del state["text_encoder.log_scale"]
    for name, other in ("position", theirs.state_dict() | shorter), ("log_scale", state):
        torch.save(other, file)
        with pytest.raises(UserError, match=rf"another model .*\(text_encoder.{name} does not fit"):
            load_pretrained(ours, file, "net")
    torch.testing.assert_close(ours.state_dict(), two_encoders().state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no.pt", "there is no such file"),
        (__file__, "it is torn, or not a checkpoint"),
        ("IMAGENET1K_V1", r"resnet18-f37072fd.pth can't be downloaded .*; put that file into"),
    ],
)
def test_missing_weights_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "urlopen", mock.Mock(side_effect=URLError("no network")))
    with pytest.raises(UserError, match=words):
        load_pretrained(torchvision.models.resnet18(), source, "resnet18")


VALUES = torch.arange(99.0)
# A type of which a byte holds two values; torch before 2.8 has none that it saves.
PACKED = getattr(torch, "float4_e2m1fn_x2", torch.uint8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"fc.weight": torch.ones(10, 512).to_sparse()}, "it holds torch.*_sparse_tensor"),
        ({"fc.weight": torch.ones(10, 512, device="meta")}, "it holds torch.*_meta_tensor"),
        ({"weight": torch.ones(2, 2).bool().to_sparse_csr()}, "it holds torch.*_sparse_tensor"),
        (
            {"weight": torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)},
            "it holds torch.*_qtensor",
        ),
        pytest.param(
            {"a": torch.zeros(2, dtype=torch.uint8).view(PACKED)},
            f"a is {PACKED}, of parts of bytes",
            marks=pytest.mark.skipif(torch.uint8 == PACKED, reason="this torch has no such type"),
        ),
        ({f"{n}": VALUES[n:] for n in range(60)}, "its tensors overlap"),
        ({"fc.weight": None}, "it holds no weights"),
        ({1: torch.ones(2)}, "it holds no weights"),
        ({"model": [torch.ones(2)]}, "it holds no weights"),
        ({}, "it holds no weights"),
        (torch.ones(2), "it holds no weights"),
    ],
    ids=[
        "sparse",
        "meta",
        "csr",
        "quantized",
        "bits",
        "overlap",
        "none",
        "numbers",
        "list",
        "empty",
        "tensor",
    ],
)
def test_weights_without_values_are_an_error(tmp_path: Path, content: object, words: str) -> None:
    file = tmp_path / "weights.pt"
    torch.save(content, file)
    with pytest.raises(UserError, match=f"^--weights {file}: {words}"):
        load_pretrained(nn.Linear(2, 2), str(file), "net")


def test_a_flipped_bit_in_weights_is_detected_or_has_no_effect(tmp_path: Path) -> None:
    """Flip one at every 512 bytes, and all over the archive's directory, which is at the end."""
    torch.manual_seed(0)
    file, theirs = tmp_path / "weights.pt", nn.Linear(40, 40)
    torch.save({"state_dict": theirs.state_dict()}, file)
    data = file.read_bytes()
    directory, found = data.index(b"PK\x01\x02"), 0
    for position in [*range(0, directory, 512), *range(directory, len(data), 3)]:
        altered = bytearray(data)
        altered[position] ^= 1 << position % 8
        file.write_bytes(altered)
        ours = nn.Linear(40, 40)
        try:
            load_pretrained(ours, str(file), "net")
        except UserError:
            found += 1
        else:
            torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert found > 20


@pytest.mark.parametrize(
    ("version", "is_safe"), [("2.6.0+cu124", False), ("2.9.1", False), ("2.10.0", True)]
)
def test_old_torch_warns_of_files_of_old_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_safe: bool
) -> None:
    """Their records are not checked; those of an archive are."""
    file, model = str(tmp_path / "weights.pt"), nn.Linear(3, 3)
    torch.save(model.state_dict(), file)
    with monkeypatch.context() as context:
        context.setattr(torch, "__version__", "2.9.1")
        assert "warning" not in load_pretrained(model, file, "net")
    torch.save(model.state_dict(), file, _use_new_zipfile_serialization=False)
    monkeypatch.setattr(torch, "__version__", version)
    said = load_pretrained(model, file, "net")
    assert (f"warning: torch {version} can be made to crash" in said) == (not is_safe)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_an_error(tmp_path: Path, value: float) -> None:
    file, model = str(tmp_path / "weights.pt"), nn.Linear(3, 3)
    torch.save(model.state_dict() | {"bias": torch.tensor([0.0, value, 0.0])}, file)
    with pytest.raises(UserError, match="bias is not finite"):
        load_pretrained(model, file, "net")


def test_masks_of_a_model_may_be_infinite(tmp_path: Path) -> None:
    file, model = str(tmp_path / "weights.pt"), nn.Linear(3, 3)
    model.register_buffer("mask", torch.full((3,), float("-inf")))
    torch.save(model.state_dict(), file)
    model.bias.data.zero_()
    load_pretrained(model, file, "net")
    assert torch.equal(model.bias, torch.load(file)["bias"])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("0.weight", torch.int64), ("0.weight", torch.bool), ("1.running_var", torch.complex64)]
    + [("1.num_batches_tracked", torch.float32)],
)
def test_weights_of_another_kind_are_an_error(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """torch would convert them without a warning."""
    file, model = str(tmp_path / "weights.pt"), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    state = model.state_dict()
    torch.save(state | {name: state[name].to(dtype)}, file)
    with pytest.raises(
        UserError, match=rf"--weights .*\({name} is {dtype}, not {state[name].dtype}"
    ):
        load_pretrained(model, file, "net")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_precision_are_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    file, model = str(tmp_path / "weights.pt"), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    state = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    counter = {"1.num_batches_tracked": torch.tensor(2, dtype=torch.int32)}
    torch.save({name: value.to(dtype) for name, value in state.items()} | counter, file)
    load_pretrained(model, file, "net")
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["expanded", "compressed"])
def test_weights_larger_than_their_file_are_an_error(tmp_path: Path, kind: str) -> None:
    """They would fill the memory before their shape is compared."""
    file, model = tmp_path / "weights.pt", nn.Linear(3, 3)
    huge = {"expanded": torch.zeros(1).expand(10**6, 10**6), "compressed": torch.zeros(10**6)}
    torch.save(model.state_dict() | {"weight": huge[kind]}, file)
    if kind == "compressed":
        with zipfile.ZipFile(file) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, part in parts.items():
                archive.writestr(name, part)
    with pytest.raises(UserError, match=r"is larger than what is stored|unpacks to more"):
        load_pretrained(model, str(file), "net")


class Hostile:
    def __reduce__(self) -> tuple:
        return print, ("this is run",)


def test_downloaded_weights_run_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Nor do those that another program has put into torchvision's cache."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    path = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    path.parent.mkdir(parents=True)
    torch.save({"conv1.weight": Hostile()}, path)
    with pytest.raises(UserError, match=f"{path} holds no weights; remove it"):
        load_pretrained(torchvision.models.resnet18(), "DEFAULT", "resnet18")
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("terminal", "rank"), [(True, 0), (False, 0), (True, 1)])
def test_a_download_shows_a_progress_bar_on_the_terminal_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, rank: int
) -> None:
    model = torchvision.models.resnet18()
    get = mock.Mock(return_value=model.state_dict())
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", get)
    monkeypatch.setattr(sys, "stderr", mock.Mock(isatty=lambda: terminal))
    monkeypatch.setenv("RANK", str(rank))
    assert load_pretrained(model, "DEFAULT", "resnet18") == "weights of DEFAULT"
    assert get.call_args.kwargs["progress"] == (terminal and not rank)
