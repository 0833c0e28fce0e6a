"""`--draft-model` and its companions, for the commands that take them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from infer.cli.console import UsageError, checked_options
from infer.runtime.errors import BundleError

if TYPE_CHECKING:
    from infer.runtime.model import LanguageModel
    from infer.runtime.speculative import SpeculationStats

DEFAULT_NUM_DRAFT_TOKENS = 4
SELF_PRECISION = "int8"

DraftModelOption = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="BUNDLE|self|lookup",
        help="Guess several tokens at a time, which the model then checks in one pass: another bundle guesses, or "
        "the bundle's own int8 variant, or what followed the same words before. The text keeps the model's own "
        "distribution.",
    ),
]
DraftPrecisionOption = Annotated[
    str | None, typer.Option("--draft-precision", help="The draft's variant; its default one by default.")
]
NumDraftTokensOption = Annotated[
    str | None,
    typer.Option(
        "--num-draft-tokens",
        metavar="N|auto",
        help="Guesses at a time, 1 to 16; auto measures how many pay, 0 included.  [default: 4]",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class DraftChoice:
    """What the options ask for: "self", "lookup" or a bundle; its variant; how many guesses at a time."""

    source: str
    precision: str | None
    num_draft_tokens: int | Literal["auto"]


def chosen_draft(
    draft_model: str | None, draft_precision: str | None, num_draft_tokens: str | None
) -> DraftChoice | None:
    """Returns what the three options ask for, None for no draft.

    Raises:
        UsageError: they contradict each other, or the number is none or out of range.
    """
    if draft_model is None:
        for name, value in (("--draft-precision", draft_precision), ("--num-draft-tokens", num_draft_tokens)):
            if value is not None:
                raise UsageError(f"{name} says nothing without --draft-model; give both or neither")
        return None
    if not draft_model:
        raise UsageError("--draft-model is empty; give a bundle's folder, self or lookup")
    if draft_model == "lookup" and draft_precision is not None:
        raise UsageError("--draft-model lookup takes no --draft-precision: it guesses without a model")
    return DraftChoice(draft_model, draft_precision, _number(num_draft_tokens))


def _number(text: str | None) -> int | Literal["auto"]:
    if text is None:
        return DEFAULT_NUM_DRAFT_TOKENS
    if text == "auto":
        return "auto"
    from infer.runtime.draft_length import FixedLength

    with checked_options():
        return FixedLength(int(text) if text.isdecimal() else text).count  # type: ignore[arg-type]  # refused there


def load_draft(choice: DraftChoice, targets: "Mapping[str, LanguageModel]") -> "LanguageModel | Literal['lookup']":
    """Returns the draft for models of one bundle.

    Args:
        choice: what the options ask for.
        targets: precision -> model, at least one; load them before the draft, whose size must not choose the threads.

    Raises:
        BundleError: there is no such bundle or variant.
        UsageError: a variant would have to draft for itself.
    """
    from infer.runtime.model import LanguageModel

    if choice.source == "lookup":
        return "lookup"
    if choice.source != "self":
        return LanguageModel.load(choice.source, choice.precision or "auto")
    manifest, own = next(iter(targets.values())).manifest, choice.precision or SELF_PRECISION
    own = manifest.default_precision if own == "auto" else own
    if own not in manifest.variants:
        raise BundleError(
            f"--draft-model self needs a variant {own} to draft with, the bundle {manifest.folder} holds "
            f"{', '.join(manifest.variants)}; export it again with --precision {own} too, or draft with another bundle"
        )
    if list(targets) == [own]:
        others = ", ".join(name for name in manifest.variants if name != own)
        remedy = f"choose another --precision ({others})" if others else "the bundle holds no other variant"
        raise UsageError(f"--draft-model self drafts with the {own} variant, which cannot draft for itself; {remedy}")
    return targets[own] if own in targets else LanguageModel.load(manifest.folder, own)


def speculation_document(stats: "SpeculationStats") -> dict[str, Any]:
    """Returns what a draft did, for `--json`."""
    names = ("proposed", "accepted", "acceptance_rate", "target_calls", "draft_calls", "tokens_per_target_call")
    return {name: getattr(stats, name) for name in (*names, "draft_s", "target_s", "sampling_s")}
