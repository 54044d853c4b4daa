"""Kernel looping on a CPU: a decode step as one native call, in C++ compiled at the first start. Begin with
``step.cpp``."""
