"""The estimate of the memory of weights, gradients and optimizer, in bytes."""

from argparse import Namespace

import pytest
import torch
from engine.diagnostics.memory import check_memory, estimate_bytes, persistent_bytes
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 10)  # 100 parameters


def build_model() -> nn.Module:
    """Return a model of 460 parameters: four blocks of 100, and 60 outside of them."""
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(4))), nn.Linear(5, 10))


def flags(opt_level: str, *, ema: float = 0.0, cpu_offload: bool = False, **sgd: float):
    others = {"freeze": None, "accumulate": 1, "cuda_graphs": False}
    return Namespace(opt_level=opt_level, ema=ema, cpu_offload=cpu_offload, **others | sgd)


@pytest.mark.parametrize(
    ("ddp", "args", "expected"),
    [
        ("dataparallel", flags("O0"), 16),  # weight, gradient, two moments
        ("torch", flags("O1"), 20),  # and the bucket
        ("torch", flags("O0", momentum=0.9), 16),
        ("apex", flags("O1"), 16),  # whose buckets are the gradients
        ("apex", flags("O1", accumulate=2), 20),  # but for those that are not averaged yet
        ("apex", flags("O1", cuda_graphs=True), 20),
        ("apex", flags("O2"), 20),  # 2 × 2, masters 8, moments 8
        ("apex", flags("O3"), 12),
        ("fsdp", flags("O5"), 16),
        ("fsdp", flags("O0", ema=0.99), 20),
    ],
)
def test_bytes_of_a_parameter(ddp, args, expected):
    assert persistent_bytes(args, ddp) == expected


def test_fsdp_divides_what_persists_and_gathers_two_blocks():
    assert estimate_bytes(build_model(), flags("O5"), "fsdp", (), 4) == 115 * 16 + 260 * 4
    offloaded = flags("O0", cpu_offload=True)
    assert estimate_bytes(build_model(), offloaded, "fsdp", (), 4) == 260 * 8


def test_check_builds_the_model_without_memory(run_check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def build_large() -> nn.Module:
        return nn.Linear(2**20, 2**16)  # 256 GiB

    status, text = run_check(check_memory, flags("O0"), "torch", (), build_large)
    assert status == "ok" and text.startswith("68,719,542,272 parameters need 1280.00 GiB")


def test_check_of_an_unknown_part_to_freeze_is_an_error(run_check):
    args = flags("O0")
    args.freeze = ["layer9"]
    status, text = run_check(check_memory, args, "torch", (), lambda: nn.Linear(4, 8))
    assert status == "error" and "--freeze layer9: the model has no such part" in text


def test_check_builds_a_model_whose_constructor_reads_values(run_check, monkeypatch):
    """As those of torchvision's RegNet do, which is impossible on the meta device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def build_wide() -> nn.Module:
        return nn.Linear(4, *torch.tensor([8]).tolist())

    status, text = run_check(check_memory, flags("O0"), "torch", (), build_wide)
    assert status == "ok" and text.startswith("40 parameters need 0.00 GiB")
