"""The guests' network: its addresses and texts, and its firewall with real packets."""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network
from uuid import uuid4
from xml.etree import ElementTree as ET

import pytest

from hosts.errors import NetworkInUse, NoFreeSubnet
from hosts.network import (
    NetworkConfig,
    addresses,
    ensure_network,
    free_subnet,
    mac_of,
    network_is_ready,
    network_xml,
    remove_network,
    ruleset,
    tap_of,
)
from tests.hosts.machine import need_libvirt

SMALL = IPv4Network("10.88.0.0/28")
# A narrow subnet of the documentation range: the machine may have a use for the rest.
UPSTREAM, INTERNET = "203.0.113.253", "203.0.113.254"
PRIVATE = "10.254.77.9"
LINK_LOCAL = "169.254.77.9"
# Ports of the outside's servers, and of the host's own.
PORT, HOST_PORT = 24080, 24081


def test_the_gateway_comes_first_and_guests_follow() -> None:
    guests = addresses(SMALL)

    assert guests.gateway == IPv4Address("10.88.0.1")
    assert list(guests) == [IPv4Address(f"10.88.0.{last}") for last in range(2, 15)]
    assert guests.capacity == 13
    assert guests.with_prefix(guests.address(3)) == "10.88.0.5/28"


def test_an_address_knows_its_index() -> None:
    guests = addresses(IPv4Network("10.88.16.0/20"))

    for index in (0, 1, 255, guests.capacity - 1):
        assert guests.index(guests.address(index)) == index


@pytest.mark.parametrize("index", [-1, 13])
def test_there_is_no_address_outside_the_subnet(index: int) -> None:
    with pytest.raises(IndexError):
        addresses(SMALL).address(index)


@pytest.mark.parametrize("address", ["10.88.0.0", "10.88.0.1", "10.88.0.15", "10.88.0.16"])
def test_gateway_broadcast_and_strangers_are_no_guests(address: str) -> None:
    with pytest.raises(ValueError, match="no guest address"):
        addresses(SMALL).index(IPv4Address(address))


@pytest.mark.parametrize("subnet", ["10.0.0.0/8", "10.88.0.0/19", "10.88.0.0/30"])
def test_a_subnet_too_wide_or_narrow_is_refused(subnet: str) -> None:
    with pytest.raises(ValueError, match="guest subnet"):
        addresses(IPv4Network(subnet))


def test_macs_and_taps_are_one_for_each_address_and_fit() -> None:
    guests = list(addresses(IPv4Network("10.88.0.0/20")))
    taps = {tap_of("sandkeep-ab12cd34", address) for address in guests}

    assert mac_of(IPv4Address("10.88.0.5")) == "52:54:0a:58:00:05"
    assert len({mac_of(address) for address in guests}) == len(guests)
    assert len(taps) == len(guests)
    assert max(len(tap) for tap in taps) <= 15
    assert tap_of("other", guests[0]) not in taps


def test_the_network_is_isolated_and_has_no_dhcp() -> None:
    config = NetworkConfig(name="sktest", bridge="sktest0", subnet=SMALL)

    network = ET.fromstring(network_xml(config))

    assert network.find("port[@isolated='yes']") is not None
    assert network.find("ip[@address='10.88.0.1'][@netmask='255.255.255.240']") is not None
    assert network.find(".//dhcp") is None


def test_what_is_allowed_and_denied_besides_is_in_the_rules() -> None:
    config = NetworkConfig(
        name="sktest",
        bridge="sktest0",
        subnet=SMALL,
        allowed=(IPv4Network("10.1.2.3/32"),),
        denied=(IPv4Network("203.0.113.0/24"),),
    )

    rules = ruleset(config)

    assert "elements = { 10.1.2.3/32 }" in rules
    assert "203.0.113.0/24 }" in rules


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Machine:
    """A network namespace that plays a machine, with `eth0` as its only way out."""

    name: str
    servers: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def stop(self) -> None:
        for server in self.servers:
            server.kill()
            server.wait(10)

    def run(self, *command: str) -> str:
        return run("ip", "netns", "exec", self.name, *command)

    def reaches(self, address: str, port: int, *, source: str = "") -> bool:
        """Tell whether a TCP connection from here is answered."""
        program = (
            "import socket, sys\n"
            "address, port, source = sys.argv[1:]\n"
            "try:\n"
            "    socket.create_connection((address, int(port)), 1, (source, 0)).close()\n"
            "except OSError:\n"
            "    print('refused')\n"
            "else:\n"
            "    print('answered')\n"
        )
        return self.run("python3", "-I", "-c", program, address, str(port), source).startswith(
            "answered"
        )

    def listen(self, port: int) -> None:
        """Answer TCP connections at all of this machine's addresses, until `stop`."""
        ready, done = os.pipe()
        program = (
            "import os, socket, sys\n"
            "server = socket.create_server(('', int(sys.argv[1])))\n"
            "os.write(int(sys.argv[2]), b'.')\n"
            "while True: server.accept()[0].close()\n"
        )
        command = ["python3", "-I", "-c", program, str(port), str(done)]
        self.servers.append(
            subprocess.Popen(["ip", "netns", "exec", self.name, *command], pass_fds=[done])
        )
        os.close(done)
        assert os.read(ready, 1) == b"."
        os.close(ready)


class Machines:
    """Makes machines and takes them away."""

    def __init__(self, config: NetworkConfig) -> None:
        self.config = config
        self._made: list[tuple[Machine, str]] = []

    def _make(self, host_end: str) -> Machine:
        name = f"sktest-{uuid4().hex[:8]}"
        run("ip", "netns", "add", name)
        machine = Machine(name)
        self._made.append((machine, host_end))
        run("ip", "link", "add", host_end, "type", "veth", "peer", "eth0", "netns", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        return machine

    def guest(self, index: int) -> Machine:
        """Make a guest on the bridge, on the tap that a real one would have."""
        guests = addresses(self.config.subnet)
        address = guests.address(index)
        tap = tap_of(self.config.name, address)
        machine = self._make(tap)
        run("ip", "link", "set", tap, "master", self.config.bridge, "up")
        run("bridge", "link", "set", "dev", tap, "isolated", "on")
        run("ip", "-n", machine.name, "link", "set", "eth0", "address", mac_of(address), "up")
        run("ip", "-n", machine.name, "addr", "add", guests.with_prefix(address), "dev", "eth0")
        run("ip", "-n", machine.name, "route", "add", "default", "via", str(guests.gateway))
        return machine

    def outside(self, host_address: str, *own: str) -> Machine:
        """Make a machine behind the host, which knows the way back to guests."""
        host_end = f"skt{uuid4().hex[:8]}"
        machine = self._make(host_end)
        run("ip", "addr", "add", f"{host_address}/30", "dev", host_end)
        run("ip", "link", "set", host_end, "up")
        run("ip", "-n", machine.name, "link", "set", "eth0", "up")
        for address in own:
            run("ip", "-n", machine.name, "addr", "add", f"{address}/30", "dev", "eth0")
        run("ip", "-n", machine.name, "route", "add", "default", "via", host_address)
        for address in own[1:]:
            run("ip", "route", "add", f"{address}/32", "dev", host_end)
        machine.listen(PORT)
        return machine

    def remove(self) -> None:
        for machine, host_end in self._made:
            machine.stop()
            run("ip", "link", "del", host_end)
            run("ip", "netns", "del", machine.name)


@pytest.fixture
def network() -> Iterator[NetworkConfig]:
    need_libvirt()
    config = NetworkConfig(
        name=f"sktest{uuid4().hex[:6]}",
        bridge=f"skt{uuid4().hex[:8]}",
        subnet=free_subnet(IPv4Network(f"10.201.{third}.0/24") for third in range(256)),
    )
    ensure_network(config)
    yield config
    remove_network(config)


@pytest.fixture
def machines(network: NetworkConfig) -> Iterator[Machines]:
    machines = Machines(network)
    try:
        yield machines
    finally:
        machines.remove()


@pytest.fixture
def guest(machines: Machines) -> Machine:
    return machines.guest(0)


@pytest.fixture
def host_service() -> Iterator[int]:
    """A server of the host's that listens everywhere."""
    with socket.create_server(("", HOST_PORT)) as server:
        stopped = threading.Event()
        server.settimeout(0.1)

        def serve() -> None:
            while not stopped.is_set():
                try:
                    server.accept()[0].close()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        yield HOST_PORT
        stopped.set()
        thread.join()


def host_reaches(address: IPv4Address, port: int) -> bool:
    try:
        socket.create_connection((str(address), port), 1).close()
    except OSError:
        return False
    return True


def test_a_guest_reaches_the_internet_and_the_name_server(
    machines: Machines, network: NetworkConfig, guest: Machine
) -> None:
    machines.outside(UPSTREAM, INTERNET)

    assert guest.reaches(INTERNET, PORT)
    assert guest.reaches(str(addresses(network.subnet).gateway), 53)
    guest.run("busybox", "ping", "-c1", "-W2", str(addresses(network.subnet).gateway))


def test_a_guest_does_not_reach_private_and_link_local_addresses(
    machines: Machines, network: NetworkConfig, guest: Machine
) -> None:
    machines.outside(UPSTREAM, INTERNET, PRIVATE, LINK_LOCAL)

    assert guest.reaches(INTERNET, PORT)
    assert not guest.reaches(PRIVATE, PORT)
    assert not guest.reaches(LINK_LOCAL, PORT)


def test_a_private_address_can_be_allowed_and_a_public_one_denied(
    machines: Machines, network: NetworkConfig, guest: Machine
) -> None:
    machines.outside(UPSTREAM, INTERNET, PRIVATE)

    ensure_network(
        replace(
            network,
            allowed=(IPv4Network(f"{PRIVATE}/32"),),
            denied=(IPv4Network("203.0.113.0/24"),),
        )
    )

    assert guest.reaches(PRIVATE, PORT)
    assert not guest.reaches(INTERNET, PORT)


def test_a_guest_does_not_reach_the_hosts_services(
    machines: Machines, network: NetworkConfig, guest: Machine, host_service: int
) -> None:
    outside = machines.outside(UPSTREAM, INTERNET)

    assert outside.reaches(UPSTREAM, host_service)
    assert not guest.reaches(str(addresses(network.subnet).gateway), host_service)
    assert not guest.reaches(UPSTREAM, host_service)


def test_a_guest_does_not_reach_another(
    machines: Machines, network: NetworkConfig, guest: Machine
) -> None:
    guests = addresses(network.subnet)
    other = machines.guest(1)
    other.listen(22)

    directly = guest.reaches(str(guests.address(1)), 22)
    guest.run("ip", "route", "add", f"{guests.address(1)}/32", "via", str(guests.gateway))
    by_the_gateway = guest.reaches(str(guests.address(1)), 22)

    assert host_reaches(guests.address(1), 22)
    assert not directly
    assert not by_the_gateway


def test_the_host_alone_reaches_a_guest(
    machines: Machines, network: NetworkConfig, guest: Machine
) -> None:
    address = addresses(network.subnet).address(0)
    outside = machines.outside(UPSTREAM, INTERNET)
    guest.listen(22)

    assert host_reaches(address, 22)
    assert not outside.reaches(str(address), 22)


def test_a_guest_does_not_send_from_another_address(
    machines: Machines, network: NetworkConfig, guest: Machine
) -> None:
    guests = addresses(network.subnet)
    machines.outside(UPSTREAM, INTERNET)
    stolen = str(guests.address(1))
    guest.run("ip", "addr", "add", guests.with_prefix(guests.address(1)), "dev", "eth0")

    assert guest.reaches(INTERNET, PORT, source=str(guests.address(0)))
    assert not guest.reaches(INTERNET, PORT, source=stolen)
    assert not guest.reaches(str(guests.gateway), 53, source=stolen)


def test_a_guest_does_not_answer_for_anothers_address(
    machines: Machines, network: NetworkConfig, guest: Machine
) -> None:
    guests = addresses(network.subnet)
    guest.run("ip", "addr", "add", guests.with_prefix(guests.address(1)), "dev", "eth0")
    guest.listen(22)

    assert host_reaches(guests.address(0), 22)
    assert not host_reaches(guests.address(1), 22)
    neighbours = json.loads(run("ip", "-j", "neigh", "show", "dev", network.bridge))
    assert [entry["dst"] for entry in neighbours if "lladdr" in entry] == [
        str(guests.address(0))
    ]


def test_a_guest_does_not_send_from_another_mac(
    machines: Machines, network: NetworkConfig, guest: Machine
) -> None:
    gateway = str(addresses(network.subnet).gateway)
    assert guest.reaches(gateway, 53)

    guest.run("ip", "link", "set", "eth0", "address", mac_of(IPv4Address("10.201.0.77")))

    assert not guest.reaches(gateway, 53)


def test_a_guest_speaks_no_ipv6(
    machines: Machines, network: NetworkConfig, guest: Machine
) -> None:
    # Where the host would answer: the bridge is given an address for the test.
    run("sysctl", "-qw", f"net.ipv6.conf.{network.bridge}.disable_ipv6=0")
    run("ip", "addr", "add", "fd00:77::1/64", "dev", network.bridge, "nodad")
    guest.run("ip", "addr", "add", "fd00:77::2/64", "dev", "eth0", "nodad")

    assert not guest.reaches("fd00:77::1", 53, source="fd00:77::2")


def test_ensuring_again_keeps_the_network_and_its_guests(
    machines: Machines, network: NetworkConfig, guest: Machine
) -> None:
    ensure_network(network)

    assert network_is_ready(network)
    assert guest.reaches(str(addresses(network.subnet).gateway), 53)


def test_rules_that_were_lost_come_back(network: NetworkConfig) -> None:
    run("nft", "delete", "table", "bridge", f"sandkeep_{network.name}")
    lost = network_is_ready(network)

    ensure_network(network)

    assert not lost
    assert network_is_ready(network)


def test_a_network_with_guests_is_not_changed(
    machines: Machines, network: NetworkConfig, guest: Machine
) -> None:
    other = free_subnet(IPv4Network(f"10.202.{third}.0/24") for third in range(256))

    with pytest.raises(NetworkInUse):
        ensure_network(replace(network, subnet=other))

    assert guest.reaches(str(addresses(network.subnet).gateway), 53)


def test_a_network_without_guests_takes_another_subnet(network: NetworkConfig) -> None:
    other = free_subnet(IPv4Network(f"10.202.{third}.0/24") for third in range(256))

    ensure_network(replace(network, subnet=other))

    assert str(addresses(other).gateway) in run("ip", "addr", "show", "dev", network.bridge)


def test_a_removed_network_leaves_no_bridge_and_no_rules(network: NetworkConfig) -> None:
    remove_network(network)
    remove_network(network)

    assert not network_is_ready(network)
    assert network.bridge not in run("ip", "-br", "link")
    assert network.name not in run("nft", "list", "tables")


def test_a_subnet_in_use_is_not_free(network: NetworkConfig) -> None:
    beside = free_subnet(IPv4Network(f"10.203.{third}.0/24") for third in range(256))

    assert free_subnet([network.subnet, beside]) == beside
    with pytest.raises(NoFreeSubnet):
        free_subnet([network.subnet])
