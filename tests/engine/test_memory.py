"""The estimate of the memory of weights, gradients and optimizer, in bytes."""

import pytest
import torch
from engine.diagnostics.memory import MemoryPlan, check_memory, estimate_bytes, persistent_bytes
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 10)  # 100 parameters


def build_model() -> nn.Module:
    """Return a model of 460 parameters: four blocks of 100, and 60 outside of them."""
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(4))), nn.Linear(5, 10))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (MemoryPlan("dataparallel", "O0", moments=2), 16),  # weight, gradient, two moments
        (MemoryPlan("torch", "O1", moments=2), 20),  # and the bucket
        (MemoryPlan("torch", "O0", moments=1), 16),
        (MemoryPlan("apex", "O2", moments=2), 22),  # 3 × 2, masters 8, moments 8
        (MemoryPlan("apex", "O3", moments=2), 14),
        (MemoryPlan("fsdp", "O5", moments=2), 16),
        (MemoryPlan("fsdp", "O0", moments=2, has_ema=True), 20),
    ],
)
def test_bytes_of_a_parameter(plan, expected):
    assert persistent_bytes(plan) == expected


def test_fsdp_divides_what_persists_and_gathers_two_blocks():
    plan = MemoryPlan("fsdp", "O5", moments=2)
    assert estimate_bytes(build_model(), plan, 4) == 115 * 16 + 260 * 4
    offloaded = MemoryPlan("fsdp", "O0", moments=2, cpu_offload=True)
    assert estimate_bytes(build_model(), offloaded, 4) == 260 * 8


def test_check_builds_the_model_without_memory(run_check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def build_large() -> nn.Module:
        return nn.Linear(2**20, 2**16)  # 256 GiB

    status, text = run_check(check_memory, MemoryPlan("torch", "O0", moments=2), build_large)
    assert status == "ok" and text.startswith("68,719,542,272 parameters need 1280.00 GiB")


def test_check_builds_a_model_whose_constructor_reads_values(run_check, monkeypatch):
    """As those of torchvision's RegNet do, which is impossible on the meta device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def build_wide() -> nn.Module:
        return nn.Linear(4, *torch.tensor([8]).tolist())

    plan = MemoryPlan("torch", "O0", moments=2)
    status, text = run_check(check_memory, plan, build_wide)
    assert status == "ok" and text.startswith("40 parameters need 0.00 GiB")
