"""Write a model as a plain Hugging Face folder that transformers and vLLM load."""

import copy
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from topd.models.language_model import LanguageModel
from topd.run.files import replacing


def export(model: LanguageModel, folder: Path) -> None:
    """Weights (adapters merged), configuration, generation settings, tokenizer. Complete or absent."""
    module = model.module if model.adapter is None else _merged(model.adapter)
    with replacing(folder) as partial:
        module.save_pretrained(partial)
        model.tokenizer.save_pretrained(partial)


def _merged(adapter: Any) -> PreTrainedModel:
    """A copy of a peft.PeftModel with its adapters added into the weights; training may go on with the original."""
    return copy.deepcopy(adapter).merge_and_unload()
