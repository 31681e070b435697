"""--data with the URL of packed data, from nginx: training, resumption, evaluation, --check."""

import json
import subprocess
import sys

import pytest
import torch
from fresh import TEMPLATE
from nginx import NGINX, FaultyProxy, serving
from running import SCREENED, run, run_script, run_two

pytest.importorskip("aiohttp")
pytestmark = [
    pytest.mark.xdist_group("short"),
    pytest.mark.skipif(NGINX is None, reason="nginx is missing (apt-get install nginx-light)"),
]
SMALL = ("--arch", "shufflenet_v2_x0_5", "--batch-size", 4)


@pytest.fixture
def packed(image_folder, tmp_path):
    out = tmp_path / "served" / "packed"
    out.parent.mkdir()
    command = [sys.executable, "-m", "engine.data.pack", image_folder, out]
    command += ["--shard-size=40KB", "--shuffle", "--workers=1"]
    subprocess.run(command, check=True, cwd=TEMPLATE, capture_output=True)
    return out


@pytest.fixture
def server(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "nginx"
    folder.mkdir()
    with serving(packed.parent, folder) as server:
        yield server


def weights(folder):
    return torch.load(folder / "last.pt", weights_only=True)["model"]


@pytest.mark.weekly
def test_training_resumes_exactly_and_evaluates_by_url(bake, server, tmp_path):
    project, url = bake(), f"{server.url}/packed"
    common = (*SMALL, "--data", url, "--epochs", 1, "--workers", 1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # 24 images: 6 steps an epoch. Stopped within it, with another cache.
    runs = [
        ("--output", whole, "--steps", 4, "--cache-dir", tmp_path / "one"),
        ("--output", parts, "--steps", 2, "--cache-dir", tmp_path / "two"),
        ("--output", parts, "--steps", 4, "--cache-dir", tmp_path / "two", "--resume", "auto"),
    ]
    for flags in runs:
        done = run(project, *common, *flags, nproc=0)
        assert done.returncode == 0, done.stderr
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(parts).items())
    assert json.loads((whole / "config.json").read_text())["data"] == url
    checkpoint = ("--eval-only", "--resume", whole / "last.pt", "--cache-dir", tmp_path / "one")
    done = run(project, *common, *checkpoint, nproc=0)
    assert done.returncode == 0 and "val_loss" in done.stdout, done.stderr


@pytest.mark.slow
def test_predict_takes_no_url(bake):
    done = run_script(bake(), "predict.py", "x.pt", "https://host/packed", variables=SCREENED)
    assert done.returncode == 2 and "is a URL, which only --data takes" in done.stderr


@pytest.mark.slow
def test_two_processes_share_a_cache_and_the_check_counts_samples(bake, server, tmp_path):
    project = bake()
    data = ("--data", f"{server.url}/packed", "--cache-dir", tmp_path / "cache")
    flags = ("--epochs", 2, "--workers", 1)
    done = run_two(project, *SMALL, *data, *flags, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "cache").glob("*/train/shard-*.tar"))
    done = run(project, *SMALL, *data, "--check", nproc=1)
    assert f"{server.url}/packed: 24 training samples, 10 validation samples" in done.stdout
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_errors_in_workers_are_one_message(bake, packed, server, tmp_path):
    project = bake()
    for shard in (packed / "train").glob("*.tar"):
        shard.unlink()
    data = ("--data", f"{server.url}/packed", "--cache-dir", tmp_path / "cache")
    for workers in (0, 1):
        flags = (*SMALL, *data, "--workers", workers, "--output", tmp_path / "run")
        done = run(project, *flags, nproc=0)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert "/packed/train/shard-" in done.stderr and "is missing" in done.stderr


@pytest.mark.weekly
def test_training_from_a_faulty_server(bake, server, tmp_path):
    faults = ["cut", "", "", "error", "", "", "refuse", "", ""] * 14
    proxy = FaultyProxy(server.port, faults)
    data = ("--data", f"{proxy.url}/packed", "--cache-dir", tmp_path / "cache")
    flags = (*SMALL, *data, "--epochs", 1, "--workers", 2, "--output", tmp_path / "run")
    done = run(bake(), *flags, nproc=0)
    assert done.returncode == 0, done.stderr
    assert len(proxy.faults) < len(faults) // 2, done.stderr
    proxy.close()
