"""Altered checkpoints: each one is resumed and trains on, or is one clear error."""

import contextlib
import copy
import io
import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from apex_native import amp
from apex_native.optimizers import FusedAdam
from engine import UserError, backend
from engine.checkpoint import CheckpointManager, TrainingState
from engine.checkpoint.pretrained import load_pretrained
from engine.distributed.watchdog import StopSignals, Watchdog
from engine.monitoring.meter import Meter
from engine.optim import Ema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library_fixtures import begin_afresh
from test_checkpoint_manager import Messages
from torch import nn

NATIVE = backend.load_backend("native", "O1")
# Cases of altered values and of altered bytes: the same 100 in each run, random ones on demand.
CASES = os.environ.get("FUZZ_CASES", "")
EXAMPLES = [
    20,
    pytest.param(100, marks=pytest.mark.slow),
    pytest.param(
        int(CASES or 0),
        marks=[
            pytest.mark.weekly,
            pytest.mark.skipif(not CASES, reason="FUZZ_CASES, the number of cases, is not set"),
        ],
        id="random",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def manager_of(folder: Path) -> CheckpointManager:
    """Return the manager of a run with all that a checkpoint can hold."""
    begin_afresh()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = FusedAdam(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    manager = CheckpointManager(
        folder=folder,
        keep=2,
        save_every=None,
        timeout_s=60.0,
        state=TrainingState(model, optimizer, NATIVE, Ema(model, 0.9)),
        metadata={"metric": "m", "arch": "a", "data": "", "classes": ["b", "c"], "opt_level": "O1"},
        data_sets={},
        settings={},
        logger=Messages(),
        stop_signals=StopSignals(),
        watchdog=Watchdog(60.0),
    )
    manager.logger.rows = [{"epoch": 1, "step": 1, "train_loss": 0.5}]
    manager.logger.run_id = "0123456789abcdef"
    return manager


def train_a_step(manager: CheckpointManager) -> None:
    """Train, and save as a run does."""
    state = manager.state
    meter = Meter(torch.device("cpu"), 1)
    manager.start_epoch(meter)
    meter.update(torch.tensor(1.0))
    loss = state.model(torch.ones(4, 3)).square().mean()
    with amp.scale_loss(loss, state.optimizer) as scaled_loss:
        scaled_loss.backward()
    state.optimizer.step()
    weights = NATIVE.fp32_state_dict(state.model, state.optimizer)
    state.ema.update(weights, state.progress.step)
    state.progress.samples += 1
    state.progress.step += 1
    manager.save({"val_accuracy": 0.5})
    manager.finish()


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    manager = manager_of(folder)
    train_a_step(manager)
    return torch.load(folder / "last.pt", weights_only=True)


def cyclic() -> list:
    value: list = []
    value.append(value)
    return value


def nested(depth: int, width: int = 1) -> list:
    value: list = []
    for _ in range(depth):
        value = [value] * width
    return value


def expanded() -> torch.Tensor:
    return torch.zeros(1).expand(10**6, 10**6)


def hostile_values() -> list:
    return [
        *(
            None,
            True,
            -1,
            0,
            3,
            10**400,
            -(10**400),
            2**63,
            0.5,
            -0.5,
            math.inf,
            -math.inf,
            math.nan,
        ),
        *("", "model", "\x1b[2J", b"bytes", [], {}, (), [1], {"a": 1}, {1: 2}, (1, 2)),
        *(cyclic(), {"a": cyclic()}, nested(200), nested(40, 2), OrderedDict(b=1)),
        *(torch.Size([2]), torch.float16, torch.device("cpu"), torch.zeros(()), torch.zeros(0)),
        *(
            torch.ones(2),
            torch.ones(4, 3),
            torch.ones(4, dtype=torch.int64),
            torch.ones(4) * math.nan,
        ),
        *(torch.ones(4) * math.inf, torch.ones(4, dtype=torch.complex64), torch.ones(4).half()),
        *(torch.ones(4).bool(), torch.ones(4).to(torch.float8_e5m2), expanded()),
        *(torch.ones(4, device="meta"), torch.eye(4).to_sparse(), nn.Parameter(torch.ones(4))),
        torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    ]


def containers(value: object) -> Iterator[dict | list]:
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


def altered(entries: dict[str, Any], changes: list[tuple[float, float, int, str]]) -> dict:
    """Return a copy in which values are replaced, also by one another, removed or added."""
    entries = copy.deepcopy(entries)
    found = list(containers(entries))
    for place, key, value, action in changes:
        # Half of the changes are in the checkpoint itself; most containers hold random numbers.
        container = entries if place < 0.3 else found[int(place * len(found))]
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        chosen = keys[int(key * len(keys))] if keys else None
        if action == "add" or chosen is None:
            if isinstance(container, dict):
                container["added"] = hostile_values()[value]
            else:
                container.append(hostile_values()[value])
        elif action == "remove":
            del container[chosen]
        elif action == "repeat":
            container[chosen] = container[keys[value % len(keys)]]
        else:
            container[chosen] = hostile_values()[value]
    return entries


fractions = st.floats(0, 1, exclude_max=True)
changes = st.lists(
    st.tuples(
        fractions,
        fractions,
        st.integers(0, len(hostile_values()) - 1),
        st.sampled_from(["replace", "replace", "repeat", "remove", "add"]),
    ),
    min_size=1,
    max_size=3,
)


def assert_resumed_or_refused(content: bytes, folder: Path) -> None:
    path = folder / "altered.pt"
    path.write_bytes(content)
    with contextlib.suppress(UserError):
        manager = manager_of(folder)
        manager.resume(path, 10)
        train_a_step(manager)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with contextlib.suppress(UserError):
        load_pretrained(model, str(path), "a", ["b", "c"], lambda _: copy.deepcopy(model))
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def saved(entries: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    torch.save(entries, content)
    return content.getvalue()


def check(examples: int, strategy: st.SearchStrategy, test: Any) -> None:
    limits = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=not CASES,
        suppress_health_check=list(HealthCheck),
    )
    limits(given(strategy)(test))()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("examples", EXAMPLES)
def test_altered_values_are_resumed_or_refused(
    entries: dict[str, Any], tmp_path: Path, examples: int
) -> None:
    def test(changes: list) -> None:
        assert_resumed_or_refused(saved(altered(entries, changes)), tmp_path)

    check(examples, changes, test)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("examples", EXAMPLES)
def test_altered_bytes_are_resumed_or_refused(
    entries: dict[str, Any], tmp_path: Path, examples: int
) -> None:
    data = saved(entries)

    def test(edits: list) -> None:
        content = bytearray(data)
        for place, length, new in edits:
            position = int(place * len(content))
            content[position : position + length] = new
        assert_resumed_or_refused(bytes(content), tmp_path)

    edit = st.tuples(fractions, st.integers(0, 8), st.binary(max_size=8))
    check(examples, st.lists(edit, min_size=1, max_size=3), test)
