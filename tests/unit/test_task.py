"""The demo's material: prompts that OpenRLHF can read, and a model folder that vLLM can stop."""

import json

import pytest

from gapo_megatron.demo.task import HELD_OUT, write_task
from gapo_megatron.rewards.math import is_correct

pytest.importorskip("reasoning_gym")


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_and_held_out_prompts_are_disjoint_and_each_held_out_one_is_unique(tmp_path):
    train, held_out = map(read, write_task(tmp_path, seed=1, train_size=300))
    asked = [row["input"] for row in held_out]
    assert len(train) == 300 and len(asked) == len(set(asked)) == HELD_OUT
    assert not {row["input"] for row in train} & set(asked)


def test_seed_reorders_the_training_prompts_and_leaves_the_held_out_ones(tmp_path):
    one, two, again = (
        [read(p) for p in write_task(tmp_path / str(i), seed=s, train_size=64)] for i, s in enumerate((1, 2, 1))
    )
    assert one == again
    assert one[0] != two[0] and one[1] == two[1]


def test_label_is_the_value_of_the_expression(tmp_path):
    train, _ = map(read, write_task(tmp_path, seed=1, train_size=120))
    for row in train:
        left, operator, right = row["input"].removeprefix("Calculate ").split(".")[0].split()
        assert int(row["label"]) == (int(left) + int(right) if operator == "+" else int(left) - int(right))
        assert is_correct(f"{left} {operator} {right} = {row['label']}", row["label"])


def test_model_folder_ends_its_turn_with_the_token_that_the_chat_template_writes(tmp_path):
    pytest.importorskip("gguf")
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from gapo_megatron.demo.model import prepare_model

    folder = prepare_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turn = tokenizer.apply_chat_template([{"role": "assistant", "content": "7"}], tokenize=False)
    last = tokenizer(turn.rstrip(), add_special_tokens=False).input_ids[-1]
    assert last == tokenizer.eos_token_id == GenerationConfig.from_pretrained(folder).eos_token_id
    assert AutoConfig.from_pretrained(folder).eos_token_id == last
    assert (
        tokenizer.decode(tokenizer("Is 4 - 1 = 3 ? Yes .", add_special_tokens=False).input_ids)
        == "Is 4 - 1 = 3 ? Yes ."
    )
    assert prepare_model(folder) == folder  # there already
