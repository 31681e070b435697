"""The package apex-native: the files of its wheel, and its installation."""

import email
import os
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from apex_native import VERSION
from fresh import ROOT, TEMPLATE

pytestmark = pytest.mark.xdist_group("package")

MODERN_SCRIPT = """
import torch
from apex import amp, optimizers
from apex.parallel import DistributedDataParallel

model = torch.nn.Linear(3, 1)
optimizer = optimizers.FusedAdam(model.parameters())
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
with amp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
print("trained", amp.__name__)
"""


def files(folder: Path) -> set[str]:
    """Return the files of a package's folder that a checkout has, as a wheel names them."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in paths if "__pycache__" not in path.parts)
    return {path.relative_to(folder.parent).as_posix() for path in kept}


def test_wheel_has_the_library_and_what_only_the_package_has(wheel):
    with zipfile.ZipFile(wheel) as archive:
        own = f"apex_native-{VERSION}.dist-info/"
        names = {name for name in archive.namelist() if not name.startswith(own)}
    assert names == files(TEMPLATE / "apex_native") | files(ROOT / "packages" / "apex_native")
    assert "apex_native/py.typed" in names


def test_metadata_of_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        prefix = f"apex_native-{VERSION}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{prefix}/METADATA"))
        assert f"{prefix}/licenses/LICENSE" in archive.namelist()
    assert metadata["Name"] == "apex-native"
    assert metadata["Version"] == VERSION
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get_all("Requires-Dist") == [
        "torch<3,>=2.6",
        'libcst>=1.1; extra == "migrate"',
    ]
    assert metadata.get_payload().startswith("# apex_native")


@pytest.mark.weekly
def test_package_installed_by_pip_in_a_new_environment(wheel, tmp_path):
    """The environment has pip and this one's torch, and nothing of this repository."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "torch.pth").write_text(str(Path(torch.__file__).parent.parent))
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    (tmp_path / "script.py").write_text(MODERN_SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for command in (
        [folder / "bin" / "apex-native", "run", "script.py"],
        [folder / "bin" / "apex-native", "run", "-m", "script"],
        [python, "-m", "apex_native", "script.py"],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.stdout == "trained apex_native.amp\n", done.stderr
