"""A program that measures what a GPU of an unknown kind computes, by torch; its argument is the GPU's number.

It prints one object: the operations a second in float16 and float32 and the bytes a second of memory, or an error.
"""

import json
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

WIDTH = 4096
LONG_ENOUGH_S = 0.4


def best_s(torch: "Any", work: "Any") -> float:
    """Return the least seconds of a piece of work among repeats."""
    work()
    torch.cuda.synchronize()
    took = []  # type: list[float]
    end = time.monotonic() + LONG_ENOUGH_S
    while len(took) < 3 or time.monotonic() < end:
        begin = time.monotonic()
        work()
        torch.cuda.synchronize()
        took.append(time.monotonic() - begin)
    return min(took)


def rates(number: str) -> "dict[str, Any]":
    """Return the rates of one GPU."""
    try:
        import torch

        torch.cuda.set_device(int(number))
        found = {}
        for name in ("float16", "float32"):
            one = torch.randn(WIDTH, WIDTH, device="cuda", dtype=getattr(torch, name))
            two, out = torch.randn_like(one), torch.empty_like(one)
            found[name] = 2 * WIDTH**3 / best_s(torch, lambda: torch.mm(one, two, out=out))  # noqa: B023
        whole = torch.empty(2**26, device="cuda")
        other = torch.empty_like(whole)
        found["memory"] = 2 * 4 * 2**26 / best_s(torch, lambda: other.copy_(whole))
        return dict(found, error="")
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is the answer
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}


if __name__ == "__main__":
    print(json.dumps(rates(sys.argv[1])))  # noqa: T201 - to whoever sent it
