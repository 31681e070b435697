"""Function casts of O1 and O4."""

import copy

import pytest
import torch
from amp_helpers import (
    BF16,
    FP16,
    FP32,
    LEVELS,
    Net,
    backward,
    batches,
    gradients,
    initialize,
    on,
    prepare,
    same,
    sgd,
    train,
)
from apex_native import amp
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize(("level", "dtype"), [("O1", FP16), ("O4", BF16)])
def test_function_casts_apply_outside_the_model(device, level, dtype):
    model = initialize(Net().to(device), None, level)
    output = model(torch.randn(4, 4, device=device))
    assert output.dtype == on(device, dtype)
    assert F.cross_entropy(output, torch.zeros(4, dtype=int, device=device)).dtype == FP32
    assert F.mse_loss(output, torch.zeros_like(output)).dtype == FP32
    if device.type == "cuda":  # torch's list for the CPU is shorter
        assert output.softmax(1).dtype == output.sum().dtype == FP32
    a = torch.ones(2, 2, device=device)
    assert (a @ a).dtype == on(device, dtype)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_autocast_leaves_float64(device, level):
    layer = initialize(nn.Linear(2, 2).to(device), None, level)
    x = torch.ones(2, 2, dtype=torch.float64, device=device)
    assert (x @ x).dtype == x.softmax(1).dtype == torch.float64
    with pytest.raises(RuntimeError, match="type"):
        layer(x)
    assert layer(x.float()).dtype == on(device, FP16 if level == "O1" else BF16)


def product_type():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize("level", LEVELS)
def test_only_o1_and_o4_cast_functions(level):
    initialize(Net(), None, level)
    assert product_type() == on("cpu", {"O1": FP16, "O4": BF16}.get(level, FP32))


class Spy(torch.optim.SGD):
    def step(self, closure=None):
        self.seen = product_type()
        return super().step(closure)


def test_casts_are_off_in_backward_and_step():
    model = Net()
    model, optimizer = initialize(model, Spy(model.parameters(), lr=0.1), "O4")
    assert product_type() == on("cpu", BF16)
    with amp.scale_loss(model(torch.randn(2, 4)).sum(), optimizer):
        assert product_type() == FP32
    optimizer.step()
    assert optimizer.seen == FP32
    with amp.disable_casts():
        assert product_type() == FP32
        with amp.disable_casts():
            assert product_type() == FP32
        assert product_type() == FP32
    assert product_type() == on("cpu", BF16)
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        raise ZeroDivisionError
    assert product_type() == on("cpu", BF16)


@pytest.mark.parametrize("options", [{"opt_level": "O0"}, {"enabled": False}])
def test_second_initialize_ends_the_casts(options):
    initialize(Net(), None, "O4")
    amp.initialize(Net(), verbosity=0, **options)
    assert product_type() == FP32


@pytest.mark.parametrize("level", LEVELS)
def test_cast_weights_are_never_stale(level):
    model, optimizer = prepare(level)
    x = torch.randn(16, 4)

    def output():
        """Evaluate the model, and one that was never called before."""
        model.eval()
        with torch.no_grad():
            result = model(x)
            assert torch.equal(result, copy.deepcopy(model)(x))
        model.train()
        return result

    outputs = [output()]
    for batch in batches(2):
        train(model, optimizer, [batch])
        assert all(parameter.grad is not None for parameter in model.norm.parameters())
        outputs.append(output())
    model.load_state_dict(Net().state_dict())
    outputs.append(output())
    assert len({tuple(result.flatten().tolist()) for result in outputs}) == 4


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_after_an_evaluation(level):
    results = []
    for evaluated in (False, True):
        torch.manual_seed(0)
        model, optimizer = prepare(level, loss_scale=128.0)
        x = torch.ones(2, 4)
        model.eval()
        if evaluated:
            with torch.no_grad():
                model(x)
        backward(model(x).sum(), optimizer)
        results.append(gradients(optimizer))
    assert same(*results)


@pytest.mark.parametrize("level", LEVELS)
def test_weight_used_twice(device, level):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    model, x = Twice().to(device), torch.randn(8, 4, device=device)
    model(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model, optimizer = initialize(model, sgd(model), level)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model(x).square().mean(), optimizer)
    for gradient, wanted in zip(gradients(optimizer), expected, strict=True):
        torch.testing.assert_close(gradient.float(), wanted, rtol=0.05, atol=0.01)


def product_with(device, decorated):
    """Return ``x @ weight`` as a function with a backward pass of its own."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(context, x, weight):
            context.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(context, gradient):
            x, weight = context.saved_tensors
            return gradient @ weight.t(), x.t() @ gradient

    if decorated:
        kind = device.type
        Product.forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type=kind))
        Product.backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type=kind))
    return Product.apply


def test_casts_are_off_in_backward_passes_of_own_functions(device):
    """torch's decorators bring them back, as the table says."""
    weight = nn.Parameter(torch.randn(4, 4, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    initialize(nn.Linear(1, 1).to(device), optimizer)
    x = torch.randn(8, 4, device=device)
    with pytest.raises(RuntimeError, match="same dtype"):
        backward(product_with(device, decorated=False)(x, weight).float().mean(), optimizer)
    backward(product_with(device, decorated=True)(x, weight).float().mean(), optimizer)
    expected = x.sum(0)[:, None].expand(4, 4) / 32
    torch.testing.assert_close(weight.grad, expected, rtol=0.02, atol=0.01)


def test_backward_passes_outside_of_scale_loss_are_cast(device):
    """Also those of what was computed in fp32, unless the script turns the casts off."""
    initialize(nn.Linear(1, 1).to(device))
    x = torch.randn(8, 4, device=device)
    weight = torch.randn(4, 4, device=device, requires_grad=True)
    with amp.disable_casts():
        loss = (x @ weight).square().sum()
        expected = 2 * x.t() @ (x @ weight.detach())
    (cast,) = torch.autograd.grad(loss, weight, retain_graph=True)
    with amp.disable_casts():
        (exact,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(exact, expected)
    assert not torch.allclose(cast, expected, rtol=1e-5)
    torch.testing.assert_close(cast, expected, rtol=0.05, atol=0.5)
