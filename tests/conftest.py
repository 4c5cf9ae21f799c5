"""Fixtures shared by all tests. Nothing here imports topd at module level: the type checks have to come first."""

import pytest
import torch
from hypothesis import settings

from tests import type_checks

type_checks.install()
torch.set_num_threads(1)

settings.register_profile("topd", deadline=None, max_examples=40, derandomize=True, database=None)
settings.load_profile("topd")


def pytest_configure(config):
    # peft asks a transformers model for a property that is deprecated there; nothing of ours does
    config.addinivalue_line("filterwarnings", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="session")
def tokenizer():
    """The character tokenizer of fakes.py; treat it as read-only."""
    from tests.fakes import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model():
    """(kind, seed=0) -> LanguageModel with random weights, made once per session; treat it as read-only."""
    from tests.fakes import make_model

    made = {}

    def get(kind="qwen3", seed=0):
        if (kind, seed) not in made:
            made[kind, seed] = make_model(kind, seed=seed)
        return made[kind, seed]

    return get


@pytest.fixture
def model_folder(tmp_path):
    """(kind="qwen3", seed=0, **config) -> a fresh Hugging Face folder with a tiny model and its tokenizer."""
    from tests.fakes import save_folder

    def save(kind="qwen3", seed=0, name="model", **config):
        return save_folder(tmp_path / name, kind, seed=seed, **config)

    return save
