"""Captured shapes of GPU copies are never stale or swapped.

Without a GPU a stand-in takes the place of CUDA graphs: like them it replays what was captured, from a fixed input to a fixed
output, whatever has become of the model. With one, the same tests run on real graphs.
"""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from tests.models.test_inference import build, error, some_images
from vitrail.errors import VitrailError
from vitrail.models.cuda_graph import CudaGraph
from vitrail.models.inference import InferenceModel, capture, for_inference
from vitrail.models.inference.capture import MAX_CAPTURES, WARMUP_CALLS, CapturedForward
from vitrail.models.inference.gpu import GpuModel, gpu_copy

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
CLOSE = 1e-3 if GPU else 1e-6  # a replay may take other kernels than a call
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")


class StandInGraph:
    """Computes with a copy of the model as it was; slowly, so that threads without a lock get in each other's way."""

    captured, replayed, fails = 0, 0, False

    def capture(self, run: functools.partial[Tensor]) -> Tensor:
        type(self).captured += 1
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nsee the manual")
        self.model, (self.images,) = copy.deepcopy(run.func.__self__._model), run.args  # type: ignore[attr-defined]
        self.result = run()
        return self.result

    def replay(self) -> None:
        type(self).replayed += 1
        time.sleep(0.001)
        with torch.autocast(DEVICE.type, enabled=False):  # a graph computes as it was captured
            self.result.copy_(self.model(self.images))
        time.sleep(0.001)


class CountedCudaGraph(CudaGraph):
    captured, replayed, fails = 0, 0, False

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        type(self).captured += 1
        return super().capture((lambda: run() * run().sum().item()) if self.fails else run)  # .item() cannot be captured

    def replay(self) -> None:
        type(self).replayed += 1
        super().replay()


GraphClass: Any = CountedCudaGraph if GPU else StandInGraph
NEW_GRAPH: Any = None if GPU else StandInGraph


@pytest.fixture(autouse=True)
def _counted_from_zero(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(capture, "CudaGraph", CountedCudaGraph)
    GraphClass.captured, GraphClass.replayed, GraphClass.fails = 0, 0, False
    yield
    GraphClass.fails = False


def make(kind: str = "Ti/16", dtype: torch.dtype = torch.float32, **changes: Any) -> InferenceModel:
    return gpu_copy(build(kind, **changes), DEVICE, dtype, NEW_GRAPH)


def random_images(made: InferenceModel, count: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, *made.config.image_size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def captured(made: InferenceModel, images: Tensor) -> None:
    """Call until this shape is replayed."""
    before = GraphClass.replayed
    for _ in range(WARMUP_CALLS + 1):
        made(images)
    assert GraphClass.replayed > before


def uncaptured(made: InferenceModel, images: Tensor) -> Tensor:
    with torch.no_grad():
        return made.model(images.to(made.device, made.dtype)).float()  # type: ignore[no-any-return]


def test_recurring_shapes_are_replayed() -> None:
    made = make()
    batches = [random_images(made, seed=seed) for seed in range(6)]
    for number, images in enumerate(batches):
        found = made(images)
        assert found.dtype == torch.float32 and not found.requires_grad
        assert error(found, uncaptured(made, images)) < CLOSE
        assert GraphClass.replayed == max(0, number + 1 - WARMUP_CALLS)
    assert GraphClass.captured == 1
    first = made(batches[0])
    kept = first.clone()
    made(batches[1])
    assert torch.equal(first, kept), "a result was overwritten by the next replay"


def test_every_shape_has_its_own_capture_up_to_a_limit() -> None:
    made = make()
    for count in range(1, MAX_CAPTURES + 3):
        images = random_images(made, count)
        for _ in range(WARMUP_CALLS + 2):
            assert error(made(images), uncaptured(made, images)) < CLOSE
    assert GraphClass.captured == MAX_CAPTURES


def test_resize_and_a_new_head() -> None:
    made = make()
    captured(made, random_images(made))
    assert made.resize(32) is made and made.config.image_size == (32, 32)
    for _ in range(WARMUP_CALLS + 2):
        assert error(made(random_images(made)), uncaptured(made, random_images(made))) < CLOSE
    assert made.replace_head(7) is made and made.config.outputs == 7
    assert made(random_images(made)).shape == (2, 7) and not made(random_images(made)).any()
    with torch.no_grad():
        nn.init.normal_(made.head.weight)
    assert not any(parameter.requires_grad for parameter in made.parameters())
    captured(made, random_images(made))
    assert error(made(random_images(made)), uncaptured(made, random_images(made))) < CLOSE


def test_images_of_any_size_have_captures_of_their_own() -> None:
    made = make(any_size=True)
    batches = [torch.randn(2, 3, *size).to(DEVICE) for size in ((64, 64), (32, 128), (128, 32), (96, 48))]
    for images in batches:
        captured(made, images)
    for images in batches:
        assert error(made(images), uncaptured(made, images)) < CLOSE
    assert GraphClass.captured == 4
    nn.init.normal_(made.model.positions.table)
    for images in batches:
        assert error(made(images), uncaptured(made, images)) < CLOSE


@torch.no_grad()
def test_threads_get_their_own_results() -> None:
    made = make()
    batches = [random_images(made, 1 + seed % 2, seed=seed) for seed in range(6)]
    expected = [uncaptured(made, images) for images in batches]
    faults: list[str] = []

    def call(number: int) -> None:
        stream = torch.cuda.Stream() if GPU else None
        with torch.cuda.stream(stream):  # None: the current one
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream())
            for _ in range(12):
                found = made(batches[number])
                if stream is not None:
                    stream.synchronize()
                if error(found, expected[number]) > CLOSE:
                    faults.append(f"thread {number} got another's logits")

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and GraphClass.captured == 2 and GraphClass.replayed >= 50


@needs_gpu
def test_streams_that_alternate() -> None:
    """Calls on two streams share a graph's memory, without a wait of the caller's between them."""
    made = make("S/16")
    batches = [random_images(made, seed=seed) for seed in range(2)]
    expected = [uncaptured(made, images) for images in batches]
    captured(made, batches[0])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    found: list[tuple[int, Tensor]] = []
    for call in range(40):
        number = call // 2 % 2  # twice on one stream, then on the other
        with torch.cuda.stream(streams[number]):
            found.append((number, made(batches[number])))
    torch.cuda.synchronize()
    assert all(error(logits, expected[number]) < CLOSE for number, logits in found)


@torch.no_grad()
def test_images_of_other_types_and_devices() -> None:
    made, model = make(), build()
    images = random_images(made)
    for _ in range(WARMUP_CALLS + 2):
        for given in (
            images,
            images.double(),
            images.cpu(),
            images.to(memory_format=torch.channels_last),
            images.to(torch.bfloat16),
        ):
            assert error(made(given).to(DEVICE), uncaptured(made, given)) < CLOSE
    assert GraphClass.captured == 1, "images are converted to one type before they are replayed"
    sentences = []
    for callee in (made, model):
        for bad in (torch.zeros(2, 3, 64, 64, dtype=torch.uint8), torch.zeros(2, 3, 32, 64), torch.zeros(3, 64, 64)):
            with pytest.raises(VitrailError) as refused:
                callee(bad)
            sentences.append(str(refused.value))
    assert sentences[:3] == sentences[3:] and "these are torch.uint8" in sentences[0]


@torch.no_grad()
def test_a_failed_capture_is_reported_once_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    made = make()
    GraphClass.fails = True
    torch.manual_seed(5)
    expected_draw = torch.rand(3, device=DEVICE)
    torch.manual_seed(5)
    with caplog.at_level(logging.WARNING, "vitrail"):
        for count in (2, 3):
            for _ in range(WARMUP_CALLS + 3):
                images = random_images(made, count)
                assert error(made(images), uncaptured(made, images)) < CLOSE
    assert GraphClass.captured == 2 and GraphClass.replayed == 0
    (record,) = caplog.records
    assert "[2, 3, 64, 64] cannot be captured as a CUDA graph" in record.getMessage()
    assert torch.equal(torch.rand(3, device=DEVICE), expected_draw), "the generator's state was not restored"
    GraphClass.fails = False
    made.resize(32)  # a changed model is tried again
    captured(made, random_images(made))


@torch.no_grad()
def test_code_that_is_not_ours_is_not_captured() -> None:
    """A user's module may do anything in its forward: it runs at every call."""

    class Counts(nn.Identity):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return x

    made = make()
    made.model.dropout = Counts()
    for _ in range(WARMUP_CALLS + 3):
        made(random_images(made))
    assert Counts.calls == WARMUP_CALLS + 3 and GraphClass.captured == 0


@torch.no_grad()
def test_what_watches_the_operations_sees_them() -> None:
    made = make()
    images = random_images(made)
    captured(made, images)
    replayed, totals = GraphClass.replayed, []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            made(images)
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 1e6 and GraphClass.replayed == replayed
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, found: seen.append(module))
    seen: list[nn.Module] = []
    try:
        made(images)
    finally:
        handle.remove()
    assert made.model in seen and GraphClass.replayed == replayed


@torch.no_grad()
def test_captures_of_other_settings_of_torch_are_dropped() -> None:
    made = make()
    images = random_images(made)
    captured(made, images)
    assert made._captured._captures
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
        made(images)
        assert not made._captured._captures  # computed as usual, and captured anew after the next calls
        captured(made, images)
    finally:
        torch.set_float32_matmul_precision(before)
    captured(made, images)
    with sdpa_kernel(SDPBackend.MATH):
        made(images)
    assert not made._captured._captures
    captured(made, images)
    allowed = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = not allowed  # convolutions, as in a hybrid's ResNet
        made(images)
        assert not made._captured._captures
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    captured(made, images)
    matmul = torch.backends.cuda.matmul
    reduced = matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = not reduced
        made(images)
        assert not made._captured._captures
    finally:
        matmul.allow_bf16_reduced_precision_reduction = reduced


@torch.no_grad()
def test_copies_of_a_copy_do_not_share_captures() -> None:
    made = make()
    images = random_images(made)
    captured(made, images)
    expected = made(images)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert isinstance(other, GpuModel)
        other.model.norm.weight.mul_(3)
        captured(other, images)
        assert error(other(images), uncaptured(other, images)) < CLOSE and error(other(images), expected) > CLOSE
        assert error(made(images), expected) < CLOSE


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_calls_in_and_out_of_inference_mode(context: Any) -> None:
    with context():
        made = make()
        captured(made, random_images(made))
        images = random_images(made)
        made(images)
    for other in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with other():
            assert error(made(images), uncaptured(made, images)) < CLOSE


@torch.no_grad()
def test_autocast_does_not_change_what_a_copy_computes() -> None:
    made = make()
    images = random_images(made)
    expected = made(images)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        for _ in range(WARMUP_CALLS + 2):
            assert error(made(images), expected) < CLOSE
    assert error(made(images), expected) < CLOSE


def test_a_captured_forward_takes_any_model() -> None:
    model = build().to(DEVICE)
    forward = CapturedForward(model, NEW_GRAPH)
    images = some_images(model).to(DEVICE)
    with torch.no_grad():
        for _ in range(WARMUP_CALLS + 2):
            assert error(forward(images, DEVICE, torch.float32), model(images)) < CLOSE
    assert GraphClass.replayed == 2
    forward.drop()
    assert not forward._captures


# --- Only a GPU can tell ------------------------------------------------------------------------------------------------------


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("name", ["S/16", "B/16"])
def test_bf16_copies_on_a_gpu(name: str) -> None:
    """Captured and not: at most twice as far from float64 as torch's own bf16 model is."""
    model = vitrail.create_model(name, seed=0, gelu="erf").to(DEVICE).eval()
    nn.init.normal_(model.head.weight, std=0.05)
    images = torch.randn(8, 3, 224, 224, device=DEVICE)
    exact = copy.deepcopy(model).double()(images.double())
    plain = copy.deepcopy(model).bfloat16()
    plain.kernels = "plain"
    theirs = error(plain(images.bfloat16()).double(), exact)
    made = for_inference(model, "bf16")
    for _ in range(WARMUP_CALLS + 2):
        assert error(made(images).double(), exact) <= 2 * theirs


@needs_gpu
@torch.no_grad()
def test_moving_a_captured_copy() -> None:
    made = make()
    images = random_images(made)
    captured(made, images)
    expected = made(images)
    made.cpu()
    assert made.device.type == "cpu" and error(made(images).to(DEVICE), expected) < CLOSE
    made.to(DEVICE)
    captured(made, images)
    assert error(made(images), expected) < CLOSE


@needs_gpu
@torch.no_grad()
def test_an_own_capture_around_a_copy() -> None:
    made = make()
    images = random_images(made)
    captured(made, images)
    expected, replayed = made(images), GraphClass.replayed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made(images)
    graph.replay()
    assert error(found, expected) < CLOSE and GraphClass.replayed == replayed


@pytest.mark.skipif(not GPU or torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@torch.no_grad()
def test_a_copy_on_a_gpu_that_is_not_the_current_one() -> None:
    model = build()
    other = torch.device("cuda", 1)
    for precision in ("fp32", "bf16"):
        made = for_inference(model, precision, other)  # type: ignore[arg-type]
        images = some_images(model)
        for _ in range(WARMUP_CALLS + 2):
            found = made(images)
            assert found.device == other and error(found.cpu(), model(images)) < 0.03
            assert torch.cuda.current_device() == 0
