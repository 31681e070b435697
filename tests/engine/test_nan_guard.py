"""engine.diagnostics.first_step: a run that cannot recover ends with the name of the bad layer."""

import math

import pytest
import torch
from engine.diagnostics.first_step import check_finite, first_nonfinite_layer
from engine.monitoring.meter import LogRecord
from engine.optim import eval_mode
from torch import Tensor, nn


class TwoEncoders(nn.Module):
    """Model whose only argument is a tuple of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.image_encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.text_encoder = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, captions = inputs
        return self.image_encoder(images), self.text_encoder(captions)


INPUTS = torch.ones(2, 4), torch.zeros(2, 3, dtype=torch.long)


def record(nonfinite_losses: float = 0.0, loss_scale: float = 1.0) -> LogRecord:
    return LogRecord(20, 0.1, 1.0, nonfinite_losses, loss_scale, 100.0, {})


@pytest.mark.parametrize("good", [None, record(), record(9.0), record(loss_scale=2.0**-16)])
def test_training_that_can_recover_passes(good):
    check_finite(good, TwoEncoders(), INPUTS)


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (record(10.0), "10 losses in a row, up to step 20, are not finite. "),
        (record(loss_scale=2.0**-17), "the loss scale is down to 7.62939e-06: no scale keeps"),
    ],
)
def test_training_that_can_not_recover_is_an_error(bad, cause):
    with pytest.raises(FloatingPointError, match=cause):
        check_finite(bad, nn.DataParallel(TwoEncoders()), INPUTS)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        ("image_encoder.1", "statistics"),
        ("image_encoder.2", "weights"),
        ("text_encoder.0", "weights"),
    ],
)
def test_first_nonfinite_layer_is_named(layer, kind):
    model = TwoEncoders()
    module = model.get_submodule(layer)
    with torch.no_grad():
        (module.running_var if kind == "statistics" else module.weight).fill_(math.nan)
    sentence = f"The first layer that is not finite is {layer}, in its {kind}"
    assert first_nonfinite_layer(model, INPUTS) == sentence


def test_layer_of_a_compiled_model_is_named():
    """Compiled code does not call hooks that are registered afterwards."""
    model = TwoEncoders()
    model.compile(backend="eager")
    with eval_mode(model), torch.no_grad():
        model(INPUTS)
        model.image_encoder[2].weight.fill_(math.nan)
    sentence = "The first layer that is not finite is image_encoder.2, in its weights"
    assert first_nonfinite_layer(model, INPUTS) == sentence


def test_overflow_in_a_layer_is_named():
    model = TwoEncoders()
    with torch.no_grad():
        model.image_encoder[0].weight.fill_(3e38)
    sentence = "The first layer whose output is not finite is image_encoder.0"
    assert first_nonfinite_layer(model, INPUTS) == sentence


def test_nonfinite_inputs_are_named():
    images, captions = INPUTS
    sentence = "What goes into the model is not finite"
    assert first_nonfinite_layer(TwoEncoders(), (images / 0, captions)) == sentence


def test_finite_model_keeps_its_mode_and_hooks():
    model = TwoEncoders().train()
    model.text_encoder.eval()
    assert first_nonfinite_layer(model, INPUTS) == "Every layer's output is finite, the loss is not"
    assert model.training and not model.text_encoder.training
    assert not any(module._forward_hooks for module in model.modules())
