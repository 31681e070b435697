"""What engine.checkpoint makes of a file, for optimizers that are not apex_native's too."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from apex_native import amp
from engine import checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("saved", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("loaded", [torch.contiguous_format, torch.channels_last])
def test_adams_moments_are_fp32_and_lie_as_their_parameters_do(
    tmp_path: Path,
    dtype: torch.dtype,
    saved: torch.memory_format,
    loaded: torch.memory_format,
) -> None:
    """Real Apex's kernel takes both for granted. Its FusedAdam loads as torch's AdamW does."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=saved)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    checkpoint.save(
        tmp_path / "last.pt", model, optimizer, amp, epoch=0, step=1, steps_per_epoch=9, best=0.0
    )
    expected = copy.deepcopy(optimizer.state_dict()["state"])

    model = nn.Conv2d(3, 4, 3).to(dtype, memory_format=loaded)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.restore(tmp_path / "last.pt", model, optimizer, amp)
    for index, parameter in enumerate(model.parameters()):
        for name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[parameter][name]
            assert moment.dtype == torch.float32
            assert moment.stride() == parameter.stride()
            assert torch.equal(moment, expected[index][name])
