"""Models by their id on the Hugging Face hub: ``Qwen/Qwen3-0.6B``, with a revision ``Qwen/Qwen3-0.6B@main``, and a
GGUF file of one: ``Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf``.

``huggingface_hub`` downloads to its own cache, with its token and its offline mode. Only weights in safetensors,
tokenizer files, chat templates and JSON are fetched, or the named GGUF file, nothing that could be executed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from snapstream.config.values import as_path
from snapstream.models.gguf_header import SPLIT, SUFFIX, is_gguf

HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w][\w. /+-]*\.gguf))?")
CONFIG_FILES = ("config.json", "generation_config.json")
FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
OTHER_FILES = ("*/*", "consolidated*")  # the same weights in other layouts


def local_folder(
    model: str | Path, *, config_only: bool = False, progress: bool = True, wanted: str = "config.json"
) -> Path:
    """The folder or GGUF file of a model that is a path or a hub id; what exists here is a path. A folder of the hub
    must have the file ``wanted``.

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

    repo, revision, file = found["repo"], found["revision"], found["file"]
    patterns = [*CONFIG_FILES] if config_only else [*FILES]
    if file is not None:
        patterns = [SPLIT.sub(r"\g<stem>-*-of-\g<count>.gguf", file)]
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=None if file else list(OTHER_FILES),
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
    names = () if (Path(folder) / (file or wanted)).is_file() else _gguf_files(repo, revision)
    if file is not None:
        if not (Path(folder) / file).is_file():
            raise ValueError(f"{repo} has no {file}; its GGUF files: {', '.join(names) or 'none'}")
        return Path(folder) / file
    if names:
        raise ValueError(f"{repo} has GGUF files; give one of them, as {repo}:{names[0]} ({', '.join(names)})")
    if not (Path(folder) / wanted).is_file():
        raise ValueError(f"{repo} has no {wanted}; it is no model of transformers, or no adapter of PEFT")
    if not config_only and not any(Path(folder).glob("*.safetensors")):
        raise ValueError(f"{repo} has no weights in safetensors; other formats are not downloaded")
    return Path(folder)


def _gguf_files(repo: str, revision: str | None, most: int = 8) -> tuple[str, ...]:
    """GGUF files of a repository, of a model in several the first; none where the hub cannot be asked."""
    from huggingface_hub import list_repo_files
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        names = list_repo_files(repo, revision=revision)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError):
        return ()
    own = [name for name in sorted(names) if name.endswith(SUFFIX)]
    return tuple(name for name in own if (split := SPLIT.fullmatch(name)) is None or int(split["number"]) == 1)[:most]


def model_name(folder: str | Path) -> str:
    """The name under which a model is served: the folder's or file's, and the id of a folder in the hub's cache."""
    if is_gguf(Path(folder)):
        return Path(folder).stem
    path = Path(folder).resolve()
    cached = path.parents[1].name if path.parent.name == "snapshots" else ""
    return cached.removeprefix("models--").replace("--", "/", 1) if cached.startswith("models--") else path.name


def _no_progress() -> Any:
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

    return Silent
