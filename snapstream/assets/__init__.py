"""Files that ship with the package: the tiny models' checkpoint folders and the generator of their documents."""

from pathlib import Path

TINY_MODEL = Path(__file__).parent / "tiny"
TINY_DRAFT_MODEL = Path(__file__).parent / "tiny_draft"
TINY_LATENT_MODEL = Path(__file__).parent / "tiny_latent"
