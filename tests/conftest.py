"""What every test shares: no network, few threads, reproducible examples, the real model."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a core; torch is not imported yet
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
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


#: Workers of `-n auto`, at most: each holds torch and transformers.
MOST_WORKERS = 8


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return min(MOST_WORKERS, os.cpu_count() or 1)
