"""bf16 on one GPU, where kernels differ from the CPU's: see `bf16_parity`."""

import pytest

from tests.distributed.bf16_parity import distances
from tests.distributed.parity_matrix import is_mixture
from tests.distributed.ranks import RankPool
from tests.tiny_models import CONFIGS


@pytest.fixture(scope="module")
def ranks():
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family",
    [name for name in CONFIGS if not is_mixture(name)],  # rounding sends a token to another expert
)
def test_bf16_is_as_far_from_fp32_as_transformers_is(ranks, tmp_path, family):
    ours, theirs = distances(ranks, tmp_path, family, "one rank")
    print(family, ours, theirs)
    assert ours.log_probs <= 1.5 * theirs.log_probs
    assert ours.gradients <= 1.5 * theirs.gradients
