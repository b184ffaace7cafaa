import json
from types import SimpleNamespace

from gapo_megatron.openrlhf import metrics


def test_a_step_becomes_one_json_line_and_one_line_on_the_terminal(tmp_path, capsys):
    args = SimpleNamespace(
        ckpt=SimpleNamespace(output_dir=str(tmp_path / "out")),
        actor=SimpleNamespace(backend="megatron", policy_loss_type="gapo"),
    )
    logs = {
        "rollout/reward_mean": 0.25,
        "ppo_clip_ratio": 0.125,
        "timing/generation": 3.21,
        "bad": float("nan"),
        "generated_samples": ["text", 1.0],
        "flag": True,
    }
    metrics.log(args, 1, logs, "train")
    metrics.log(args, 1, {"eval_default_pass1": 0.5}, "eval")
    first, second = map(json.loads, (tmp_path / "out" / metrics.FILE).read_text().splitlines())
    assert (first["kind"], first["step"], first["backend"]) == ("train", 1, "megatron")
    assert first["rollout/reward_mean"] == 0.25 and first["bad"] is None
    assert "generated_samples" not in first and "flag" not in first
    assert second["kind"] == "eval" and second["eval_default_pass1"] == 0.5
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "[train 1] reward 0.250  clip 0.125  generate 3.2"
    assert printed[1] == "[eval 1] eval_default_pass1 0.500"
