"""torch's own random numbers, which belong to all threads."""

import subprocess
import sys
from threading import Thread

import torch

from spantrain.models.build import build_units
from spantrain.models.randomness.draws import global_seed, torch_state
from testing.models.small import small_spec
from testing.patience import PATIENCE_S

SIDE_BY_SIDE = """
import gc, sys, threading, time
from spantrain.models.randomness.draws import global_seed, torch_state
sys.setswitchinterval(1e-6)
gc.set_threshold(1)
gc.callbacks.append(lambda *_: time.sleep(0))  # other threads go on while Python tidies up
def work():
    for number in range(500):
        with global_seed(number):
            torch_state()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
"""


def test_threads_that_seed_side_by_side_all_come_to_their_end():
    """torch's own functions hang here at once."""
    ran = subprocess.run(
        [sys.executable, "-c", SIDE_BY_SIDE], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert ran.stdout == "done\n"


def test_each_thread_draws_what_its_seed_says():
    wanted = {}
    for seed in range(8):
        with global_seed(seed):
            wanted[seed] = torch.rand(64)
    found: dict[int, torch.Tensor] = {}

    def draw(seed: int) -> None:
        for _ in range(50):
            with global_seed(seed):
                found[seed] = torch.rand(64)
                assert torch.equal(found[seed], wanted[seed])

    before = torch_state()
    threads = [Thread(target=draw, args=(seed,)) for seed in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], wanted[seed]) for seed in wanted)
    assert torch.equal(torch_state(), before)
    assert torch.equal(torch_state(put=before), before)


def test_numbers_of_other_devices_stay_as_they_are(monkeypatch):
    """`torch.manual_seed` seeds those of all devices; nothing puts them back."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    with global_seed(3):
        torch.rand(2)
    build_units(small_spec("gpt2", layers=2), seed=0)
    assert seeded == []
