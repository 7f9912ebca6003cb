"""How fast each op is, beside eager torch, ``torch.compile`` and what the machine's memory allows.

``python -m benchmarks --help`` says how to run them. A new op gets its rows in cases.py.
"""
