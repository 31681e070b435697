"""A small transformer, trained in the processes of a test, sharded or not."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 50
needs_fsdp_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP of this torch needs a GPU"
)


class Classifier(nn.Module):
    """Four transformer blocks: (N, 6, 8) -> (N, 5). It has a buffer that is not in its state."""

    scale: Tensor

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        options = {"dropout": 0.0, "batch_first": True}
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 2, 24, **options) for _ in range(4))
        )
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens)).mean(1))) * self.scale


def batches(num_batches: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return random batches, which are other ones on each rank, and can be learned."""
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = torch.randn(num_batches, 8, 6, 8, generator=generator)
    return list(zip(tokens, tokens.mean(2)[..., :5].argmax(-1), strict=True))


def build(level: str = "O0", sharded: bool = True, **options: object):
    """Return model and optimizer, after amp.initialize, with the same weights in all forms."""
    from apex_native import amp
    from apex_native.optimizers import FusedAdam
    from engine.blocks import checkpoint_activations
    from engine.distributed.sharding import Sharding

    torch.manual_seed(0)
    recompute = options.pop("recompute", False)
    norm = bool(options.pop("norm", False))
    if not sharded:
        model = Classifier(norm)
        optimizer = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
        if dist.get_world_size() > 1:
            model = nn.parallel.DistributedDataParallel(model)
        return model, optimizer
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = Classifier(norm)
    if recompute:
        checkpoint_activations(model)
    Sharding(torch.device("cpu"), level, **options).apply(model)
    optimizer = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    return amp.initialize(model, optimizer, opt_level=level, cast_model_type=False)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, accumulate: int = 1
) -> list[float]:
    """Train; return the loss of each step, which is the mean over the ranks."""
    import apex_native
    from apex_native import amp
    from engine.backend import Backend

    backend = Backend(apex_native, "")
    losses = []
    data = iter(batches(steps * accumulate, dist.get_rank()))
    for _ in range(steps):
        total = torch.zeros(())
        for number in range(1, accumulate + 1):
            tokens, labels = next(data)
            is_last = number == accumulate
            with backend.gradient_sync(model, enabled=is_last):
                loss = F.cross_entropy(model(tokens).float(), labels)
                scaled = amp.scale_loss(loss / accumulate, optimizer, delay_unscale=not is_last)
                with scaled as scaled_loss:
                    scaled_loss.backward()
            total += loss.detach() / accumulate
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def emulate_bfloat16() -> None:
    """Compute in bfloat16 at O4 and O5 on a CPU without instructions for it, too."""
    from apex_native.amp import frontend
    from engine.distributed import sharding

    frontend.half_type = sharding.half_type = lambda dtype, _: dtype


def losses(level: str, sharded: bool, accumulate: int = 1, **options: object) -> list[float]:
    """Train a new model; return its losses."""
    emulate_bfloat16()
    return train(*build(level, sharded, **options), accumulate=accumulate)
