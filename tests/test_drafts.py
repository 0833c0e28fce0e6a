"""Where guesses come from: what each draft says, and which drafts are refused."""

import numpy as np
import pytest
import tokenizers
from drafting import GREEDY, cached, guesses, model, murmur
from scripted import ScriptedDecoder, ScriptedModel, byte_tokenizer
from tokenizers import decoders, models

from infer.runtime.drafts import ModelDraft, PromptLookup, certain
from infer.runtime.errors import DraftMismatch
from infer.runtime.generate import GenerationOptions
from infer.runtime.sampler import Sampler
from infer.runtime.sampling import SamplingOptions, distribution, draw
from infer.runtime.text import Tokenizer
from infer.runtime.uniforms import UniformStream

V = 256
RULE = murmur(3)
TEXT = list(b"And God said, Let there be light: and there was light.")


def decoder(window: int = 128) -> ScriptedDecoder:
    return ScriptedDecoder(RULE, window=window, vocab_size=V)


def fed(ran: ScriptedDecoder) -> list[tuple[str, int]]:
    """The passes, by kind and number of tokens."""
    return [(kind, len(ids)) for kind, ids in ran.calls if kind != "rollback"]


# Another model


def test_a_model_guesses_what_it_would_write():
    alone = model(RULE, window=128).generate(TEXT, GenerationOptions(max_new_tokens=6), GREEDY)
    assert guesses(ModelDraft(decoder(), V), TEXT, 6) == list(alone.token_ids)


def test_a_guess_is_drawn_from_the_filtered_distribution_that_it_carries():
    chosen = SamplingOptions(temperature=0.7, top_k=9, top_p=0.8, repetition_penalty=1.4, seed=5)
    made = ModelDraft(decoder(), V).propose(TEXT, 5, context_start=0, sampler=Sampler(chosen))
    numbers, seen = UniformStream(5), list(TEXT)
    for guess in made:
        wanted = distribution(np.asarray(RULE(tuple(seen)), np.float32), chosen, seen_ids=seen)
        assert np.array_equal(guess.draft_probs.ids, wanted.ids)
        assert np.array_equal(guess.draft_probs.probs, wanted.probs)
        assert guess.token_id == draw(wanted, numbers.next())
        seen.append(guess.token_id)  # the penalty counts guesses as well


def test_after_all_guesses_were_kept_the_last_one_and_the_bonus_are_fed():
    ran = decoder()
    draft = ModelDraft(ran, V)
    made = guesses(draft, TEXT, 3)
    text = [*TEXT, *made, 7]
    guesses(draft, text, 2)
    assert fed(ran) == [("prefill", len(TEXT)), ("decode", 1), ("decode", 1), ("decode", 2), ("decode", 1)]
    assert draft.calls == 5


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_after_a_rejection_the_replacement_alone_is_fed(kept: int):
    ran = decoder()
    draft = ModelDraft(ran, V)
    made = guesses(draft, TEXT, 3)
    text = [*TEXT, *made[:kept], (made[kept] + 1) % V]
    again = guesses(draft, text, 1)
    assert fed(ran)[3:] == [("decode", 1)]
    assert cached(ran) == text
    assert again == guesses(ModelDraft(decoder(), V), text, 1)


def test_what_came_without_guesses_is_fed_in_one_pass():
    ran = decoder()
    draft = ModelDraft(ran, V)
    made = guesses(draft, TEXT, 2)
    text = [*TEXT, *made, *b"1234567890"]
    assert guesses(draft, text, 2) == guesses(ModelDraft(decoder(), V), text, 2)
    assert fed(ran)[2:] == [("decode", 11), ("decode", 1)]


def test_a_replacement_that_equals_the_next_guess_by_chance_is_no_confusion():
    # Both guesses were wrong, and the text goes on with other tokens that happen to be the same ids in another order.
    ran = decoder()
    draft = ModelDraft(ran, V)
    first, second, _ = guesses(draft, TEXT, 3)
    text = [*TEXT, second, first]
    assert guesses(draft, text, 2) == guesses(ModelDraft(decoder(), V), text, 2)


def test_a_text_that_ends_in_guesses_that_were_fed_has_its_last_token_fed_again():
    ran = decoder()
    draft = ModelDraft(ran, V)
    text = [*TEXT, *guesses(draft, TEXT, 4)[:2]]
    assert guesses(draft, text, 2) == guesses(ModelDraft(decoder(), V), text, 2)
    assert fed(ran)[4:] == [("decode", 1), ("decode", 1)]


def test_a_draft_starts_again_from_the_targets_first_token_when_that_has_moved():
    ran = decoder()
    draft = ModelDraft(ran, V)
    guesses(draft, TEXT, 2)
    text = [*TEXT, 1, 2, 3]
    moved = guesses(draft, text, 2, start=40)
    assert fed(ran)[2:] == [("prefill", len(text) - 40), ("decode", 1)]
    assert moved == guesses(ModelDraft(decoder(), V), text[40:], 2)


@pytest.mark.parametrize(("window", "count", "kept"), [(16, 3, 8), (16, 12, 5), (7, 4, 3), (7, 7, 1), (2, 2, 1)])
def test_a_full_draft_goes_on_with_its_latest_half_or_what_leaves_room_for_the_guesses(
    window: int, count: int, kept: int
):
    ran = decoder(window)
    made = guesses(ModelDraft(ran, V), TEXT, count)
    assert len(made) == count
    assert fed(ran)[0] == ("prefill", kept)
    assert made == guesses(ModelDraft(decoder(), V), TEXT[-kept:], count)


def test_a_draft_with_a_small_window_guesses_no_more_than_fit():
    assert len(guesses(ModelDraft(decoder(3), V), TEXT, 8)) == 3
    assert len(guesses(ModelDraft(decoder(1), V), TEXT, 8)) == 1


def test_a_draft_is_not_restarted_before_its_window_is_full():
    ran = decoder(16)
    draft, text = ModelDraft(ran, V), TEXT[:11]
    while len(text) + 1 <= 16:  # the text and the first of two guesses fit
        text += [*guesses(draft, text, 2)[:1], 0]
    assert len(text) == 17
    assert [kind for kind, _ in fed(ran)].count("prefill") == 1
    guesses(draft, text, 2)
    assert [kind for kind, _ in fed(ran)].count("prefill") == 2


# Whose tokens are the same


def small(vocab_size: int = V, **changes: object) -> ScriptedModel:
    return model(RULE, vocab_size=vocab_size, **changes)


def refused(target: ScriptedModel, draft: ScriptedModel) -> str:
    with pytest.raises(DraftMismatch) as raised:
        target.stream(b">", draft=draft)
    assert target.scripted.calls == draft.scripted.calls == []
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("sizes", [(256, 257), (257, 256)])
def test_a_draft_with_another_number_of_ids_with_text_is_refused_with_both(sizes: tuple[int, int]):
    target, draft = (
        small(size, tokenizer=byte_tokenizer(["the"] if size == 257 else []), sha256=str(size)) for size in sizes
    )
    message = refused(target, draft)
    assert f"a vocabulary of {sizes[1]} ids with text, the target {sizes[0]}" in message
    assert "must share the target's tokenizer" in message


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        (["one", "two"], ["two", "one"], "token id 256 is 'two' for the draft and 'one' for the target"),
        (["a b", "c", "d e"], ["a b", "c", "d f"], "token id 258 is 'd f' for the draft and 'd e' for the target"),
        (
            [b"\xf0\x9f", b"\xe6\x97"],
            [b"\xe6\x97", b"\xf0\x9f"],
            r"token id 256 is b'\xe6\x97' for the draft and b'\xf0\x9f' for",
        ),
    ],
)
def test_a_draft_with_other_tokens_is_refused_naming_the_first(ours: list[str], theirs: list[str], named: str):
    pair = [small(V + len(ours), tokenizer=byte_tokenizer(pieces), sha256=str(pieces)) for pieces in (ours, theirs)]
    assert named in refused(*pair)


def test_tokens_that_differ_in_their_space_alone_differ():
    made = []
    for words in (["▁the", "the"], ["the", "▁the"]):
        inner = tokenizers.Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="the"))
        inner.decoder = decoders.Metaspace()
        made.append(small(2, tokenizer=Tokenizer(inner), sha256=words[0]))
    with pytest.raises(DraftMismatch, match="token id 0 is 'the' for the draft and ' the' for the target"):
        made[0].stream([0], draft=made[1])


def test_a_draft_with_the_same_tokens_that_cuts_text_in_another_way_is_refused():
    assert "cuts text in another way" in refused(small(sha256="one"), small(sha256="two"))


def padded(rule_id: int, vocab_size: int, n_with_text: int = 260) -> ScriptedModel:
    """A model that likes its rows without text best, and then one id."""

    def rule(held: tuple[int, ...]) -> np.ndarray:
        row = np.array(murmur(rule_id, vocab_size)(held))
        row[n_with_text:] = 50.0
        return row

    tokenizer = byte_tokenizer(["the", "and", "of ", " in"])
    ranges = [(n_with_text, vocab_size)] if vocab_size > n_with_text else []
    return model(rule, vocab_size=vocab_size, tokenizer=tokenizer, ids_without_text=ranges, window=32)


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingOptions(temperature=1.5, top_k=0, seed=1)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize(("target_size", "draft_size"), [(304, 304), (320, 264), (264, 320), (260, 320), (320, 260)])
def test_rows_without_text_may_differ_in_number_and_are_neither_proposed_nor_accepted(
    target_size: int, draft_size: int, sampling: SamplingOptions
):
    options = GenerationOptions(max_new_tokens=60)
    for rule_id in (1, 2):
        target, draft = padded(1, target_size), padded(rule_id, draft_size)
        result = target.generate(b">", options, sampling, draft=draft)
        assert result.speculation.proposed > 40
        for ran in (target, draft):
            assert max(i for kind, ids in ran.scripted.calls if kind != "rollback" for i in ids) < 260
        if sampling is GREEDY:
            assert result.token_ids == padded(1, target_size).generate(b">", options, sampling).token_ids


def test_a_draft_without_an_id_of_the_prompt_guesses_nothing_until_that_has_left_the_window():
    target, draft, plain = padded(1, 320), padded(1, 264), padded(1, 320)
    prompt, options = [65, 300, 66], GenerationOptions(max_new_tokens=60)
    steps = list(target.stream(prompt, options, GREEDY, draft=draft))
    assert [step.token_id for step in steps] == list(plain.generate(prompt, options, GREEDY).token_ids)
    guessed = [step.from_draft for step in steps]
    assert not any(guessed[:29]) and any(guessed[29:])  # a window of 32 tokens


def test_an_id_without_text_in_the_prompt_is_not_accepted_where_the_text_repeats():
    # The prompt holds it, so that a lookup proposes it; the target gives it no probability.
    target = padded(1, 264)
    prompt = [*b"ab", 262, *b"ab"]
    assert guesses(PromptLookup(), prompt, 1) == [262]
    for seed in range(20):
        sampling = SamplingOptions(temperature=2, top_k=0, seed=seed)
        result = target.generate(prompt, GenerationOptions(max_new_tokens=4), sampling, draft="lookup")
        assert max(result.token_ids) < 260


def test_certain_guesses_are_all_on_their_token():
    guess = certain(5)
    assert (guess.token_id, guess.draft_probs.ids.tolist(), guess.draft_probs.probs.tolist()) == (5, [5], [1.0])
