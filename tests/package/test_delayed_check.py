"""Scripts that check for overflows and update the loss scale themselves, as NVIDIA's BERT does."""

import math

import pytest
import torch
from apex_native import amp
from apex_native.amp.state import LossScaler
from apex_native.extras.flat import unflatten
from apex_native.extras.multi_tensor import multi_tensor_scale
from apex_native.optimizers import FusedLAMB
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCHES, MICRO = 5, 2
BAD = 2  # the batch with an inf


def prepare():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)
    return model, FusedLAMB(model.parameters(), lr=0.01)


def losses(model):
    """Yield the index of a batch and the losses of its micro-batches."""
    for index in range(BATCHES):
        x = torch.randn(MICRO, 4, 6, generator=torch.Generator().manual_seed(index)).to(DEVICE)
        yield index, (model(each).float().square().mean() / MICRO for each in x)


def take_optimizer_step(model, optimizer, buffer):
    """Reduce the gradients in one buffer, check them there, and step unless one overflowed."""
    scaler = amp._amp_state.loss_scalers[0]
    grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    flat = torch.empty(sum(grad.numel() for grad in grads), device=DEVICE)
    views = unflatten(flat, grads)
    multi_tensor_scale(65536, buffer.zero_(), [grads, views], scaler.loss_scale() / 2)
    flat.mul_(2)  # all_reduce of two processes
    multi_tensor_scale(65536, buffer.zero_(), [views, grads], 1 / scaler.loss_scale())
    scaler._overflow_buf = buffer
    had_overflow = scaler.update_scale()
    assert had_overflow == scaler._has_overflow
    if had_overflow == 0:
        optimizer.step()
    elif amp._amp_state.opt_properties.master_weights:
        for master in optimizer._amp_stash.all_fp32_from_fp16_params:
            master.grad = None
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize(
    ("level", "options", "tolerance"),
    [("O0", {}, 0.0), ("O2", {"cast_model_type": torch.float16}, 5e-3)],
)
def test_loop_of_bert_equals_plain_training(level, options, tolerance):
    expected, plain = prepare()
    for index, parts in losses(expected):
        plain.zero_grad()
        for loss in parts:
            loss.backward()
        if index != BAD:
            plain.step()

    model, optimizer = prepare()
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0, **options
    )
    scaler, buffer = amp._amp_state.loss_scalers[0], torch.zeros(1, dtype=torch.int32).to(DEVICE)
    scaler._loss_scale = 2.0**10
    for index, parts in losses(model):
        for loss in parts:
            factor = math.inf if index == BAD else 1.0
            with amp.scale_loss(loss * factor, optimizer, delay_overflow_check=True) as scaled:
                scaled.backward()
        take_optimizer_step(model, optimizer, buffer)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**9, "unskipped": 2}}
    for one, other in zip(amp.master_params(optimizer), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_update_after_a_delayed_check_uses_the_gradients_of_its_block():
    model, optimizer = amp.initialize(*prepare(), loss_scale="dynamic", verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    for factor, scale in ((1.0, 2.0**16), (math.inf, 2.0**15), (1.0, 2.0**15)):
        loss = model(torch.ones(2, 6, device=DEVICE)).float().sum() * factor
        with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled:
            scaled.backward()
        assert not optimizer._amp_stash.already_patched
        assert scaler.update_scale() == math.isinf(factor)
        assert scaler.loss_scale() == scale
        optimizer.zero_grad()


def test_changed_masters_are_copied_to_the_model():
    """As in block-momentum training, which averages the masters of processes."""
    model, optimizer = prepare()
    options = {"cast_model_type": torch.float16, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", **options)
    for master in amp.master_params(optimizer):
        master.data.fill_(0.1)
        master.grad = torch.ones_like(master)
    optimizer._master_params_to_model_params()
    assert all(torch.equal(p, torch.full_like(p, 0.1)) for p in model.parameters())
    assert all(master.grad is not None for master in amp.master_params(optimizer))
    model, optimizer = prepare()  # without half parameters, there are no masters
    options["cast_model_type"] = torch.float32
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", **options)
    optimizer._master_params_to_model_params()


def test_stash_lists_half_parameters_and_masters_and_whether_the_step_is_skipped():
    model, optimizer = prepare()
    options = {"cast_model_type": torch.float16, "loss_scale": "dynamic", "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", **options)
    optimizer._amp_lazy_init()
    stash = optimizer._amp_stash
    assert list(map(id, stash.all_fp16_params)) == list(map(id, model.parameters()))
    masters = list(map(id, stash.all_fp32_from_fp16_params))
    assert masters == list(map(id, amp.master_params(optimizer)))
    assert [stash.all_fp16_params] == stash.fp16_groups
    assert list(map(id, *stash.fp32_from_fp16_groups)) == masters
    assert amp._amp_state.loss_scalers[0]._has_overflow is stash.already_patched is False
    with amp.scale_loss(model(torch.ones(2, 6, device=DEVICE)).sum() * math.inf, optimizer) as loss:
        loss.backward()
    assert amp._amp_state.loss_scalers[0]._has_overflow is stash.already_patched is True
    optimizer.step()
    assert not stash.already_patched


def test_loss_scaler_is_created_as_in_apex():
    assert LossScaler("dynamic").loss_scale() == 65536.0
    scaler = LossScaler("dynamic", 8.0, 4.0, 2, 1.0, 16.0)
    scales = []
    for found in (0, 0, 1, 1):
        scaler._overflow_buf = torch.tensor([found], dtype=torch.int32)
        assert scaler.update_scale() == bool(found)
        scales.append(scaler.loss_scale())
    assert scales == [8.0, 16.0, 4.0, 1.0]
    static = LossScaler(128.0)
    assert (static.update_scale(), static.loss_scale(), static.dynamic) == (False, 128.0, False)


class SgdByStash(torch.optim.SGD):
    """SGD that finds what to step in amp's stash, if it is there, as Apex's FusedSGD does."""

    @torch.no_grad()
    def step(self, closure=None):
        stash = getattr(self, "_amp_stash", None)
        for index, group in enumerate(self.param_groups):
            parameters = group["params"]
            if hasattr(stash, "fp32_from_fp16_groups"):
                parameters = stash.fp32_from_fp32_groups[index] + stash.fp32_from_fp16_groups[index]
                assert len(stash.fp16_groups[index]) == len(stash.fp32_from_fp16_groups[index])
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_optimizer_of_an_installed_apex_steps_each_group(level):
    weights = []
    for kind in (torch.optim.SGD, SgdByStash):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8))
        model = model.append(torch.nn.Linear(8, 2)).to(DEVICE)
        optimizer = kind([{"params": model[:2].parameters()}], lr=0.1)
        cast = {"cast_model_type": torch.float16} if level in ("O2", "O3") else {}
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **cast)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 6, device=DEVICE) * torch.arange(4.0)[:, None].to(DEVICE))
            with amp.scale_loss(loss.square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        weights.append([parameter.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))
