"""The facts of a decoder, read from the untyped settings of a checkpoint and checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from infer.exporter.messages import listed, shown
from infer.runtime.errors import CheckpointError, UnsupportedModel

ARCHITECTURES = ("classic", "modern")
REQUIRED = ("vocab_size", "context_length", "n_embed", "n_head", "n_blocks")

_MAX_SIZE = 2**31 - 1
_MAX_PARTS = 10_000  # layers and heads are counted in names of weights: bound the work that a bad file can ask for
_SIZES = {
    "vocab_size": _MAX_SIZE,
    "n_embed": _MAX_SIZE,
    "n_layers": _MAX_PARTS,
    "n_head": _MAX_PARTS,
    "n_kv_head": _MAX_PARTS,
    "head_size": _MAX_SIZE,
    "ffn_hidden": _MAX_SIZE,
    "context_length": _MAX_SIZE,
    "window": _MAX_SIZE,
}
_CHOICES = {
    "positions": ("learned", "rotary"),
    "norm": ("layer", "rms"),
    "mlp": ("relu", "swiglu"),
}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What a decoder is made of. Facts, not a family: nothing but messages may depend on `arch`.

    Raises:
        CheckpointError: a value is outside its range, or two values contradict each other.
    """

    arch: str
    """The checkpoint's own name of its architecture, for messages and the manifest."""
    vocab_size: int
    """V, rows of the embedding."""
    n_embed: int
    """C, width of the residual stream."""
    n_layers: int
    n_head: int
    """H, query heads."""
    n_kv_head: int
    """K, key and value heads; head k serves the query heads k·H/K to (k+1)·H/K - 1."""
    head_size: int
    """D, numbers in one head; even with rotary positions."""
    ffn_hidden: int
    """F, width of the MLP."""
    context_length: int
    """Rows of the position table, or the longest position that the original allows."""
    window: int
    """Tokens that were seen together in training, 1 to context_length."""
    positions: str
    """`learned` (a table) or `rotary`."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies, above 0; without meaning for learned positions."""
    norm: str
    """`layer` (LayerNorm with weight and bias) or `rms`."""
    norm_eps: float
    """Added to the variance or the mean square, above 0 and at most 1."""
    mlp: str
    """`relu` (up, down) or `swiglu` (gate, up, down)."""
    qk_norm: bool = False
    """RMSNorm over D on queries and keys, before the rotation."""
    attn_gate: bool = False
    """The attention output is multiplied by a sigmoid gate before `o`."""
    sliding_window: int | None = None
    """w: query i sees keys j with i - w < j <= i; None is all of them."""
    tie_embeddings: bool = False
    """The head is the embedding."""
    attn_out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False

    def __post_init__(self) -> None:
        for name, most in _SIZES.items():
            _check_range(name, getattr(self, name), most)
        if self.sliding_window is not None:
            _check_range("sliding_window", self.sliding_window, _MAX_SIZE)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise CheckpointError(f"{name} is {shown(getattr(self, name))}; it must be {' or '.join(choices)}")
        _check_number("rope_theta", self.rope_theta, math.inf)
        _check_number("norm_eps", self.norm_eps, 1.0)
        if self.n_head % self.n_kv_head:
            raise CheckpointError(
                f"n_head is {self.n_head} and n_kv_head {self.n_kv_head}; the key heads must divide the query heads"
            )
        if self.window > self.context_length:
            raise CheckpointError(
                f"window is {self.window}, context_length {self.context_length}; the window must fit into the context"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise CheckpointError(f"the head size is {self.head_size}; rotary positions need an even one")


def parse_settings(raw: Mapping[str, object]) -> ModelSettings:
    """Returns the settings of a checkpoint with the defaults filled in.

    Keys that mean nothing to a decoder are ignored, and so are the modern-only keys of a classic file.

    Args:
        raw: the checkpoint's `cfg` or `config`. The values are untyped: 4.0 counts as 4, while "4" and true are errors.

    Raises:
        CheckpointError: a size is missing, or a value has a wrong type, is out of range or contradicts another.
        UnsupportedModel: an unknown architecture, latent attention or a mixture of experts.
    """
    arch = _text(raw, "arch", "classic")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"arch is {shown(arch)} in the settings; this version knows {' and '.join(ARCHITECTURES)}"
        )
    missing = [name for name in REQUIRED if raw.get(name) is None]
    if missing:
        raise CheckpointError(f"its settings lack {listed(missing)}; the sizes of a model are not guessed")
    return _modern(raw) if arch == "modern" else _classic(raw)


def _classic(raw: Mapping[str, object]) -> ModelSettings:
    """The 2017 style: learned positions, LayerNorm, ReLU, an untied head with a bias."""
    n_embed, n_head, head_size = _widths(raw)
    context_length = _integer(raw, "context_length")
    return ModelSettings(
        arch="classic",
        vocab_size=_integer(raw, "vocab_size"),
        n_embed=n_embed,
        n_layers=_integer(raw, "n_blocks", most=_MAX_PARTS),
        n_head=n_head,
        n_kv_head=n_head,
        head_size=head_size,
        ffn_hidden=4 * n_embed,
        context_length=context_length,
        window=_window(raw, context_length),
        positions="learned",
        norm="layer",
        norm_eps=1e-5,
        mlp="relu",
        attn_out_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def _modern(raw: Mapping[str, object]) -> ModelSettings:
    """The Llama and Qwen style: rotary positions, RMSNorm, SwiGLU, grouped queries, no biases."""
    _refuse_other_kinds(raw)
    n_embed, n_head, head_size = _widths(raw)
    rope_dim = _optional_integer(raw, "rope_dim") or 2  # of latent attention alone: its default matters to no other
    if rope_dim % 2:
        raise CheckpointError(f"rope_dim is {rope_dim}; it must be even")
    context_length = _integer(raw, "context_length")
    return ModelSettings(
        arch="modern",
        vocab_size=_integer(raw, "vocab_size"),
        n_embed=n_embed,
        n_layers=_integer(raw, "n_blocks", most=_MAX_PARTS),
        n_head=n_head,
        n_kv_head=_optional_integer(raw, "n_kv_head") or n_head,
        head_size=head_size,
        ffn_hidden=_optional_integer(raw, "ffn_hidden") or -(-(8 * n_embed // 3) // 64) * 64,
        context_length=context_length,
        window=_window(raw, context_length),
        positions="rotary",
        rope_theta=_number(raw, "rope_theta", 10000.0),
        norm="rms",
        norm_eps=_number(raw, "norm_eps", 1e-6),
        mlp="swiglu",
        qk_norm=_flag(raw, "qk_norm", True),
        attn_gate=_flag(raw, "attn_gate", False),
        sliding_window=_optional_integer(raw, "sliding_window"),
        tie_embeddings=_flag(raw, "tie_embeddings", True),
    )


def _refuse_other_kinds(raw: Mapping[str, object]) -> None:
    """Raises UnsupportedModel for the kinds of modern model that have no decoder here."""
    attention = _text(raw, "attention", "gqa")
    if attention != "gqa":
        kind = "latent attention (MLA)" if attention == "mla" else "an unknown kind"
        raise UnsupportedModel(f"attention is {shown(attention)}, {kind}; this version exports attention = 'gqa'")
    experts = _optional_integer(raw, "n_experts", most=_MAX_PARTS)
    if experts is not None:
        raise UnsupportedModel(f"n_experts is {experts}, a mixture of experts; this version exports dense models only")


def _widths(raw: Mapping[str, object]) -> tuple[int, int, int]:
    """C, H and D, where H must divide C."""
    n_embed, n_head = _integer(raw, "n_embed"), _integer(raw, "n_head", most=_MAX_PARTS)
    if n_embed % n_head:
        raise CheckpointError(f"n_embed is {n_embed} and n_head {n_head}; the heads must divide the width")
    return n_embed, n_head, n_embed // n_head


def _window(raw: Mapping[str, object], context_length: int) -> int:
    """The usable window: positions beyond the trained ones do not count."""
    return min(_optional_integer(raw, "t_context_length") or context_length, context_length)


def _integer(raw: Mapping[str, object], name: str, *, least: int = 1, most: int = _MAX_SIZE) -> int:
    """The whole number under `name`, converted only where nothing is lost."""
    value = raw[name]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{name} is {_typed(value)} in the settings; it must be a whole number")
    _check_range(name, value, most, least)
    return int(value)


def _optional_integer(raw: Mapping[str, object], name: str, *, most: int = _MAX_SIZE) -> int | None:
    """The whole number under `name`, or None when it is missing, None or 0."""
    return None if raw.get(name) is None else _integer(raw, name, least=0, most=most) or None


def _number(raw: Mapping[str, object], name: str, default: float) -> float:
    """The number under `name`; missing and None are the default."""
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(f"{name} is {_typed(value)} in the settings; it must be a number")
    try:
        return float(value)
    except OverflowError as error:
        raise CheckpointError(f"{name} is {shown(value)} in the settings, too large for a float") from error


def _flag(raw: Mapping[str, object], name: str, default: bool) -> bool:
    """The truth value under `name`; 0 and 1 count, missing and None are the default."""
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or value not in (0, 1):
        raise CheckpointError(f"{name} is {_typed(value)} in the settings; it must be true or false")
    return bool(value)


def _text(raw: Mapping[str, object], name: str, default: str) -> str:
    """The word under `name`; missing and None are the default."""
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise CheckpointError(f"{name} is {_typed(value)} in the settings; it must be a word")
    return value


def _typed(value: object) -> str:
    """A value and its type, because "4" and 4 are easily mistaken for each other."""
    return f"{shown(value)} ({type(value).__name__})"


def _check_range(name: str, value: int, most: int, least: int = 1) -> None:
    if not least <= value <= most:
        raise CheckpointError(f"{name} is {shown(value)}; it must be from {least} to {most}")


def _check_number(name: str, value: float, most: float) -> None:
    """Raises CheckpointError unless 0 < value <= most and value is finite (NaN fails every comparison)."""
    if not (0 < value <= most and math.isfinite(value)):
        limit = "a finite number above 0" if most == math.inf else f"above 0 and at most {most:g}"
        raise CheckpointError(f"{name} is {shown(value)}; it must be {limit}")
