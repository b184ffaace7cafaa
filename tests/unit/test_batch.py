import pytest
import torch

from gapo_megatron.megatron.batch import Rollout, pack, partition


def rollout(length: int, response: int, value: float = 0.0) -> Rollout:
    mask = torch.zeros(length - 1, dtype=torch.bool)
    mask[length - 1 - response :] = True
    filled = torch.full((length - 1,), value)
    return Rollout(torch.arange(length), mask, filled, filled + 1, eps_hi=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_partition_holds_every_sequence_once_within_the_budget(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 200, (40,), generator=generator).tolist()
    parts = partition(lengths, 256)
    assert sorted(i for part in parts for i in part) == list(range(40))
    assert all(sum(lengths[i] for i in part) <= 256 for part in parts)


def test_partition_depends_on_lengths_alone():
    lengths = [5, 9, 9, 3, 7]
    assert partition(lengths, 12) == partition(list(lengths), 12)


def test_a_sequence_longer_than_the_budget_has_a_part_of_its_own():
    parts = partition([10, 300, 10], 64)
    assert [1] in parts
    assert sorted(i for part in parts for i in part) == [0, 1, 2]


def test_partition_gives_empty_parts_when_there_are_fewer_sequences_than_parts():
    assert sorted(map(len, partition([4, 4], 64, num_parts=3))) == [0, 1, 1]


def test_labels_are_the_tokens_that_follow_the_response_positions():
    batch = pack([rollout(5, 2), rollout(4, 3)], torch.device("cpu"))
    assert [(s.keys.start, s.keys.stop) for s in batch.sequences.spans] == [(0, 5), (5, 9)]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.response_positions.tolist() == [2, 3, 5, 6, 7]
    assert batch.labels.tolist() == batch.input_ids[0, batch.response_positions + 1].tolist()
    assert batch.sequence_ids.tolist() == [0, 0, 1, 1, 1]
    assert batch.response_lengths.tolist() == [2, 3]


def test_padding_is_a_sequence_without_response_tokens():
    batch = pack([rollout(5, 2)], torch.device("cpu"), tensor_parallel_size=4)
    assert [(s.keys.start, s.keys.stop) for s in batch.sequences.spans] == [(0, 5), (5, 8)]
    assert batch.input_ids.shape == (1, 8)
    assert batch.response_positions.tolist() == [2, 3]


def test_per_token_values_follow_their_tokens():
    batch = pack([rollout(5, 2, 0.5), rollout(4, 3, 0.25)], torch.device("cpu"))
    assert batch.old_log_probs.tolist() == [0.5] * 2 + [0.25] * 3
    assert batch.advantages.tolist() == [1.5] * 2 + [1.25] * 3


def test_a_pack_of_nothing_still_has_tokens_for_the_collectives():
    batch = pack([], torch.device("cpu"), tensor_parallel_size=2)
    assert batch.input_ids.shape == (1, 2)
    assert batch.labels.numel() == 0 and batch.response_lengths.tolist() == [0]
