"""Random-number state: saved and restored."""

import random

import numpy as np
import pytest
import torch
from engine.data import get_rng_state, seed_everything, set_rng_state


def draws() -> list[float]:
    return [random.random(), np.random.random(), torch.rand(()).item()]


def test_random_numbers_are_restored() -> None:
    seed_everything(3)
    random.gauss(0, 1)
    state = get_rng_state()
    expected = draws()
    set_rng_state(state)
    assert draws() == expected


@pytest.mark.gpu(2)
def test_random_numbers_of_each_gpu_are_restored() -> None:
    """DataParallel's threads draw on all of them."""
    seed_everything(0)
    state = get_rng_state()
    expected = [torch.rand(3, device=f"cuda:{index}").tolist() for index in range(2)]
    set_rng_state(state)
    assert [torch.rand(3, device=f"cuda:{index}").tolist() for index in range(2)] == expected
