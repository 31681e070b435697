"""engine.export: files of a model for other programs."""

import os
import subprocess
import sys
import tempfile
import textwrap
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from engine import UserError, export, protect_compiled_code
from fresh import TEMPLATE
from torch import nn


class Pair(nn.Module):
    """Two inputs and two outputs, of which one has a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Conv2d(1, 2, 3)

    def forward(self, inputs):
        rows, images = inputs
        return {"rows": self.first(rows), "images": self.second(images).relu()}


def pair(batch_size: int) -> tuple:
    return torch.randn(batch_size, 3), torch.randn(batch_size, 1, 4 + batch_size, 9)


# The exporter for ONNX takes ten seconds to import.
FORMATS = [pytest.param(one, marks=[pytest.mark.slow] * (one == ".onnx")) for one in export.FORMATS]


@pytest.mark.parametrize("suffix", FORMATS)
def test_exported_file_equals_the_model_for_other_sizes(tmp_path, suffix):
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    path = tmp_path / f"model{suffix}"
    text = export.export_model(Pair().eval(), path, pair)
    assert text.startswith(f"{path}: outputs as the model's")
    assert path.stat().st_size > 1000


def test_inputs_of_another_size_than_the_models_are_an_error(tmp_path):
    path = tmp_path / "model.pt2"
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval()
    with pytest.raises(UserError, match="does not take the inputs of dummy_batch .*mat1 and mat2"):
        export.export_model(model, path, lambda n: torch.rand(n, 3, 4, 4))
    assert not path.exists()


class Windows(nn.Module):
    """A model that computes otherwise for large images, as torchvision's Swin transformers do."""

    def forward(self, images):
        return images.mean((1, 2, 3)) * (2 if images.size(2) > 8 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 9])
def test_onnx_file_that_is_right_for_one_size_takes_no_other(tmp_path, size):
    pytest.importorskip("onnxscript")
    session = pytest.importorskip("onnxruntime").InferenceSession
    path = tmp_path / "model.onnx"
    text = export.export_model(Windows().eval(), path, lambda n: torch.rand(n, 3, size, size))
    assert text.endswith("; only for inputs of the size that it was exported with, in any number")
    found = session(path, providers=["CPUExecutionProvider"])
    assert found.get_inputs()[0].shape[1:] == [3, size, size]
    images = torch.rand(5, 3, size, size)
    (means,) = found.run(None, {found.get_inputs()[0].name: images.numpy()})
    torch.testing.assert_close(torch.from_numpy(means), Windows()(images))


def test_program_refuses_sizes_for_which_the_model_computes_otherwise(tmp_path):
    path = tmp_path / "model.pt2"
    text = export.export_model(Windows().eval(), path, lambda n: torch.rand(n, 3, 6, 6))
    assert "only" not in text
    program = torch.export.load(path).module()
    assert torch.equal(program(torch.ones(3, 3, 7, 7)), torch.ones(3))
    with pytest.raises((AssertionError, RuntimeError), match="Guard failed|to be <= 8, but got 9"):
        program(torch.ones(3, 3, 9, 9))


@pytest.mark.slow
@pytest.mark.parametrize("fails_in", ["the model", "the file"])
def test_size_that_fails(tmp_path, fails_in):
    """A size that the model does not take is no difference; one that the file does not take is."""

    class Fails(nn.Module):
        def forward(self, images):
            if fails_in == "the model" or torch.compiler.is_compiling():
                images = images.reshape(-1, 192)
            return images.flatten(1).sum(1)[:2].mean()

    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    path = tmp_path / "model.onnx"
    text = export.export_model(Fails().eval(), path, lambda n: torch.ones(n, 3, 8, 8))
    assert ("only for inputs of the size" in text) == (fails_in == "the file")


def test_model_that_can_be_saved_for_one_size_only(tmp_path, monkeypatch):
    """As timm:tf_efficientnet_b0, whose padding rounds sizes up, which torch 2.15 can't save."""
    errors, save = [KeyError("ceil is not in _SYM_OPS")], torch.export.save

    def save_or_fail(*args):
        if errors:
            raise errors.pop()
        return save(*args)

    monkeypatch.setattr(torch.export, "save", save_or_fail)
    model, path = nn.Conv2d(1, 2, 3).eval(), tmp_path / "model.pt2"
    text = export.export_model(model, path, lambda size: torch.randn(size, 1, 8, 8))
    assert not errors
    assert "only for inputs of the size" in text
    assert torch.export.load(path).module()(torch.randn(5, 1, 8, 8)).shape == (5, 2, 6, 6)


@pytest.mark.slow
def test_inputs_of_one_size_are_resized_together(tmp_path):
    class Sum(Windows):
        def forward(self, images):
            return super().forward(images[0] + images[1])

    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    sample = lambda n: [torch.rand(n, 3, 8, 8) for _ in range(2)]  # noqa: E731
    assert "only for" in export.export_model(Sum().eval(), tmp_path / "model.onnx", sample)


@pytest.mark.slow
def test_weights_that_are_too_large_for_the_onnx_file_are_beside_it(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    session = pytest.importorskip("onnxruntime").InferenceSession
    save = partialmethod(torch.onnx.ONNXProgram.save, external_data=True)  # as from 2 GB on
    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", save)
    for _ in range(2):  # the second replaces the first
        export.export_model(Pair().eval(), tmp_path / "model.onnx", pair)
        files = {file.name for file in tmp_path.iterdir()}
        assert files == {"model.onnx", "model.onnx.data"}
        session(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])


def test_file_whose_outputs_differ_is_an_error(tmp_path):
    class Differs(nn.Module):
        """A model that computes something else when it is exported."""

        def forward(self, inputs):
            return inputs + torch.compiler.is_compiling()

    path = tmp_path / "model.pt2"
    path.write_text("the one before")
    with pytest.raises(UserError, match=r"model\.pt2: its outputs differ .* nothing was written"):
        export.export_model(Differs().eval(), path, lambda count: torch.zeros(count, 2))
    assert [file.read_text() for file in tmp_path.iterdir()] == ["the one before"]


def test_each_output_is_compared_with_its_own_numbers(tmp_path):
    class Outputs(nn.Module):
        """A model whose second output depends on the number of calls."""

        calls = 0

        def forward(self, inputs):
            self.calls += 1
            return inputs + 1e2, inputs + (float("nan") if self.calls > 1 else 0)

    with pytest.raises(UserError, match="its outputs differ"):
        export.export_model(Outputs().eval(), tmp_path / "model.pt2", lambda n: torch.ones(n, 2))


def test_an_output_that_is_zero_up_to_rounding_is_no_difference(tmp_path):
    class Outputs(nn.Module):
        calls = 0

        def forward(self, inputs):
            self.calls += 1
            return inputs, inputs * 1e-8 * self.calls

    path = tmp_path / "model.pt2"
    assert "as the model's" in export.export_model(Outputs().eval(), path, lambda n: torch.ones(n))


class MaskedOutputs(nn.Module):
    def forward(self, inputs):
        mask = inputs > 1
        return inputs.masked_fill(mask, -float("inf")), mask, inputs[:, :0]


class WronglyMasked(MaskedOutputs):
    def forward(self, inputs):
        return super().forward(inputs + torch.compiler.is_compiling())


def test_outputs_may_be_infinite_or_empty_or_masks(tmp_path):
    path = tmp_path / "model.pt2"
    samples = torch.arange(12.0).view(6, 2)
    export.export_model(MaskedOutputs().eval(), path, lambda count: samples[:count])
    with pytest.raises(UserError, match="differ from the model's by up to inf, where .* is 1;"):
        export.export_model(WronglyMasked().eval(), path, lambda count: samples[:count])


def test_exported_program_takes_others_than_views(tmp_path):
    """The samples may be parts of a batch, such as all tokens but the last."""
    path = tmp_path / "model.pt2"
    model = nn.Embedding(9, 4).eval()
    export.export_model(model, path, lambda count: torch.zeros(count, 7, dtype=torch.long)[:, :-1])
    tokens = torch.ones(5, 3, dtype=torch.long)
    assert torch.equal(torch.export.load(path).module()(tokens), model(tokens))


@pytest.mark.parametrize("suffix", FORMATS)
def test_path_that_can_not_be_written_is_an_error(tmp_path, suffix):
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    (tmp_path / f"folder{suffix}").mkdir()
    for name, reason in (("missing/model", "No such file"), ("folder", "Is a directory")):
        with pytest.raises(
            UserError, match=rf"{name}{suffix} can't be written \({reason}.*\): name"
        ):
            export.export_model(Pair().eval(), tmp_path / f"{name}{suffix}", pair)
    assert len(list(tmp_path.iterdir())) == 1


def test_unknown_format_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"ends in \.onnx or \.pt2"):
        export.export_model(nn.Identity(), tmp_path / "model.pkl", torch.ones)


def test_missing_onnx_packages_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"onnxscript and onnxruntime: pip install -e \.\[onnx\]"):
        export.export_model(nn.Identity(), tmp_path / "model.onnx", torch.ones)


def test_compiled_code_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    protect_compiled_code()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    protect_compiled_code()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "link"))
    protect_compiled_code()
    if os.getuid() == 0:  # another user's link could be changed after the check
        os.chown(tmp_path / "link", 65534, 65534, follow_symlinks=False)
        with pytest.raises(UserError, match="belongs to another user"):
            protect_compiled_code()
    monkeypatch.setattr(os, "getuid", lambda: 1 + folder.stat().st_uid)
    with pytest.raises(UserError, match="belongs to another user.*: set TMPDIR"):
        protect_compiled_code()


def test_compiled_code_that_others_could_write_is_checked(tmp_path, monkeypatch) -> None:
    """torch makes the folder when it is imported; umask may be 000."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    protect_compiled_code()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    (folder / "own").touch()
    folder.chmod(0o777)
    protect_compiled_code()
    assert folder.stat().st_mode & 0o777 == 0o700
    if os.getuid() == 0:
        os.chown(folder / "own", 65534, 65534)
        for _ in range(2):
            with pytest.raises(UserError, match=f"own belongs to another user: remove {folder}"):
                protect_compiled_code()


def test_export_reads_no_files_of_another_user(tmp_path, monkeypatch) -> None:
    """torch reads some of that folder while it traces, and writes there, too."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    protect_compiled_code()
    monkeypatch.setattr(os, "getuid", lambda: 1 + tmp_path.stat().st_uid)
    with pytest.raises(UserError, match="belongs to another user.*: set TMPDIR"):
        export.export_model(nn.Identity(), tmp_path / "model.pt2", torch.ones)


def test_onnxruntime_writes_to_no_shared_folder(tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    code = "from engine.export import _import_onnxruntime as load; load().InferenceSession"
    variables = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=TEMPLATE, env=variables, check=True)
    assert not (tmp_path / ".ses").exists()


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 has no such headers")
def test_headers_of_compiled_code_are_in_a_folder_that_is_checked() -> None:
    """torch has them in its default folder, whatever TORCHINDUCTOR_CACHE_DIR is."""
    code = """
        import os
        from engine import protect_compiled_code
        protect_compiled_code()
        print(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))
        from torch._inductor.codecache import _HEADER_DIR
        print(os.path.dirname(_HEADER_DIR))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=TEMPLATE,
        env={name: value for name, value in os.environ.items() if "INDUCTOR" not in name},
        capture_output=True,
        text=True,
        check=True,
    )
    checked, used = done.stdout.splitlines()
    assert checked == used
