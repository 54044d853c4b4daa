"""What Ray Serve is asked for, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.serve import Application

from snapstream.integrations.ray.application import build, scaling_of
from snapstream.integrations.ray.config import DecodeSettings
from snapstream.integrations.ray.replicas import ScaleByLoad
from snapstream.server.run import CannotLoad


@pytest.mark.parametrize("given", [{}, {"decode": {"max_replicas": 4}}, {"front": {"replicas": 2}}, {"prefill": {}}])
def test_an_application_is_made_of_a_config(tmp_path: Path, given: dict[str, Any]) -> None:
    assert isinstance(build(given), Application)
    file = tmp_path / "deploy.toml"
    file.write_text("port = 8100")
    assert isinstance(build({"config": str(file)}), Application)


def test_what_cannot_be_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(CannotLoad):
        build({"model": str(tmp_path)})
    with pytest.raises(ValueError, match="kv heads cannot be split over 3 ranks"):
        build({"prefill": {"tensor_parallel": 3}})
    with pytest.raises(ValueError, match="tool parser"):
        build({"front": {"tool_parser": "smoke signals"}})
    with pytest.raises(ValueError, match="holds no API key"):
        (tmp_path / "keys").write_text("")
        build({"api_key_file": str(tmp_path / "keys")})


def test_ray_can_make_the_policy_of_what_it_is_given() -> None:
    assert scaling_of(DecodeSettings(replicas=3), reads=True) is None
    scaling = scaling_of(DecodeSettings(replicas=1, max_replicas=5, rows_in_use=0.5), reads=True)
    assert scaling is not None and (scaling.min_replicas, scaling.max_replicas) == (1, 5)
    policy = scaling.policy.get_policy()(**scaling.policy.policy_kwargs)
    assert type(policy).__name__ == ScaleByLoad.__name__
