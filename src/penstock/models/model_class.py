"""What class of transformers makes a model of a configuration: one that reads, or one that sees."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from penstock.models.load_errors import said_of

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model's folder that say how pictures are prepared."""


def auto_class(config: Any) -> Any:
    """The class that loads a configuration's model."""
    sees = getattr(config, "vision_config", None) is not None
    if sees and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def generates_text(config: Any) -> bool:
    """Whether there is a model for a configuration that goes on with a text."""
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return known or auto_class(config) is AutoModelForImageTextToText


def load_processor(folder: Path, config: Any, *, own_code: bool) -> tuple[Any, tuple[str, ...]]:
    """What prepares pictures for a model that sees, and what a user should know of it.

    Args:
        own_code: whether Python code in the folder may run.

    Returns:
        None, and the reason, where there is none or it cannot be made: the model reads text then.
    """
    if auto_class(config) is not AutoModelForImageTextToText:
        return None, ()
    if not any((folder / name).is_file() for name in PROCESSORS):
        return None, (f"takes no pictures: its folder has no {PROCESSORS[0]}",)
    try:
        made: Any = AutoProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=own_code
        )
    except ImportError as error:
        why = f"{said_of(error)}; pip install 'penstock[vision]'"
    except Exception as error:  # whatever a processor's code raises
        why = said_of(error)
    else:
        return (made, ()) if hasattr(made, "tokenizer") else (None, ())
    return None, (f"takes no pictures: {why}",)
