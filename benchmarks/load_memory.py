"""Peak memory of filling a model from a Hugging Face folder, against the model's own size.

    python benchmarks/load_memory.py [--layers 28] [--output load_memory.json]

Writes random bf16 weights in the configuration of Qwen2.5-Math-1.5B, loads them as one rank of one, and reports the peak
resident memory above that of the process before it: the model itself, and whatever the conversion needs beside it. Pages of
the files that the kernel keeps mapped are counted apart, because it takes them back when memory is short.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

QWEN_MATH_1_5B = dict(
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    vocab_size=151936,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    use_sliding_window=False,
    tie_word_embeddings=True,
)


def write_model(folder: Path, layers: int) -> int:
    """A folder of random bf16 weights, written one layer at a time; returns the number of parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config

    config = Qwen2Config(**{**QWEN_MATH_1_5B, "num_hidden_layers": layers})
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    hidden, inner, kv = config.hidden_size, config.intermediate_size, 2 * 128
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    parts = [{"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}]
    parts += [{f"model.layers.{i}.{name}": shape for name, shape in layer.items()} for i in range(layers)]
    weight_map, count = {}, 0
    for i, part in enumerate(parts):
        tensors = {name: torch.randn(shape, dtype=torch.bfloat16).mul_(0.02) for name, shape in part.items()}
        file = f"model-{i:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        count += sum(t.numel() for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return count


def resident() -> dict[str, int]:
    """Resident bytes of this process: its own (anonymous) and those of mapped files; and the peak of their sum."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM")}


def load(folder: str) -> dict[str, int]:
    """Load `folder` as the only rank; returns bytes: before, the peak, and what stays."""
    import torch
    from transformers import AutoConfig

    from gapo_megatron.megatron import runtime
    from gapo_megatron.megatron.layout import ParallelLayout
    from gapo_megatron.megatron.model import PolicyModel
    from gapo_megatron.megatron.transformer_config import transformer_config
    from gapo_megatron.megatron.weights.hf_folder import HFReader
    from gapo_megatron.megatron.weights.load import load_hf_weights

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    layout = ParallelLayout(1)
    runtime.initialize(layout)
    config = AutoConfig.from_pretrained(folder)
    before = resident()
    model = PolicyModel(transformer_config(config, layout, torch.bfloat16), config, temperature=1.0)
    load_hf_weights([model], config, HFReader(folder))
    after = resident()
    runtime.finalize()
    return {
        "model": sum(p.nbytes for p in model.parameters()),
        "anonymous": after["RssAnon"] - before["RssAnon"],
        "mapped_files": after["RssFile"] - before["RssFile"],
        "peak": after["VmHWM"] - before["RssAnon"] - before["RssFile"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=QWEN_MATH_1_5B["num_hidden_layers"], help="fewer for a trial")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load)))
        return
    with tempfile.TemporaryDirectory() as folder:
        count = write_model(Path(folder), args.layers)
        done = subprocess.run(
            [sys.executable, __file__, "--load", folder], capture_output=True, text=True, check=True, timeout=1800
        )
    figures = json.loads(done.stdout.splitlines()[-1])
    figures |= {"parameters": count, "peak_over_model": figures["peak"] / figures["model"]}
    figures |= {"anonymous_over_model": figures["anonymous"] / figures["model"]}
    for name, value in figures.items():
        print(
            f"{name:22s}{value / 2**30:8.3f} GiB" if isinstance(value, int) and value > 2**31 else f"{name:22s}{value}"
        )
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
