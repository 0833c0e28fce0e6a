"""From a checkpoint file to a proven bundle."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata, resources
from pathlib import Path

from infer.exporter.alternating import model_to_prove
from infer.exporter.bundle import (
    TOKENIZER_NAME,
    check_output,
    manifest_document,
    staged_folder,
    variant_files,
    write_manifest,
)
from infer.exporter.checkpoint import Checkpoint, load_checkpoint
from infer.exporter.decoder import Decoder
from infer.exporter.graphs import operators_of, serialize, trace, weights_of
from infer.exporter.parity import PrecisionReport, compare
from infer.exporter.tokenizer import TokenizerBundle, build_tokenizer
from infer.exporter.weight_file import write_weights
from infer.exporter.weight_formats import FORMATS, WeightFormat, WeightOptions
from infer.runtime.bench import cpu_name
from infer.runtime.errors import ExportError
from infer.runtime.manifest import Manifest, Variant, read_manifest
from infer.runtime.text import Tokenizer

DEFAULT_PRECISIONS = ("fp32", "int8")
_PARITY_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to export, and where to.

    Attributes:
        output: the bundle's folder; None for artifacts/<name of the checkpoint>.
        precisions: variants to write; the first one is the bundle's default.
        context_length: the most tokens that the cache shall hold; None for the checkpoint's usable window.
        tokenizer_file: a Hugging Face tokenizer.json to use instead of the checkpoint's description.
        eos_tokens: texts of end tokens that the tokenizer does not declare.
        force: overwrite an existing bundle.
        weights: how the quantised precisions store matrices.

    Raises:
        ValueError: an option is out of range.
    """

    output: Path | None = None
    precisions: tuple[str, ...] = DEFAULT_PRECISIONS
    context_length: int | None = None
    tokenizer_file: Path | None = None
    eos_tokens: tuple[str, ...] = ()
    force: bool = False
    weights: WeightOptions = field(default_factory=WeightOptions)

    def __post_init__(self) -> None:
        """Checks the options."""
        unknown = [name for name in self.precisions if name not in FORMATS]
        if unknown or not self.precisions:
            raise ValueError(f"precision {', '.join(unknown) or 'none'} is not one of {', '.join(FORMATS)}")
        if len(set(self.precisions)) < len(self.precisions):
            raise ValueError(f"precision is named twice in {', '.join(self.precisions)}")
        for name in ("int8_block", "quantize_head"):
            if self.precisions == ("fp32",) and getattr(self.weights, name) != getattr(WeightOptions(), name):
                raise ValueError(f"{name} says nothing about fp32; export int8 too")
        if self.context_length is not None and self.context_length < 1:
            raise ValueError(f"context length must be at least 1, got {self.context_length}")


@dataclass(frozen=True)
class ExportResult:
    """A finished export: the bundle's manifest and the parity figures of each precision."""

    manifest: Manifest
    reports: tuple[PrecisionReport, ...]
    notes: tuple[str, ...] = field(default=())


def export(
    checkpoint_path: Path, options: ExportOptions, *, on_stage: Callable[[str], None] = lambda stage: None
) -> ExportResult:
    """Writes a bundle that has been proven against its checkpoint.

    Args:
        checkpoint_path: a `.pt` file.
        options: what to write and where to.
        on_stage: called with a short name as each stage begins.

    Raises:
        CheckpointError: the file cannot be exported.
        TokenizerError: the tokenizer is missing, or does not fit the model.
        ExportError: the output is in the way.
        ParityError: what was written does not compute what the checkpoint computes; nothing is left behind.
    """
    output = options.output or Path("artifacts") / checkpoint_path.stem
    check_output(output, force=options.force)
    on_stage(f"reading {checkpoint_path.name}")
    checkpoint = _with_context(load_checkpoint(checkpoint_path), options.context_length)
    tokenizer = build_tokenizer(
        checkpoint.tokenizer,
        vocab_size=checkpoint.settings.vocab_size,
        tokenizer_file=options.tokenizer_file,
        eos_tokens=options.eos_tokens,
    )
    with staged_folder(output, force=options.force) as folder:
        weights = options.weights.for_weights(checkpoint.weights)
        formats = {name: FORMATS[name](weights) for name in options.precisions}
        reports = _write_and_verify(folder, checkpoint, tokenizer, formats, on_stage)
    return ExportResult(read_manifest(output), reports, checkpoint.notes)


def _with_context(checkpoint: Checkpoint, context_length: int | None) -> Checkpoint:
    window = checkpoint.settings.window
    if context_length is None or context_length == window:
        return checkpoint
    if context_length > window:
        raise ExportError(
            f"a context of {context_length} tokens was asked for, the checkpoint's usable window is {window}; "
            f"pass --context-length {window} or less"
        )
    return replace(checkpoint, settings=replace(checkpoint.settings, window=context_length))


def _write_and_verify(
    folder: Path,
    checkpoint: Checkpoint,
    tokenizer: TokenizerBundle,
    formats: Mapping[str, WeightFormat],
    on_stage: Callable[[str], None],
) -> tuple[PrecisionReport, ...]:
    (folder / TOKENIZER_NAME).write_text(tokenizer.json, encoding="utf-8")
    variants = {}
    for precision, weight_format in formats.items():
        operators = _write_variant(folder, checkpoint, weight_format, variant_files(precision), on_stage)
        gc.collect()  # traced programs are full of cycles, and hold the variant's weights
        variants[precision] = {"operators": sorted(operators), "weight_format": weight_format.facts()}
    on_stage("hashing")
    document = manifest_document(checkpoint, tokenizer, variants)
    write_manifest(folder, document, measured={})
    text = text_for(Tokenizer.from_file(folder / TOKENIZER_NAME), parity_tokens(checkpoint.settings.window))
    reports = []
    for precision in formats:
        on_stage(f"proving {precision} against the checkpoint")
        report = compare(checkpoint, model_to_prove(folder, precision), text, full=False)
        report.raise_if_failed()
        reports.append(report)
        gc.collect()  # its sessions, before the next ones are opened
    machine = {"cpu": cpu_name(), "onnxruntime": metadata.version("onnxruntime")}
    parity = {report.precision: report.figures.as_dict() for report in reports}
    write_manifest(folder, document, {"machine": machine, "parity": parity})
    return tuple(reports)


def _write_variant(
    folder: Path,
    checkpoint: Checkpoint,
    weight_format: WeightFormat,
    names: Variant,
    on_stage: Callable[[str], None],
) -> set[str]:
    """Writes the two graphs and the weights of one precision; returns the operators that they use."""
    settings = checkpoint.settings
    decoder = Decoder(settings, checkpoint.weights, weight_format)
    graphs = {}
    for name, last_row_only in ((names.prefill, True), (names.decode, False)):
        on_stage(f"tracing {name}")
        graphs[name] = trace(decoder, settings, last_row_only=last_row_only)
    on_stage(f"writing {names.weights}")
    weights = {name: tensor for graph in graphs.values() for name, tensor in weights_of(graph).items()}
    slots = write_weights(folder / names.weights, weights)
    for name, graph in graphs.items():
        (folder / name).write_bytes(serialize(graph, slots, names.weights))
    return set().union(*(operators_of(graph) for graph in graphs.values()))


def parity_tokens(window: int) -> int:
    """Returns how many tokens a comparison runs by default: whole windows, enough of them for shares of a percent."""
    return window * -(-_PARITY_ROWS // window) + 1


def text_for(tokenizer: Tokenizer, length: int, text: str | None = None) -> list[int]:
    """Returns `length` ids of real text, repeated where it is too short.

    Args:
        tokenizer: the bundle's.
        length: how many ids.
        text: the text; None for the held-out text that ships with the exporter.

    Raises:
        ExportError: the text has no tokens.
    """
    if text is None:
        text = (resources.files("infer.exporter") / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text[: 64 * length])
    if not ids:
        raise ExportError("the text for the comparison has no tokens; pass --text with a file that has some")
    return (ids * -(-length // len(ids)))[:length]
