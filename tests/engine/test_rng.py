"""Random-number state: saved and restored."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from engine.checkpoint.validation import is_rng_state
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


def test_integers_of_numpy_are_not_those_of_torch() -> None:
    """Both have a Mersenne Twister: of the same seed, they would draw the same bits."""
    seed_everything(3)
    numpys, torchs = np.random.randint(2, size=100), torch.randint(2, (100,)).numpy()
    assert 30 < (numpys == torchs).sum() < 70


def test_every_own_state_is_valid() -> None:
    """Expect it of each position of the generators, whose layout torch does not document."""
    seed_everything(0)
    for _ in range(700):
        assert is_rng_state(get_rng_state())
        draws()
        random.gauss(0, 1), np.random.normal(), torch.randn(())


def numpys(position: object, num_words: int = 624) -> tuple:
    return "MT19937", [1] * num_words, position, 0, 0.0


def torchs(left: int, position: int) -> torch.Tensor:
    """Return a state of torch's generator with these counters, which torch accepts."""
    state = torch.Generator().get_state()
    state.view(torch.int32)[2], state.view(torch.int64)[2] = left, position
    torch.Generator().set_state(state)
    return state


@pytest.mark.parametrize(
    "change",
    [
        {"numpy": numpys(625)},  # these four were accepted, and memory was read behind the words
        {"numpy": numpys(-1)},
        {"torch": torchs(624, 2)},
        {"torch": torchs(2, 624)},
        {"numpy": numpys(1.0)},
        {"numpy": numpys(1, num_words=623)},
        {"numpy": None},
        {"numpy": {"bit_generator": "MT19937", "state": {"key": [1] * 624, "pos": 625}}},
        {"python": (3, (1,) * 624 + (625,), None)},
        {"python": (3, (1,) * 625, "1")},
        {"python": (3, (2**32,) + (1,) * 624, None)},
        {"torch": torch.zeros(5056)},
        {"torch": torch.zeros(8, dtype=torch.uint8)},
        {"torch": None},
    ],
)
def test_an_altered_state_is_invalid(change: dict[str, Any]) -> None:
    assert not is_rng_state(get_rng_state() | change)


@pytest.mark.gpu(2)
def test_random_numbers_of_each_gpu_are_restored() -> None:
    """DataParallel's threads draw on all of them."""
    torch.cuda.init()  # states of GPUs that are not in use are not saved
    seed_everything(0)
    state = get_rng_state()
    expected = [torch.rand(3, device=f"cuda:{index}").tolist() for index in range(2)]
    set_rng_state(state)
    assert [torch.rand(3, device=f"cuda:{index}").tolist() for index in range(2)] == expected
