"""The engine behind other people's tools: one file per tool, which it imports and which is not a dependency of ours."""
