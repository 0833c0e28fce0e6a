"""Runs a decoder row by row on a cache: the traced graphs in ONNX Runtime, or the module in PyTorch.

Both take ragged batches: rows of different cached lengths and several new tokens a row, padded on the right. Slots that
no token has filled hold NaN, and past and present are one buffer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from variations import RandomModel

from infer.exporter.decoder import Decoder, Program
from infer.exporter.graphs import CacheShape, serialize, trace, weights_of
from infer.exporter.settings import ModelSettings
from infer.exporter.weight_file import write_weights
from infer.exporter.weight_formats import FORMATS, WeightFormat, WeightOptions
from infer.runtime.session import use_threads

Rows = NDArray[np.float32]
PROGRAMS = ("prefill", "decode")


class Cache:
    """Keys and values of a batch; unused slots are NaN."""

    def __init__(self, shape: CacheShape, batch: int, slots: int):
        self.shape, self.batch, self.slots = shape, batch, slots
        size = (batch, shape.n_kv_head, slots, shape.head_size)
        self.buffers = [np.full(size, np.nan, np.float32) for _ in range(2 * shape.n_layers)]

    def put(self, row: int, other: "Cache", tokens: int) -> None:
        """Takes the first tokens of a cache of one row."""
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine[row, :, :tokens] = theirs[0, :, :tokens]


class Runner(Protocol):
    """What the tests need of a decoder."""

    def cache(self, batch: int, slots: int | None = None) -> Cache: ...

    def decode(self, cache: Cache, new: Sequence[Sequence[int]], cached: Sequence[int], **how: int) -> list[Rows]: ...

    def prefill(self, cache: Cache, new: Sequence[Sequence[int]], cached: Sequence[int], **how: int) -> list[Rows]: ...


def inputs_of(
    settings: ModelSettings,
    new: Sequence[Sequence[int]],
    cached: Sequence[int],
    *,
    pad_id: int = 0,
    total: int | None = None,
) -> dict[str, NDArray[np.int64] | NDArray[np.int32]]:
    """The graphs' inputs for new tokens of each row after so many cached ones; `total` is a bound of all lengths."""
    counts = np.array([len(ids) for ids in new], np.int32)
    totals = np.array(cached, np.int32) + counts
    ids = np.full((len(new), counts.max()), pad_id, np.int64)
    for row, row_ids in enumerate(new):
        ids[row, : len(row_ids)] = row_ids
    positions = np.array(cached)[:, None] + np.arange(ids.shape[1])
    inputs = {
        "input_ids": ids,
        "seqlens_k": totals - 1,
        "total_sequence_length": np.array(totals.max() if total is None else total, np.int32),
        "query_seqlens": counts,
    }
    if settings.positions == "learned":
        inputs["position_ids"] = np.minimum(positions, settings.window - 1).astype(np.int64)
    return inputs


def fp32() -> WeightFormat:
    """Weights as they are."""
    return FORMATS["fp32"](WeightOptions())


def int8(**options: object) -> WeightFormat:
    """Weights in 8 bits, see `WeightOptions`."""
    return FORMATS["int8"](WeightOptions(**options))


class OnnxRunner:
    """Traced graphs over one data file, in sessions of ONNX Runtime."""

    def __init__(self, folder: Path, model: RandomModel, fmt: WeightFormat, programs: Sequence[str] = PROGRAMS):
        """Traces and writes the graphs into a folder and loads them."""
        self.folder, self.settings = folder, model.checkpoint.settings
        self.shape = CacheShape.of(self.settings)
        decoder = Decoder(self.settings, model.checkpoint.weights, fmt)
        graphs = {name: trace(decoder, self.settings, last_row_only=name == "prefill") for name in programs}
        weights = {name: tensor for graph in graphs.values() for name, tensor in weights_of(graph).items()}
        slots = write_weights(folder / "weights.bin", weights)
        for name, graph in graphs.items():
            (folder / f"{name}.onnx").write_bytes(serialize(graph, slots, "weights.bin"))
        self.sessions = {name: session_of(folder / f"{name}.onnx") for name in programs}

    def cache(self, batch: int, slots: int | None = None) -> Cache:
        return Cache(self.shape, batch, slots or self.settings.window)

    def decode(self, cache: Cache, new: Sequence[Sequence[int]], cached: Sequence[int], **how: int) -> list[Rows]:
        logits = self._run("decode", cache, new, cached, **how)
        return [logits[row, : len(ids)] for row, ids in enumerate(new)]

    def prefill(self, cache: Cache, new: Sequence[Sequence[int]], cached: Sequence[int], **how: int) -> list[Rows]:
        return list(self._run("prefill", cache, new, cached, **how))

    def _run(self, name: str, cache: Cache, new: Sequence[Sequence[int]], cached: Sequence[int], **how: int) -> Rows:
        binding = self.sessions[name].io_binding()
        for key, array in inputs_of(self.settings, new, cached, **how).items():
            binding.bind_cpu_input(key, array)
        names = zip(cache.shape.names("past_key_values"), cache.shape.names("present"), cache.buffers, strict=True)
        for past, present, buffer in names:
            value = ort.OrtValue.ortvalue_from_numpy(buffer)
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(present, value)
        binding.bind_output("logits")
        self.sessions[name].run_with_iobinding(binding)
        logits: Rows = binding.get_outputs()[-1].numpy()
        return logits


class EagerRunner:
    """The module in PyTorch, with the twins of the fused operators."""

    def __init__(self, model: RandomModel, fmt: WeightFormat):
        self.settings = model.checkpoint.settings
        self.shape = CacheShape.of(self.settings)
        self.decoder = Decoder(self.settings, model.checkpoint.weights, fmt)

    def cache(self, batch: int, slots: int | None = None) -> Cache:
        return Cache(self.shape, batch, slots or self.settings.window)

    def decode(self, cache: Cache, new: Sequence[Sequence[int]], cached: Sequence[int], **how: int) -> list[Rows]:
        logits = self._run(Program(self.decoder, last_row_only=False), cache, new, cached, **how)
        return [logits[row, : len(ids)] for row, ids in enumerate(new)]

    def prefill(self, cache: Cache, new: Sequence[Sequence[int]], cached: Sequence[int], **how: int) -> list[Rows]:
        return list(self._run(Program(self.decoder, last_row_only=True), cache, new, cached, **how))

    @torch.inference_mode()
    def _run(
        self, program: Program, cache: Cache, new: Sequence[Sequence[int]], cached: Sequence[int], **how: int
    ) -> Rows:
        inputs = {name: torch.from_numpy(a) for name, a in inputs_of(self.settings, new, cached, **how).items()}
        inputs.setdefault("position_ids", None)
        past = [torch.from_numpy(buffer) for buffer in cache.buffers]
        logits, present = program(**inputs, past=list(zip(past[::2], past[1::2], strict=True)))
        for buffer, tensor in zip(past, [t for pair in present for t in pair], strict=True):
            buffer.copy_(tensor)
        rows: Rows = logits.numpy()
        return rows


def session_of(graph: Path | bytes) -> ort.InferenceSession:
    """A session of the process's one thread pool, which ONNX Runtime wants of all sessions or of none."""
    use_threads(1, explicit=False)
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 4
    return ort.InferenceSession(
        graph if isinstance(graph, bytes) else str(graph), options, providers=["CPUExecutionProvider"]
    )


def relative_error(got: Rows, want: Rows) -> float:
    """Largest difference as a share of the largest logit; NaN where a logit is NaN."""
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())
