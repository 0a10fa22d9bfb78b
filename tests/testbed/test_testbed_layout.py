"""Addresses, packets and state files: what needs no namespace."""

import dataclasses
import os
from pathlib import Path

import pytest

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.core.cluster import Cluster, Host, Link
from spantrain.errors import TestbedError
from spantrain.testbed.build import NetworkLayout, gateway, lay_out
from spantrain.testbed.control import ProcessMark, State, boot_id, mark_of, read_states, runtime_dir
from spantrain.testbed.shaper import parse_packet
from spantrain.testbed.testbed import down_all


def ip_packet(
    *, protocol: int = 6, payload_bytes: int = 100, port: int = 5000, segment_bytes: int = 0, fragment: int = 0
) -> bytes:
    offload = bytes([0, 1 if segment_bytes else 0, 0, 0]) + segment_bytes.to_bytes(2, "little") + bytes(4)
    address = bytes([10, 1, 0, 2, 10, 7, 0, 3])
    header = bytes([0x45, 0, 0, 0, 0, 0]) + fragment.to_bytes(2, "big") + bytes([64, protocol, 0, 0]) + address
    transport = port.to_bytes(2, "big") + (80).to_bytes(2, "big") + bytes(8) + bytes([8 << 4]) + bytes(19)
    return offload + header + transport + bytes(payload_bytes)


def test_a_packet_is_read() -> None:
    packet = parse_packet(ip_packet())
    assert packet is not None
    assert (packet.site, packet.wire_bytes, packet.packets) == (7, 20 + 32 + 100, 1)


def test_joined_packets_pay_for_each_header() -> None:
    packet = parse_packet(ip_packet(payload_bytes=20_000, segment_bytes=8948))
    assert packet is not None
    assert (packet.wire_bytes, packet.packets) == (20_000 + 3 * 52, 3)


def test_flows_are_told_apart_by_ports_but_not_for_fragments_or_pings() -> None:
    def flow(**fields: int) -> bytes:
        packet = parse_packet(ip_packet(**fields))
        assert packet is not None
        return packet.flow

    assert flow(port=1) != flow(port=2)
    assert flow(port=1, protocol=17) != flow(port=1)
    assert flow(port=1, protocol=1) == flow(port=2, protocol=1)
    assert flow(port=1, protocol=17, fragment=0x2000) == flow(port=2, protocol=17, fragment=0x0040)


@pytest.mark.parametrize("data", [b"", bytes(12), bytes(10) + b"\x60" + bytes(60)])
def test_what_is_not_ipv4_is_refused(data: bytes) -> None:
    assert parse_packet(data) is None


def test_addresses_are_unlike_and_survive_json(cluster: Cluster) -> None:
    hosts = tuple(Host(name=f"h{number}", site="edge", devices=()) for number in range(600))
    layout = lay_out(dataclasses.replace(cluster, hosts=hosts), testbed_id="t", parent_pid=None)
    addresses = [layout.address_of[host] for host in layout.sites[1].hosts]
    assert len(set(addresses)) == 600
    assert addresses[0] == "10.2.0.2"
    assert gateway(2) not in addresses
    assert from_json(NetworkLayout, to_json(layout, wire=True), "layout", wire=True) == layout


def test_a_sites_line_is_laid_out(cluster: Cluster) -> None:
    sites = (dataclasses.replace(cluster.sites[0], uplink_bandwidth_bytes_per_s=5e6), *cluster.sites[1:])
    layout = lay_out(dataclasses.replace(cluster, sites=sites), testbed_id="t", parent_pid=None)
    assert [site.uplink_bandwidth_bytes_per_s for site in layout.sites] == [5e6, None]
    assert [site.downlink_bandwidth_bytes_per_s for site in layout.sites] == [None, None]
    assert from_json(NetworkLayout, to_json(layout, wire=True), "layout", wire=True) == layout


def test_all_that_is_wrong_with_a_cluster_is_said_at_once(cluster: Cluster) -> None:
    link = Link(source="cloud", target="moon", bandwidth_bytes_per_s=1.0, latency_s=0.0)
    wrong = dataclasses.replace(
        cluster,
        hosts=(Host(name="lost", site="mars", devices=()),),
        links=(link, dataclasses.replace(link, target="edge"), dataclasses.replace(link, target="edge")),
    )
    with pytest.raises(TestbedError, match=r"mars.*no site moon.*2 links cloud -> edge"):
        lay_out(wrong, testbed_id="t", parent_pid=None)


def stale_state(directory: Path, router: ProcessMark) -> State:
    state = State(
        directory=str(directory), testbed_id="old", cluster="c", boot_id=boot_id(), router=router,
        keeper=ProcessMark(pid=router.pid, started=1), owner=None, has_user_namespace=False, site_of={}, address_of={},
        namespace_fd_of={}, networks=(os.stat("/proc/self/ns/net").st_ino,),
    )  # fmt: skip
    state.write()
    return state


def test_down_does_not_kill_a_process_that_has_a_dead_routers_id(own_runtime_dir: Path) -> None:
    ours = mark_of(os.getpid())
    state = stale_state(runtime_dir(), ProcessMark(pid=ours.pid, started=ours.started - 1))
    assert read_states() == [state]
    assert not state.running
    assert down_all() == ("old",)
    assert read_states() == []


def test_a_runtime_directory_open_to_others_is_refused(own_runtime_dir: Path) -> None:
    runtime_dir().chmod(0o755)
    with pytest.raises(TestbedError, match="mode 700"):
        runtime_dir()


def test_a_broken_state_file_is_named(own_runtime_dir: Path) -> None:
    (runtime_dir() / "x.json").write_text("{}")
    with pytest.raises(TestbedError, match=r"x\.json is not a testbed's state file"):
        read_states()
