"""Bandwidth: loads of many pieces, judged by when they arrive."""

import statistics
import time
from collections.abc import Callable, Sequence

from spantrain.profiler.network_probes import MAX_PIECE_BYTES, MAX_PIECES

OVERHEAD_BYTES = 280
"""What a small message takes on the wire besides its tensors: header, framing, encryption, TCP and IP."""
WARM_UP_BYTES = 256 * 1024
_TRANSFER_S, _TRANSFER_ROUND_TRIPS, _MAX_TRANSFER_S = 0.15, 1, 1.5
_MAX_GROWTH = 6
"""Growth of a transfer over the one before: TCP finds its speed in steps."""
_LONG_ENOUGH_PART = 0.6
_AS_EXPECTED = 0.05
_MIN_REPEATS, _REPEAT_PART = 2, 2.0
"""A transfer that was not steady is repeated so often, and more within so many times the length that was wanted."""
_PIECES = 48
_MIN_PIECE_BYTES = 8 * 1024
_RAMP_PART = 0.35
"""Part of a transfer that is left out at its beginning: TCP may still be finding its speed."""
_STEADY_RATIO, _RAMP_ROUND_TRIPS = 0.1, 2
_AGREEMENT, _MAX_RAMP_PART = 0.03, 0.15
"""Two transfers whose wholes came equally fast are believed, if the beginning may have spoilt so little of each."""
_GRAIN_BYTES = 64 * 1024
"""Kernels join packets up to this size, so that pieces arrive in grains, not evenly."""
_MIN_GRAINS, _MIN_POINTS = 12, 4
_GRAIN_GAP_PART = 0.25
"""Pieces nearer than this part of their mean distance came in one grain."""
_MIN_JUDGED_BYTES = _MIN_GRAINS * _GRAIN_BYTES


def arrival_rate(arrivals_s: Sequence[float], piece_bytes: int) -> float:
    """Return bytes per second of the later part of a load.

    The first third is left out, for TCP may still be finding its speed, and the last pieces, for then connections run
    empty one after the other. Latency has no part in it, so nothing is to be taken off. Of a large load it is the
    median over windows of a third of that part: a machine that stalls and then reads what had piled up spoils some
    windows, not the median. Of a small one, where windows would hold few packets, it is the slope of a line.

    >>> round(arrival_rate([0.01 * n for n in range(50)], 1000))
    100000
    """
    count = len(arrivals_s)
    begin, end = int(count * _RAMP_PART), max(count - 3, int(count * _RAMP_PART) + 2)
    lag = max(1, (end - begin) // 3)
    if lag * piece_bytes < _MIN_JUDGED_BYTES:
        slope_s = _slope(arrivals_s, begin, end)
    else:
        slope_s = statistics.median(arrivals_s[at + lag] - arrivals_s[at] for at in range(begin, end - lag)) / lag
    return piece_bytes / slope_s if slope_s > 0 else 1e12  # faster than the clock tells


def _slope(arrivals_s: Sequence[float], begin: int, end: int) -> float:
    """Return the seconds per piece of the line through the last piece of each grain.

    Pieces that came in one packet have one time; how many had come by then is exact for the last of them only.
    """
    least_gap_s = _GRAIN_GAP_PART * (arrivals_s[-1] - arrivals_s[0]) / len(arrivals_s)
    last = [at for at in range(begin, end) if arrivals_s[at + 1] - arrivals_s[at] > least_gap_s]
    if len(last) < _MIN_POINTS:
        last = list(range(begin, end))
    middle, middle_s = statistics.fmean(last), statistics.fmean(arrivals_s[at] for at in last)
    return sum((at - middle) * (arrivals_s[at] - middle_s) for at in last) / sum((at - middle) ** 2 for at in last)


def _pieces(total_bytes: float) -> tuple[int, int]:
    """Divide a load into pieces small enough to see its course."""
    piece_bytes = int(min(max(total_bytes / _PIECES, _MIN_PIECE_BYTES), MAX_PIECE_BYTES))
    return min(max(8, round(total_bytes / piece_bytes)), MAX_PIECES), piece_bytes


def measure_bandwidth(
    load: Callable[[int, int], list[float]],
    max_payload_bytes: int,
    rounds: int,
    latency_s: float,
    *,
    expected_bytes_per_s: float | None = None,
) -> tuple[float, int]:
    """Send more and more until a transfer takes long enough to be judged; return bytes per second and payload.

    The smaller transfers before are the warm-up. Long enough is long against a round trip: TCP finds its speed in
    round trips, not in seconds. How much is enough follows from the later part of the one before, for its beginning was
    slow on a new connection; or from what is expected, where links like this one were measured already. One that took
    long may have waited for a lost packet, or for TCP to find its speed: so it counts only if it was as fast as
    expected, or if the next one, of as many bytes, takes long too. A transfer that was not steady is repeated while
    there is time.
    """
    wanted_s = min(_TRANSFER_S + _TRANSFER_ROUND_TRIPS * 2 * latency_s, _MAX_TRANSFER_S)
    give_up_s = time.monotonic() + _REPEAT_PART * wanted_s
    total_bytes = float(min(WARM_UP_BYTES, max_payload_bytes))
    while True:
        pieces, piece_bytes = _pieces(total_bytes)
        transfers = [load(pieces, piece_bytes)]
        if total_bytes >= max_payload_bytes:
            break
        if _long_enough(transfers[-1], total_bytes, wanted_s):
            if _as_expected(transfers[-1], piece_bytes, 2 * latency_s, expected_bytes_per_s):
                break
            transfers.append(load(pieces, piece_bytes))
            if _long_enough(transfers[-1], total_bytes, wanted_s):
                break
        if expected_bytes_per_s is not None and total_bytes < wanted_s * expected_bytes_per_s:
            enough_bytes = wanted_s * expected_bytes_per_s
        else:
            enough_bytes = min(_MAX_GROWTH * total_bytes, wanted_s * arrival_rate(transfers[-1], piece_bytes))
        total_bytes = min(max_payload_bytes, max(1.25 * total_bytes, _MIN_JUDGED_BYTES, enough_bytes))
    while len(transfers) < rounds or (
        not _steady(transfers[-1], piece_bytes, 2 * latency_s)
        and not _agree(transfers, 2 * latency_s)
        and not _as_expected(transfers[-1], piece_bytes, 2 * latency_s, expected_bytes_per_s)
        and (len(transfers) <= _MIN_REPEATS or time.monotonic() < give_up_s)
    ):
        transfers.append(load(pieces, piece_bytes))
    return _judge(transfers, piece_bytes, 2 * latency_s), pieces * piece_bytes


def _long_enough(arrivals_s: Sequence[float], total_bytes: float, wanted_s: float) -> bool:
    return arrivals_s[-1] - arrivals_s[0] >= _LONG_ENOUGH_PART * wanted_s and total_bytes >= _MIN_JUDGED_BYTES


def _as_expected(
    arrivals_s: Sequence[float], piece_bytes: int, round_trip_s: float, expected_bytes_per_s: float | None
) -> bool:
    if expected_bytes_per_s is None:
        return False
    return abs(_judge([arrivals_s], piece_bytes, round_trip_s) / expected_bytes_per_s - 1) <= _AS_EXPECTED


def _judge(transfers: Sequence[Sequence[float]], piece_bytes: int, round_trip_s: float) -> float:
    """Return the median rate of the transfers that were steady; if none was, of all; or of the last two if they agree.

    A lost packet holds up all that came after it, which then comes at once: then only the time of the whole says much.
    """
    steady = [arrivals_s for arrivals_s in transfers if _steady(arrivals_s, piece_bytes, round_trip_s)]
    if not any(arrivals_s in steady for arrivals_s in transfers[-2:]) and _agree(transfers, round_trip_s):
        return statistics.fmean(_whole_rate(arrivals_s, piece_bytes + OVERHEAD_BYTES) for arrivals_s in transfers[-2:])
    judged = steady or transfers
    rates = []
    for arrivals_s in judged:
        over_whole = _over_whole(arrivals_s, piece_bytes)
        in_a_burst = over_whole > _most_over_whole(arrivals_s, round_trip_s)
        rates.append(arrival_rate(arrivals_s, piece_bytes + OVERHEAD_BYTES) / (over_whole if in_a_burst else 1.0))
    return statistics.median(rates)


def _agree(transfers: Sequence[Sequence[float]], round_trip_s: float) -> bool:
    """Whether the last two transfers took equally long, and long against a connection's beginning.

    Then the link set their pace, in whatever order and grains the pieces came: where its queue had overflowed, many
    wait for the one that is sent again.
    """
    if len(transfers) < _MIN_REPEATS:
        return False
    took_s = [max(arrivals_s[-1] - arrivals_s[0], 1e-6) for arrivals_s in transfers[-2:]]
    ramp_part = _RAMP_ROUND_TRIPS * round_trip_s / min(took_s)
    return max(took_s) <= (1 + _AGREEMENT) * min(took_s) and ramp_part <= _MAX_RAMP_PART


def _whole_rate(arrivals_s: Sequence[float], piece_bytes: int) -> float:
    return (len(arrivals_s) - 1) * piece_bytes / max(arrivals_s[-1] - arrivals_s[0], 1e-6)


def _most_over_whole(arrivals_s: Sequence[float], round_trip_s: float) -> float:
    """Return how much faster than the whole its later part may be: a new connection begins slowly, for round trips."""
    return 1 + _STEADY_RATIO + _RAMP_ROUND_TRIPS * round_trip_s / max(arrivals_s[-1] - arrivals_s[0], 1e-6)


def _over_whole(arrivals_s: Sequence[float], piece_bytes: int) -> float:
    """Return the judged part's rate over that of the whole."""
    return arrival_rate(arrivals_s, piece_bytes) / _whole_rate(arrivals_s, piece_bytes)


def _steady(arrivals_s: Sequence[float], piece_bytes: int, round_trip_s: float) -> bool:
    """Whether a load came as fast early in what is judged as late, and hardly faster than the whole.

    If not, TCP was still finding its speed, or a machine was too busy to read and then read what had piled up.
    """
    begin, end = int(len(arrivals_s) * _RAMP_PART), len(arrivals_s) - 3
    middle = (begin + end) // 2
    early_s, late_s = arrivals_s[middle] - arrivals_s[begin], arrivals_s[end] - arrivals_s[middle]
    if middle == begin or early_s <= 0 or late_s <= 0:
        return True
    ratio = (late_s / (end - middle)) / (early_s / (middle - begin))
    tolerance = _STEADY_RATIO + _GRAIN_BYTES / (piece_bytes * (middle - begin))
    burst = _over_whole(arrivals_s, piece_bytes) > _most_over_whole(arrivals_s, round_trip_s)
    return abs(ratio - 1) < tolerance and not burst
