"""What a user gets wrong: one sentence on what to do, status 2, soon, and nothing overwritten."""

import shutil
from argparse import Namespace

import pytest
from engine import UserError, distributed
from parameters import mostly_slow
from running import Run, run, run_two

pytestmark = pytest.mark.xdist_group("short")
SMALL = ("--arch", "shufflenet_v2_x0_5", "--batch-size", 4, "--steps", 4)


@pytest.fixture(scope="module")
def project(bake):
    return bake()


@pytest.fixture(scope="module")
def checkpoint(project, tmp_path_factory):
    """The last.pt of a short run on the digits."""
    output = tmp_path_factory.mktemp("run")
    assert run(project, *SMALL, "--output", output, nproc=0).returncode == 0
    return output / "last.pt"


def run_one(project, *flags, timeout):
    return run(project, *flags, nproc=0, timeout=timeout)


def refused(project, *flags, saying, start=run_one):
    done = start(project, *flags, timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for words in saying if isinstance(saying, tuple) else (saying,):
        assert str(words) in sentence
    assert "Traceback" not in done.stderr
    return sentence


@pytest.mark.parametrize(
    ("flags", "saying"),
    [
        pytest.param(["--batch-size", "5000"], "use at most 718", id="batch_size"),
        pytest.param(["--output", "/proc/runs"], "choose another folder", id="output"),
        pytest.param(["--resume", "missing.pt"], "there is no such file", id="resume"),
        pytest.param(["--opt-level", "01"], "'O0', 'O1'", id="opt_level"),
    ],
)
def test_usage_error_is_reported_by_one_process(project, flags, saying):
    sentence = refused(project, *flags, saying=saying, start=run_two)
    assert flags[0] in sentence
    assert flags[1] in sentence


@pytest.mark.parametrize(
    ("flags", "saying"),
    mostly_slow(
        [
            pytest.param(["--no-such-flag"], "--no-such-flag", id="flag"),
            pytest.param(["--epochs", "0"], "from 1 to 2^31 - 1", id="epochs"),
            pytest.param(["--save-every", "9" * 5000], "a number of steps", id="save_every"),
            pytest.param(["--loss-scale", "big"], "above 0", id="loss_scale"),
            pytest.param(["--arch", "resnet81"], "the nearest are resnet18", id="arch"),
            pytest.param(["--backend", "apex"], "--backend native", id="apex"),
            pytest.param(["--keep-batchnorm-fp32"], "O1 casts none", id="keep_batchnorm"),
            pytest.param(["--seed", "99999999999999999999"], "2^32", id="seed"),
            pytest.param(["--eval-only"], "--resume", id="eval_only"),
            pytest.param(
                ["--class-weights", "--dummy"], "--class-weights is for", id="class_weights"
            ),
            pytest.param(
                ["--mixup", "0.2", "--dummy"], "are for data, not for --dummy", id="mixup"
            ),
            pytest.param(["--cutmix", "1e308"], "from 0 to 1000", id="cutmix"),
            pytest.param(["--random-erasing", "1.5"], "a number from 0", id="random_erasing"),
            pytest.param(["--auto-augment", "randaugment"], "is for --data", id="auto_augment"),
            pytest.param(["--report", "--dummy"], "--report is about validation data", id="report"),
            pytest.param(["--arch", "googlenet"], "choose another --arch", id="aux_outputs"),
            pytest.param(["--arch", "vit_b_16"], "Wrong image height", id="image_size"),
            pytest.param(["--batch-size", "1"], "more than 1 value per channel", id="batch_of_one"),
            pytest.param(["--data", "/no/such/folder"], "there is no folder", id="data"),
            pytest.param(["--cuda-graphs"], "this run is on the CPU", id="cuda_graphs"),
            pytest.param(["--decode", "gpu"], "for the JPEG files of --data", id="decode"),
        ],
        fast=8,
    ),
)
def test_invalid_flag_is_a_usage_error(project, flags, saying):
    sentence = refused(project, *flags, saying=saying)
    assert flags[0] in sentence


def test_evaluation_that_cannot_be_written_ends_before_the_validation(project, checkpoint):
    flags = ("--eval-only", "--resume", checkpoint, "--output", "/proc/runs", "--log-every", 1)
    done = run(project, *SMALL, *flags, nproc=0)
    assert done.returncode == 2 and "choose another folder for --output" in done.stderr
    assert "resumed" in done.stdout and "validating" not in done.stdout


def test_empty_data_folder_is_an_error(project, tmp_path):
    refused(project, "--data", tmp_path, saying=(tmp_path / "train", "train/CLASS/IMAGE"))


def test_data_folder_without_val_is_an_error(project, image_folder):
    shutil.rmtree(image_folder / "val")
    refused(project, "--data", image_folder, saying=image_folder / "val")


def test_folder_whose_name_is_not_utf_8_is_an_error_if_torch_traces_code(project, tmp_path):
    folder = tmp_path / "my\udcffproject"
    shutil.copytree(project, folder)
    done = run(folder, "--compile", "--dummy", "--output", tmp_path / "run", nproc=0)
    assert done.returncode == 2
    assert r"error: rename the folder " in done.stderr and r"my\udcffproject: " in done.stderr
    assert done.stderr.count("\n") == 1


def test_train_folder_without_images_is_an_error(project, image_folder):
    for image in (image_folder / "train").glob("*/*"):
        image.unlink()
    refused(project, "--data", image_folder, saying=(image_folder / "train", "holds no images"))


@pytest.mark.parametrize("task", mostly_slow(["classification", "segmentation"]))
def test_data_without_classes_is_an_error(bake, task):
    folder = bake(task=task)
    with (folder / "task.py").open("a") as file:
        file.write("\n\ndel Digits.classes\n")
    refused(folder, saying=("the data has no classes", "build_datasets", ".classes"))


def test_decode_gpu_without_a_gpu_is_an_error(project, image_folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = ("--decode", "gpu", "--data", image_folder)
    refused(project, *SMALL, *flags, saying="this run is on the CPU")


def test_class_missing_in_training_data_is_an_error(project, image_folder):
    shutil.copytree(image_folder / "val" / "red", image_folder / "val" / "zebra")
    refused(project, "--data", image_folder, saying=("zebra", "train/"))


@pytest.mark.parametrize(
    ("content", "workers"),
    mostly_slow(
        [pytest.param(b"no image", 1, id="foreign"), pytest.param(None, 0, id="truncated")]
    ),
)
def test_broken_image_is_an_error(project, image_folder, tmp_path, content, workers):
    image = image_folder / "train" / "red" / "0.jpg"
    image.write_bytes(content or image.read_bytes()[:300])
    flags = ("--data", image_folder, "--workers", workers, "--steps", 40)
    flags += ("--output", tmp_path / "run")
    refused(project, *SMALL, *flags, saying=(image, "fix or remove"), start=run_two)


@pytest.mark.parametrize("damage", mostly_slow(["torn", "foreign", "weights_alone", "arguments"]))
def test_damaged_or_foreign_checkpoint_is_an_error(project, checkpoint, tmp_path, damage):
    import torch

    bad, saying = tmp_path / "bad.pt", "it is torn, or not a checkpoint"
    if damage == "torn":
        bad.write_bytes(checkpoint.read_bytes()[:20_000])
    elif damage == "foreign":
        bad.write_text("not a checkpoint")
    elif damage == "weights_alone":
        torch.save({"state_dict": {}}, bad)
        saying = "it has no optimizer"
    else:
        torch.save({"model": {}, "optimizer": {}, "args": Namespace(lr=0.1)}, bad)
        saying = ("argparse.Namespace", "if you trust the file", "weights_only=False")
    sentence = refused(project, *SMALL, "--resume", bad, "--output", tmp_path / "r", saying=saying)
    assert str(bad) in sentence
    assert not (tmp_path / "r").exists()


def test_checkpoint_of_another_model_is_an_error(project, checkpoint, tmp_path):
    flags = ("--resume", checkpoint, "--arch", "resnet18", "--output", tmp_path / "run")
    refused(
        project,
        *flags,
        saying=("does not fit", "resume with the --arch shufflenet_v2_x0_5, the classes"),
    )


def test_checkpoint_of_another_optimizer_is_an_error(bake, checkpoint, tmp_path):
    flags = ("--resume", checkpoint, "--output", tmp_path / "run")
    refused(
        bake(fused_adam=False), *SMALL, *flags, saying="its optimizer was FusedAdam and is SGD now"
    )
    assert not (tmp_path / "run").exists()


def test_name_that_is_too_long_is_an_error(project):
    refused(project, "--weights", f"{'long' * 80}.pt", saying="File name too long")


def test_rank_without_world_size_is_an_error(project, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    refused(project, saying=("WORLD_SIZE", "./run.sh"))


def test_code_in_a_checkpoint_is_not_executed(project, tmp_path):
    import pickle

    class Hostile:
        def __reduce__(self):
            return open, (str(tmp_path / "pwned"), "w")

    (tmp_path / "hostile.pt").write_bytes(pickle.dumps(Hostile()))
    refused(project, "--resume", tmp_path / "hostile.pt", saying="hostile.pt")
    assert not (tmp_path / "pwned").exists()


def test_output_folder_of_a_run_is_not_overwritten(project, checkpoint):
    (checkpoint.parent / "last.pt").rename(checkpoint.parent / "kept.pt")

    def content():
        return {path: path.read_bytes() for path in checkpoint.parent.rglob("*") if path.is_file()}

    before = content()
    refused(
        project, *SMALL, "--output", checkpoint.parent, saying=("already holds", "--resume auto")
    )
    assert content() == before
    (checkpoint.parent / "kept.pt").rename(checkpoint.parent / "last.pt")


@pytest.mark.slow
def test_output_folder_of_a_running_job_is_locked(project, tmp_path):
    flags = (*SMALL[:4], "--output", tmp_path / "run")
    with Run(project, *flags) as first:
        first.wait_for("train_loss")
        refused(project, *flags, saying=("another run is writing to", "--output"))
        assert first.ranks()


WHOLE = {
    "__init__.py": "import sys; sys.modules['amp_C'] = sys",
    "amp.py": "def initialize(): pass\ndef scale_loss(): pass",
    "parallel.py": "class DistributedDataParallel: pass\ndef convert_syncbn_model(): pass",
    "optimizers.py": "class FusedAdam: pass",
}
"""Files of a package that looks like a whole Apex."""
OF_TODAY = {
    "__init__.py": "",
    "optimizers.py": "class FusedAdam: pass",
    "normalization.py": "",
}
"""Files of one that looks like Apex since May 2025."""


def bake_beside(bake, package):
    """A project with `package` as its apex."""
    project = bake()
    (project / "apex").mkdir()
    for name, text in package.items():
        (project / "apex" / name).write_text(text)
    return project


@pytest.mark.parametrize(
    ("flag", "saying"),
    [
        ("--compile", "torch.compile can't follow"),
        ("--compress-gradients", "real Apex's DDP can't compress"),
    ],
)
def test_unsupported_flags_with_real_apex_are_errors(bake, flag, saying):
    project = bake_beside(bake, WHOLE)
    refused(project, "--backend", "apex", flag, saying=(saying, "use --backend native"))


@pytest.mark.parametrize(
    ("package", "saying"),
    [
        pytest.param({"__init__.py": ""}, "not NVIDIA's Apex", id="unrelated"),
        pytest.param({"__init__.py": "import pyramid_of_2013"}, "can't be imported", id="needy"),
        pytest.param(OF_TODAY, "removed in May 2025", id="without_amp"),
        pytest.param(WHOLE | {"__init__.py": ""}, "amp_C is missing", id="python_only"),
    ],
)
def test_unusable_apex_is_an_error(bake, package, saying):
    refused(bake_beside(bake, package), "--backend", "apex", saying=(saying, "--backend native"))


@pytest.mark.slow
def test_apex_without_amp_falls_back_to_apex_native(bake, tmp_path):
    project = bake_beside(bake, OF_TODAY)
    done = run(project, *SMALL, "--output", tmp_path / "run", nproc=0)
    assert done.returncode == 0
    assert "apex_native, because this Apex no longer has amp.initialize" in done.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x"}, "^RANK in the environment must be a number"),
        ({"LOCAL_RANK": "x", "WORLD_SIZE": "-1"}, "^LOCAL_RANK and WORLD_SIZE in the env"),
        ({"RANK": "9" * 5000}, "^RANK in the environment must be a number"),
        ({"MASTER_PORT": "abc"}, "^MASTER_PORT in the environment must be a number"),
        ({"MASTER_PORT": "99999"}, "^MASTER_PORT=99999 is more than 65535"),
        ({"LOCAL_WORLD_SIZE": "two"}, "^LOCAL_WORLD_SIZE in the environment must be a number"),
        ({"WORLD_SIZE": "0"}, "^RANK=0 must be less than WORLD_SIZE=0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "^RANK=2 must be less than WORLD_SIZE=2"),
    ],
)
def test_variables_that_no_launcher_sets_are_errors(monkeypatch, variables, message):
    usual = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (usual | variables).items():
        monkeypatch.setenv(name, value)
    assert not distributed.is_rank_zero() or variables.get("RANK", "0") == "0"
    with pytest.raises(UserError, match=message):
        distributed.resolve_ranks(None)


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": "0", "MASTER_PORT": "1"}, "RANK, MASTER_PORT but not WORLD_SIZE, MASTER_ADDR"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE but not RANK, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_variables_that_are_incomplete_are_an_error(monkeypatch, variables, missing):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"the environment has {missing}: start with ./run.sh"):
        distributed.resolve_ranks(None)
