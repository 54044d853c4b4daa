"""Which kv heads of a model need slots: measured once per checkpoint, written as a profile (``config/kv.py``).

``ablation.py`` measures what a model loses with a head; ``texts.py`` says on what; ``calibrate.py`` puts both together.
"""
