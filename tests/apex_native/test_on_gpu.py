"""Behaviour on GPUs: the casts of O1, recurrent networks in half, and torch's fused SGD.

The casts are tested without a GPU too, on torch's imitation of one.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from amp_helpers import FP16, FP32
from apex_native import amp
from apex_native.amp import half_type
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The casts of O1


@pytest.fixture(params=["imitated", pytest.param("cuda", marks=pytest.mark.gpu)])
def o1(request: pytest.FixtureRequest) -> Iterator[None]:
    """O1 on a GPU, or on the imitation, whose tensors have types and shapes but no values."""
    is_imitated = request.param == "imitated"
    with FakeTensorMode() if is_imitated else contextlib.nullcontext():
        try:
            model = nn.Linear(1, 1, device="cuda")
        except RuntimeError as error:
            if is_imitated and "driver version is insufficient" in str(error):
                pytest.skip("torch 2.6 imitates no GPU where there is no driver")
            raise
        amp.initialize(model, opt_level="O1", verbosity=0)
        yield


@pytest.mark.usefixtures("o1")
def test_device_is_that_of_the_optimizer_where_there_is_no_model():
    """As in scripts that optimize images, such as DeepInversion."""
    images = torch.ones(2, 3, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([images], lr=0.1)
    _, optimizer = amp.initialize([], optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
    assert amp._amp_state.device_type == "cuda"
    with amp.scale_loss(images.sum(), optimizer) as loss:
        assert loss.device.type == "cuda"


@pytest.mark.usefixtures("o1")
def test_loss_on_another_gpu_is_scaled(request):
    """Of a model on several GPUs, whose scaler is on the first one."""
    if "imitated" not in request.node.name and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    model = nn.Linear(1, 1, device="cuda:1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    amp._amp_state.loss_scalers[0].factor = torch.ones((), device="cuda:0")
    with (
        pytest.raises(ZeroDivisionError),  # the imitation has no values to unscale by
        amp.scale_loss(model(torch.ones(2, 1, device="cuda:1")), optimizer) as scaled_loss,
    ):
        assert scaled_loss.device == torch.device("cuda:1")
        raise ZeroDivisionError


def half(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda").half()


def single(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda")


def index(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="cuda")


# What each function is called with: `t` makes tensors of the type that the test is about.
IN_HALF = {
    "conv1d": lambda t: F.conv1d(t(1, 2, 5), t(3, 2, 3)),
    "conv2d": lambda t: F.conv2d(t(1, 2, 5, 5), t(3, 2, 3, 3), t(3)),
    "conv3d": lambda t: F.conv3d(t(1, 2, 5, 5, 5), t(3, 2, 3, 3, 3)),
    "conv_transpose1d": lambda t: F.conv_transpose1d(t(1, 2, 5), t(2, 3, 3)),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(1, 2, 5, 5), t(2, 3, 3, 3)),
    "conv_transpose3d": lambda t: F.conv_transpose3d(t(1, 2, 5, 5, 5), t(2, 3, 3, 3, 3)),
    "conv_tbc": lambda t: torch.conv_tbc(t(5, 1, 2), t(3, 2, 3), t(3)),
    "linear": lambda t: F.linear(t(2, 4), t(3, 4), t(3)),
    "prelu": lambda t: F.prelu(t(2, 4), t(1)),
    "matmul": lambda t: torch.matmul(t(2, 3, 4), t(4, 3)),
    "@": lambda t: t(2, 4) @ t(4, 3),
    "mm": lambda t: torch.mm(t(2, 4), t(4, 3)),
    "mv": lambda t: torch.mv(t(2, 4), t(4)),
    "addmm": lambda t: torch.addmm(t(2, 3), t(2, 4), t(4, 3)),
    "addmv": lambda t: torch.addmv(t(2), t(2, 4), t(4)),
    "addr": lambda t: torch.addr(t(2, 3), t(2), t(3)),
    "bmm": lambda t: torch.bmm(t(5, 2, 4), t(5, 4, 3)),
    "addbmm": lambda t: torch.addbmm(t(2, 3), t(5, 2, 4), t(5, 4, 3)),
    "baddbmm": lambda t: torch.baddbmm(t(5, 2, 3), t(5, 2, 4), t(5, 4, 3)),
}


def of_one(function: Callable) -> Callable:
    return lambda t: function(t(4))


def enlarged(mode: str, *shape: int) -> Callable:
    return lambda t: F.interpolate(t(*shape), scale_factor=2, mode=mode)


IN_SINGLE = {
    **{
        name: of_one(getattr(torch, name))
        for name in (
            *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2"),
            *("norm", "prod", "reciprocal", "rsqrt", "sinh", "sum", "tan"),
        )
    },
    "pow": lambda t: torch.pow(t(4), 2),
    "**": lambda t: t(4) ** 2,
    "2 **": lambda t: 2 ** t(4),
    "pow of two tensors": lambda t: torch.pow(t(4), t(4)),
    "cumprod": lambda t: torch.cumprod(t(4), 0),
    "cumsum": lambda t: torch.cumsum(t(4), 0),
    "dist": lambda t: torch.dist(t(4), t(4)),
    "norm of rows": lambda t: t(2, 4).norm(dim=1),
    "prod of rows": lambda t: t(2, 4).prod(1),
    "renorm": lambda t: torch.renorm(t(2, 4), 2, 0, 1.0),
    "sum of rows": lambda t: t(2, 4).sum(1),
    "softmax": lambda t: F.softmax(t(2, 4), 1),
    "softmin": lambda t: F.softmin(t(2, 4), 1),
    "log_softmax": lambda t: F.log_softmax(t(2, 4), 1),
    "softplus": lambda t: F.softplus(t(4)),
    "layer_norm": lambda t: F.layer_norm(t(2, 4), (4,), t(4), t(4)),
    "group_norm": lambda t: F.group_norm(t(2, 4), 2, t(4), t(4)),
    "normalize": lambda t: F.normalize(t(2, 4)),
    "cosine_similarity": lambda t: F.cosine_similarity(t(2, 4), t(2, 4)),
    "interpolate, linear": enlarged("linear", 1, 2, 4),
    "interpolate, bilinear": enlarged("bilinear", 1, 2, 4, 4),
    "interpolate, bicubic": enlarged("bicubic", 1, 2, 4, 4),
    "interpolate, trilinear": enlarged("trilinear", 1, 2, 4, 4, 4),
    "interpolate, nearest": enlarged("nearest", 1, 2, 4, 4),
    "interpolate, nearest-exact": enlarged("nearest-exact", 1, 2, 4, 4),
    "binary_cross_entropy_with_logits": lambda t: F.binary_cross_entropy_with_logits(t(4), t(4)),
    "cosine_embedding_loss": lambda t: F.cosine_embedding_loss(t(2, 4), t(2, 4), index(2)),
    "cross_entropy": lambda t: F.cross_entropy(t(2, 4), index(2)),
    "cross_entropy of images": lambda t: F.cross_entropy(t(2, 4, 3, 3), index(2, 3, 3)),
    "hinge_embedding_loss": lambda t: F.hinge_embedding_loss(t(4), index(4)),
    "kl_div": lambda t: F.kl_div(t(2, 4), t(2, 4), reduction="batchmean"),
    "l1_loss": lambda t: F.l1_loss(t(4), t(4)),
    "margin_ranking_loss": lambda t: F.margin_ranking_loss(t(4), t(4), index(4)),
    "mse_loss": lambda t: F.mse_loss(t(4), t(4)),
    "multi_margin_loss": lambda t: F.multi_margin_loss(t(2, 4), index(2)),
    "multilabel_margin_loss": lambda t: F.multilabel_margin_loss(t(2, 4), index(2, 4)),
    "nll_loss": lambda t: F.nll_loss(t(2, 4), index(2)),
    "poisson_nll_loss": lambda t: F.poisson_nll_loss(t(4), t(4)),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(t(4), t(4)),
    "soft_margin_loss": lambda t: F.soft_margin_loss(t(4), t(4)),
    "triplet_margin_loss": lambda t: F.triplet_margin_loss(t(2, 4), t(2, 4), t(2, 4)),
}

# `a` and `b` make tensors of the two types that meet.
IN_THE_WIDEST = {
    "add": lambda a, b: a(4) + b(4),
    "sub": lambda a, b: a(4) - b(4),
    "mul": lambda a, b: a(4) * b(4),
    "div": lambda a, b: a(4) / b(4),
    "addcdiv": lambda a, b: torch.addcdiv(a(4), b(4), a(4)),
    "addcmul": lambda a, b: torch.addcmul(a(4), a(4), b(4)),
    "atan2": lambda a, b: torch.atan2(a(4), b(4)),
    "bilinear": lambda a, b: F.bilinear(a(2, 3), b(2, 4), a(5, 3, 4), b(5)),
    "cat": lambda a, b: torch.cat([a(4), b(4)]),
    "cross": lambda a, b: torch.cross(a(3), b(3), dim=0),
    "dot": lambda a, b: torch.dot(a(4), b(4)),
    "stack": lambda a, b: torch.stack([a(4), b(4)]),
}

# Where autocast's lists are not Apex's: what Apex alone runs in fp32 …
NOT_IN_SINGLE = {
    "gelu": lambda: F.gelu(half(4)),
    "std": lambda: torch.std(half(4)),
    "var": lambda: torch.var(half(4)),
    "interpolate, area": lambda: F.interpolate(half(1, 2, 4, 4), size=2, mode="area"),
    "cpu": lambda: half(4).cpu(),
    "grid_sample": lambda: F.grid_sample(half(1, 2, 4, 4), half(1, 3, 3, 2), align_corners=False),
}
# … the same for what is inside of a function that ends in fp32 …
HALF_INSIDE = {
    "local_response_norm": (lambda: F.local_response_norm(half(1, 2, 4), 3), "aten.mul"),
    "multilabel_soft_margin_loss": (
        lambda: F.multilabel_soft_margin_loss(half(2, 4), half(2, 4)),
        "aten.log_sigmoid_forward",
    ),
}
# … and what autocast alone casts.
ONLY_IN_AUTOCAST = {
    "log1p": (lambda: torch.log1p(half(4)), FP32),
    "logsumexp": (lambda: torch.logsumexp(half(2, 4), 1), FP32),
    "huber_loss": (lambda: F.huber_loss(half(4), half(4)), FP32),
    "cdist": (lambda: torch.cdist(half(2, 4), half(2, 4)), FP32),
    "pdist": (lambda: F.pdist(half(2, 4)), FP32),
    "linalg.norm": (lambda: torch.linalg.norm(half(4)), FP32),
    "linalg.vector_norm": (lambda: torch.linalg.vector_norm(half(4)), FP32),
    "linalg.matrix_norm": (lambda: torch.linalg.matrix_norm(half(2, 4)), FP32),
    "einsum": (lambda: torch.einsum("ij,jk->ik", single(2, 4), single(4, 3)), FP16),
    "scaled_dot_product_attention": (
        lambda: F.scaled_dot_product_attention(*(single(1, 2, 4, 8) for _ in range(3))),
        FP16,
    ),
    "linalg.multi_dot": (lambda: torch.linalg.multi_dot([single(2, 4), single(4, 3)]), FP16),
    "chain_matmul": (lambda: torch.chain_matmul(single(2, 4), single(4, 3)), FP16),
    "linalg.vecdot": (lambda: torch.linalg.vecdot(single(4), single(4)), FP16),
    "vdot": (lambda: torch.vdot(half(4), single(4)), FP32),
    "tensordot": (lambda: torch.tensordot(half(2, 4), single(4, 3), 1), FP32),
    "scatter_add": (lambda: torch.scatter_add(half(4), 0, index(4), single(4)), FP32),
    "index_put": (lambda: torch.index_put(half(4), (index(1),), single(1)), FP32),
}


class Spy(TorchDispatchMode):
    """Mode that records the floating types of operators' arguments, after casts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value in tree_leaves(args):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.seen.setdefault(str(func.overloadpacket), set()).add(value.dtype)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("function", IN_HALF.values(), ids=IN_HALF)
def test_o1_casts_to_half(o1: None, function: Callable) -> None:
    assert function(single).dtype == FP16


@pytest.mark.parametrize("function", IN_SINGLE.values(), ids=IN_SINGLE)
def test_o1_casts_to_fp32(o1: None, function: Callable) -> None:
    assert function(half).dtype == FP32


@pytest.mark.parametrize("function", IN_THE_WIDEST.values(), ids=IN_THE_WIDEST)
def test_o1_casts_to_the_widest_type(o1: None, function: Callable) -> None:
    assert function(half, half).dtype == FP16
    assert function(half, single).dtype == function(single, half).dtype == FP32


def test_o1_compares_in_the_widest_type(device: torch.device) -> None:
    amp.initialize(nn.Linear(1, 1, device=device), opt_level="O1", verbosity=0)
    exact = torch.full((1,), 0.1, device=device)
    rounded = exact.half()  # 0.09998
    assert rounded < exact and rounded <= exact and rounded != exact
    assert not (rounded > exact or rounded >= exact or rounded == exact)


def test_o1_binary_cross_entropy_takes_fp32_only(o1: None) -> None:
    assert F.binary_cross_entropy(single(4), single(4), single(4)).dtype == FP32
    assert nn.BCELoss()(single(4), single(4)).dtype == FP32
    for arguments in ([half(4), single(4)], [single(4), half(4)], [single(4), single(4), half(4)]):
        with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(*arguments)


def test_autocast_leaves_in_place_functions_in_their_type(o1: None) -> None:
    for name in ("exp_", "log_", "reciprocal_", "rsqrt_", "tan_"):
        assert getattr(half(4), name)().dtype == FP16
    assert half(4).pow_(2).dtype == FP16


def test_autocast_leaves_arguments_of_in_place_functions_in_their_type(
    device: torch.device,
) -> None:
    amp.initialize(nn.Linear(1, 1, device=device), opt_level="O4", verbosity=0)
    a, b = torch.ones(2, 2, device=device), torch.ones(2, 2, device=device, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        a.addmm_(b, b)


@pytest.mark.parametrize("function", NOT_IN_SINGLE.values(), ids=NOT_IN_SINGLE)
def test_autocast_runs_in_half_what_apex_runs_in_fp32(o1: None, function: Callable) -> None:
    assert function().dtype == FP16


@pytest.mark.parametrize(("function", "operator"), HALF_INSIDE.values(), ids=HALF_INSIDE)
def test_autocast_runs_composite_functions_in_half(
    o1: None, function: Callable, operator: str
) -> None:
    with Spy() as spy:
        assert function().dtype == FP32
    assert spy.seen[operator] == {FP16}


@pytest.mark.gpu  # the imitation asks the driver about cuDNN
def test_autocast_runs_ctc_loss_in_half() -> None:
    amp.initialize(nn.Linear(1, 1, device="cuda"), opt_level="O1", verbosity=0)
    lengths = torch.tensor([5, 5]), torch.tensor([3, 3])
    with Spy() as spy, contextlib.suppress(RuntimeError):  # CUDA has no kernel for it
        F.ctc_loss(half(5, 2, 4), index(2, 3) + 1, *lengths)
    assert spy.seen["aten._ctc_loss"] == {FP16}


@pytest.mark.parametrize(("function", "dtype"), ONLY_IN_AUTOCAST.values(), ids=ONLY_IN_AUTOCAST)
def test_autocast_casts_functions_that_apex_does_not(
    o1: None, function: Callable, dtype: torch.dtype
) -> None:
    assert function().dtype == dtype


def test_o1_casts_user_functions(o1: None) -> None:
    def seen(tensor: Tensor) -> torch.dtype:
        return tensor.dtype

    assert amp.half_function(seen)(single(2)) == FP16
    assert amp.bfloat16_function(seen)(single(2)) == torch.bfloat16
    assert amp.float_function(seen)(half(2)) == FP32


# Recurrent networks


class Recurrent(nn.Module):
    """A recurrent layer, or a cell called once for each time, before a linear layer."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layer, self.last = kind(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(time, batch, 4) → (batch, 2)."""
        state = None
        if isinstance(self.layer, nn.RNNBase):
            _, state = self.layer(x)
        else:
            for step in x:
                state = self.layer(step, state)
        self.state = state[0] if isinstance(state, tuple) else state
        return self.last(self.state.reshape(-1, 8))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_recurrent_networks_train_in_half(device: torch.device, level: str, kind: type) -> None:
    model = Recurrent(kind).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # A scale at which no step is skipped.
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
    )
    x, target = torch.randn(5, 3, 4, device=device), torch.tensor([0, 1, 0], device=device)
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(x), target)
        if level == "O2" or device.type == "cuda":  # autocast's list for the CPU is shorter
            assert model.state.dtype == half_type(FP16, device)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


# SGD


def test_torch_fused_sgd_fails_after_overflow_in_first_step(
    device: torch.device, poisoned_memory: None
) -> None:
    """Why amp does not let it skip steps by itself. Should this fail, torch has been mended."""
    parameter = nn.Parameter(torch.ones(4, device=device))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler(device.type)
    finite = []
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        finite.append(bool(parameter.isfinite().all()))
    assert finite == [True, False]  # the first step was skipped, but left a momentum behind
