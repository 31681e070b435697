"""Models for images of about 32 x 32 pixels, such as those of CIFAR and Fashion-MNIST.

resnetN_cifar is torchvision's ResNet with a first convolution of 3 x 3 pixels, stride 1, and
without max pooling. wrnN_K is a Wide ResNet of N layers that are K times as wide: wrn28_10.

Source: Zagoruyko and Komodakis, "Wide Residual Networks", BMVC 2016.
"""

import re

import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

RESNET = re.compile(r"(resnet(?:18|34|50))_cifar")
WIDE_RESNET = re.compile(r"wrn([1-9]\d{0,2})_([1-9]\d?)")  # a checkpoint can name any
EXAMPLES = ("resnet18_cifar", "wrn28_10")


def build_small_model(arch: str, num_classes: int) -> nn.Module | None:
    """Return the untrained model (N, 3, H, W) -> (N, num_classes), None if `arch` is none of these.

    Wide ResNets have 4 layers more than a multiple of 6.
    """
    if match := RESNET.fullmatch(arch):
        return build_resnet(match[1], num_classes)
    match = WIDE_RESNET.fullmatch(arch)
    if match and int(match[1]) % 6 == 4 and int(match[1]) > 4:
        return WideResNet(int(match[1]), int(match[2]), num_classes)
    return None


def build_resnet(name: str, num_classes: int) -> nn.Module:
    """Return torchvision's ResNet of that name with a stem for small images."""
    model = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    model.conv1 = convolution(3, 64, 3)
    model.maxpool = nn.Identity()
    return model


def convolution(channels_in: int, channels_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, with He's initialization, that keeps the image size."""
    layer = nn.Conv2d(channels_in, channels_out, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class WideBlock(nn.Module):
    """Residual block that normalizes before each of its two convolutions."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = convolution(channels_in, channels_out, 3, stride)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.conv2 = convolution(channels_out, channels_out, 3)
        has_same_shape = channels_in == channels_out and stride == 1
        self.shortcut = (
            None if has_same_shape else convolution(channels_in, channels_out, 1, stride)
        )

    def forward(self, images: Tensor) -> Tensor:
        activated = F.relu(self.norm1(images))
        shortcut = images if self.shortcut is None else self.shortcut(activated)
        return shortcut + self.conv2(F.relu(self.norm2(self.conv1(activated))))


def wide_stage(channels_in: int, channels_out: int, depth: int, stride: int) -> nn.Sequential:
    """Return one of the three stages of a Wide ResNet of `depth` layers."""
    blocks = [WideBlock(channels_in, channels_out, stride)]
    blocks += [WideBlock(channels_out, channels_out, 1) for _ in range((depth - 4) // 6 - 1)]
    return nn.Sequential(*blocks)


class WideResNet(nn.Module):
    """Wide ResNet of `depth` layers in three stages of 16, 32 and 64 times `width` channels."""

    def __init__(self, depth: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = convolution(3, 16, 3)
        self.layer1 = wide_stage(16, 16 * width, depth, stride=1)
        self.layer2 = wide_stage(16 * width, 32 * width, depth, stride=2)
        self.layer3 = wide_stage(32 * width, 64 * width, depth, stride=2)
        self.norm = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits: (N, 3, H, W) -> (N, num_classes)."""
        features = self.layer3(self.layer2(self.layer1(self.conv1(images))))
        return self.fc(F.relu(self.norm(features)).mean(dim=(2, 3)))
