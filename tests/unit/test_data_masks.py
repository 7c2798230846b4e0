"""Targets of random conversations in six template styles, against a slow reference that renders turn by turn."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from tests.fixtures.data.tokenizers import STYLES, WORDS, bpe_tokenizer
from zft.config import ZftError
from zft.data import DataOptions, TrainOn, prepare
from zft.data.mask import token_mask

ODD = ["\n\nwell", "  two  spaces ", "tail\n", "你好 café", "😀", "a\n\n\nb", "x"]


def random_messages(rng: random.Random, style: str) -> list[dict]:
    def text() -> str:
        return rng.choice(ODD) if rng.random() < 0.3 else " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))

    messages = [{"role": "system", "content": text().strip()}] if style != "gemma" and rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 4)):
        messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        if style == "qwen3" and rng.random() < 0.5:
            messages[-1]["reasoning_content"] = text()
        if style in ("qwen3", "llama3") and rng.random() < 0.3:
            call = {"type": "function", "function": {"name": "f", "arguments": {"x": text()}}}
            messages[-1:] = [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": text()},
                {"role": "assistant", "content": text()},
            ]
    return messages


def slow_turns(tokenizer, messages: list[dict]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of every assistant turn, each rendered and tokenized on its own."""
    out = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, tokenize=False)
        ids = tokenizer.apply_chat_template(messages[: number + 1], return_dict=False)
        # the answer begins at the first token that holds nothing of the prompt
        near = max(0, len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) - 4)
        first = next(k for k in range(near, len(ids) + 1) if tokenizer.decode(ids[:k]).startswith(prompt))
        last = max(k for k, token in enumerate(ids) if token in tokenizer.all_special_ids)
        out.append((ids[:first], ids[first : last + 1]))
    return out


def trained_turns(store, row: int) -> list[tuple[list[int], list[int]]]:
    """(all ids before, target ids) of every unbroken run of targets of a row, in the order of the conversation."""
    out = []
    for sequence in np.flatnonzero(store.rows == row):
        ids, mask = store.ids(sequence), store.mask(sequence).astype(np.int8)
        borders = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
        out += [(ids[:start].tolist(), ids[start:end].tolist()) for start, end in borders]
    return sorted(out, key=lambda turn: len(turn[0]))


def slow_reference(tokenizer, style: str, messages: list[dict]) -> list[tuple[list[int], list[int]]]:
    expected = slow_turns(tokenizer, messages)
    if style == "phi":
        # its EOS stands once, after the whole conversation: rendered turn by turn it shows after every turn
        end = tokenizer.convert_tokens_to_ids("<|end|>")
        expected[:-1] = [(before, answer[: answer.index(end) + 1]) for before, answer in expected[:-1]]
    return sorted(expected, key=lambda turn: len(turn[0]))


@pytest.mark.parametrize("style", STYLES)
def test_200_random_conversations(style: str, tmp_path):
    tokenizer, rng = bpe_tokenizer(style), random.Random(style)
    rows = [random_messages(rng, style) for _ in range(200)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"messages": messages} for messages in rows]))
    prepared = prepare(str(path), tokenizer, DataOptions(), seq_len=100_000)
    store = prepared.epochs.store
    for number, messages in enumerate(rows):
        got, expected = trained_turns(store, number), slow_reference(tokenizer, style, messages)
        assert [answer for _, answer in got] == [answer for _, answer in expected], messages
        assert [before for before, _ in got] == [before for before, _ in expected], messages
        whole = store.ids(np.flatnonzero(store.rows == number)[0]).tolist()
        assert whole == tokenizer.apply_chat_template(messages, return_dict=False)
        if prepared.report.cut == 0:
            assert got[-1][1][-1] in tokenizer.all_special_ids, "an uncut row ends with a supervised end of turn"
    assert prepared.report.rows == 200 and not prepared.report.dropped
    assert prepared.report.supervised_tokens == sum(
        len(answer) for messages in rows for _, answer in slow_reference(tokenizer, style, messages)
    )
    # only these two show an earlier turn otherwise than it was generated
    assert (len(store) > 200) == (style in ("qwen3", "mistral"))


def test_the_reference_notices_a_shifted_mask(tmp_path):
    tokenizer = bpe_tokenizer("chatml")
    messages = [{"role": "user", "content": "the a of"}, {"role": "assistant", "content": "and to in"}]
    before, answer = slow_reference(tokenizer, "chatml", messages)[0]
    ids = np.asarray(before + answer, np.int32)
    for shift in (-1, 1):
        mask = np.zeros(len(ids), np.uint8)
        mask[len(before) + shift :] = 1
        start = len(before) + shift
        assert (ids[:start].tolist(), ids[mask == 1].tolist()) != (before, answer)


def write(tmp_path, rows: list[dict]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def targets(prepared, tokenizer, sequence: int = 0) -> str:
    store = prepared.epochs.store
    return tokenizer.decode(store.ids(sequence)[store.mask(sequence) == 1])


CHAT = [
    {"role": "user", "content": "the a"}, {"role": "assistant", "content": "of and"},
    {"role": "user", "content": "to in"}, {"role": "assistant", "content": "is that"},
]  # fmt: skip


def test_train_on(tmp_path):
    tokenizer = bpe_tokenizer("chatml")
    path = write(tmp_path, [{"messages": CHAT}])

    def trained(**options) -> str:
        return targets(prepare(path, tokenizer, DataOptions(**options), seq_len=512), tokenizer)

    assert trained() == "of and<|im_end|>is that<|im_end|>"
    assert trained(train_on=TrainOn.last) == "is that<|im_end|>"
    # everything but the first token, which nothing predicts
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained(train_on=TrainOn.all) == whole.removeprefix("<|im_start|>")


def test_weights_of_messages(tmp_path):
    tokenizer = bpe_tokenizer("chatml")
    messages = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    prepared = prepare(write(tmp_path, [{"messages": messages}]), tokenizer, seq_len=512)
    assert targets(prepared, tokenizer) == "is that<|im_end|>"
    messages = [*CHAT[:3], {**CHAT[3], "weight": 0.5}]
    with pytest.raises(ZftError, match=r"rows.jsonl:1: bad weight: message 4 has weight 0.5; it has to be 0 or 1"):
        prepare(write(tmp_path, [{"messages": messages}]), tokenizer, seq_len=512)


def test_generation_tags_are_used_and_take_in_the_end_of_turn(tmp_path):
    tokenizer = bpe_tokenizer("chatml")
    tagged = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    options = DataOptions(chat_template=tagged)
    prepared = prepare(write(tmp_path, [{"messages": CHAT}]), tokenizer, options, seq_len=512)
    assert targets(prepared, tokenizer) == "of and<|im_end|>is that<|im_end|>"
    tokenizer.chat_template = tagged
    done = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert prepared.epochs.store.ids(0).tolist() == done["input_ids"]
    last = prepare(write(tmp_path, [{"messages": CHAT}]), tokenizer, DataOptions(train_on=TrainOn.last), seq_len=512)
    assert targets(last, tokenizer) == "is that<|im_end|>"


def test_a_template_that_can_not_be_masked_is_named(tmp_path):
    tokenizer = bpe_tokenizer("chatml")
    # the prompt for an answer differs from what the conversation shows there
    bad = "{% for m in messages %}{{ m['role'] ~ m['content'] }}{% endfor %}{% if add_generation_prompt %}G{% endif %}"
    path = tmp_path / "odd.jinja"
    path.write_text(bad)
    rows = write(tmp_path, [{"messages": CHAT}])
    with pytest.raises(ZftError, match=r"rows.jsonl:1: no answer range: .*odd.jinja.* turn \d is no prefix"):
        prepare(rows, tokenizer, DataOptions(chat_template=str(path)), seq_len=512)


def test_system_turns(tmp_path):
    tokenizer = bpe_tokenizer("gemma")
    rows = write(tmp_path, [{"messages": [{"role": "system", "content": "be it"}, *CHAT]}])
    with pytest.raises(ZftError, match=r"rows.jsonl:1: system turn refused: .*System role not supported.*fold_system"):
        prepare(rows, tokenizer, seq_len=512)
    prepared = prepare(rows, tokenizer, DataOptions(fold_system=True), seq_len=512)
    folded = [{"role": "user", "content": "be it\n\nthe a"}, *CHAT[1:]]
    assert prepared.epochs.store.ids(0).tolist() == tokenizer.apply_chat_template(folded, return_dict=False)
    # a template that drops the system turn without a word is refused, too
    silent = "{% for m in messages if m['role'] != 'system' %}{{ m['role'] + m['content'] + eos_token }}{% endfor %}"
    with pytest.raises(ZftError, match="leaves the system turn out"):
        prepare(rows, tokenizer, DataOptions(chat_template=silent), seq_len=512)


def test_one_bos(tmp_path):
    tokenizer = bpe_tokenizer("llama3", adds_bos=True)
    prepared = prepare(write(tmp_path, [{"messages": CHAT}]), tokenizer, seq_len=512)
    ids = prepared.epochs.store.ids(0).tolist()
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    # and none where the template has none
    options = DataOptions(chat_template="chatml")
    prepared = prepare(write(tmp_path, [{"messages": CHAT}]), tokenizer, options, seq_len=512)
    assert tokenizer.bos_token_id not in prepared.epochs.store.ids(0)


def test_plain_text_gets_bos_and_a_supervised_eos(tmp_path):
    tokenizer = bpe_tokenizer("llama3", adds_bos=True)
    prepared = prepare(write(tmp_path, [{"text": "the a of"}]), tokenizer, seq_len=512)
    ids, mask = prepared.epochs.store.ids(0), prepared.epochs.store.mask(0)
    assert ids.tolist() == [*tokenizer("the a of")["input_ids"], tokenizer.eos_token_id]
    assert mask.tolist() == [0] + [1] * (len(ids) - 1)


def test_a_template_without_end_of_turn_gets_eos(tmp_path):
    tokenizer = bpe_tokenizer("chatml")
    bare = "{% for m in messages %}{{ '### ' + m['role'] + ':\\n' + m['content'] + '\\n' }}{% endfor %}" \
        "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"  # fmt: skip
    prepared = prepare(
        write(tmp_path, [{"messages": CHAT[:2]}]), tokenizer, DataOptions(chat_template=bare), seq_len=512
    )
    assert targets(prepared, tokenizer) == "of and\n<|im_end|>"
    assert any("EOS appended" in note for note in prepared.report.notes)


def test_mask_by_offsets():
    offsets = [(0, 2), (2, 3), (3, 5), (5, 5), (5, 8), (5, 8), (9, 11)]
    mask, across = token_mask(offsets, [(3, 8)])
    assert mask.tolist() == [0, 0, 1, 1, 1, 1, 0] and across == 0
    mask, across = token_mask(offsets, [(4, 8)])
    assert mask.tolist() == [0, 0, 0, 1, 1, 1, 0] and across == 1
    # the last token's offset leaves out its leading space, at 8, which the span does not hold
    assert token_mask(offsets, [(9, 11)])[0].tolist() == [0] * 7
    assert token_mask([], [(0, 1)])[0].tolist() == []
