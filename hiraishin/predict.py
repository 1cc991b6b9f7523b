"""Predictions for the build and card at hand, and what measured receipts say about predictions made in the same way."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hiraishin import dispatch, dispatch_cuda
from hiraishin.dispatch_cuda import Card, Parts, Shape
from hiraishin.errors import UserError
from hiraishin.gguf_header import Header, read_header
from hiraishin.judge import width_classes
from hiraishin.results import Result, ResultSet
from hiraishin.synthetic import SHAPES
from hiraishin.tasks import PARTS

if TYPE_CHECKING:
    from hiraishin.models import ModelFile
    from hiraishin.worker import Worker

CARDS = {"NVIDIA H200": 132}
"""Streaming multiprocessors of cards that receipts name."""

_BEFORE_0111 = ("ab1bb966d77b", "fbc830e7155a")
"""Fingerprints of the receipts' patched builds that are older than the patch for fused float experts."""

_CORES_PER_SM = {(8, 0): 64}
"""CUDA cores of an SM where they are not 128 (compute capability 8.0 and later)."""


def predict(
    worker: Worker,
    model: ModelFile,
    settings: dict[str, Any],
    prompt_tokens: int,
    tokens: int,
    widths: list[int],
    *,
    switch: int = 0,
) -> dict[str, Any]:
    """Width classes and first differing positions before anything runs, as :func:`hiraishin.dispatch.predict`.

    Layers on a GPU are predicted by :mod:`hiraishin.dispatch_cuda`, the rest by :mod:`hiraishin.dispatch`. Where there is
    no model of the dispatch, ``classes`` is empty and ``why`` says so.
    """
    if not settings.get("gpu_layers") or switch < 0 or worker.build.backend != "cuda":
        return dispatch.predict(worker, model, settings, prompt_tokens, tokens, widths, switch=switch)
    try:
        shape, card = shape_of(read_header(model.path)), card_here()
        patches = worker.build.description.get("patches") or []
        parts = Parts(frozenset(PARTS) if switch else frozenset(), any("0111" in p["name"] for p in patches))
        if switch and any(w > switch for w in widths):
            raise UserError(f"passes wider than {switch} run as stock does, which is not predicted together with it")
        return dispatch_cuda.predict_widths(shape, card, settings, prompt_tokens, tokens, widths, parts)
    except UserError as error:
        return {
            "classes": [],
            "first_differing_width": None,
            "first_differing_kv": None,
            "first_differing_kv_by_width": {},
            "why": [error.what],
        }


def card_here() -> Card:
    """The first GPU of this machine.

    Raises:
        UserError: no driver tells about one, or it is older than what the model of the dispatch covers.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            cores = pynvml.nvmlDeviceGetNumGpuCores(handle)
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # no package, no driver, no device
        raise UserError(f"no NVIDIA card can be asked what it is ({type(error).__name__})") from error
    if major < 8:
        raise UserError(f"there is no model of the dispatch on compute capability {major}.{minor}")
    return Card(100 * major + 10 * minor, cores // _CORES_PER_SM.get((major, minor), 128))


def shape_of(header: Header) -> Shape:
    """What the dispatch looks at in a model.

    Raises:
        UserError: an attention that the model of the dispatch does not cover.
    """
    window = header.values.get(f"{header.architecture}.attention.sliding_window", 0)
    if not header.n_head or not header.n_head_kv or header.head_dim != header.head_dim_v or window:
        raise UserError(f"there is no model of the CUDA dispatch for the attention of {header.architecture}")
    kinds = set()
    tied = not any(t.name == "output.weight" for t in header.tensors)
    for tensor in header.tensors:
        if len(tensor.shape) < 2 or (tensor.name == "token_embd.weight" and not tied):
            continue
        kind = tensor.type.lower()
        fits = tensor.shape[0] % (32 if kind == "f32" else 64) == 0 and tensor.shape[1] % 32 == 0
        kinds.add((kind, len(tensor.shape) == 3, fits))
    return Shape(header.n_head, header.n_head_kv, header.head_dim, frozenset(kinds))


@dataclass(frozen=True)
class Scored:
    """One model on one arm: what was predicted of its widths and what was measured.

    ``late`` maps a width to how many positions after the predicted one its first difference came; widths that were
    predicted to differ and do not have ``None``. ``early`` are widths that differ before, or without, a prediction.
    """

    inputs: dict[str, Any]
    predicted: list[list[int]]
    measured: list[list[int]]
    widths: int
    late: dict[int, int | None]
    early: list[int]

    @property
    def right(self) -> bool:
        """Whether the width classes are as predicted."""
        return self.predicted == self.measured


def score_receipt(results: ResultSet) -> Iterator[Scored]:
    """Predict every replayed model and arm of a GPU receipt from its shape, and hold the prediction against the bits."""
    gpu = (results.machine.get("gpu") or {}).get("name")
    if gpu not in CARDS:
        return
    groups: dict[str, dict[int, Result]] = defaultdict(dict)
    for result in results.of("replay"):
        if result.inputs["switch"] >= 0:
            rest = {k: v for k, v in result.inputs.items() if k != "width"}
            groups[json.dumps(rest, sort_keys=True)][int(result.inputs["width"])] = result
    for key in sorted(groups):
        scored = _score(json.loads(key), groups[key], CARDS[gpu])
        if scored is not None:
            yield scored


def _score(inputs: dict[str, Any], by_width: dict[int, Result], sms: int) -> Scored | None:
    start: int | None = inputs.get("prompt_tokens")
    for result in by_width.values():
        if result.record["first_differing"] is not None:
            start = int(result.record["first_differing_kv"]) - int(result.record["first_differing"])
        elif result.table is not None:
            start = int(result.table["kv_position"].iloc[0])
    if start is None:
        return None  # where the trace began is not in the receipt
    hashes: dict[int, tuple[str, ...]] = {1: ("as alone",)}
    for width, result in by_width.items():
        if not result.record["differing"]:
            hashes[width] = hashes[1]
        elif result.table is None:
            return None
        else:
            hashes[width] = tuple(result.table["row_sha256"])
    widths = sorted(w for w in by_width if w > 1)
    tokens = next(iter(by_width.values())).record["positions"]
    prediction = dispatch_cuda.predict_widths(
        _named_shape(inputs["model"], inputs["quant"]),
        _card_of(inputs, sms),
        inputs,
        start,
        tokens,
        widths,
        _parts_of(inputs),
    )
    firsts = {w: by_width[w].record["first_differing_kv"] for w in widths}
    late_by = dispatch.score(prediction, [], firsts)["late_by"]
    expected = prediction["first_differing_kv_by_width"]
    early = [w for w in widths if firsts[w] is not None and (expected[str(w)] is None or firsts[w] < expected[str(w)])]
    late = {int(w): value for w, value in late_by.items() if value != 0 and int(w) not in early}
    return Scored(inputs, prediction["classes"], width_classes(hashes), len(widths), late, early)


def _parts_of(inputs: dict[str, Any]) -> Parts:
    on = (part for part, bit in PARTS.items() if not bit & (inputs.get("parts_off") or 0))
    return Parts(frozenset(on) if inputs["switch"] else frozenset(), not inputs["fingerprint"].startswith(_BEFORE_0111))


def _card_of(inputs: dict[str, Any], sms: int) -> Card:
    env = dict(word.split("=", 1) for word in (inputs.get("env") or "").split())
    fit = env.get("GGML_CUDA_TEST_BLOCKS_PER_SM", "")
    pinned = tuple(int(n) for n in fit.split(",")) if fit else None
    return Card(
        900,
        int(env.get("GGML_CUDA_TEST_NSM") or sms),
        int(env.get("GGML_CUDA_TEST_DISPATCH_CC") or 0),
        (pinned[0], pinned[1]) if pinned else None,
    )


@functools.cache
def _named_shape(model: str, quant: str) -> Shape:
    """A receipt's model by its name: receipts hold no weights."""
    kind = quant.lower().removesuffix("_m").removesuffix("_s")
    if model.startswith("SmolLM2-135M"):
        return Shape(9, 3, 64, frozenset({(kind, False, True)}))
    shape = SHAPES[model.removeprefix("synthetic-")]
    kinds = {(kind, False, True)}
    if shape.experts:
        kinds |= {(kind, True, True), ("f32", False, True)}  # the router is F32 whatever the quant
    return Shape(shape.heads, shape.kv_heads, shape.head_dim, frozenset(kinds))
