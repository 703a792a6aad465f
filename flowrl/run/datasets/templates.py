"""The conversation template of a run, which is saved with its checkpoints and models."""

from pathlib import Path

from flowrl.config import DataConfig, RunConfig, find_tokenizer_role, models_of
from flowrl.config.data.data_settings import TEMPLATE_FILE
from flowrl.data.chat import ChatTokenizer
from flowrl.data.messages import DataError
from flowrl.data.template import ConversationTemplate, write_template


def conversation_template(config: RunConfig) -> ConversationTemplate | None:
    """Returns the run's conversation template with all values. Without a template file, the template is generated from
    the tokenizer. Returns None if the run has no data settings, or no tokenizer with a chat template.

    Raises DataError if the template file is invalid.
    """
    role = models_of(config).get(find_tokenizer_role(config) or "")
    data = next((value for _, value in config if isinstance(value, DataConfig)), None)
    if role is None or role.model is None or data is None:
        return None
    try:
        return ChatTokenizer(role.model.tokenizer_path, data.template).template
    except DataError:
        if data.template is not None or (role.model.tokenizer_path / TEMPLATE_FILE).is_file():
            raise
        return None


def save_template(template: ConversationTemplate | None, folder: Path) -> None:
    """Writes a conversation template to the folder of a model, also as the chat template of its tokenizer. None writes
    nothing.
    """
    if template is None:
        return
    write_template(folder / TEMPLATE_FILE, template)
    (folder / "chat_template.jinja").write_text(template.chat_template or "", encoding="utf-8")
