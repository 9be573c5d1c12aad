"""Facts hidden in real long text: questions whose answers stand somewhere in thousands of tokens of documentation.

The text is Python's own documentation of its language topics (`pydoc_data.topics`, some 465,000 characters, part of
every Python installation; which text exactly depends on the Python version). Sentences that state access codes are put
between its paragraphs at random depth, and the question asks for one of the codes. A reward checks the number.
"""

import importlib.util
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from longstraw.config.locate import install_command, resolve_path

PLACES = (
    "north gate", "old observatory", "harbour office", "glass house", "music school", "river station", "town archive",
    "east tower", "print shop", "weather station", "cable car", "fish market", "stone bridge", "toy museum",
    "boat shed", "rose garden", "water mill", "tea house", "lighthouse", "clock room", "film studio", "seed bank",
    "ice cellar", "map room",
)  # fmt: skip
INSTRUCTION = "Read the document, then answer the question that follows it."
MAX_CHARACTERS_A_TOKEN = 8
MIN_PROMPT_TOKENS = 256

_PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
_NUMBER = re.compile(r"\d+")


def prompts(
    num_rows: int, prompt_tokens: int, tokenizer: str, gguf_file: str | None = None, num_facts: int = 4, seed: int = 0
) -> list[dict[str, Any]]:
    """Chat prompts about a long document, each close to a given length in tokens.

    Row i depends on the other arguments and i only. A prompt has at most `prompt_tokens` tokens as the tokenizer's chat
    template renders it, generation prompt included, and falls short of that by a few at most.

    Args:
        num_rows: rows to make, at least 0.
        prompt_tokens: length to fill, at least 256.
        tokenizer: what measures the length: a folder, a hub name or `package:NAME/folder`; the model's own.
        gguf_file: name of the GGUF file inside that folder, if the tokenizer is in one.
        num_facts: codes hidden in the document, 1 to 24; one of them is asked for.
        seed: a non-negative integer.

    Returns:
        Rows `{"prompt": chat messages, "answer": str, "depth": float}`: the code as digits, and where in the document
        the fact stands, 0 at the start to 1 at the end.

    Raises:
        ValueError: an argument out of range, a package that is not installed (the message has the command), or a
            tokenizer without a chat template.
    """
    if num_rows < 0 or seed < 0:
        raise ValueError(f"num_rows={num_rows} and seed={seed} must be 0 or more.")
    if prompt_tokens < MIN_PROMPT_TOKENS:
        raise ValueError(
            f"prompt_tokens={prompt_tokens} leaves no room for a document; ask for {MIN_PROMPT_TOKENS} or more."
        )
    if not 1 <= num_facts <= len(PLACES):
        raise ValueError(f"num_facts={num_facts} is not in 1..{len(PLACES)}, the number of places that facts speak of.")
    measure = _load_tokenizer(tokenizer, gguf_file)
    return [
        _row(np.random.default_rng([seed, prompt_tokens, num_facts, i]), prompt_tokens, num_facts, measure)
        for i in range(num_rows)
    ]


def reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1.0 where the numbers that a completion names are the answer and nothing else, else 0.0.

    Called by keyword in TRL's reward contract; `completions` holds text or lists of chat messages, `answer` is the
    dataset's column.
    """
    return [
        1.0 if set(_NUMBER.findall(_text_of(completion))) == {expected} else 0.0
        for completion, expected in zip(completions, answer, strict=True)
    ]


def _text_of(completion: str | Sequence[dict[str, str]]) -> str:
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def _row(generator: np.random.Generator, prompt_tokens: int, num_facts: int, tokenizer: Any) -> dict[str, Any]:
    document = _document(generator, MAX_CHARACTERS_A_TOKEN * prompt_tokens)
    places = [PLACES[index] for index in generator.permutation(len(PLACES))[:num_facts]]
    codes = [str(1000 + code) for code in generator.permutation(9000)[:num_facts]]
    depths = generator.random(num_facts).tolist()
    facts = [f"The access code of the {place} is {code}." for place, code in zip(places, codes, strict=True)]
    asked = int(generator.integers(num_facts))
    question = f"What is the access code of the {places[asked]}? Answer with the number only."

    def messages(num_characters: int) -> list[dict[str, str]]:
        text = _hide(document[:num_characters], facts, depths)
        return [{"role": "user", "content": f"{INSTRUCTION}\n\n{text}\n\n{question}"}]

    def num_tokens(num_characters: int) -> int:
        ids = tokenizer.apply_chat_template(messages(num_characters), add_generation_prompt=True, return_dict=False)
        return len(ids)

    fits, exceeds = 0, len(document) + 1
    guess = min(4 * prompt_tokens, len(document))
    while exceeds - fits > 1:
        missing = prompt_tokens - num_tokens(guess)
        if missing >= 0:
            fits = guess
        else:
            exceeds = guess
        if missing == 0:
            break
        guess = min(max(guess + 3 * missing, fits + 1), exceeds - 1)
    return {"prompt": messages(fits), "answer": codes[asked], "depth": depths[asked]}


def _document(generator: np.random.Generator, num_characters: int) -> str:
    """Topics in random order, repeated in another order if they do not suffice: `num_characters` of them."""
    from pydoc_data.topics import topics

    titles = sorted(topics)
    parts: list[str] = []
    length = 0
    while length < num_characters:
        for index in generator.permutation(len(titles)):
            parts.append(topics[titles[index]].strip())
            length += len(parts[-1])
    return "\n\n".join(parts)[:num_characters]


def _hide(text: str, facts: Sequence[str], depths: Sequence[float]) -> str:
    """Put each fact, as a paragraph of its own, at the first paragraph break from its depth on (at the end if none)."""
    breaks = [match.start() for match in _PARAGRAPH_BREAK.finditer(text)] + [len(text)]
    places = [next(place for place in breaks if place >= depth * len(text)) for depth in depths]
    # From the last to the first, so that earlier places stay valid.
    for place, fact in sorted(zip(places, facts, strict=True), reverse=True):
        text = f"{text[:place]}\n\n{fact}{text[place:]}"
    return text


@lru_cache(maxsize=2)
def _load_tokenizer(reference: str, gguf_file: str | None) -> Any:
    from transformers import AutoTokenizer

    if gguf_file is not None and importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"Reading {gguf_file} takes the package 'gguf', which is not installed. "
            f"Install it: {install_command('gguf')}"
        )
    tokenizer = AutoTokenizer.from_pretrained(resolve_path(reference, "dataset.args.tokenizer"), gguf_file=gguf_file)
    if tokenizer.chat_template is None:
        raise ValueError(f"The tokenizer of '{reference}' has no chat template; give that of a chat model.")
    return tokenizer
