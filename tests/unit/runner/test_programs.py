"""Compiled programs are kept in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from snapstream.kernels.compile_cache import VARIABLE
from snapstream.kernels.cpu.native import find_compiler
from snapstream.runner.programs import INDUCTOR_FOLDER, Compiler, inductor_folder


class Double:
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2 + x


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_what_was_compiled_is_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In our own folder, also after torch has written its default into the variable, as it does when it looks there."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv(INDUCTOR_FOLDER, default_cache_dir())
    x = torch.randn(64)

    def start() -> tuple[int, int]:
        """Programs that were compiled, and found."""
        torch.compiler.reset()
        counters.clear()
        with torch.inference_mode():
            torch.testing.assert_close(Compiler().make(Double().run, x)(x), torch.relu(x) * 2 + x)
        return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]

    assert start() == (1, 0)
    assert list(tmp_path.glob("compiled-*/inductor/*"))
    assert start() == (0, 1)
    assert os.environ[INDUCTOR_FOLDER] == default_cache_dir()
    monkeypatch.setenv(INDUCTOR_FOLDER, str(tmp_path / "chosen"))
    with inductor_folder("ours"):
        assert os.environ[INDUCTOR_FOLDER] == str(tmp_path / "chosen")
