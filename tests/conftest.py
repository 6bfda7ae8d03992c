"""What every test shares: no network, few threads, reproducible examples, the real model."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import settings

settings.register_profile("hf_dflash", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("hf_dflash")

#: Programs that tests run in processes of their own; to import them here would do what they do.
collect_ignore = [
    "e2e/shards_on_cpus.py",
    "e2e/train_on_ranks.py",
    "parity/engine_code.py",
    "parity/speculators_code.py",
]
