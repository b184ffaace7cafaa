"""Our options on OpenRLHF's real parser: what they resolve to, and what is refused.

The parser is the installed one (`openrlhf_parser`), so an option that OpenRLHF renames or drops fails here.
"""

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from transformers import GPT2Config, LlamaConfig

from gapo_megatron.loss.config import PolicyLossConfig
from gapo_megatron.loss.kl import KLConfig
from gapo_megatron.megatron.objective import Objective
from gapo_megatron.megatron.recompute import Recompute
from gapo_megatron.openrlhf import unsupported
from gapo_megatron.openrlhf.arguments import add_arguments, resolve
from gapo_megatron.openrlhf.engine_config import engine_config, reference_settings
from tests.unit.openrlhf_parser import hierarchize, openrlhf_parser

GAPO = "--policy_loss gapo --algo.advantage.estimator dr_grpo --rollout.n_samples_per_prompt 8"
MEGATRON = (
    "--actor.backend megatron --actor.num_gpus_per_node 6 --algo.kl.init_coef 0 --reward.remote_url reward.py "
    "--vllm.num_engines 1"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """Folder of a configuration with SmolLM2's shape."""
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def parse(model) -> Callable[[str], SimpleNamespace]:
    def parse(line: str) -> SimpleNamespace:
        parser = openrlhf_parser()
        add_arguments(parser)
        args = hierarchize(parser.parse_args(["--actor.model_name_or_path", model, *line.split()]))
        resolve(args, parser)
        return args

    return parse


@pytest.fixture
def refusal(parse, capsys) -> Callable[[str], str]:
    """The sentence with which a command line is refused."""

    def refusal(line: str) -> str:
        with pytest.raises(SystemExit) as exit:
            parse(line)
        assert exit.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "usage" not in err
        assert err.count("\n") == 1
        return err

    return refusal


def test_without_our_flags_openrlhfs_arguments_are_what_they_were(parse, model):
    line = "--actor.policy_loss_type gspo --actor.eps_clip 0.1"
    theirs = vars(hierarchize(openrlhf_parser().parse_args(["--actor.model_name_or_path", model, *line.split()])))
    ours = vars(parse(line))
    assert ours["policy_loss_config"] is None
    assert ours["megatron_layout"] is None
    ours["actor"].__dict__.pop("backend")
    assert {name: ours[name] for name in theirs} == theirs


def test_the_default_policy_loss_is_still_openrlhfs_ppo(parse):
    args = parse("")
    assert args.actor.policy_loss_type == "ppo"
    assert args.policy_loss_config is None


@pytest.mark.parametrize("flag", ["--policy_loss", "--actor.policy_loss_type"])
def test_two_flags_give_the_papers_gapo(parse, flag):
    args = parse(f"{GAPO.replace('--policy_loss', flag)} --eps_hi_max 5e-3")
    assert args.actor.policy_loss_type == "gapo"
    assert args.policy_loss_config == PolicyLossConfig("sequence", 3e-3, 5e-3, "linear", "token-mean", None, 0.5)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{GAPO} --importance_level token", PolicyLossConfig("token", 0.2, 0.28)),
        (f"{GAPO} --eps_lo 7e-5 --eps_hi_max 3e-4", PolicyLossConfig("sequence", 7e-5, 3e-4)),
        (f"{GAPO} --clip_schedule exponential", PolicyLossConfig(clip_schedule="exponential")),
        (f"{GAPO} --clip_schedule fixed", PolicyLossConfig(clip_schedule="fixed")),
        (f"{GAPO} --correct_threshold 0.9", PolicyLossConfig(correct_threshold=0.9)),
        (f"{GAPO} --actor.dual_clip 3", PolicyLossConfig(dual_clip=3.0)),
        (f"{GAPO} --actor.loss_agg_mode seq-mean-token-mean", PolicyLossConfig(aggregation="seq-mean-token-mean")),
        (
            "--policy_loss gspo --eps_lo 3e-3 --eps_hi_max 4e-3",
            PolicyLossConfig("sequence", 3e-3, 4e-3, "fixed", "seq-mean-token-mean"),
        ),
        ("--policy_loss ppo --eps_hi_max 0.28", PolicyLossConfig("token", 0.2, 0.28, "fixed")),
        (
            f"{MEGATRON} --algo.advantage.estimator group_norm --actor.eps_clip 0.1",
            PolicyLossConfig("token", 0.1, 0.1, "fixed"),
        ),
        (
            f"{MEGATRON} --algo.advantage.estimator reinforce --policy_loss gspo --actor.eps_clip_low_high 3e-3 4e-3",
            PolicyLossConfig("sequence", 3e-3, 4e-3, "fixed", "seq-mean-token-mean"),
        ),
    ],
)
def test_loss_flags_resolve_to_a_configuration(parse, line, expected):
    assert parse(line).policy_loss_config == expected


def test_a_megatron_block_is_what_openrlhf_takes_for_one_data_shard(parse):
    line = (
        "--megatron.tensor_model_parallel_size 3 --megatron.pipeline_model_parallel_size 2 --megatron.sequence_parallel"
    )
    args = parse(f"{GAPO} {MEGATRON} {line}")
    layout = args.megatron_layout
    assert (layout.world_size, layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size) == (6, 3, 2)
    assert layout.sequence_parallel
    assert (args.ds.tensor_parallel_size, args.ds.ring_attn_size) == (6, 1)
    assert (args.megatron.params_dtype, args.megatron.distributed_timeout_minutes) == ("bf16", 10)
    assert args.megatron.sync_bucket_mb == 256


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", Recompute()),
        ("--actor.gradient_checkpointing_enable", Recompute("full")),
        ("--actor.gradient_checkpointing_enable --megatron.recompute_granularity full", Recompute("full")),
        ("--megatron.recompute_granularity selective", Recompute("selective", ("core_attn",))),
        (
            "--megatron.recompute_granularity selective --megatron.recompute_modules core_attn mlp",
            Recompute("selective", ("core_attn", "mlp")),
        ),
    ],
)
def test_recompute_flags_resolve_to_a_configuration(parse, line, expected):
    assert engine_config(parse(f"{GAPO} {MEGATRON} {line}"), max_steps=1).recompute == expected


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (GAPO.replace("prompt 8", "prompt 1"), "set --rollout.n_samples_per_prompt to at least 2"),
        (GAPO.replace("dr_grpo", "group_norm"), "not group_norm; use --algo.advantage.estimator dr_grpo"),
        (f"{GAPO} --eps_hi_max 1e-3", "--eps_hi_max 0.001 is below --eps_lo 0.003"),
        (f"{GAPO} --eps_lo nan", "--eps_lo must be a finite number"),
        (f"{GAPO} --eps_lo=-1", "--eps_lo must be a finite number"),
        (f"{GAPO} --actor.dual_clip 0.5", "--actor.dual_clip must be"),
        (f"{GAPO} --actor.eps_clip 0.1", "use --eps_lo and --eps_hi_max"),
        (f"{GAPO} --actor.eps_clip_low_high 0.2 0.28", "use --eps_lo and --eps_hi_max"),
        (f"{GAPO} --algo.advantage.is_correction_level token", "is_correction_level is not supported by --policy_loss"),
        ("--eps_hi_max 5e-3", "--eps_hi_max is an option of a policy loss that is named; add --policy_loss gapo"),
        ("--policy_loss gspo --clip_schedule linear", "contradicts --policy_loss gspo"),
        ("--policy_loss ppo --importance_level sequence", "contradicts --policy_loss ppo"),
        ("--policy_loss ppo --eps_lo 0.1 --actor.eps_clip_low_high 0.2 0.3", "both give the clip widths"),
        ("--megatron.tensor_model_parallel_size 2", "add --actor.backend megatron"),
        (f"{GAPO} {MEGATRON} --megatron.tensor_model_parallel_size 4", "cannot be divided into blocks of 4"),
        (f"{GAPO} {MEGATRON} --megatron.tensor_model_parallel_size 2", "use one of 1, 3"),
        (f"{GAPO} {MEGATRON} --megatron.sequence_parallel", "--megatron.sequence_parallel splits"),
        (f"{GAPO} {MEGATRON} --megatron.recompute_modules mlp", "add --megatron.recompute_granularity selective"),
        (
            f"{GAPO} {MEGATRON} --actor.gradient_checkpointing_enable --megatron.recompute_granularity selective",
            "leave one out",
        ),
        ("--megatron.recompute_granularity full", "add --actor.backend megatron"),
        (f"{GAPO} {MEGATRON} --megatron.sync_bucket_mb 0", "--megatron.sync_bucket_mb must be above 0"),
        (
            f"{GAPO} {MEGATRON} --actor.num_gpus_per_node 31 --megatron.pipeline_model_parallel_size 31",
            "use at most 30",
        ),
        (
            f"{GAPO} {MEGATRON} --algo.kl.init_coef 0.01",
            "--ref.num_nodes x --ref.num_gpus_per_node = 8 ranks do not hold a reference model split like the actor; use a "
            "multiple of 1, at most 6, or --algo.kl.init_coef 0",
        ),
        (
            f"{GAPO} {MEGATRON} --algo.kl.init_coef 0.01 --megatron.tensor_model_parallel_size 3 "
            "--ref.num_gpus_per_node 4",
            "use a multiple of 3, at most 6",
        ),
        (
            f"{GAPO} {MEGATRON} --algo.kl.init_coef 0.01 --train.colocate_actor_ref --ref.num_gpus_per_node 3",
            "set --ref.num_nodes 1 and --ref.num_gpus_per_node 6",
        ),
        (
            f"{GAPO} {MEGATRON} --train.colocate_all",
            "is 6 and --vllm.num_engines x --vllm.tensor_parallel_size is 1; make",
        ),
        (f"{GAPO} {MEGATRON} --actor.model_name_or_path ./no/such/folder", "the configuration cannot be read"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence_with_flag_and_fix(refusal, line, sentence):
    assert sentence in refusal(line)


def test_a_model_of_another_family_is_refused(refusal, tmp_path):
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    assert "'gpt2' is not supported" in refusal(f"{GAPO} {MEGATRON} --actor.model_name_or_path {tmp_path}")


UNSUPPORTED_LINES = [
    "--algo.advantage.estimator gae --policy_loss ppo",
    "--reward.model_name_or_path rm",
    "--reward.remote_url=",
    "--vllm.num_engines 0",
    "--ds.tensor_parallel_size 2",
    "--ds.ring_attn_size 2",
    "--ds.zero_stage 3",
    "--ds.zpg 8",
    "--ref.offload",
    "--ds.adam_offload",
    "--ds.deepcompile",
    "--ds.use_universal_ckpt",
    "--ds.param_dtype fp16",
    "--ds.grad_accum_dtype bf16",
    "--ds.lora.rank 8",
    "--ds.load_in_4bit",
    "--ds.use_liger_kernel",
    "--ds.experts_implementation eager",
    "--data.max_images_per_prompt 1",
    "--actor.freeze_visual_encoder",
    "--train.enable_ema",
    "--actor.optim muon",
    "--actor.aux_loss_coef 0.01",
    "--rollout.max_tokens_per_gpu 512",
    "--train.async_enable",
    "--train.partial_rollout_enable",
    "--vllm.sync_with_ray",
]


@pytest.mark.parametrize(("line", "row"), list(zip(UNSUPPORTED_LINES, unsupported.MEGATRON, strict=True)))
def test_an_option_that_megatron_would_ignore_is_refused_by_its_row(refusal, line, row):
    message = refusal(f"{GAPO} {MEGATRON} {line}")
    assert f"{row.flag} is not supported by --actor.backend megatron" in message
    assert row.fix in message


@pytest.mark.parametrize("line", UNSUPPORTED_LINES)
def test_openrlhfs_own_actor_still_takes_every_option_that_megatron_does_not(parse, line):
    assert parse(line.replace(" --policy_loss ppo", "")).megatron_layout is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", Objective(PolicyLossConfig())),
        ("--actor.entropy_coef 0", Objective(PolicyLossConfig())),
        ("--actor.entropy_coef 1e-3", Objective(PolicyLossConfig(), entropy_coef=1e-3)),
        ("--algo.kl.use_loss", Objective(PolicyLossConfig())),  # without a reference model there is nothing to add
        (
            "--algo.kl.use_loss --algo.kl.init_coef 0.02 --algo.kl.estimator k3 --ref.num_gpus_per_node 6",
            Objective(PolicyLossConfig(), KLConfig("k3"), 0.02),
        ),
        (
            "--algo.kl.use_loss --algo.kl.init_coef 0.02 --algo.kl.unbiased_gradient --ref.num_gpus_per_node 6",
            Objective(PolicyLossConfig(), KLConfig("k1", True), 0.02),
        ),
        # In the reward: the actor's loss has no such term.
        ("--algo.kl.init_coef 0.02 --ref.num_gpus_per_node 6", Objective(PolicyLossConfig(), None, 0.02)),
    ],
)
def test_kl_and_entropy_flags_resolve_to_the_objective(parse, line, expected):
    assert engine_config(parse(f"{GAPO} {MEGATRON} {line}"), max_steps=1).objective == expected


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_a_reference_model_is_split_like_the_actor_over_its_own_ranks(parse, ranks):
    flags = "--megatron.pipeline_model_parallel_size 2 --algo.kl.init_coef 0.01 --ref.num_gpus_per_node"
    args = parse(f"{GAPO} {MEGATRON} {flags} {ranks}")
    layout = reference_settings(args).layout
    assert layout.world_size == ranks and layout.ranks_per_data_shard == args.megatron_layout.ranks_per_data_shard == 2


def test_there_is_no_reference_model_without_a_kl_coefficient_or_megatron(parse):
    assert parse(f"{GAPO} {MEGATRON}").reference_layout is None
    assert parse(f"{GAPO} --algo.kl.init_coef 0.01").reference_layout is None


def test_dynamic_batching_is_openrlhfs_with_deepspeed_and_ours_with_megatron(parse):
    args = parse(f"{GAPO} --train.dynamic_batch_enable")
    assert args.train.dynamic_batch_enable and not args.balance_ranks
    args = parse(f"{GAPO} {MEGATRON} --train.dynamic_batch_enable --rollout.max_tokens_per_gpu 16192")
    assert args.balance_ranks and not args.train.dynamic_batch_enable


@pytest.fixture(params=["jsonl", "json", "parquet", "folder"])
def dataset(request, tmp_path) -> str:
    rows = [{"question": "1+1", "answer": "2"}, {"question": "1+2", "answer": "3"}]
    if request.param == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
        return str(tmp_path / "data.parquet")
    if request.param == "json":
        (tmp_path / "data.json").write_text(json.dumps(rows, indent=1))
        return str(tmp_path / "data.json")
    (tmp_path / "data.jsonl").write_text("\n" + "\n".join(map(json.dumps, rows)))
    return str(tmp_path if request.param == "folder" else tmp_path / "data.jsonl")


@pytest.mark.parametrize("flag", ["--data.prompt_dataset", "--eval.dataset"])
def test_a_dataset_without_the_named_columns_is_refused_with_those_it_has(parse, refusal, dataset, flag):
    line = f"{GAPO} {flag} {dataset}"
    parse(f"{line} --data.input_key question --data.label_key answer")
    parse(f"{line} --data.input_key question")
    message = refusal(f"{line} --data.input_key prompt")
    assert f"--data.input_key prompt: {flag} {dataset} has no such column, but question, answer" in message
    assert "--data.label_key label" in refusal(f"{line} --data.input_key question --data.label_key label")


@pytest.mark.parametrize("text", ["", "[]", "not json", "3"])
def test_a_dataset_that_does_not_begin_with_an_object_is_refused(refusal, tmp_path, text):
    path = tmp_path / "data.json"
    path.write_text(text)
    assert "write one object per line" in refusal(f"{GAPO} --data.prompt_dataset {path}")


def test_a_dataset_that_is_not_local_is_left_to_openrlhf(parse):
    assert parse(f"{GAPO} --data.prompt_dataset someone/prompts,other/prompts@folder").policy_loss_config is not None


def test_help_shows_defaults_and_the_papers_values(capsys):
    parser = openrlhf_parser()
    add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for words in (
        "--policy_loss {gapo,gspo,ppo}",
        "Default 3e-3",
        "7e-5 for R1-distilled",
        "8, 8, 7, 7",
        "Default bf16",
    ):
        assert words in text
