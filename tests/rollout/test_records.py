"""Rollout records: what travels between processes, and what a checkpoint keeps of them."""

from __future__ import annotations

import pickle

import tiny
import torch

from longstraw.data.prompts import prepare_prompts
from longstraw.data.stream import PromptStream
from longstraw.data.text import TextCodec
from longstraw.rollout.records import Batch, Group, Rollout
from longstraw.rollout.store import batch_from_stored, batch_to_stored


def rollout(num_tokens: int, **known: object) -> Rollout:
    ids = torch.arange(num_tokens)
    return Rollout(ids, ids > 0, "stop", policy_version=4, reward=0.5, advantage=-1.0, old_logps=-ids.float(), **known)


def test_a_checkpoint_keeps_what_the_next_iteration_needs() -> None:
    stream = PromptStream(prepare_prompts(tiny.rows(), TextCodec(None), "dataset"), seed=0, shuffle=True)
    group = Group(3, stream.at(3), [rollout(2), rollout(0, completion="forgotten")], owner=1)
    stored, tensors = batch_to_stored(Batch([group], next_position=4, num_replaced=2))
    assert stored is not None
    for entry in (stored, {**stored, "groups": [{k: v for k, v in stored["groups"][0].items() if "version" not in k}]}):
        batch = batch_from_stored(entry, tensors, stream)
        assert batch is not None and (batch.next_position, batch.num_replaced) == (4, 2)
        assert batch.groups[0].prompt is group.prompt and batch.groups[0].owner == 1
        for ours, theirs in zip(batch.rollouts, group.rollouts, strict=True):
            assert (ours.finish_reason, ours.reward, ours.advantage) == ("stop", 0.5, -1.0)
            assert ours.policy_version == (4 if entry is stored else 0)  # which earlier checkpoints do not name
            assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.mask, theirs.mask)
            assert ours.old_logps is not None and torch.equal(ours.old_logps, theirs.old_logps)
            assert ours.sampled_logps is None and ours.reference_logps is None and ours.completion is None
    assert batch_from_stored(*batch_to_stored(None), stream) is None


def test_a_group_travels_without_prompt_and_state() -> None:
    group = pickle.loads(pickle.dumps(Group(0, tiny.rows()[0], [rollout(3)], state=lambda: None)))  # type: ignore[arg-type]
    assert group.prompt is None and group.state is None and group.rollouts[0].policy_version == 4
