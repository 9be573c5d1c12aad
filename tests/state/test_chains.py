"""Chains of pieces by layer kind: order, boundaries kept, forks, truncation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longstraw.pages import PageStore
from longstraw.state.chain import Chain
from longstraw.state.kv import KVChain
from longstraw.state.layer import PieceComplete
from longstraw.state.recurrent import RecurrentChain
from longstraw.state.window import WindowChain

HEADS, DIM, WINDOW = 2, 4, 5


@pytest.fixture
def store() -> Any:
    store = PageStore("cpu")
    yield store
    store.close()


def new_chain(store: PageStore, grad_from: int = 0) -> Chain:
    return Chain([KVChain(store, grad_from), WindowChain(store, WINDOW, grad_from), RecurrentChain(store, grad_from)])


def write(cache: Any, num_tokens: int, value: float, rows: int = 1) -> None:
    """What a model would do to each layer of the cache: `value` everywhere, recurrent states summed up."""
    key = torch.full((rows, HEADS, num_tokens, DIM), value)
    for layer in (0, 1):
        cache.update(key, -key, layer, kwargs={})
    cache.update_conv_state(torch.full((rows, 3, num_tokens), value), 2, conv_kernel_size=4)
    before = cache.get_recurrent_state(2, state_idx=0)
    cache.update_recurrent_state(torch.full((rows, 1, 2, 2), value) + (0 if before is None else before), 2)


def grow(chain: Chain, sizes: list[int]) -> None:
    for size in sizes:
        cache = chain.enter(chain.num_pieces)
        write(cache, size, float(chain.num_pieces + 1), chain.rows)
        chain.commit(cache, size)


def kinds(store: PageStore) -> dict[str, int]:
    found: dict[str, int] = {}
    for page in store.table:
        found[page.kind] = found.get(page.kind, 0) + 1
    return found


def test_positions_and_pages(store: PageStore) -> None:
    chain = new_chain(store)
    assert chain.num_pieces == 0 and chain.stop == 0
    grow(chain, [3, 4, 2])
    assert chain.starts == [0, 3, 7, 9] and chain.stop == 9 and chain.num_pieces == 3
    paged = [page for page in store.table if page.kind == "kv"]
    assert [(page.start, page.num_tokens, page.rows) for page in paged] == [(0, 3, 1), (3, 4, 1), (7, 2, 1)]


def test_a_window_keeps_one_token_less_than_it_sees(store: PageStore) -> None:
    chain = new_chain(store)
    grow(chain, [3, 4, 2])
    keys, values = chain.layers[1].start_of(3)
    assert keys.shape == (1, HEADS, WINDOW - 1, DIM)
    assert keys[0, 0, :, 0].tolist() == [2, 2, 3, 3] and torch.equal(values, -keys)
    assert chain.layers[1].start_of(1)[0].shape[2] == 3, "no more than there is"


def test_a_convolution_tail_is_filled_with_zeros_on_the_left(store: PageStore) -> None:
    chain = new_chain(store)
    grow(chain, [1, 1, 1])
    conv, recurrent = chain.layers[2].start_of(3)
    assert conv[0, 0].tolist() == [0, 1, 2, 3]
    assert recurrent[0, 0, 0, 0] == 6
    grow(chain, [7])
    assert chain.layers[2].start_of(4)[0][0, 0].tolist() == [4, 4, 4, 4]


def test_states_that_no_gradient_enters_are_dropped(store: PageStore) -> None:
    """K/V pages all stay; of the replaced states those before the first live piece go, except what a branch needs."""
    every, late, none = (new_chain(PageStore("cpu"), grad_from) for grad_from in (0, 4, 6))
    counts = []
    for chain in (every, late, none):
        grow(chain, [2] * 6)
        found = kinds(chain.layers[0].store)
        assert found["kv"] == 6 and found["window"] == found["recurrent"]
        counts.append(found["recurrent"])
        assert chain.layers[2].start_of(6)[1][0, 0, 0, 0] == 21
    assert counts[0] == 6 and counts[0] > counts[1] >= counts[2] and counts[2] <= 2
    assert late.layers[2].start_of(4) is not None
    with pytest.raises(RuntimeError, match="state before piece 2 was not kept"):
        none.layers[2].start_of(2)


def test_a_fork_reads_its_parent_and_never_changes_it(store: PageStore) -> None:
    trunk = new_chain(store)
    grow(trunk, [3, 4])
    before = [(page.number, [t.clone() for t in store.fetch(page)]) for page in store.table]
    forks = [trunk.fork(2), trunk.fork(2)]
    for fork in forks:
        assert fork.starts == [7] and fork.rows == 2
        _, recurrent = fork.layers[2].start_of(0)
        assert recurrent[0, 0, 0, 0] == 3
        grow(fork, [2, 2])
        assert fork.stop == 11
    assert forks[0].layers[2].start_of(2)[1][1, 0, 0, 0] == 3 + 1 + 2
    for fork in forks:
        fork.truncate(0)
    after = [(page.number, store.fetch(page)) for page in store.table]
    assert [number for number, _ in before] == [number for number, _ in after]
    assert all(torch.equal(a, b) for (_, x), (_, y) in zip(before, after) for a, b in zip(x, y))


def test_truncation_frees_from_the_end(store: PageStore) -> None:
    chain = new_chain(store)
    grow(chain, [2, 2, 2])
    chain.truncate(1)
    assert chain.num_pieces == 1 and chain.stop == 2
    assert kinds(store) == {"kv": 1, "window": 1, "recurrent": 1}
    grow(chain, [5])
    assert chain.starts == [0, 2, 7]
    chain.truncate(0)
    assert store.nbytes() == {}


def test_pieces_are_committed_in_order(store: PageStore) -> None:
    chain = new_chain(store)
    for layer, place in zip(chain.layers, range(3)):
        cache = chain.enter(0)
        write(cache, 2, 1.0)
        with pytest.raises(RuntimeError, match="piece 1 is committed after 0 pieces"):
            layer.commit(1, cache.layers[place], 0)


def test_the_last_layer_stops_a_piece_whose_output_nothing_reads(store: PageStore) -> None:
    for last, update in (
        (KVChain(store), lambda cache: cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0, kwargs={})),
        (WindowChain(store, 3), lambda c: c.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0, kwargs={})),
    ):
        chain = Chain([last])
        update(chain.enter(0))
        cache = chain.enter(0, output_read=False)
        with pytest.raises(PieceComplete):
            update(cache)
        chain.commit(cache, 2)
        assert chain.num_pieces == 1, "its state is written all the same"


def test_cotangents_of_a_carried_state_are_summed_in_float32(store: PageStore) -> None:
    chain = RecurrentChain(store)
    for scale in (1.0, 2.0**-9):  # in bfloat16 the second would be rounded away
        chain.add_cotangent(1, [torch.full((2,), scale, dtype=torch.bfloat16)])
    live = type("Live", (), {"end": (torch.zeros(2, requires_grad=True),)})()
    [(_, total)] = chain.outputs(0, live)
    assert total.dtype == torch.float32 and total.tolist() == [1 + 2.0**-9] * 2
    assert chain.outputs(0, live) == [], "consumed"


def test_decoding_takes_one_token_at_a_time(store: PageStore) -> None:
    chain = Chain([KVChain(store)])
    cache = chain.decoder(2)
    with pytest.raises(RuntimeError, match="one token at a time, got 2"):
        cache.update(torch.ones(2, 1, 2, 4), torch.ones(2, 1, 2, 4), 0, kwargs={})


def test_a_decoding_tail_grows_and_drops_rows(store: PageStore) -> None:
    from longstraw.state.chain import select_rows

    cache = Chain([KVChain(store)]).decoder(3)
    for step in range(150):
        token = torch.arange(cache_rows(step), dtype=torch.float32)[:, None, None, None] + 1000 * step
        token = token.expand(-1, 1, 1, 4)
        keys, values = cache.update(token, -token, 0, kwargs={})
        assert keys.shape == (cache_rows(step), 1, step + 1, 4) and torch.equal(values, -keys)
        assert not torch.isnan(keys).any()
        if step == 70:
            select_rows(cache, torch.tensor([0, 2]))
    assert keys[1, 0, 5, 0] == 5002 and keys[1, 0, 100, 0] == 100_001


def cache_rows(step: int) -> int:
    return 3 if step <= 70 else 2
