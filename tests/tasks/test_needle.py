"""Facts in long documents: prompt lengths, derivable answers, the reward. The tokenizer is a local one made here."""

import importlib.util
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longstraw.tasks import needle

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose tokens are words, runs of spaces apart."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", chat_template=CHAT_TEMPLATE)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("prompt_tokens", [256, 1000, 4096])
def test_prompts_fill_the_requested_length(tokenizer_folder: Path, prompt_tokens: int) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    for row in needle.prompts(3, prompt_tokens, str(tokenizer_folder), seed=2):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert prompt_tokens - 4 <= len(ids) <= prompt_tokens


def test_answer_follows_from_prompt(tokenizer_folder: Path) -> None:
    rows = needle.prompts(8, 2000, str(tokenizer_folder), num_facts=4, seed=1)
    for row in rows:
        text = row["prompt"][0]["content"]
        question = text.rsplit("\n\n", 1)[1]
        place = question.removeprefix("What is the access code of the ").split("?")[0]
        assert place in needle.PLACES
        facts = [line for line in text.splitlines() if line.startswith("The access code of the ")]
        assert len(facts) == 4
        assert [fact for fact in facts if f" the {place} is" in fact] == [
            f"The access code of the {place} is {row['answer']}."
        ]
        where = text.index(f"The access code of the {place} is") / len(text)
        assert row["depth"] - 0.1 <= where
    assert max(row["depth"] for row in rows) - min(row["depth"] for row in rows) > 0.3


def test_rows_depend_on_seed_and_index_alone(tokenizer_folder: Path) -> None:
    rows = needle.prompts(3, 400, str(tokenizer_folder), seed=5)
    assert needle.prompts(2, 400, str(tokenizer_folder), seed=5) == rows[:2]
    assert needle.prompts(3, 400, str(tokenizer_folder), seed=6) != rows


def test_reward_wants_the_number_and_no_other() -> None:
    texts = ["4821", "The access code is 4821.", "4821 or 4822", "48213", "I do not know", ""]
    expected = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert needle.reward(completions=texts, answer=["4821"] * 6, prompts=None, depth=None) == expected
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert needle.reward(completions=chats, answer=["4821"] * 6) == expected


def test_missing_packages_give_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="pip install not-a-package"):
        needle.prompts(1, 512, "package:not_a_package")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find_spec(name, *rest)
    )
    with pytest.raises(ValueError, match="pip install gguf"):
        needle.prompts(1, 512, "anything", gguf_file="model.gguf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": -1}, "num_rows=-1"),
        ({"prompt_tokens": 100}, "prompt_tokens=100"),
        ({"num_facts": 25}, "num_facts=25"),
    ],
)
def test_bad_arguments_are_named(tokenizer_folder: Path, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needle.prompts(**({"num_rows": 1, "prompt_tokens": 512, "tokenizer": str(tokenizer_folder)} | arguments))
