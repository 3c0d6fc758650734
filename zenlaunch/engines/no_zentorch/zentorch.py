"""Stands before the real zentorch on PYTHONPATH when ZenTorch is switched off.

vLLM takes its zen platform whenever `import zentorch` works on an AMD CPU with AVX-512 and has no
switch of its own; an ImportError is how it learns that there is none.
"""

raise ImportError("zentorch is switched off by zenlaunch (zentorch: off)")
