"""The names of a checkpoint's weights, one table an architecture, and the weights under canonical names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from infer.exporter.messages import listed, one_line
from infer.exporter.settings import ModelSettings
from infer.runtime.errors import CheckpointError, UnsupportedModel


@dataclass(frozen=True)
class Row:
    """One weight: what the file calls it, what this project calls it, and its shape in the file.

    `{i}` counts layers. `{h}` counts heads: their matrices are stacked in order into one canonical weight.
    The letters of the shape are those of `_sizes`.
    """

    source: str
    name: str
    shape: tuple[str, ...]
    only_if: str = ""
    """The setting without which the file has no such weight."""
    old_files: str = ""
    """What stands in when no layer of the file has it: `identity` or `zeros`."""


CLASSIC = (
    Row("token_embed.weight", "embed", ("V", "C")),
    Row("position_embed.weight", "positions", ("N", "C")),
    Row("attn_blocks.{i}.ln1.weight", "layers.{i}.attn_norm.weight", ("C",)),
    Row("attn_blocks.{i}.ln1.bias", "layers.{i}.attn_norm.bias", ("C",)),
    Row("attn_blocks.{i}.attn.heads.{h}.query.weight", "layers.{i}.q", ("D", "C")),
    Row("attn_blocks.{i}.attn.heads.{h}.key.weight", "layers.{i}.k", ("D", "C")),
    Row("attn_blocks.{i}.attn.heads.{h}.value.weight", "layers.{i}.v", ("D", "C")),
    Row("attn_blocks.{i}.attn.proj.weight", "layers.{i}.o.weight", ("C", "HD"), old_files="identity"),
    Row("attn_blocks.{i}.attn.proj.bias", "layers.{i}.o.bias", ("C",), old_files="zeros"),
    Row("attn_blocks.{i}.ln2.weight", "layers.{i}.mlp_norm.weight", ("C",)),
    Row("attn_blocks.{i}.ln2.bias", "layers.{i}.mlp_norm.bias", ("C",)),
    Row("attn_blocks.{i}.mlp.hidden.weight", "layers.{i}.mlp_up.weight", ("F", "C")),
    Row("attn_blocks.{i}.mlp.hidden.bias", "layers.{i}.mlp_up.bias", ("F",)),
    Row("attn_blocks.{i}.mlp.proj.weight", "layers.{i}.mlp_down.weight", ("C", "F")),
    Row("attn_blocks.{i}.mlp.proj.bias", "layers.{i}.mlp_down.bias", ("C",)),
    Row("layer_norm.weight", "final_norm.weight", ("C",)),
    Row("layer_norm.bias", "final_norm.bias", ("C",)),
    Row("lm_head.weight", "head.weight", ("V", "C")),
    Row("lm_head.bias", "head.bias", ("V",)),
)

MODERN = (
    Row("token_embed.weight", "embed", ("V", "C")),
    Row("blocks.{i}.attn_norm.weight", "layers.{i}.attn_norm.weight", ("C",)),
    Row("blocks.{i}.attn.q_proj.weight", "layers.{i}.q", ("HD", "C")),
    Row("blocks.{i}.attn.k_proj.weight", "layers.{i}.k", ("KD", "C")),
    Row("blocks.{i}.attn.v_proj.weight", "layers.{i}.v", ("KD", "C")),
    Row("blocks.{i}.attn.gate.weight", "layers.{i}.gate", ("HD", "C"), only_if="attn_gate"),
    Row("blocks.{i}.attn.q_norm.weight", "layers.{i}.q_norm", ("D",), only_if="qk_norm"),
    Row("blocks.{i}.attn.k_norm.weight", "layers.{i}.k_norm", ("D",), only_if="qk_norm"),
    Row("blocks.{i}.attn.o_proj.weight", "layers.{i}.o.weight", ("C", "HD")),
    Row("blocks.{i}.mlp_norm.weight", "layers.{i}.mlp_norm.weight", ("C",)),
    Row("blocks.{i}.mlp.gate.weight", "layers.{i}.mlp_gate", ("F", "C")),
    Row("blocks.{i}.mlp.up.weight", "layers.{i}.mlp_up.weight", ("F", "C")),
    Row("blocks.{i}.mlp.down.weight", "layers.{i}.mlp_down.weight", ("C", "F")),
    Row("final_norm.weight", "final_norm.weight", ("C",)),
    Row("lm_head.weight", "head.weight", ("V", "C")),
)

TABLES: Mapping[str, tuple[Row, ...]] = {"classic": CLASSIC, "modern": MODERN}

_ROOTS = frozenset(row.source.partition(".")[0] for table in TABLES.values() for row in table)
_BUFFERS = frozenset({"tril", "mask", "causal_mask", "pos_idxs", "cos", "sin", "inv_freq", "freqs_cis"})
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class CanonicalWeights:
    """Weights under canonical names, and what was decided on the way."""

    settings: ModelSettings
    """The settings, with `tie_embeddings` off when the file's head is not its embedding."""
    weights: dict[str, Tensor]
    """Float32, on the CPU, contiguous, finite; a view of the file's own tensor where that is so already."""
    n_parameters: int
    """Numbers that the file brings to the decoder, a tied head counted once."""
    left_out: tuple[str, ...]
    """Weights of the file that belong to no decoder, such as a value head."""
    notes: tuple[str, ...]
    """Remarks for the user, one line each."""


@dataclass(frozen=True)
class _Part:
    """One canonical weight: where it comes from, and the shape of each of its sources."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]


def canonical_weights(found: Mapping[str, object], settings: ModelSettings) -> CanonicalWeights:
    """Returns the weights of a decoder, each of them from the file, whole and finite.

    Args:
        found: the values of the file's state dict, by names without wrapper prefixes.
        settings: what the decoder is made of.

    Raises:
        CheckpointError: a weight is missing, of another shape or type, not finite, or has no place in the decoder.
        UnsupportedModel: the file holds unmerged LoRA adapters.
    """
    _refuse_adapters(found)
    _check_layers(found, settings)
    rows = [row for row in TABLES[settings.arch] if not row.only_if or getattr(settings, row.only_if)]
    known = {source for part in _parts(rows, settings) for source in part.sources}
    rows, stand_ins, notes = _without_absent(rows, found, settings)
    if settings.tie_embeddings and any(row.name == "head.weight" for row in rows):
        settings = replace(settings, tie_embeddings=False)
        notes.append("tie_embeddings is on, but lm_head.weight is not the embedding: lm_head.weight counts")
    parts = list(_parts(rows, settings))
    _check_sources(parts, found)
    left_out = _left_out(found, known)
    if left_out:
        notes.append(f"left out, because they are no part of a decoder: {listed(left_out)}")
    weights = {part.name: _converted(part, found) for part in parts}
    return CanonicalWeights(
        settings=settings,
        weights={**weights, **{part.name: stand_in for part, stand_in in stand_ins}},
        n_parameters=sum(weight.numel() for weight in weights.values()),
        left_out=tuple(left_out),
        notes=tuple(notes),
    )


def _refuse_adapters(found: Mapping[str, object]) -> None:
    names = [name for name in found if re.search(r"(^|\.)(lora_|base\.|base_layer\.)", name)]
    if names:
        raise UnsupportedModel(
            f"it holds unmerged LoRA adapters ({listed(names, 3)}); merge them into the weights and save it again"
        )


def _check_layers(found: Mapping[str, object], settings: ModelSettings) -> None:
    """Raises CheckpointError when the file is of another architecture, or has fewer layers than its settings say."""
    layers = {arch: _layers(found, table) for arch, table in TABLES.items()}
    own = layers[settings.arch]
    others = [arch for arch, numbers in layers.items() if numbers]
    if not own and others:
        raise CheckpointError(
            f"by its settings it is of arch {settings.arch!r}, but its weights are named like those of {others[0]!r}"
        )
    if not own:
        raise CheckpointError(
            f"none of its {len(found)} weights is named like a layer of arch {settings.arch!r}; "
            f"they begin with {listed(list(found), 2)}"
        )
    if max(own) + 1 < settings.n_layers:
        raise CheckpointError(
            f"n_blocks is {settings.n_layers} in the settings, but the last block in the file is {max(own)}"
        )


def _layers(found: Mapping[str, object], table: Sequence[Row]) -> set[int]:
    """The numbers of the layers that the file names in the way of `table`."""
    roots = {row.source.partition(".{i}.")[0] for row in table if "{i}" in row.source}
    layer = re.compile(rf"({'|'.join(roots)})\.([0-9]{{1,9}})\.")
    return {int(match[2]) for match in map(layer.match, found) if match}


def _without_absent(
    rows: Sequence[Row], found: Mapping[str, object], settings: ModelSettings
) -> tuple[list[Row], list[tuple[_Part, Tensor]], list[str]]:
    """The rows that the file must hold, what stands in for the others, and notes about them."""
    wanted, stand_ins, notes = list(rows), [], []
    if settings.tie_embeddings and _head_is_embedding(rows, found):
        wanted = [row for row in wanted if row.name != "head.weight"]
    old = [row for row in rows if row.old_files]
    if old and not any(source in found for part in _parts(old, settings) for source in part.sources):
        wanted = [row for row in wanted if not row.old_files]
        for row in old:
            for part in _parts([row], settings):
                stand_in = torch.eye(part.shape[0]) if row.old_files == "identity" else torch.zeros(part.shape)
                stand_ins.append((part, stand_in))
        notes.append("its attention has no output projection, as in old files: identity matrices stand in for it")
    return wanted, stand_ins, notes


def _head_is_embedding(rows: Sequence[Row], found: Mapping[str, object]) -> bool:
    """Whether the file has no head, or one that equals the embedding."""
    sources = {row.name: row.source for row in rows}
    head, embed = found.get(sources["head.weight"]), found.get(sources["embed"])
    if not isinstance(head, Tensor) or not isinstance(embed, Tensor):
        return head is None
    if _fault(head, tuple(embed.shape)) or _fault(embed, tuple(head.shape)):
        return False
    same_type = head.dtype == embed.dtype
    return torch.equal(head, embed) if same_type else torch.equal(head.float(), embed.float())


def _parts(rows: Sequence[Row], settings: ModelSettings) -> Iterator[_Part]:
    """The weights that `rows` stand for, whole model first, then layer by layer."""
    sizes = _sizes(settings)
    for in_layers in (False, True):
        for i in range(settings.n_layers if in_layers else 1):
            for row in rows:
                if ("{i}" in row.source) == in_layers:
                    heads = settings.n_head if "{h}" in row.source else 1
                    sources = tuple(row.source.format(i=i, h=h) for h in range(heads))
                    yield _Part(row.name.format(i=i), sources, tuple(sizes[letter] for letter in row.shape))


def _sizes(settings: ModelSettings) -> dict[str, int]:
    """What the letters in the shapes of the tables stand for."""
    return {
        "V": settings.vocab_size,
        "N": settings.context_length,
        "C": settings.n_embed,
        "F": settings.ffn_hidden,
        "D": settings.head_size,
        "HD": settings.n_head * settings.head_size,
        "KD": settings.n_kv_head * settings.head_size,
    }


def _check_sources(parts: Sequence[_Part], found: Mapping[str, object]) -> None:
    """Raises CheckpointError naming what is missing and what cannot be used."""
    wanted = [(source, part.shape) for part in parts for source in part.sources]
    missing = [source for source, _ in wanted if source not in found]
    faults = [(source, _fault(found[source], shape)) for source, shape in wanted if source in found]
    wrong = [f"{source} {fault}" for source, fault in faults if fault]
    reasons = []
    if missing:
        reasons.append(f"{len(missing)} of its weights {_are(missing)} missing: {listed(missing)}")
    if wrong:
        reasons.append(f"{len(wrong)} of its weights {_are(wrong)} unusable: {listed(wrong)}")
    if reasons:
        raise CheckpointError("; ".join(reasons))


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _fault(value: object, shape: tuple[int, ...]) -> str:
    """What keeps `value` from being a weight of this shape, or nothing."""
    if not isinstance(value, Tensor):
        return f"is no tensor but {type(value).__name__}"
    if value.is_nested or value.layout != torch.strided or value.device.type != "cpu":
        return f"is not a dense tensor with data ({value.layout}, {value.device})"
    if value.dtype not in _FLOATS:
        return f"holds {str(value.dtype).removeprefix('torch.')} numbers instead of float32, float16 or bfloat16"
    if tuple(value.shape) != shape:
        return f"is {tuple(value.shape)} instead of {shape}"
    return ""


def _left_out(found: Mapping[str, object], known: set[str]) -> list[str]:
    """The weights beyond the `known` ones; buffers and masks go without a word.

    Raises:
        CheckpointError: one of them looks like a part of the decoder.
    """
    extra = [
        name
        for name, value in found.items()
        if name not in known
        and name.rpartition(".")[2] not in _BUFFERS
        and isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
    ]
    unplaced = [name for name in extra if name.partition(".")[0] in _ROOTS]
    if unplaced:
        raise CheckpointError(
            f"{len(unplaced)} of its weights {_are(unplaced)} not what its settings describe: {listed(unplaced)}; "
            "correct the settings"
        )
    return extra


def _converted(part: _Part, found: Mapping[str, object]) -> Tensor:
    """The weight as one contiguous float32 tensor."""
    tensors = []
    for source in part.sources:
        value = found[source]
        assert isinstance(value, Tensor)  # as `_check_sources` found
        try:
            if value.data_ptr() % value.element_size():  # in a repacked archive that was mapped
                value = value.clone()
            tensor = value.detach().to(torch.float32).contiguous()
        except RuntimeError as error:  # a tensor that claims more numbers than memory holds
            raise CheckpointError(f"{source} cannot be read: {one_line(error)}") from error
        low, high = torch.aminmax(tensor)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise CheckpointError(f"{source} holds NaN or infinity: training diverged, or the file is damaged")
        tensors.append(tensor)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
