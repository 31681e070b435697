"""Random numbers: where they start, and how they go on after a resume."""

import random
import sys
import zlib

import torch


def mixed(*numbers: int) -> int:
    """A seed of 32 bits that differs, most likely, for any other `numbers`."""
    return zlib.crc32(" ".join(map(str, numbers)).encode())


def seed(value: int) -> None:
    """Seeds Python, torch on every device, and NumPy if it is in use; `value` < 2^32."""
    torch.manual_seed(value)
    seed_cpu(value)


def seed_cpu(value: int) -> None:
    """The same but for GPUs, in a tenth of the time."""
    random.seed(value)
    torch.default_generator.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)


def state() -> dict[str, object]:
    """Where this process's random numbers are; plain types and tensors only."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, key, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, key.tolist(), *rest)
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
        state["each_cuda"] = torch.cuda.get_rng_state_all()  # DataParallel draws on all of them
    return state


def restore(state: dict[str, object]) -> None:
    """Goes on from `state`, but for what this process does not have, such as a GPU."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_initialized():
        each = state.get("each_cuda", [])
        if len(each) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(each)
        torch.cuda.set_rng_state(state["cuda"])
