"""The model's file on the node of a replica: nodes may keep it in different folders."""

from __future__ import annotations

from pathlib import Path

from cppbatch.models.pull import DEFAULT, choose_model, pull_default


def model_on_this_node(path: str) -> str:
    """The file itself, or one with its name in this node's models folder, or the default model, fetched if needed.

    Raises `ModelError` if there is none.
    """
    file = Path(path)
    if not file.is_file() and file.name.startswith(Path(DEFAULT.file_name).stem):  # or a requantised copy of it
        return str(pull_default())
    return path if file.is_file() else str(choose_model(file.name))
