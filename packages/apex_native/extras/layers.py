"""Layers of ``apex.mlp``, ``apex.fused_dense`` and ``apex.contrib.layer_norm``."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .norm_functions import mixed_dtype_fused_layer_norm_affine

ACTIVATIONS = {"none": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}


class MLP(nn.Module):
    """Linear layers, each of them, also the last, followed by the activation.

    Args:
        mlp_sizes: the number of features of the input and of each layer's output.
        activation: "relu", "sigmoid" or "none"; others raise TypeError.
    """

    def __init__(self, mlp_sizes: list[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise TypeError(f"MLP: activation is {activation!r}, not relu, sigmoid or none.")
        self.mlp_sizes = list(mlp_sizes)
        self.num_layers = len(mlp_sizes) - 1
        self.bias = int(bias)
        self.activation = list(ACTIVATIONS).index(activation)
        self._activate = ACTIVATIONS[activation]()
        for index, (inputs, outputs) in enumerate(zip(mlp_sizes[:-1], mlp_sizes[1:], strict=True)):
            self.register_parameter(f"weight_{index}", nn.Parameter(torch.empty(outputs, inputs)))
            if bias:
                self.register_parameter(f"bias_{index}", nn.Parameter(torch.empty(outputs)))
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        """The weights (outputs, inputs) of the layers."""
        return [getattr(self, f"weight_{index}") for index in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        """The biases of the layers, if there are any."""
        names = [f"bias_{index}" for index in range(self.num_layers)]
        return [getattr(self, name) for name in names if self.bias]

    def reset_parameters(self) -> None:
        """Draw weights and biases from the normal distributions that Apex uses."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / bias.numel()))

    def forward(self, input: Tensor) -> Tensor:
        """Return the output (…, mlp_sizes[-1]) for `input` (…, mlp_sizes[0])."""
        for index, weight in enumerate(self.weights):
            bias = getattr(self, f"bias_{index}", None)
            input = self._activate(F.linear(input, weight, bias))
        return input

    def extra_repr(self) -> str:
        """Return the sizes, for ``print(model)``."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"


class FusedDense(nn.Linear):
    """Linear layer. It is initialized as torch's, where Apex leaves the memory as it is."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


class FusedDenseGeluDense(nn.Module):
    """Linear layer, GELU in its tanh approximation, as in cuBLAS, and another linear layer.

    It is initialized as torch's linear layers are, where Apex leaves the memory as it is.
    """

    def __init__(
        self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True
    ) -> None:
        super().__init__()
        if not bias:
            raise ValueError("FusedDenseGeluDense needs bias=True, as in Apex.")
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        first = nn.Linear(in_features, intermediate_features)
        second = nn.Linear(intermediate_features, out_features)
        self.weight1, self.bias1 = first.weight, first.bias
        self.weight2, self.bias2 = second.weight, second.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the output (…, out_features) for `input` (…, in_features)."""
        hidden = F.gelu(F.linear(input, self.weight1, self.bias1), approximate="tanh")
        return F.linear(hidden, self.weight2, self.bias2)


class FastLayerNorm(nn.Module):
    """Layer norm over the last dimension, of any size, whose output has the weight's type.

    `memory_efficient` is accepted as in Apex and unused.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (…, hidden_size) normalized."""
        return mixed_dtype_fused_layer_norm_affine(
            x, self.weight, self.bias, self.weight.shape, self.epsilon
        )
