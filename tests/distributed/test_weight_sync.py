"""`WeightSync` into running vLLM engines of OpenRLHF's own class: exact weights, and loud, bounded failures.

The sender is the test's own process, with a transformers model as the source. `tests/e2e/test_weight_transfer.py` has
Megatron's own export.
"""

import shutil
import time

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta

from gapo_megatron.demo.one_engine import start_engine
from gapo_megatron.sync import gloo_engine
from gapo_megatron.sync.weight_sync import WeightSync
from tests.tiny_models import save_tiny_policy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("private_ray_session")]

# Longer than vLLM's CPU block of 128 tokens, so that the prefix cache has something to keep.
PROMPT = [5 + i % 200 for i in range(150)]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, logprobs=0, ignore_eos=True)
SMALL_BUCKET_MB = 1 / 16
REFUSED = "did not arrive whole; nothing is generated from them"


def generate(engine) -> tuple[list[int], list[float], int]:
    """Greedy tokens, their log-probs, and how many prompt tokens the prefix cache held."""
    output = ray.get(engine.generate.remote(PROMPT, GREEDY), timeout=120)
    completion = output.outputs[0]
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return list(completion.token_ids), [entry[token].logprob for token, entry in pairs], output.num_cached_tokens


def other_weights(folder: str, target) -> AutoModelForCausalLM:
    """The model of `folder` with other random weights, also saved as the folder `target`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    shutil.copytree(folder, target)
    model.save_pretrained(target)
    return model


class Watched(ModuleSource):
    """Counts what was taken; calls `at_half` half-way."""

    def __init__(self, module, at_half=lambda: None) -> None:
        super().__init__(module)
        self.at_half = at_half

    def __iter__(self):
        self.taken = 0
        for pair in super().__iter__():
            if self.taken == len(self.metadata()) // 2:
                self.at_half()
            self.taken += 1
            yield pair


class Contradicting(ModuleSource):
    """Says float32 of a last tensor that is bfloat16."""

    def metadata(self) -> list[ParamMeta]:
        *rest, last = super().metadata()
        return [*rest, ParamMeta(last.name, torch.float32, last.shape)]


@pytest.mark.parametrize("name, has_lm_head", [("llama-wide-heads", False), ("qwen3", True)])
def test_engines_generate_exactly_as_one_that_loaded_the_weights_from_a_folder(tmp_path, name, has_lm_head):
    old_folder, new_folder = save_tiny_policy(tmp_path, name), tmp_path / "new"
    new = other_weights(old_folder, new_folder)
    source = ModuleSource(new)
    assert ("lm_head.weight" in [m.name for m in source.metadata()]) == has_lm_head
    receiver, loaded = (start_engine(f, prefix_caching=True) for f in (old_folder, str(new_folder)))
    old, expected = generate(receiver), generate(loaded)
    assert old[0] != expected[0]
    assert generate(receiver)[2] == 128  # the old weights' keys and values are in the prefix cache

    WeightSync(source, [receiver, loaded], rank=0, bucket_mb=SMALL_BUCKET_MB, timeout_seconds=60).send(7)

    # Exact in bf16: the same kernels, on the same bytes, in the same shapes. No cached key of the old weights is used.
    assert generate(receiver) == generate(loaded) == expected == (*expected[:2], 0)
    assert ray.get([e.weight_version.remote() for e in (receiver, loaded)]) == [7, 7]
    for engine in (receiver, loaded):
        ray.kill(engine)


@pytest.fixture(scope="module")
def served(private_ray_session, tmp_path_factory):
    """A running engine, a model with other weights, and what an engine with those generates."""
    folder = tmp_path_factory.mktemp("served")
    old_folder = save_tiny_policy(folder)
    model = other_weights(old_folder, folder / "new")
    engine = start_engine(old_folder, prefix_caching=True)
    WeightSync(ModuleSource(model), [engine], rank=0, timeout_seconds=60).send(1)
    return engine, model, generate(engine)[:2]


def test_a_corrupted_bucket_is_found_and_named_and_nothing_is_served_until_a_whole_update(served, monkeypatch):
    engine, model, expected = served
    sync = WeightSync(ModuleSource(model), [engine], rank=0, bucket_mb=SMALL_BUCKET_MB, timeout_seconds=120)
    cut = list(gloo_engine.buckets(ModuleSource(model).metadata(), int(SMALL_BUCKET_MB * 2**20)))
    assert len(cut) > 3
    broadcast, calls = gloo_engine.broadcast, []

    def flip_a_bit_of_the_second_bucket(group, tensor):
        calls.append(tensor)
        if len(calls) == 3:  # data and checksum alternate
            tensor = tensor.clone()
            tensor[0] ^= 1
        broadcast(group, tensor)

    monkeypatch.setattr(gloo_engine, "broadcast", flip_a_bit_of_the_second_bucket)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"checksum of the bucket that starts with {cut[1][0].name} is wrong"):
        sync.send(2)
    assert time.monotonic() - started < 30  # told at once, not by the time-out
    assert len(calls) == 2 * len(cut)
    with pytest.raises(ray.exceptions.RayTaskError, match=REFUSED):
        generate(engine)
    assert ray.get(engine.weight_version.remote()) == 1

    monkeypatch.undo()
    sync.send(3)  # over the same group
    assert generate(engine)[:2] == expected
    assert ray.get(engine.weight_version.remote()) == 3


def test_a_source_that_contradicts_its_metadata_is_named_and_a_new_sync_repairs_the_engine(served):
    engine, model, expected = served
    last = ModuleSource(model).metadata()[-1].name
    sync = WeightSync(Contradicting(model), [engine], rank=0, timeout_seconds=10)
    with pytest.raises(RuntimeError, match=f"the weight source yielded {last}, but its metadata says"):
        sync.send(4)
    with pytest.raises(ray.exceptions.RayTaskError, match=REFUSED):
        generate(engine)
    WeightSync(ModuleSource(model), [engine], rank=0, timeout_seconds=60).send(5)
    assert generate(engine)[:2] == expected


def test_requests_in_flight_finish_on_the_old_weights_before_an_update(served):
    engine, model, expected = served
    sync = WeightSync(ModuleSource(model), [engine], rank=0, timeout_seconds=60)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    long = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    in_flight = engine.generate.remote(PROMPT, long)
    while ray.get(engine.get_num_unfinished_requests.remote()) == 0:
        time.sleep(0.005)
    sync.send(6)
    assert list(ray.get(in_flight).outputs[0].token_ids[:16]) == expected[0]
    assert len(ray.get(in_flight).outputs[0].token_ids) == 100
    assert generate(engine)[0] != expected[0]


def test_an_engine_that_dies_half_way_is_an_error_that_says_so_and_frees_the_other_trainer_ranks(served):
    engine, model, _ = served
    source = Watched(model, at_half=lambda: ray.kill(engine))
    sync = WeightSync(source, [engine], rank=0, bucket_mb=SMALL_BUCKET_MB, timeout_seconds=120)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"vLLM failed in update_weights \(engine 0\).*died"):
        sync.send(8)
    assert time.monotonic() - started < 60
    # The other ranks of a trainer follow this stream by collectives: it must not stop in the middle.
    assert source.taken == len(source.metadata())
    with pytest.raises(RuntimeError, match=r"vLLM failed in start_weight_update \(engine 0\)"):
        sync.send(9)
    assert source.taken == len(source.metadata())


def test_an_unknown_backend_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="'mpi' is not known; use one of gloo, nccl, ipc"):
        WeightSync(ModuleSource(torch.nn.Linear(1, 1)), [], rank=0, backend="mpi")
