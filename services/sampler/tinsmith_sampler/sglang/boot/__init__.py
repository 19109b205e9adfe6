"""What SGLang lacks where there is no GPU, put in place before it is imported.

This package runs in SGLang's environment and not in ours: it imports torch, sglang and itself, and
``serve.py`` loads it under a name of its own. On a machine with a GPU it changes nothing.
"""
