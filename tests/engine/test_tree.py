"""A tree of trajectories has the gradient of its sequences run one by one, and runs what they share once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from families import VOCAB, build, tied

import longstraw

Sequences = tuple[list[torch.Tensor], list[torch.Tensor]]
EXACT = 1e-11
PIECES = dict(segment_tokens=7, block_tokens=5)


class Interrupt(Exception):
    """Not an error that anything below could expect."""


class Turns:
    """Turns of random tokens, drawn from a seed, and sequences made of them."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, num: int, scored: bool, first: int | None = None) -> tuple[torch.Tensor, bool]:
        """A turn of `num` tokens; `first` replaces its first one, so that turns part where they are meant to."""
        ids = torch.randint(0, VOCAB, (num,), generator=self._generator)
        if first is not None:
            ids[0] = first
        return ids, scored

    @staticmethod
    def sequence(*turns: tuple[torch.Tensor, bool]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([ids for ids, _ in turns]), torch.cat([torch.full((len(ids),), s) for ids, s in turns])


def split(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Sequences:
    return [ids for ids, _ in pairs], [mask for _, mask in pairs]


def deep() -> Sequences:
    """Six forks below one another, an answer at each; turns that are scored and tool outputs that are not."""
    turns, pairs = Turns(), []
    path = [turns.draw(11, False)]
    for depth in range(6):
        pairs.append(turns.sequence(*path, turns.draw(3 + 2 * depth, True, first=0)))
        path.append(turns.draw(4 + depth, depth % 2 == 0, first=1))
    return split([*pairs, turns.sequence(*path)])


def after_one_token() -> Sequences:
    """A prompt of one token, then turns of one token, each with siblings; long enough answers for two pieces."""
    turns, pairs = Turns(1), []
    path = [turns.draw(1, False)]
    for token in (3, 4, 5):
        pairs += [turns.sequence(*path, turns.draw(num, True, first=num)) for num in (1, 2, 12)]
        path.append(turns.draw(1, True, first=token + 40))
    return split([*pairs, turns.sequence(*path)])


def prefixes() -> Sequences:
    """Sequences that end inside an edge, at a fork, one token before its end, and within the common prompt."""
    turns = Turns(2)
    prompt, turn = turns.draw(9, False), turns.draw(13, True)
    one, other = (
        turns.sequence(prompt, turn, turns.draw(6, True, 0)),
        turns.sequence(prompt, turn, turns.draw(8, True, 1)),
    )
    ends = [(one[0][:end], one[1][:end]) for end in (4, 10, 15, 21, 22, 23)]
    return split([*ends, one, other])


def duplicates() -> Sequences:
    """The same sequence three times, once with another mask, beside another."""
    turns = Turns(3)
    prompt, turn = turns.draw(10, False), turns.draw(12, True)
    one = turns.sequence(prompt, turn)
    return split([one, one, (one[0], one[1] & (one[0] % 2 == 0)), turns.sequence(prompt, turns.draw(5, True)), one])


def alone() -> Sequences:
    """One sequence of which parts are scored."""
    turns = Turns(4)
    return split([turns.sequence(*(turns.draw(num, num % 2 == 0) for num in (17, 8, 23, 4, 9)))])


def empty_masks() -> Sequences:
    """Sequences without a scored token: one that ends in the trunk, one that goes where none else does, and a fork."""
    turns = Turns(5)
    prompt, turn = turns.draw(10, False), turns.draw(4, False)
    quiet = [turns.sequence(prompt), turns.sequence(prompt, turns.draw(30, False, 0))]
    answers = [turns.sequence(prompt, turn, turns.draw(4, False, token), turns.draw(3, True)) for token in (1, 2)]
    return split([*quiet, *answers, turns.sequence(prompt, turn, turns.draw(9, False, 3))])


def many() -> Sequences:
    """Sixty leaves over three turns, up to nine tokens each, packed side by side."""
    turns, pairs = Turns(6), []
    prompt = turns.draw(8, False)
    middle = [turns.draw(3, True, first=token) for token in range(3)]
    for leaf in range(60):
        pairs.append(turns.sequence(prompt, middle[leaf % 3], turns.draw(leaf % 9 + 1, True)))
    return split(pairs)


def apart() -> Sequences:
    """Sequences that share nothing, in pairs that do, short ones that run side by side, and single tokens."""
    turns, pairs = Turns(7), []
    for token in range(3):
        begin = turns.draw(6 - 2 * token, False, first=token)
        pairs += [turns.sequence(begin, turns.draw(5, True)) for _ in range(2)]
    pairs += [turns.sequence(turns.draw(1, False, token), turns.draw(1, True)) for token in (10, 11, 12)]
    return split([*pairs, turns.sequence(turns.draw(1, False, 13))])


SHAPES: list[Callable[[], Sequences]] = [
    deep,
    after_one_token,
    prefixes,
    duplicates,
    alone,
    empty_masks,
    many,
    apart,
]


def objective_of(masks: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Clipped ratios, an advantage a sequence, plus the spread over sequences: couples all of them."""
    generator = torch.Generator().manual_seed(8)
    shift = [torch.rand(int(m.sum()), generator=generator, dtype=torch.float64) * 0.6 - 0.3 for m in masks]
    advantages = torch.randn(len(masks), generator=generator, dtype=torch.float64)
    total = sum(int(m.sum()) for m in masks)

    def objective(logps: list[torch.Tensor]) -> torch.Tensor:
        loss = logps[0].new_zeros(())
        for logp, move, advantage in zip(logps, shift, advantages):
            ratio = (logp - logp.detach() - move.to(logp)).exp()
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / total
        return loss + 0.1 * torch.stack([logp.sum() for logp in logps]).var(correction=0) + logps[0].sum() ** 2 / total

    return objective


def one_by_one(model: Any, what: Sequences, constant: int, temperature: float = 1.0) -> tuple[Any, Any, Any]:
    """(loss, log-probabilities, gradients) of stock transformers on each sequence for itself."""
    model.zero_grad(set_to_none=True)
    logps = [
        reference.response_logps(model, ids[:1], ids[1:], min(constant, len(ids) - 1), temperature)[mask[1:]]
        if len(ids) > 1
        else torch.zeros(0, dtype=torch.float64)
        for ids, mask in zip(*what)
    ]
    loss = objective_of(what[1])(logps)
    loss.backward()
    found = reference.gradients(model)
    model.zero_grad(set_to_none=True)
    return loss.detach(), [logp.detach() for logp in logps], found


def tree_step(model: Any, what: Sequences, temperature: float = 1.0, **options: Any) -> tuple[Any, Any]:
    """(outcome, gradients) of the engine, from empty gradients."""
    model.zero_grad(set_to_none=True)
    engine = longstraw.Engine(model, **PIECES | options)
    outcome = engine.backward_tree(longstraw.Tree.from_sequences(*what), objective_of(what[1]), temperature)
    found = reference.gradients(model)
    model.zero_grad(set_to_none=True)
    return outcome, found


def common_prompt(what: Sequences) -> int:
    """Tokens before the first that is scored or not in all sequences that are that long."""
    num = 0
    while True:
        rows = [(int(ids[num]), bool(mask[num])) for ids, mask in zip(*what) if len(ids) > num]
        if len({token for token, _ in rows}) != 1 or any(scored for _, scored in rows):
            return num
        num += 1


def assert_exact(model: Any, what: Sequences, mode: Any = "full", temperature: float = 1.0, **options: Any) -> None:
    constant = max(1, common_prompt(what))
    constant = 0 if mode == "full" else max(0, constant - (1 if mode == "none" else mode))
    loss, logps, expected = one_by_one(model, what, constant, temperature)
    outcome, found = tree_step(model, what, temperature, prompt_grad=mode, **options)
    torch.testing.assert_close(outcome.loss, loss, rtol=EXACT, atol=EXACT)
    for ours, theirs in zip(outcome.logps, logps, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)
    reference.assert_same_gradients(found, expected, EXACT, f"prompt_grad={mode!r}")


class Watched(longstraw.Engine):
    """Calls `look(phase, store)` after every piece."""

    def __init__(self, model: Any, look: Callable[[str, Any], None], **options: Any) -> None:
        self.stores: list[Any] = []
        super().__init__(model, progress=lambda phase, done, total: look(phase, self.stores[-1]), **options)

    def _new_store(self) -> Any:
        self.stores.append(super()._new_store())
        return self.stores[-1]


@pytest.mark.parametrize("shape", SHAPES)
def test_places_are_distinct(shape: Callable[[], Sequences]) -> None:
    sequences, masks = shape()
    tree = longstraw.Tree.from_sequences(sequences, masks)
    places = {tuple(ids[: end + 1].tolist()) for ids in sequences for end in range(len(ids))}
    assert tree.num_tokens == len(places) == sum(len(edge) for edge in tree.edges)
    assert tree.num_prompt == common_prompt((sequences, masks))
    for ids, mask, scored in zip(sequences, masks, tree.scored, strict=True):
        assert torch.equal(tree.ids_P[scored], ids[mask])
        for place, end in zip(scored.tolist(), mask.nonzero()[:, 0].tolist()):
            path = []
            while place >= 0:
                path.append(int(tree.ids_P[place]))
                place = int(tree.before_P[place])
            assert path[::-1] == ids[: end + 1].tolist()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("float64_inside")
def test_shape(shape: Callable[[], Sequences], family: str) -> None:
    """Forks lie inside a window of 13 tokens (mistral) and within the reach of a convolution of 4 (qwen3_5)."""
    assert_exact(build(family), shape(), temperature=0.8)


@pytest.mark.parametrize(
    "family", ["glm_moe_dsa", "deepseek_v3", "qwen3_mixed", "bamba", "kimi_linear", "lfm2", "falcon_h1"]
)
@pytest.mark.usefixtures("float64_inside")
def test_family(family: str) -> None:
    assert_exact(build(family), deep())


@pytest.mark.parametrize("mode", ["none", 1, 4, 11, 10_000])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
@pytest.mark.usefixtures("float64_inside")
def test_prompt_grad_counts_tokens_of_the_common_prompt(family: str, mode: Any) -> None:
    assert_exact(build(family), deep(), mode)


@pytest.mark.parametrize("mode", ["none", 2])
@pytest.mark.parametrize("shape", [after_one_token, prefixes, alone, apart])
@pytest.mark.usefixtures("float64_inside")
def test_prompt_grad_of_a_shape(shape: Callable[[], Sequences], mode: Any) -> None:
    assert_exact(build("llama"), shape(), mode)


@pytest.mark.parametrize("cut", [(1, 1), (3, 2), (2, 16), (1000, 1000)])
@pytest.mark.parametrize("family", ["mistral", "qwen3_5"])
@pytest.mark.usefixtures("float64_inside")
def test_results_do_not_depend_on_pieces(family: str, cut: tuple[int, int]) -> None:
    assert_exact(build(family), deep(), segment_tokens=cut[0], block_tokens=cut[1])


@pytest.mark.usefixtures("float64_inside")
def test_a_fork_where_indexer_scores_tie() -> None:
    """Against the engine on each sequence for itself: the stock model breaks ties by shape."""
    model, (sequences, masks) = tied("glm_moe_dsa"), deep()
    what = [ids % 4 for ids in sequences], masks  # few distinct tokens, each many times
    outcome, found = tree_step(model, what)
    engine = longstraw.Engine(model, **PIECES)
    states = [engine.capture(ids[:1]) for ids in what[0]]
    scored = [engine.score_for(state, [ids[1:]]) for state, ids in zip(states, what[0])]
    logps = [one.logps[0][mask[1:]] for one, mask in zip(scored, what[1])]
    objective_of(what[1])(logps).backward()
    for one in scored:
        engine.pull_back(one)
    for ours, theirs in zip(outcome.logps, logps, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=EXACT, atol=EXACT)
    reference.assert_same_gradients(found, reference.gradients(model), EXACT)


@pytest.mark.usefixtures("float64_inside")
def test_a_flat_tree_is_a_group() -> None:
    """A prompt and its responses, with and without a state before the last prompt token in the graph."""
    turns, model = Turns(9), build("qwen3_5")
    prompt = turns.draw(30, False)
    what = split([turns.sequence(prompt, turns.draw(num, True)) for num in (4, 9, 1, 6)])
    for mode in ("full", "none", 12):
        outcome, found = tree_step(model, what, prompt_grad=mode)
        engine = longstraw.Engine(model, prompt_grad=mode, **PIECES)
        with engine.capture(prompt[0]) as state:
            flat = engine.backward(state, [ids[30:] for ids in what[0]], objective_of(what[1]))
        torch.testing.assert_close(outcome.logps, flat.logps, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(outcome.entropies, flat.entropies, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(outcome.cotangents, flat.cotangents, rtol=EXACT, atol=EXACT)
        reference.assert_same_gradients(found, reference.gradients(model), EXACT)
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("shape", [deep, many])
def test_pages_of_one_path_are_alive(shape: Callable[[], Sequences]) -> None:
    what, model = shape(), build("qwen3", dtype=torch.float32)
    tree, layers = longstraw.Tree.from_sequences(*what), len(model.model.layers)
    most = {"score": 0, "replay": 0}

    def look(phase: str, store: Any) -> None:
        pages = [page for page in store.table if page.kind == "kv"]
        assert len(store.table) <= 2 * len(pages), "a cotangent a page at most"
        assert all(page.rows == 1 for page in pages), "what runs side by side leaves nothing that is read"
        most[phase] = max(most[phase], sum(page.num_tokens for page in pages) // layers)

    engine = Watched(model, look, **PIECES)
    engine.backward_tree(tree, objective_of(what[1]))
    assert 0 < most["replay"] <= most["score"] < tree.longest < 0.6 * tree.num_tokens
    assert not len(engine.stores[0].table)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
def test_what_branches_start_from_never_changes(family: str) -> None:
    """Every page holds the same bits as long as it lives; the trunk's live from its first run to its pullback."""
    what, model, seen = deep(), build(family, dtype=torch.float32), {}
    lives: dict[int, int] = {}

    def look(phase: str, store: Any) -> None:
        for page in store.table:
            if page.kind != "cotangent":
                parts = [hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy()) for t in store.fetch(page)]
                digest = [part.hexdigest() for part in parts]
                assert seen.setdefault(page.number, digest) == digest
                lives[page.number] = lives.get(page.number, 0) + 1

    Watched(model, look, **PIECES).backward_tree(longstraw.Tree.from_sequences(*what), objective_of(what[1]))
    assert max(lives.values()) > 20


@pytest.mark.parametrize("mode", ["none", 4])
def test_constant_tokens_never_collect_a_cotangent(mode: Any) -> None:
    what, starts = deep(), []

    def look(phase: str, store: Any) -> None:
        starts.extend(page.start for page in store.table if page.kind == "cotangent")

    engine = Watched(build("qwen3_5", dtype=torch.float32), look, prompt_grad=mode, **PIECES)
    engine.backward_tree(longstraw.Tree.from_sequences(*what), objective_of(what[1]))
    assert min(starts) == 11 - (1 if mode == "none" else mode)


@pytest.mark.parametrize(
    "options", [dict(tier="disk"), dict(boundary_bytes=1), dict(boundary_bytes=40_000), dict(recompute_layers=True)]
)
@pytest.mark.filterwarnings("ignore:boundary_bytes")
def test_options_of_memory_change_no_bit(options: dict[str, Any], tmp_path: Any) -> None:
    turns, model = Turns(10), build("qwen3_5", dtype=torch.float32)
    prompt = turns.draw(60, False)
    what = split([turns.sequence(prompt, turns.draw(3, True, 1), turns.draw(num, True)) for num in (4, 9, 1, 6)])
    plain, told = (tree_step(model, what, page_dir=tmp_path, **more) for more in ({}, options))
    assert torch.equal(plain[0].loss, told[0].loss)
    assert plain[1].keys() == told[1].keys() and all(torch.equal(g, told[1][name]) for name, g in plain[1].items())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("phase", ["score", "replay"])
def test_a_step_that_raises_leaves_gradients_as_they_were(family: str, phase: str) -> None:
    """Interrupted at a few pieces of each phase; the step after it is the step without it, to the bit."""
    what, model = deep(), build(family, dtype=torch.float32)
    tree, objective = longstraw.Tree.from_sequences(*what), objective_of(what[1])
    _, expected = tree_step(model, what)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for at in (1, 5, 11):
        seen = [0]

        def look(name: str, store: Any, at: int = at, seen: list[int] = seen) -> None:
            seen[0] += name == phase
            if name == phase and seen[0] == at:
                raise Interrupt(phase)

        engine = Watched(model, look, **PIECES)
        with pytest.raises(Interrupt):
            engine.backward_tree(tree, objective)
        assert not len(engine.stores[0].table)
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    _, found = tree_step(model, what)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_progress_counts_every_token_that_runs() -> None:
    what, calls = deep(), []
    engine = longstraw.Engine(build("llama"), prompt_grad=4, progress=lambda *call: calls.append(call), **PIECES)
    tree = longstraw.Tree.from_sequences(*what)
    outcome = engine.backward_tree(tree, objective_of(what[1]))
    run = {tuple(ids[:end].tolist()) for ids, mask in zip(*what) for end in range(1, 1 + int(mask.nonzero()[-1]))}
    for phase in ("score", "replay"):
        done = [done for name, done, total in calls if name == phase]
        assert done == sorted(set(done)) and done[-1] == len(run) < tree.num_tokens
        assert {total for name, _, total in calls if name == phase} == {len(run)}
    assert {name for name, _, _ in calls} == {"score", "replay"} == set(outcome.phases)


def test_what_no_gradient_reaches_is_not_run_again() -> None:
    """An objective of one sequence: the walk back goes along its path alone."""
    what, model, replayed = many(), build("llama"), []
    tree = longstraw.Tree.from_sequences(*what)
    engine = longstraw.Engine(model, **PIECES)
    forward = engine.host.forward
    scored = engine.score_tree_for(tree)
    engine.host.forward = lambda ids, start, cache: replayed.append(ids.numel()) or forward(ids, start, cache)
    scored.logps[0].sum().backward()
    engine.pull_back(scored)
    assert sum(replayed) < 30 < tree.num_tokens
    found = reference.gradients(model)
    model.zero_grad(set_to_none=True)
    engine.host.forward = forward
    engine.backward_tree(longstraw.Tree.from_sequences(what[0][:1], what[1][:1]), lambda logps: logps[0].sum())
    reference.assert_same_gradients(found, reference.gradients(model), EXACT)


def test_score_for_a_loss_in_between() -> None:
    what, model = deep(), build("llama")
    tree, objective = longstraw.Tree.from_sequences(*what), objective_of(what[1])
    outcome, expected = tree_step(model, what)
    engine = longstraw.Engine(model, **PIECES)
    scored = engine.score_tree_for(tree)
    assert isinstance(scored, longstraw.TreeScored)
    plain = engine.score_tree(tree)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(plain, outcome.logps, strict=True))
    objective(scored.logps).backward()
    with pytest.raises(ValueError, match="keep_response_side"):
        engine.pull_back(scored, keep_response_side=True)
    assert engine.pull_back(scored) is None
    found = reference.gradients(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    with pytest.raises(ValueError, match="pulled back or released before"):
        engine.pull_back(scored)
    stale = engine.score_tree_for(tree)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(ValueError, match="parameters have changed"):
        engine.pull_back(stale, [None] * len(stale.logps))
    stale.release()


@pytest.mark.parametrize(
    "sequences, masks, words",
    [
        ([], [], "sequences is empty"),
        (torch.tensor([1, 2]), [[0, 1]], "sequences is one tensor"),
        ([[1, 2]], [], "0 masks for 1 sequences"),
        ([[1, 2], []], [[0, 1], []], r"sequences\[1\] is empty"),
        ([[1.5]], [[0]], r"sequences\[0\] has dtype torch.float32"),
        ([[[1]]], [[0]], r"sequences\[0\] has shape \(1, 1\)"),
        ([[1, -100]], [[0, 1]], r"sequences\[0\] holds id -100"),
        ([[1, 2]], [[0, 1, 1]], r"masks\[0\] has shape \(3,\) for 2 tokens"),
        ([[1, 2]], [[0, 2]], r"masks\[0\] holds other values than 0 and 1"),
        ([[1, 2]], ["ab"], r"masks\[0\] is a str"),
        ([[1, 2], [1, 3]], [[0, 1], [1, 1]], r"masks\[1\] scores the first token"),
    ],
)
def test_sequences_that_make_no_tree(sequences: Any, masks: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        longstraw.Tree.from_sequences(sequences, masks)


def test_trees_that_the_engine_refuses() -> None:
    model = build("llama", dtype=torch.float32, max_position_embeddings=20)
    engine = longstraw.Engine(model)
    for ids, words in (([1, VOCAB], f"id {VOCAB}"), ([1] * 21, "max_position_embeddings=20")):
        with pytest.raises(ValueError, match=words):
            engine.backward_tree(longstraw.Tree.from_sequences([ids], [[0] * len(ids)]), lambda logps: logps[0].sum())
    with pytest.raises(ValueError, match="make one with longstraw"):
        engine.backward_tree([[1, 2]], lambda logps: logps[0].sum())  # type: ignore[arg-type]
    tree = longstraw.Tree.from_sequences([[1, 2, 3], [1, 2, 4]], [[0, 1, 1], [0, 0, 0]])
    with pytest.raises(ValueError, match="temperature=0"):
        engine.backward_tree(tree, lambda logps: logps[0].sum(), 0)
    with pytest.raises(ValueError, match="scalar"):
        engine.backward_tree(tree, lambda logps: logps[0])
    with pytest.raises(FloatingPointError, match="prompt of 1 tokens that starts with ids"):
        engine.backward_tree(tree, lambda logps: logps[0].sum() * torch.inf)
    assert [len(logp) for logp in engine.score_tree(tree)] == [2, 0]
    silent = longstraw.Tree.from_sequences([[1, 2, 3]], [[0, 0, 0]])
    assert [len(logp) for logp in engine.score_tree(silent)] == [0]
    assert all(p.grad is None for p in model.parameters())
