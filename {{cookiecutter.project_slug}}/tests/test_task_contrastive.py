"""Contrastive training: gradients through the gather, exact recall, what is wrong with files."""

import sys

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from processes import Processes
from torch import nn
from torch.utils.data import DataLoader, Subset

import main
import task_contrastive as task
from apex_native.parallel import DistributedDataParallel
from engine import distributed, finite, weights
from engine.errors import UserError

PAIRS = 6


@pytest.fixture(scope="module", params=[2, 3])
def processes(request: pytest.FixtureRequest) -> Processes:
    processes = Processes("gloo", request.param)
    yield processes
    processes.stop()


# The loss


class Scaled(nn.Linear):
    """Embeddings of unit length over a learned temperature, as the text encoder's are."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.log_scale = nn.Parameter(torch.ones(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(super().forward(values), dim=1) * self.log_scale.exp()


def pairs(captions: list[int]) -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    """Two encoders, and what goes into them, in float64."""
    torch.manual_seed(0)
    texts = torch.randn(PAIRS, 3).double()[captions]
    return nn.Linear(5, 4).double(), Scaled().double(), torch.randn(PAIRS, 5).double(), texts


def gradients(captions: list[int], smoothing: float) -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradients of one process's share of the batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    *encoders, images, texts = pairs(captions)
    tokens = torch.tensor(captions, dtype=torch.uint8).unsqueeze(1)
    share = slice(rank * PAIRS // world_size, (rank + 1) * PAIRS // world_size)
    image_encoder, text_encoder = map(DistributedDataParallel, encoders)
    embeddings = image_encoder(images[share]), text_encoder(texts[share])
    loss = task.criterion(*embeddings, tokens[share], rank, world_size, smoothing)
    loss.backward()
    return loss.item(), [p.grad for encoder in encoders for p in encoder.parameters()]


def clip_loss(
    images: torch.Tensor, texts: torch.Tensor, captions: list[int], smoothing: float = 0.0
) -> torch.Tensor:
    """The loss from its definition: one term for each image and for each text.

    Smoothing gives a share of the truth to all that an image, or a text, is to choose from.
    """
    logits = nn.functional.normalize(images, dim=1) @ texts.T
    terms = []
    for table in (logits, logits.T):
        for own, row in enumerate(table):
            candidates = [i for i in range(PAIRS) if i == own or captions[i] != captions[own]]
            truth = (1 - smoothing) * row[own] + smoothing * row[candidates].mean()
            terms.append(row[candidates].logsumexp(0) - truth)
    return torch.stack(terms).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("captions", [[0, 1, 2, 3, 4, 5], [0, 1, 0, 2, 2, 0]])
def test_gradients_equal_those_of_one_process_with_the_whole_batch(processes, captions, smoothing):
    image_encoder, text_encoder, images, texts = pairs(captions)
    loss = clip_loss(image_encoder(images), text_encoder(texts), captions, smoothing)
    loss.backward()
    expected = [p.grad for m in (image_encoder, text_encoder) for p in m.parameters()]
    answers = processes(gradients, captions, smoothing)
    losses = torch.tensor([own for own, _ in answers], dtype=torch.float64)
    torch.testing.assert_close(losses.mean(), loss.detach(), rtol=1e-12, atol=0)
    for _, found in answers:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_process_alone_needs_no_group(smoothing):
    image_encoder, text_encoder, images, texts = pairs(range(PAIRS))
    embeddings = image_encoder(images), text_encoder(texts)
    expected = clip_loss(*embeddings, range(PAIRS), smoothing)
    loss = task.criterion(*embeddings, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("batch", "processes", "is_refused"), [(1, 1, True), (2, 1, False), (1, 2, False)]
)
def test_a_batch_of_one_pair_is_refused(monkeypatch, capsys, batch, processes, is_refused):
    """Its loss is 0 whatever the weights."""
    assert task.criterion(torch.randn(1, 4), torch.randn(1, 4)) == 0
    monkeypatch.setattr(sys, "argv", ["main.py", "--batch-size", str(batch)])
    monkeypatch.setattr(distributed, "ranks", lambda _: (0, 0, processes))
    monkeypatch.setattr(distributed, "device_for", sys.exit)  # there the run would begin
    monkeypatch.setattr(distributed, "leave", sys.exit)
    with pytest.raises(SystemExit):
        main.main()
    assert ("--batch-size 1: one pair has no wrong" in capsys.readouterr().err) == is_refused


def test_captions_of_any_length_are_told_apart():
    texts = [b"a", b"b", b"ab", b"ba", b"abc", b"a" * 200]
    short, long = (torch.stack([task.as_tensor(t, n) for t in texts]) for n in (200, 256))
    assert len(task.fingerprints(short).unique()) == len(texts)
    assert torch.equal(task.fingerprints(short), task.fingerprints(long))


# The text encoder


def test_padding_changes_nothing_and_the_length_is_the_temperature():
    encoder = task.TextEncoder()
    texts = [torch.stack([task.as_tensor(b"a digit", length)]) for length in (7, 30)]
    short, long = map(encoder, texts)
    torch.testing.assert_close(short, long, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(short.norm(), torch.tensor(1 / 0.07), rtol=1e-4, atol=0)
    short.sum().backward()
    assert encoder.log_scale.grad.item() != 0
    with torch.no_grad():
        encoder.log_scale += 10
    torch.testing.assert_close(encoder(texts[0]).norm(), torch.tensor(100.0), rtol=1e-4, atol=0)


# Weights to begin with


@pytest.mark.parametrize("part", ["model", "ema"])
def test_weights_of_both_encoders_or_of_the_image_encoder_alone(tmp_path, part):
    file, theirs, ours = str(tmp_path / "last.pt"), build(1), build()
    torch.save({"model": build(2).state_dict(), part: theirs.state_dict()}, file)
    said = weights.load(ours, file, "shufflenet_v2_x0_5", "image_encoder")
    assert said == f"weights of {file}"
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    torch.save(theirs.image_encoder.state_dict(), file)
    ours = build()
    said = weights.load(ours, file, "shufflenet_v2_x0_5", "image_encoder")
    assert said == f"weights of {file} for image_encoder"
    for name, expected in (("image_encoder", theirs), ("text_encoder", build())):
        states = (one.get_submodule(name).state_dict() for one in (ours, expected))
        torch.testing.assert_close(*states, rtol=0, atol=0)
    state = theirs.state_dict()
    position = {"text_encoder.position": state["text_encoder.position"][:77]}
    del state["text_encoder.log_scale"]
    for name, other in ("position", theirs.state_dict() | position), ("log_scale", state):
        torch.save(other, file)
        with pytest.raises(UserError, match=rf"another model .*\(text_encoder.{name} does not fit"):
            weights.load(ours, file, "shufflenet_v2_x0_5", "image_encoder")


# Validation


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return task.build_model("shufflenet_v2_x0_5")


def validated(size: int) -> dict[str, float]:
    """What every rank gets from main.validate on the first `size` digits."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = distributed.shard(Subset(task.Digits(train=False), range(size)), rank, world_size)
    model = build()
    metrics, batches = task.Metrics(model.text_encoder), DataLoader(shard, 4)
    main.validate(model, metrics, batches, torch.contiguous_format)  # which is forgotten
    return main.validate(model, metrics, batches, torch.contiguous_format)


@pytest.mark.parametrize("size", [1, 7, 25])
@torch.no_grad()
def test_recall_equals_that_of_a_single_process(processes, size):
    digits, model = task.Digits(train=False), build().eval()
    images, captions = map(torch.stack, zip(*map(digits.__getitem__, range(size)), strict=True))
    names = sorted({digits.names[digits.labels[index]] for index in range(size)})
    candidates = torch.stack([task.as_tensor(name.encode(), 5) for name in names])
    logits = nn.functional.normalize(model(images), dim=1) @ model.text_encoder(candidates).T
    own = torch.tensor([names.index(digits.names[digits.labels[i]]) for i in range(size)])
    recall = (logits.argmax(1) == own).double().mean().item()
    loss = nn.functional.cross_entropy(logits, own).item()
    for results in processes(validated, size):
        assert results["val_recall_at_1"] == recall
        assert results["val_loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["image_encoder.conv1.0", "text_encoder.layers.1.mix_heads"])
def test_a_layer_of_either_encoder_that_is_not_finite_is_named(name: str) -> None:
    model, images = build(), torch.randn(2, 3, 32, 32)
    captions = torch.tensor([[97, 98, 0], [99, 0, 0]], dtype=torch.uint8)
    inputs = {"image_encoder": images, "text_encoder": captions}
    assert "the loss is not" in finite.first_bad_layer(model, inputs)
    model.get_submodule(name).weight.data.fill_(float("nan"))
    assert f"is {name}, in its weights" in finite.first_bad_layer(model, inputs)


@torch.no_grad()
def test_embeddings_may_be_written_over_by_those_of_the_next_batch() -> None:
    """As CUDA graphs do."""
    metrics, embedded = task.Metrics(build().text_encoder), torch.ones(2, task.EMBEDDING)
    metrics.update(embedded, torch.zeros(2, 5, dtype=torch.uint8))
    embedded.zero_()
    torch.testing.assert_close(metrics.images, [torch.ones(2, task.EMBEDDING)])


# A folder of images and captions


@pytest.fixture
def folder(tmp_path):
    """Three images, one of them with two captions."""
    lines = ("a.jpg\ta red square", "sub/b.png\teine grüne Fläche", "a.jpg\tred", "c.jpg\tblue")
    for split in ("train", "val"):
        (tmp_path / split / "sub").mkdir(parents=True)
        for name in ("a.jpg", "sub/b.png", "c.jpg"):
            Image.new("RGB", (60, 40)).save(tmp_path / split / name)
        (tmp_path / split / "captions.tsv").write_text("file\ttext\n" + "\n".join(lines) + "\n")
    return tmp_path


def test_each_caption_is_trained_and_each_image_validated_once(folder):
    train_set, val_set = task.build_datasets(folder)
    texts = [
        [bytes(caption.tolist()).rstrip(b"\0").decode() for _, caption in pairs]
        for pairs in (train_set, val_set)
    ]
    assert texts[0] == ["a red square", "eine grüne Fläche", "red", "blue"]
    assert texts[1] == ["a red square", "eine grüne Fläche", "blue"]
    assert train_set[0][0].shape == val_set[0][0].shape == (3, 224, 224)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.jpg\tred\nd.jpg\tgreen\n", ("names 1 files", "d.jpg")),
        ("a.jpg\tred\nc.jpg\t \n", ("line 2", "FILE, a tab, and a text")),
        ("a.jpg red\n", ("line 1", "FILE, a tab, and a text")),
        ("a.jpg\t" + "x" * 257, ("line 1", "257 bytes", "LENGTH")),
        ("file\ttext\n", ("holds no captions",)),
        (b"a.jpg\t\xff\xfe", ("UTF-8",)),
        (None, ("is missing",)),
    ],
    ids=["image", "empty", "tab", "long", "nothing", "bytes", "file"],
)
def test_captions_that_can_not_be_right(folder, text, words):
    path = folder / "train" / "captions.tsv"
    path.unlink()
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        task.build_datasets(folder)
    for word in (path, *words):
        assert str(word) in str(caught.value)


def test_the_captions_to_choose_from(folder, tmp_path):
    assert task.candidates(None, "") == [*task.Digits.names]
    assert task.candidates(None, str(folder)) == ["a red square", "eine grüne Fläche", "blue"]
    file = tmp_path / "captions.txt"
    file.write_text(" two words \n\nGrün\ntwo words\n", encoding="utf-8")
    assert task.candidates(file, str(folder)) == ["two words", "Grün"]
    file.write_text("one\u0085text\r\nan\u2028other\x0b.", encoding="utf-8")
    assert task.candidates(file, "") == ["one\u0085text", "an\u2028other\x0b."]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "can't be read"),
        ("\n", "holds no captions"),
        ("x" * 257, "257 bytes"),
    ],
)
def test_captions_that_can_not_be_chosen(tmp_path, text, words):
    file = tmp_path / "captions.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=f"^{file}.* {words}"):
        task.candidates(file, "")
    with pytest.raises(UserError, match="is missing.*; or name a file of captions with --captions"):
        task.candidates(None, str(tmp_path))
