"""What ships with the package: the tiny model's checkpoint folder and the generator of its documents."""

from pathlib import Path

TINY_MODEL = Path(__file__).parent / "tiny"
