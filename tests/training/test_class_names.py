"""A checkpoint meets a folder whose classes have other names than those that it was trained on."""

import pytest
from running import run

pytestmark = pytest.mark.xdist_group("short")
SMALL = ("--arch", "shufflenet_v2_x0_5", "--batch-size", 4, "--workers", 0)


@pytest.mark.slow
def test_renamed_class_is_an_error_and_replaces_the_head_of_weights(bake, image_folder, tmp_path):
    """A new name can change the labels of all classes, which follow the sorted names."""
    project, checkpoint = bake(), tmp_path / "run" / "last.pt"
    flags = (*SMALL, "--data", image_folder, "--steps", 2)
    done = run(project, *flags, "--output", checkpoint.parent, nproc=0)
    assert done.returncode == 0, done.stderr
    for split in ("train", "val"):
        (image_folder / split / "red").rename(image_folder / split / "amber")
    resume = ("--resume", checkpoint, "--output", tmp_path / "other")
    for extra in (("--eval-only",), ("--steps", 4)):
        done = run(project, *flags, *resume, *extra, nproc=0)
        assert done.returncode == 2, done.stdout
        assert "only in the checkpoint: red; only in the data: amber" in done.stderr
        assert f"--weights {checkpoint}" in done.stderr
    done = run(project, *flags, "--weights", checkpoint, "--output", tmp_path / "new", nproc=0)
    assert done.returncode == 0, done.stderr
    assert f"weights of {checkpoint}, but for fc.weight, fc.bias: " in done.stdout
