"""Maximum over ranks without a wait."""

import torch.distributed as dist
from engine import distributed
from processes import Processes


def submit_in_turn() -> list[list[int]]:
    maximum = distributed.AsyncMax(dist.new_group(backend="gloo"), 2)
    results = []
    for step in range(5):
        results.append(maximum.result())
        maximum.submit(15 if dist.get_rank() == 1 and step == 2 else 0, dist.get_rank() == 0)
    return results


def test_all_ranks_get_the_maximum_after_the_same_step(two_processes: Processes) -> None:
    first, second = two_processes(submit_in_turn)
    assert first == second == [[0, 0], [0, 1], [0, 1], [15, 1], [0, 1]]
