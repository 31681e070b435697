"""Small versions of the three tasks: models, and the targets of random images of 4 × 4 pixels."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Classification:
    """Four classes of images."""

    num_classes = 4
    frozen = "1"  # a part of the model
    half_tolerance = 0.05  # of the reference, as a share of the way that the weights went
    accumulated: tuple = ("--accumulate", 2)
    augmented: tuple = ("--mixup", 0.4, "--cutmix", 1.0, "--random-erasing", 0.3)
    stopped = (1, 4, 32)  # epoch, step and samples after four steps
    own_flags: tuple = (
        ("--accumulate", 2),
        ("--accumulate", 2, "--clip-grad", 0.1),
        ("--label-smoothing", 0.5),
        ("--scale-lr", 64, "--accumulate", 2),
        ("--class-weights",),
        ("--class-weights", "--label-smoothing", 0.5),
    )

    def __init__(self, task: object) -> None:
        self.task = task  # the generated project's

    def targets(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.num_classes, (count,), generator=generator)

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, self.num_classes)
        return nn.Sequential(*layers)

    def build_normed(self) -> nn.Module:
        """Return one with a norm, and no bias before it.

        Adam would step by the rounding errors of that bias.
        """
        torch.manual_seed(0)
        first, last = nn.Conv2d(3, 8, 1, bias=False), nn.Linear(8, self.num_classes)
        pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(first, nn.BatchNorm2d(8), nn.Tanh(), *pooled, last)

    def losses(
        self,
        model: nn.Module,
        images: Tensor,
        targets: Tensor,
        weights: float = 1,
        **options: float,
    ) -> list[Tensor]:
        """Return those of which the training's loss is the mean; the first is validation's."""
        losses = F.cross_entropy(model(images), targets, reduction="none", **options)
        return [(losses * weights).mean()]

    def parts(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts of the model with learning rates of their own."""
        return [model]


class Segmentation(Classification):
    """Four classes of pixels."""

    own_flags = Classification.own_flags[:4]  # without --class-weights
    augmented: tuple = ()
    frozen = "0"
    half_tolerance = 0.1

    def targets(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.num_classes, (count, 4, 4), generator=generator)

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        last = nn.Conv2d(8, self.num_classes, 1)
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), last)

    def build_normed(self) -> nn.Module:
        torch.manual_seed(0)
        first, last = nn.Conv2d(3, 8, 1, bias=False), nn.Conv2d(8, self.num_classes, 1)
        return nn.Sequential(first, nn.BatchNorm2d(8), nn.Tanh(), last)


class Contrastive(Classification):
    """Captions of six random letters."""

    num_classes = 0
    frozen = "image_encoder.1"
    half_tolerance = 0.1
    accumulated = augmented = ()
    stopped = (0, 4, 64)
    own_flags = (("--scale-lr", 64), ("--text-lr", 0.2), ("--label-smoothing", 0.5))

    def targets(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(97, 123, (count, 6), generator=generator, dtype=torch.uint8)

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, self.task.EMBEDDING)
        return self.task.TwoEncoders(nn.Sequential(*layers), Words(self.task.EMBEDDING))

    def losses(
        self, model: nn.Module, images: Tensor, targets: Tensor, **options: float
    ) -> list[Tensor]:
        scores = F.normalize(model.image_encoder(images), dim=1) @ model.text_encoder(targets).T
        own = torch.arange(len(images))
        return [F.cross_entropy(logits, own, **options) for logits in (scores, scores.T)]

    def parts(self, model: nn.Module) -> list[nn.Module]:
        return [model.image_encoder, model.text_encoder]


class Words(nn.Module):
    """A small text encoder."""

    def __init__(self, embedding: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, embedding)
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, captions: Tensor) -> Tensor:
        embeddings = self.head(self.embed(captions.long()).sum(dim=1))
        return 4 * F.normalize(embeddings.float(), dim=1)


BY_METRIC = {
    "val_accuracy": Classification,
    "val_miou": Segmentation,
    "val_recall_at_1": Contrastive,
}


BY_NAME = {
    "classification": Classification,
    "segmentation": Segmentation,
    "contrastive": Contrastive,
}


def small_task(task: object) -> Classification:
    """Return the small version of a generated project's task."""
    return BY_METRIC[task.METRIC](task)
