"""Parallel layouts: what divides what."""

from types import SimpleNamespace

import pytest

from gapo_megatron.megatron.layout import ParallelLayout


def model(**changes) -> SimpleNamespace:
    """The shape of SmolLM2-135M: 9 heads, 3 key-value heads."""
    shape = {
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
    }
    return SimpleNamespace(**{**shape, **changes})


def test_ranks_are_blocks_of_model_parallel_ranks_times_data_parallel_blocks():
    layout = ParallelLayout(48, tensor_model_parallel_size=2, pipeline_model_parallel_size=3, context_parallel_size=2)
    assert layout.ranks_per_data_shard == 12
    assert layout.data_parallel_size == 4


@pytest.mark.parametrize(
    ("num_layers", "stages", "expected"), [(30, 4, (8, 8, 7, 7)), (4, 4, (1, 1, 1, 1)), (5, 2, (3, 2)), (7, 1, (7,))]
)
def test_layers_are_spread_over_stages_with_the_remainder_first(num_layers, stages, expected):
    layout = ParallelLayout(stages, pipeline_model_parallel_size=stages)
    assert layout.layers_per_chunk(num_layers) == expected
    assert sum(expected) == num_layers


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"world_size": 6, "tensor_model_parallel_size": 4}, "6 ranks cannot be divided into blocks of 4"),
        ({"world_size": 0}, "0 ranks"),
        (
            {"world_size": 2, "tensor_model_parallel_size": 0},
            "--megatron.tensor_model_parallel_size must be at least 1",
        ),
        ({"world_size": 2, "pipeline_model_parallel_size": -1}, "--megatron.pipeline_model_parallel_size must be"),
        ({"world_size": 4, "expert_model_parallel_size": 3}, "--megatron.expert_model_parallel_size 3"),
        ({"world_size": 2, "sequence_parallel": True}, "set --megatron.tensor_model_parallel_size to at least 2"),
    ],
)
def test_a_layout_that_cannot_exist_is_refused_with_its_flag(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        ParallelLayout(**sizes)


@pytest.mark.parametrize("sizes", [(3, 1), (1, 30), (3, 4)])
def test_a_layout_that_fits_the_model_is_accepted(sizes):
    tensor, pipeline = sizes
    ParallelLayout(tensor * pipeline, tensor, pipeline).check_model(model())


@pytest.mark.parametrize(
    ("sizes", "changes", "sentence"),
    [
        ((2, 1), {}, "2 does not divide the 9 attention heads of this model; use one of 1, 3$"),
        ((9, 1), {}, "9 does not divide the 1536 MLP channels"),
        (
            (4, 1),
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            r"4 neither divides nor is a multiple of the 6 key-value heads of this model; use one of 1, 2, 3, 6, 12$",
        ),
        ((3, 1), {"intermediate_size": 1000}, r"3 does not divide the 1000 MLP channels .*; use one of 1$"),
        ((1, 31), {}, "--megatron.pipeline_model_parallel_size 31 is more than the 30 layers .*; use at most 30"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_with_what_fits(sizes, changes, sentence):
    tensor, pipeline = sizes
    with pytest.raises(ValueError, match=sentence):
        ParallelLayout(tensor * pipeline, tensor, pipeline).check_model(model(**changes))


def test_fewer_key_value_heads_than_tensor_parallel_ranks_are_shared():
    ParallelLayout(4, 4).check_model(model(num_attention_heads=12, num_key_value_heads=2))


def test_expert_parallelism_needs_experts():
    layout = ParallelLayout(2, expert_model_parallel_size=2)
    layout.check_model(model(num_local_experts=8))
    with pytest.raises(ValueError, match="--megatron.expert_model_parallel_size 2 needs a mixture of experts"):
        layout.check_model(model())
    with pytest.raises(ValueError, match="2 does not divide the 5 experts of this model; use one of 1, 5"):
        layout.check_model(model(num_local_experts=5))


def test_experts_under_tensor_parallelism_need_sequence_parallelism():
    with pytest.raises(ValueError, match="add --megatron.sequence_parallel"):
        ParallelLayout(3, 3).check_model(model(num_local_experts=8))


def test_virtual_stages_need_pipeline_stages_and_layers():
    with pytest.raises(ValueError, match="set --megatron.pipeline_model_parallel_size to at least 2"):
        ParallelLayout(1, virtual_pipeline_model_parallel_size=2)
    layout = ParallelLayout(4, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=8)
    with pytest.raises(ValueError, match="virtual_pipeline_model_parallel_size 8 is more than the 30 layers"):
        layout.check_model(model())


def test_a_block_of_processes_holds_one_data_shard_and_megatron_ranks_vary_slowest_over_the_pipeline():
    layout = ParallelLayout(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    # process: block 0 is stages (0, 1) and (2, 3); block 1 is (4, 5) and (6, 7)
    assert [layout.megatron_rank(r) for r in range(8)] == [0, 1, 4, 5, 2, 3, 6, 7]
