"""Speculation with the shipped checkpoints: every pair writes what plain decoding writes."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from drafting import GREEDY, assert_same_text
from exports import CHECKPOINTS, exported

from infer.exporter import export as exporting
from infer.exporter.export import ExportOptions, export
from infer.runtime.generate import GenerationOptions
from infer.runtime.manifest import read_manifest
from infer.runtime.model import LanguageModel
from infer.runtime.stream import Generation

OPTIONS = GenerationOptions(max_new_tokens=400, ignore_eos=True)
PROMPT = "And it came to pass in those days"
SMALL = ("student fp32", "student int8", "tiny-modern fp32", "tiny-modern int8", "tiny-classic fp32")
ALL = (*SMALL, "tiny-classic int8", "student-classic fp32", "student-classic int8")

Load = Callable[[str], LanguageModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Loads "checkpoint precision", exported when it is first asked for; what the export proves is not proven again."""
    folder, loaded = tmp_path_factory.mktemp("pairs"), {}
    proven = SimpleNamespace(raise_if_failed=lambda: None, precision="", figures=SimpleNamespace(as_dict=dict))

    def model(name: str) -> LanguageModel:
        if name not in loaded:
            checkpoint, precision = name.split()
            bundle = exported(tmp_path_factory.getbasetemp()) / "here" / checkpoint
            if not bundle.exists() or precision not in read_manifest(bundle).variants:
                bundle = folder / name.replace(" ", "-")
                export(CHECKPOINTS / f"{checkpoint}.pt", ExportOptions(output=bundle, precisions=(precision,)))
            loaded[name] = LanguageModel.load(bundle, precision)
        return loaded[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "compare", lambda *arguments, **options: proven)
        yield model


@pytest.fixture(scope="module")
def plain(load: Load) -> Callable[[str], Generation]:
    """The text without a draft, 400 tokens that fill the window several times."""
    made: dict[str, Generation] = {}
    return lambda name: made.get(name) or made.setdefault(name, load(name).generate(PROMPT, OPTIONS, GREEDY))


def compare_with_plain(load: Load, plain: Callable[[str], Generation], target: str, draft: str, count: int) -> None:
    model = load(target)
    guessed = model.generate(PROMPT, OPTIONS, GREEDY, draft=load(draft), num_draft_tokens=count)
    assert_same_text(model, model.tokenizer.encode(PROMPT), plain(target), guessed)
    assert guessed.speculation.target_calls <= 400
    assert guessed.speculation.accepted > 0


@pytest.mark.parametrize("target", SMALL)
@pytest.mark.parametrize("draft", SMALL)
def test_every_pair_writes_what_plain_decoding_writes(
    load: Load, plain: Callable[[str], Generation], target: str, draft: str
):
    for count in (1, 4):
        compare_with_plain(load, plain, target, draft, count)


@pytest.mark.large
@pytest.mark.parametrize(
    ("target", "draft"), [pair for pair in itertools.product(ALL, ALL) if not set(pair) <= set(SMALL)]
)
def test_every_pair_with_the_other_checkpoints_writes_what_plain_decoding_writes(
    load: Load, plain: Callable[[str], Generation], target: str, draft: str
):
    for count in (1, 4, 7):
        compare_with_plain(load, plain, target, draft, count)


@pytest.mark.parametrize("target", SMALL)
@pytest.mark.parametrize("count", [4, "auto"])
def test_text_guessed_from_itself_is_what_plain_decoding_writes(
    load: Load, plain: Callable[[str], Generation], target: str, count: object
):
    model = load(target)
    guessed = model.generate(PROMPT, OPTIONS, GREEDY, draft="lookup", num_draft_tokens=count)
    assert_same_text(model, model.tokenizer.encode(PROMPT), plain(target), guessed)


def test_the_int8_variant_is_right_nearly_always(load: Load):
    stats = load("student fp32").generate(PROMPT, OPTIONS, GREEDY, draft=load("student int8")).speculation
    assert stats.acceptance_rate > 0.95
    assert stats.tokens_per_target_call > 4.5


@pytest.mark.parametrize("name", ["student fp32", "tiny-modern fp32", "tiny-classic fp32"])
def test_a_model_that_drafts_for_itself_is_always_right(load: Load, name: str):
    for count in (1, 3, 8):
        stats = load(name).generate(PROMPT, OPTIONS, GREEDY, draft=load(name), num_draft_tokens=count).speculation
        assert stats.acceptance_rate == 1.0
