from setuptools import find_packages, setup

setup(
    name="gapo-megatron",
    version="0.1.0",
    description="GAPO and a Megatron-Core actor for OpenRLHF",
    packages=find_packages(include=["gapo_megatron", "gapo_megatron.*"]),
    python_requires=">=3.11",
    entry_points={
        "console_scripts": ["gapo = gapo_megatron.cli:main"],
        "vllm.general_plugins": ["gapo_megatron = gapo_megatron.sync.plugin:register"],
    },
)
