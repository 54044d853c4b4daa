"""A decode step as one native call: C++ in this folder, compiled at the first start and kept.

``library.py`` has its functions, ``build.py`` compiles them, ``prebuilt.py`` finds them in a wheel, ``panels.py`` lays
out matrices. Begin with ``step.h``.
"""
