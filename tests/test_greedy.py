"""The text of the shipped checkpoints' bundles is the reference's, across window overflows."""

from pathlib import Path

import pytest
from exports import CHECKPOINTS, exported
from greedy import first_divergence
from reference import load

from infer.exporter.export import ExportOptions, export
from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions

PROMPT = "And it came to pass in those days"


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("students")
    for name in ("student", "student-classic"):
        export(CHECKPOINTS / f"{name}.pt", ExportOptions(output=folder / name, precisions=("fp32",)))
    return folder


@pytest.mark.parametrize("name", ["student", "student-classic"])
def test_500_greedy_tokens_of_a_student_are_those_of_the_reference(name: str, students: Path) -> None:
    check_500_tokens(name, students / name)


@pytest.mark.parametrize("name", ["tiny-modern", "tiny-classic"])
def test_500_greedy_tokens_of_a_tiny_model_are_those_of_the_reference(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_500_tokens(name, exported(tmp_path_factory.getbasetemp()) / "here" / name)


def check_500_tokens(name: str, bundle: Path) -> None:
    found = first_divergence(load(CHECKPOINTS / f"{name}.pt"), LanguageModel.load(bundle, "fp32"), PROMPT, 500)
    if found is not None:
        print(f"{name}: first difference at token {found.step}, a near-tie of {found.gap:.2g}")
        assert found.gap <= found.limit


def test_the_stretches_between_shifts_say_what_the_references_own_loop_says(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = LanguageModel.load(exported(tmp_path_factory.getbasetemp()) / "here" / "tiny-modern", "fp32")
    reference, ids = load(CHECKPOINTS / "tiny-modern.pt"), model.tokenizer.encode(PROMPT)
    options = GenerationOptions(max_new_tokens=200, ignore_eos=True)
    written = list(model.generate(ids, options, SamplingOptions(temperature=0)).token_ids)
    assert written == reference.greedy(ids, 200)
    assert first_divergence(reference, model, PROMPT, 200) is None


def test_a_text_of_another_model_diverges_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = LanguageModel.load(exported(tmp_path_factory.getbasetemp()) / "here" / "tiny-modern", "fp32")
    found = first_divergence(load(CHECKPOINTS / "tiny-classic.pt"), model, PROMPT, 50)
    assert found is not None
    assert found.gap > found.limit
