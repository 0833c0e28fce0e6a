"""`infer bench`: how fast a bundle is on this machine."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.console import checked_options, print_json, read_text
from infer.cli.drafts import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DraftChoice,
    DraftModelOption,
    DraftPrecisionOption,
    NumDraftTokensOption,
    chosen_draft,
    load_draft,
    speculation_document,
)

if TYPE_CHECKING:
    from infer.runtime.bench import BenchResult, Contender
    from infer.runtime.model import LanguageModel

EXAMPLE = """\b
Examples:
  infer bench artifacts/student
  infer bench artifacts/student --precision fp32 --draft-model self --threads 2
  infer bench artifacts/student --draft-model lookup --num-draft-tokens auto --json
"""

_Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle's folder.", show_default=False)]
_PromptTokens = Annotated[
    int, typer.Option("--prompt-tokens", min=1, metavar="N", help="Tokens of the prompt: the row pp.")
]
_NewTokens = Annotated[int, typer.Option("--new-tokens", min=1, metavar="N", help="Tokens to draw: the row tg.")]
_Precision = Annotated[
    list[str] | None,
    typer.Option("--precision", metavar="fp32|int8", help="Only this variant; may be given several times."),
]
_Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, metavar="N", help="At most the CPUs at hand; chosen by the model's size by default."
    ),
]
_PromptFile = Annotated[
    str | None,
    typer.Option(
        "--prompt-file", help="Take the prompt from a UTF-8 file, or - for standard input; repeated if short."
    ),
]
_Repeats = Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="Runs that count; one more warms up.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, with the seconds of every run.")]


def bench(
    bundle: _Bundle,
    prompt_tokens: _PromptTokens = 128,
    new_tokens: _NewTokens = 128,
    precision: _Precision = None,
    threads: _Threads = None,
    prompt_file: _PromptFile = None,
    draft_model: DraftModelOption = None,
    draft_precision: DraftPrecisionOption = None,
    num_draft_tokens: NumDraftTokensOption = None,
    repeats: _Repeats = 5,
    as_json: _Json = False,
) -> None:
    """Measure how fast a bundle is on this machine.

    Reading a prompt and drawing tokens, greedily, with and without a draft; everything takes turns in one run.
    Printed are median and standard deviation. A process has one pool of threads: compare thread counts in several runs.
    """
    choice = chosen_draft(draft_model, draft_precision, num_draft_tokens)
    text = None if prompt_file is None else read_text(prompt_file, "prompt")
    from infer.cli.tables import progress
    from infer.runtime import bench as measure

    with checked_options():
        options = measure.BenchOptions(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repeats=repeats,
            num_draft_tokens=choice.num_draft_tokens if choice else DEFAULT_NUM_DRAFT_TOKENS,
        )
    models, load_s = _load(bundle, precision, threads)
    contenders = _contenders(models, choice)
    with progress("measuring") as on_run:
        result = measure.bench(contenders, options, text=measure.TEXT if text is None else text, on_run=on_run)
    report = _report(models, load_s)
    if as_json:
        print_json(report | {"rows": _rows(result), "remarks": list(result.remarks)})
    else:
        _print_tables(report, result)


def _load(
    bundle: Path, precisions: Sequence[str] | None, threads: int | None
) -> "tuple[dict[str, LanguageModel], dict[str, float]]":
    """Returns the models, and the seconds that each took to load, by precision."""
    from infer.runtime.manifest import read_manifest
    from infer.runtime.model import LanguageModel

    manifest = read_manifest(bundle)
    models: dict[str, LanguageModel] = {}
    load_s: dict[str, float] = {}
    for name in dict.fromkeys(manifest.variant(name)[0] for name in precisions or manifest.variants):
        start_s = time.perf_counter()
        models[name] = LanguageModel.load(bundle, name, threads)
        load_s[name] = time.perf_counter() - start_s
    return models, load_s


def _contenders(models: "Mapping[str, LanguageModel]", choice: DraftChoice | None) -> "list[Contender]":
    """Pairs each model with the draft; the variant that drafts for the others is measured alone."""
    from infer.runtime.bench import Contender

    if choice is None:
        return [Contender(model) for model in models.values()]
    draft = load_draft(choice, models)
    own = draft.precision if choice.source == "self" and draft != "lookup" else None
    return [Contender(model, None if name == own else draft) for name, model in models.items()]


def _report(models: "Mapping[str, LanguageModel]", load_s: Mapping[str, float]) -> dict[str, Any]:
    """Returns what the figures depend on."""
    from importlib import metadata
    from platform import platform, python_version

    from infer.runtime.bench import cpu_name, peak_memory_bytes
    from infer.runtime.session import allowed_cpus, build_id

    model = next(iter(models.values()))
    return {
        "bundle": str(model.manifest.folder),
        "parameters": model.manifest.n_parameters,
        "window": model.manifest.window,
        "cpu": cpu_name(),
        "allowed_cpus": allowed_cpus(),
        "threads": model.threads,
        "system": platform(),
        "versions": {
            "infer": metadata.version("onnx-infer"),
            "onnxruntime": build_id().split()[0],
            "python": python_version(),
        },
        "load_s": dict(load_s),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _rows(result: "BenchResult") -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "precision": row.precision,
            "draft": row.draft,
            "tokens": row.tokens,
            "tokens_per_s": row.tokens_per_s,
            "sd": row.sd,
            "runs_s": list(row.runs_s),
            "speed_up": result.speed_up(row),
            "speculation": None if row.speculation is None else speculation_document(row.speculation),
        }
        for row in result.rows
    ]


def _print_tables(report: Mapping[str, Any], result: "BenchResult") -> None:
    from infer.cli.tables import bench_table, facts_table, output, size

    threads, peak = report["threads"], report["peak_memory_bytes"]
    facts = [
        ("bundle", f"{report['bundle']}: {report['parameters']} parameters, window {report['window']}"),
        ("machine", f"{report['cpu']}, {report['allowed_cpus']} CPUs allowed, {report['system']}"),
        ("threads", str(threads) if threads else "those of the host program"),
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
        ("loaded in", ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in report["load_s"].items())),
        ("peak memory", "unknown" if peak is None else f"{size(peak)}, of all that was measured together"),
    ]
    console = output()
    console.print(facts_table(facts))
    console.print(bench_table(result))
    for remark in result.remarks:
        console.print(f"note: {remark}", markup=False, soft_wrap=True)
