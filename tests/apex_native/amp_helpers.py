"""Types, levels, models, optimizers and steps that the tests of amp and parallel share."""

import pytest
import torch
from apex_native import amp
from apex_native.amp import half_type
from apex_native.optimizers import FusedAdam
from torch import nn
from torch.nn import functional as F

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# Levels to compile at: on the CPU, O4 and O5 are O1 and O2 with another loss scale.
_O4_AND_O5 = [pytest.param(level, marks=pytest.mark.weekly) for level in ("O4", "O5")]
COMPILED_LEVELS = ["O0", "O1", "O2", *_O4_AND_O5]
OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "FusedAdam": lambda model: FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1),
}


class Net(nn.Module):
    """A net with all that the levels tell apart, which notes what it is given."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x):
        self.seen = x.dtype
        return self.last(torch.relu(self.norm(self.first(x + self.offset))))


def on(device, dtype):
    """Return the type used for `dtype`: on the CPU it depends on the processor."""
    return half_type(dtype, torch.device(device))


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1} | options)


def initialize(models, optimizers=None, level="O1", **options):
    return amp.initialize(models, optimizers, opt_level=level, **{"verbosity": 0} | options)


def prepare(level, make=sgd, device="cpu", **options):
    """A model and an optimizer; weights are cast to real fp16 on any CPU, which may emulate it."""
    if level in ("O2", "O3"):
        options = {"cast_model_type": FP16} | options
    model = Net().to(device)
    return initialize(model, make(model), level, **options)


def backward(loss, optimizer, **options):
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def train(model, optimizer, batches):
    for x, target in batches:
        optimizer.zero_grad()
        backward(F.cross_entropy(model(x), target), optimizer)
        optimizer.step()


def batches(count, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(16, 4, generator=generator)
        yield x.to(device), x[:, :3].argmax(1).to(device)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def gradients(optimizer):
    return [parameter.grad.clone() for parameter in amp.master_params(optimizer)]


def same(ones, others):
    """Return whether two mappings or sequences of tensors are bit-identical."""
    if isinstance(ones, dict):
        assert ones.keys() == others.keys()
        ones, others = ones.values(), others.values()
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def scale(index=0):
    return amp.state_dict()[f"loss_scaler{index}"]["loss_scale"]


def set_scale(loss_scale, unskipped=0):
    amp.load_state_dict({"loss_scaler0": {"loss_scale": loss_scale, "unskipped": unskipped}})


def two_losses(model):
    """Two functions that give losses of different gradients."""
    (x, target), (y, other) = batches(2)
    model.eval()
    return lambda: F.cross_entropy(model(x), target), lambda: F.cross_entropy(model(y), other)


def alone(optimizer, losses):
    """Return the gradients of each of the losses."""
    found = []
    for loss in losses:
        optimizer.zero_grad()
        backward(loss(), optimizer)
        found.append(gradients(optimizer))
    optimizer.zero_grad()
    return found
