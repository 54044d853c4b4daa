"""Integrations with other tools, each of which is an optional dependency: one module per tool."""
