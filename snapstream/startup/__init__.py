"""From settings and a checkpoint folder to what an engine needs: ``resolve.py`` decides, ``build.py`` loads."""
