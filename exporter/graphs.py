"""Traces the prefill and decode programs of a decoder into ONNX graphs.

The graphs carry no weights: each initializer above a kilobyte becomes a reference into one data file, whose layout
the graphs of a precision share.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor

from infer.exporter.decoder import Decoder, HeadPadding, Program
from infer.exporter.settings import ModelSettings
from infer.exporter.weight_file import Slot

OPSET = 18  # the oldest that every standard operator here needs; newer ones only lock out older tools
IR_VERSION = 10
INLINE_BYTES = 1024  # smaller tensors stay in the graph

_AXES = {
    "input_ids": ("batch", "tokens"),
    "seqlens_k": ("batch",),
    "total_sequence_length": (),
    "query_seqlens": ("batch",),
    "position_ids": ("batch", "tokens"),
}


@dataclass(frozen=True)
class CacheShape:
    """What a layer's key and value buffers look like: (B, heads, slots, size) float32 each."""

    n_layers: int
    n_kv_head: int
    head_size: int

    @classmethod
    def of(cls, settings: ModelSettings) -> "CacheShape":
        """Returns the cache of a model, head sizes as they are stored."""
        return cls(settings.n_layers, settings.n_kv_head, HeadPadding.of(settings).padded)

    def names(self, kind: str) -> list[str]:
        """Returns the tensors' names in order, `kind` being "past_key_values" or "present"."""
        return [f"{kind}.{i}.{part}" for i in range(self.n_layers) for part in ("key", "value")]


def trace(decoder: Decoder, settings: ModelSettings, *, last_row_only: bool) -> ir.Model:
    """Returns the traced program, its weights still in memory and under their names in the decoder.

    Args:
        decoder: the module; its programs may be traced one after the other.
        settings: the decoder's settings.
        last_row_only: True for the prefill program, whose logits are those of each row's last token.
    """
    cache = CacheShape.of(settings)
    inputs = [name for name in _AXES if name != "position_ids" or settings.positions == "learned"]
    program = Program(decoder, last_row_only=last_row_only).eval()
    with _quiet(), torch.no_grad():
        traced = torch.onnx.export(
            program,
            _example(cache, settings),
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            optimize=True,
            input_names=inputs + cache.names("past_key_values"),
            output_names=["logits", *cache.names("present")],
            dynamic_shapes=_dynamic_shapes(cache, settings),
        )
    if traced is None:
        raise RuntimeError("torch.onnx.export returned no program")
    _tidy(traced.model, last_row_only=last_row_only)
    return traced.model


def weights_of(model: ir.Model) -> dict[str, Tensor]:
    """Returns the graph's weights that belong into the data file, by name."""
    weights = {}
    for name, value in model.graph.initializers.items():
        if value.const_value is not None and value.const_value.nbytes >= INLINE_BYTES:
            weights[name] = torch.from_numpy(value.const_value.numpy())
    return weights


def serialize(model: ir.Model, slots: Mapping[str, Slot], weights_name: str) -> bytes:
    """Returns the graph as a protobuf whose weights are references into the data file `weights_name`."""
    for name, slot in slots.items():
        value = model.graph.initializers.get(name)
        if value is not None and value.const_value is not None:
            value.const_value = ir.ExternalTensor(
                weights_name,
                slot.offset,
                slot.length,
                value.const_value.dtype,
                shape=value.const_value.shape,
                name=name,
            )
    data: bytes = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
    return data


def operators_of(model: ir.Model) -> set[str]:
    """Returns the operators that the graph uses, as "domain::Name" (standard ones without a domain)."""
    return {f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in model.graph}


def _example(cache: CacheShape, settings: ModelSettings) -> tuple[object, ...]:
    """Inputs to trace with: sizes above 1 and all different, so that no axis is taken for a constant or for another."""
    batch, tokens, slots = 2, 3, 5
    empty = torch.zeros(1).expand(batch, cache.n_kv_head, slots, cache.head_size)
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return (
        ids,
        torch.full((batch,), tokens - 1, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        torch.full((batch,), tokens, dtype=torch.int32),
        ids.clone() if settings.positions == "learned" else None,
        [(empty.clone(), empty.clone()) for _ in range(cache.n_layers)],
    )


def _dynamic_shapes(cache: CacheShape, settings: ModelSettings) -> tuple[object, ...]:
    batch, tokens, slots = (torch.export.Dim(name) for name in ("batch", "tokens", "slots"))
    rows, buffer = {0: batch, 1: tokens}, {0: batch, 2: slots}
    positions = rows if settings.positions == "learned" else None
    return (rows, {0: batch}, {}, {0: batch}, positions, [(buffer, buffer)] * cache.n_layers)


def _tidy(model: ir.Model, *, last_row_only: bool) -> None:
    """Names the dynamic axes, and drops what tells of the machine that traced: the same input gives the same bytes."""
    model.ir_version = IR_VERSION
    model.doc_string = None
    model.metadata_props.clear()
    graph = model.graph
    graph.doc_string, graph.name = None, "prefill" if last_row_only else "decode"
    graph.metadata_props.clear()
    for i, node in enumerate(graph):
        node.doc_string, node.name = None, f"{node.op_type}_{i}"
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
            if not value.is_graph_output():
                value.shape = value.type = None  # inferred at load; here they would only name torch's symbols
    for value in [*graph.inputs, *graph.outputs, *graph.initializers.values()]:
        value.metadata_props.clear()
    for name in list(graph.initializers):
        graph.initializers[name].name = name.removeprefix("decoder.")
    _name_axes(graph.inputs, graph.outputs, last_row_only=last_row_only)


def _name_axes(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], *, last_row_only: bool) -> None:
    for value in [*inputs, *outputs]:
        sizes = list(value.shape or [])
        if value.name == "logits":
            axes: tuple[object, ...] = ("batch", 1 if last_row_only else "tokens", sizes[2])
        elif value.name in _AXES:
            axes = _AXES[value.name]
        else:
            axes = ("batch", sizes[1], "slots", sizes[3])
        value.shape = ir.Shape(axes)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Holds back what torch says while it traces (missing torchvision, renamed axes): none of it is for a user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
