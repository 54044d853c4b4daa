"""Models by their id on the Hugging Face hub: ``Qwen/Qwen3-0.6B``, with a revision ``Qwen/Qwen3-0.6B@main``.

``huggingface_hub`` downloads to its own cache, with its token and its offline mode. Only weights in safetensors,
tokenizer files, chat templates and JSON are fetched, nothing that could be executed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from snapstream.config.values import as_path

HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
CONFIG_FILES = ("config.json", "generation_config.json")
FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
OTHER_FILES = ("*/*", "consolidated*")  # the same weights in other layouts


def local_folder(model: str | Path, *, config_only: bool = False, progress: bool = True) -> Path:
    """The folder of a model that is a path or a hub id; what exists here is a path.

    Downloads what the cache lacks, with ``config_only`` no weights. ValueError, in one line, for a model that the hub
    does not have or does not give, and where it cannot be reached. Other text is returned as a path.
    """
    path = as_path("the model's folder", model)
    found = None if path.exists() else HUB_ID.fullmatch(str(model))
    if found is None:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, revision = found["repo"], found["revision"]
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(CONFIG_FILES if config_only else FILES),
            ignore_patterns=list(OTHER_FILES),
            tqdm_class=None if progress else _no_progress(),
        )
    except GatedRepoError:
        raise ValueError(
            f"{repo} is gated: accept its terms on its page of the Hugging Face hub, then run `hf auth login` or set "
            "HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ValueError(f"{repo} has no revision {revision!r} on the Hugging Face hub") from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"{repo} is no folder here and no public model of the Hugging Face hub; for a private one run `hf auth "
            "login` or set HF_TOKEN"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{repo} is no folder here, and the Hugging Face hub did not answer ({type(error).__name__}: "
            f"{reason:.200}); give a checkpoint folder"
        ) from None
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{repo} has no config.json; it is no model of transformers")
    if not config_only and not any(Path(folder).glob("*.safetensors")):
        raise ValueError(f"{repo} has no weights in safetensors; other formats are not downloaded")
    return Path(folder)


def model_name(folder: str | Path) -> str:
    """The name under which a model is served: the folder's, and the id of one in the hub's cache."""
    path = Path(folder).resolve()
    cached = path.parents[1].name if path.parent.name == "snapshots" else ""
    return cached.removeprefix("models--").replace("--", "/", 1) if cached.startswith("models--") else path.name


def _no_progress() -> Any:
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

    return Silent
