"""Write a model as a plain Hugging Face folder that transformers and vLLM load."""

import copy
from pathlib import Path

from topd.models.language_model import LanguageModel
from topd.run.files import replacing


def export(model: LanguageModel, folder: Path) -> None:
    """Weights (adapters merged), configuration, generation settings, tokenizer. Complete or absent."""
    module = model.module if model.adapter is None else copy.deepcopy(model.adapter).merge_and_unload()
    with replacing(folder) as partial:
        module.save_pretrained(partial)
        model.tokenizer.save_pretrained(partial)
