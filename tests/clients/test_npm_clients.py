"""Clients from npm in their default modes, three turns with a tool: the AI SDK, Codex CLI, Claude Code.

``make test-clients`` installs the AI SDK where npm is. The two agents take 0.6 GB: they are run where they are on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.scripted import QUESTIONS, check_three_turns, scripted_server, three_turns
from tests.waiting import HANG_S

PACKAGES = Path(__file__).parents[2] / ".npm-clients"
AI_SDK = r"""
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, provider, mode, questions] = JSON.parse(process.env.ASK);
const options = { baseURL: `${url}/v1`, apiKey: 'none', name: 'local' };
const providers = { openai: createOpenAI, compatible: createOpenAICompatible, anthropic: createAnthropic };
const model = providers[provider](options)('tiny');
const inputSchema = z.object({ city: z.string() });
const tools = { weather: tool({ inputSchema, execute: async ({ city }) => `sun in ${city}` }) };
const messages = [], texts = [];
for (const content of questions) {
  messages.push({ role: 'user', content });
  const wish = { model, messages, tools, stopWhen: stepCountIs(5), maxRetries: 0 };
  if (mode === 'whole') {
    const result = await generateText(wish);
    texts.push(result.text);
    messages.push(...result.response.messages);
  } else {
    const result = streamText({ ...wish, onError: ({ error }) => { throw error; } });
    let text = '';
    for await (const piece of result.textStream) text += piece;
    texts.push(text);
    messages.push(...(await result.response).messages);
  }
}
console.log(JSON.stringify(texts));
"""


def run(command: list[str], where: Path, **environment: str) -> str:
    """What a program writes to stdout."""
    done = subprocess.run(
        command, cwd=where, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def need(program: str) -> str:
    found = shutil.which(program)
    return found or pytest.skip(f"{program} is not installed")


@pytest.mark.skipif(not (PACKAGES / "node_modules" / "ai").is_dir(), reason="the AI SDK is not installed")
@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize("provider", ["openai", "compatible", "anthropic"])
def test_the_ai_sdk(provider: str, mode: str) -> None:
    with scripted_server(three_turns("weather", '{"city": "Rome"}')) as running:
        ask: Any = [running.url, provider, mode, QUESTIONS]
        # Packages are looked for from where the program runs.
        texts = run([need("node"), "--input-type=module", "-e", AI_SDK], PACKAGES, ASK=json.dumps(ask))
        assert json.loads(texts.splitlines()[-1]) == ["Done 1.", "Done 2.", "Done 3."]
        check_three_turns(running, "weather")
        assert "tool: sun in Rome" in running.engine.prompts[1]


def test_codex(tmp_path: Path) -> None:
    with scripted_server(three_turns("exec_command", '{"cmd": "echo it works"}')) as running:
        program = [need("codex"), "exec"]
        (tmp_path / "config.toml").write_text(
            'model = "tiny"\nmodel_provider = "local"\nsandbox_mode = "danger-full-access"\n'
            '[model_providers.local]\nname = "local"\nwire_api = "responses"\n'
            f'base_url = "{running.url}/v1"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
        )
        for number, question in enumerate(QUESTIONS, 1):
            resumed = ["resume", "--last"] if number > 1 else []
            said = run([*program, *resumed, "--skip-git-repo-check", question], tmp_path, CODEX_HOME=str(tmp_path))
            assert f"Done {number}." in said
        check_three_turns(running, "exec_command")
        assert "it works" in running.engine.prompts[1]


def test_claude_code(tmp_path: Path) -> None:
    arguments = '{"command": "echo it works", "description": "Tries it"}'
    with scripted_server(three_turns("Bash", arguments)) as running:
        program = [need("claude"), "-p"]
        environment = {
            "HOME": str(tmp_path), "CLAUDE_CONFIG_DIR": str(tmp_path), "ANTHROPIC_BASE_URL": running.url,
            "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "tiny", "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }  # fmt: skip
        for number, question in enumerate(QUESTIONS, 1):
            resumed = ["--continue"] if number > 1 else []
            said = run([*program, question, *resumed, "--allowedTools", "Bash"], tmp_path, **environment)
            assert f"Done {number}." in said
        check_three_turns(running, "Bash")
        assert "it works" in running.engine.prompts[1]
