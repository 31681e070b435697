"""The task in small, and its loss and features as test_features.py expects them."""

from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import task

CLASSES = 0
FROZEN = "image_encoder.1"  # a part of the model
FORWARD_PASSES = 2  # of a batch, by each DDP
ACCUMULATED, STOPPED = (), (0, 4, 64)  # after four steps: epoch, step, samples
OWN_FLAGS = [("--scale-lr", 64), ("--text-lr", 0.2)]


def targets(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(97, 123, (count, 6), generator=generator, dtype=torch.uint8)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, task.EMBEDDING)
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, captions: Tensor) -> Tensor:
        embeddings = self.head(self.embed(captions.long()).sum(dim=1))
        return 4 * F.normalize(embeddings.float(), dim=1)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, task.EMBEDDING)
    return task.TwoEncoders(nn.Sequential(*layers), Words())


def loss_of(model: nn.Module, images: Tensor, captions: Tensor, args: Namespace) -> Tensor:
    scores = F.normalize(model(images), dim=1) @ model.text_encoder(captions).T
    own = torch.arange(len(images))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def val_loss_of(model: nn.Module, images: Tensor, captions: Tensor) -> Tensor:
    scores = F.normalize(model(images), dim=1) @ model.text_encoder(captions).T
    return F.cross_entropy(scores, torch.arange(len(images)))


def parts_of(model: nn.Module, args: Namespace) -> list[tuple[nn.Module, float]]:
    """What is trained, with the highest learning rate of each."""
    text_lr = args.lr if args.text_lr is None else args.text_lr
    return [(model.image_encoder, args.lr), (model.text_encoder, text_lr)]
