"""What goes between machines that would stop or slow a run: ports, address translation, packets, clocks, rates."""

from collections.abc import Iterator, Mapping, Sequence

from spantrain.app.machines.checks import CheckLine
from spantrain.core.quantities import format_bandwidth, format_seconds
from spantrain.reach.pairs import Pair, PairReport, pairs_of

_USUAL_MTU, _LEAST_MTU = 1400, 1280
_CLOCK_S = 1.0
_SLOW_BYTES_PER_S = 10e6 / 8


def way_lines(names: Sequence[str], ways: Mapping[Pair, PairReport]) -> Iterator[CheckLine]:
    """Yield what was found between each two machines."""
    for one, other in pairs_of(names):
        there, back = ways[one, other], ways[other, one]
        for source, target, way in ((one, other, there), (other, one, back)):
            yield _port(source, target, way, other_way=back if way is there else there)
        best = there if there.is_open else back
        if best.is_open:
            yield from _translation(one, other, there, back)
            yield from _packets(one, other, there, back)
            offset_s = there.clock_offset_s if there.is_open else -back.clock_offset_s
            yield _clock(one, other, offset_s)
            yield _rate(one, other, best, swapped=best is back)


def _port(source: str, target: str, way: PairReport, *, other_way: PairReport) -> CheckLine:
    where = f"{source}->{target}"
    if way.is_open:
        return CheckLine(check="ports", where=where, verdict="ok", text=f"reaches {way.address}")
    tried = "; ".join(f"{address}: {why}" if address else why for address, why in way.errors.items())
    text = f"{source} cannot connect to {target} ({tried})" + ("; the other way it can" if other_way.is_open else "")
    silent = any("no answer" in why for why in way.errors.values())
    first = f"let {target}'s firewall pass TCP from {source} to all ports" if silent else f"give {target} an address"
    remedy = f"{first}, or join both by a tunnel (WireGuard, Tailscale); workers dial one another both ways"
    return CheckLine(check="ports", where=where, verdict="fail", text=text, remedy=remedy)


def _translation(one: str, other: str, there: PairReport, back: PairReport) -> Iterator[CheckLine]:
    for source, target, way in ((one, other, there), (other, one, back)):
        if way.is_open and way.seen_address != way.local_address:
            text = f"{target} sees {source} as {way.seen_address}, which is {way.local_address} at home"
            remedy = f"give {source}'s workers --data-address ADDRESS, by which {target} reaches it"
            yield CheckLine(check="nat", where=f"{source}->{target}", verdict="warn", text=text, remedy=remedy)


def _packets(one: str, other: str, there: PairReport, back: PairReport) -> Iterator[CheckLine]:
    """Yield what is said of the largest packets; silence where no datagram came back."""
    for source, target, way in ((one, other, there), (other, one, back)):
        where, most, own = f"{source}->{target}", way.path_mtu, way.interface_mtu
        if not way.is_open or own is None:
            continue
        if most is None:
            text = "no datagram came back, so the largest packet is not known"
            yield CheckLine(check="mtu", where=where, verdict="ok", text=text)
        elif most < own:
            text = f"packets of {most} bytes pass, and the interface sends {own}: larger ones are lost or divided"
            remedy = f"on {source}: ip link set dev INTERFACE mtu {most}; or clamp TCP's segments where the way narrows"
            yield CheckLine(check="mtu", where=where, verdict="fail", text=text, remedy=remedy)
        elif most < _USUAL_MTU:
            text = f"packets of {most} bytes at most, as tunnels have them"
            remedy = "raise the tunnel's MTU if the network below has room (1420 for WireGuard over 1500)"
            yield CheckLine(check="mtu", where=where, verdict="warn", text=text, remedy=remedy)
        else:
            yield CheckLine(check="mtu", where=where, verdict="ok", text=f"packets of {most} bytes")


def _clock(one: str, other: str, offset_s: float) -> CheckLine:
    where, size = f"{one}->{other}", format_seconds(abs(offset_s))
    if abs(offset_s) < _CLOCK_S:
        return CheckLine(check="clock", where=where, verdict="ok", text=f"clocks differ by {size}")
    ahead, behind = (other, one) if offset_s > 0 else (one, other)
    text = f"{ahead}'s clock is {size} ahead of {behind}'s: logs and traces cannot be laid beside each other"
    remedy = "set both by NTP: timedatectl set-ntp true, or chronyc makestep"
    return CheckLine(check="clock", where=where, verdict="warn", text=text, remedy=remedy)


def _rate(one: str, other: str, way: PairReport, *, swapped: bool) -> CheckLine:
    up, down = way.up_bytes_per_s, way.down_bytes_per_s
    there, back = (down, up) if swapped else (up, down)
    where, text = f"{one}->{other}", f"{format_seconds(way.round_trip_s)} there and back"
    if there is None or back is None or min(there, back) < 0:
        return CheckLine(check="rate", where=where, verdict="ok", text=text)
    text += f", {format_bandwidth(there)} there, {format_bandwidth(back)} back, over one connection"
    if min(there, back) >= _SLOW_BYTES_PER_S:
        return CheckLine(check="rate", where=where, verdict="ok", text=text)
    remedy = "a plan over it seldom pays: see `spantrain plan` and `spantrain outer`, or what else uses the line"
    return CheckLine(check="rate", where=where, verdict="warn", text=text, remedy=remedy)
