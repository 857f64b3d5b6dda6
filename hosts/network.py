"""The network of a host's guests: a bridge of libvirt's, and a firewall of ours.

A guest reaches the internet and the gateway's name server; it does not reach another
guest, a service of the host, or private and special addresses. It sends from its own
address and MAC or not at all. The host reaches every guest; nobody else does.

    bridge table   per tap: only IPv4 and ARP with the guest's own MAC and address
    inet table     input: DNS and ping to the gateway;  forward: no private destinations

libvirt adds its own rules, NAT among them, by iptables or nftables. They do not interfere:
a packet has to pass every chain of a hook, so what ours drop stays dropped.
"""

import hashlib
import json
import logging
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import NamedTuple
from xml.etree import ElementTree as ET

import libvirt

from hosts.errors import NetworkInUse, NetworkNotReady, NoFreeSubnet

log = logging.getLogger(__name__)

# The rules that tie taps to addresses are written once for the whole subnet (0.1 s and
# 1 MB for 4,094 guests); a host that holds more guests takes more platforms.
WIDEST_PREFIX = 20
NARROWEST_PREFIX = 29

# Private, special and multicast addresses: RFC 6890, RFC 5771. 169.254.0.0/16 holds the
# metadata services of the clouds.
DENIED = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)

COMMAND_TIMEOUT_S = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """The guest network of one platform on one host.

    Attributes:
        bridge: at most 15 characters, of this network alone.
        allowed: destinations that guests reach although they are private.
        denied: destinations that guests do not reach, besides private ones.
    """

    name: str
    bridge: str
    subnet: IPv4Network
    allowed: tuple[IPv4Network, ...] = ()
    denied: tuple[IPv4Network, ...] = ()


class Addresses:
    """The addresses of a subnet, by index: a guest's is 0 … `capacity - 1`.

    The first usable address is the gateway's.
    """

    def __init__(self, subnet: IPv4Network) -> None:
        if not WIDEST_PREFIX <= subnet.prefixlen <= NARROWEST_PREFIX:
            raise ValueError(
                f"A guest subnet is a /{WIDEST_PREFIX} to /{NARROWEST_PREFIX}, not {subnet}."
            )
        self.subnet = subnet
        self.gateway = subnet.network_address + 1
        self.capacity = subnet.num_addresses - 3

    def address(self, index: int) -> IPv4Address:
        """Return the address of a guest.

        Raises:
            IndexError: the subnet has no such index.
        """
        if not 0 <= index < self.capacity:
            raise IndexError(f"{self.subnet} has no guest address {index}.")
        return self.gateway + 1 + index

    def index(self, address: IPv4Address) -> int:
        """Return the index of a guest's address.

        Raises:
            ValueError: it is no guest address of the subnet.
        """
        index = int(address) - int(self.gateway) - 1
        if not 0 <= index < self.capacity:
            raise ValueError(f"{address} is no guest address of {self.subnet}.")
        return index

    def with_prefix(self, address: IPv4Address) -> str:
        """Return an address as a guest configures it: `10.88.0.5/20`."""
        return f"{address}/{self.subnet.prefixlen}"

    def __iter__(self) -> Iterator[IPv4Address]:
        return (self.gateway + 1 + index for index in range(self.capacity))


def addresses(subnet: IPv4Network) -> Addresses:
    """Return the guest addresses of a subnet.

    Raises:
        ValueError: the subnet is too wide or too narrow for guests.
    """
    return Addresses(subnet)


def mac_of(address: IPv4Address) -> str:
    """Return the MAC of the guest at an address: locally administered, one for each."""
    return "52:54:" + ":".join(f"{byte:02x}" for byte in address.packed)


def tap_prefix(network: str) -> str:
    """Return what the names of a network's taps begin with: 9 characters."""
    return f"sk{hashlib.sha256(network.encode()).hexdigest()[:6]}."


def tap_of(network: str, address: IPv4Address) -> str:
    """Return the host's name of a guest's interface: at most 15 characters.

    Derived from the address, so that the rules for it can stand before the guest does.
    """
    return f"{tap_prefix(network)}{int(address) & 0xFFFF:x}"


def table_name(network: str) -> str:
    """Return the name of the network's nftables tables."""
    return "sandkeep_" + "".join(mark if mark.isalnum() else "_" for mark in network)


def network_xml(config: NetworkConfig) -> str:
    """Return the libvirt description of the guest network.

    There is no DHCP: a guest is told its address. The name server answers at the gateway
    and does not tell the host's own `/etc/hosts`.

    Source: https://libvirt.org/formatnetwork.html
    """
    options = "http://libvirt.org/schemas/network/dnsmasq/1.0"
    ET.register_namespace("dnsmasq", options)
    network = ET.Element("network")
    ET.SubElement(network, "name").text = config.name
    ET.SubElement(network, "forward", mode="nat")
    ET.SubElement(network, "bridge", name=config.bridge, stp="off", delay="0")
    ET.SubElement(network, "port", isolated="yes")
    ET.SubElement(
        network,
        "ip",
        address=str(Addresses(config.subnet).gateway),
        netmask=str(config.subnet.netmask),
    )
    extra = ET.SubElement(network, f"{{{options}}}options")
    for option in ("no-hosts", "bogus-priv"):
        ET.SubElement(extra, f"{{{options}}}option", value=option)
    return ET.tostring(network, encoding="unicode")


def ruleset(config: NetworkConfig) -> str:
    """Return the nftables script that puts the network's rules in place, all at once.

    It replaces what a former run left, in one transaction: there is no moment without.
    """
    table = table_name(config.name)
    return "\n".join(
        (
            *(f"add table {family} {table}" for family in ("bridge", "inet")),
            *(f"delete table {family} {table}" for family in ("bridge", "inet")),
            _bridge_table(config, table),
            _inet_table(config, table),
            "",
        )
    )


def _bridge_table(config: NetworkConfig, table: str) -> str:
    senders = ", ".join(
        f'"{tap_of(config.name, address)}" . {mac_of(address)} . {address}'
        for address in Addresses(config.subnet)
    )
    askers = ", ".join(
        f'"{tap_of(config.name, address)}" . {mac_of(address)} . {mac_of(address)} . {address}'
        for address in Addresses(config.subnet)
    )
    return f"""\
table bridge {table} {{
    set senders {{
        typeof iifname . ether saddr . ip saddr
        elements = {{ {senders} }}
    }}
    set askers {{
        typeof iifname . ether saddr . arp saddr ether . arp saddr ip
        elements = {{ {askers} }}
    }}
    chain prerouting {{
        type filter hook prerouting priority -300; policy accept;
        iifname "{tap_prefix(config.name)}*" jump guest
    }}
    chain guest {{
        ether type ip iifname . ether saddr . ip saddr @senders accept
        ether type arp iifname . ether saddr . arp saddr ether . arp saddr ip @askers accept
        counter drop
    }}
}}"""


def _inet_table(config: NetworkConfig, table: str) -> str:
    bridge, gateway = config.bridge, Addresses(config.subnet).gateway
    return f"""\
table inet {table} {{
    set allowed {{
        type ipv4_addr; flags interval; auto-merge;
        {_elements(config.allowed)}
    }}
    set denied {{
        type ipv4_addr; flags interval; auto-merge;
        {_elements((*DENIED, *config.denied))}
    }}
    chain input {{
        type filter hook input priority -10; policy accept;
        iifname "{bridge}" jump to_host
    }}
    chain to_host {{
        meta nfproto ipv6 drop
        ip saddr != {config.subnet} counter drop
        ct state established,related accept
        ip daddr {gateway} udp dport 53 accept
        ip daddr {gateway} tcp dport 53 accept
        ip daddr {gateway} icmp type echo-request limit rate 100/second accept
        counter drop
    }}
    chain forward {{
        type filter hook forward priority -10; policy accept;
        iifname "{bridge}" jump from_guest
        oifname "{bridge}" jump to_guest
    }}
    chain from_guest {{
        meta nfproto ipv6 drop
        oifname "{bridge}" counter drop
        ip saddr != {config.subnet} counter drop
        ip daddr {config.subnet} counter drop
        ip daddr @allowed accept
        ip daddr @denied counter reject with icmp type admin-prohibited
        fib daddr type != unicast counter drop
    }}
    chain to_guest {{
        ct state established,related accept
        counter drop
    }}
}}"""


def _elements(subnets: tuple[IPv4Network, ...]) -> str:
    return f"elements = {{ {', '.join(str(subnet) for subnet in subnets)} }}" if subnets else ""


def ensure_network(config: NetworkConfig, *, uri: str = "qemu:///system") -> None:
    """Make the guest network and its firewall be as described. Safe to repeat.

    The rules come first, so that no guest is ever on the bridge without them.

    Raises:
        NetworkInUse: it is there with another bridge or subnet, and guests are on it.
        NetworkNotReady: nft or libvirt turned it down.
    """
    with _libvirt(config.name, uri) as connection:
        network = _find(connection, config.name)
        active = network is not None and bool(network.isActive())
        if network is not None and active and _differs(network, config):
            if _taps(str(network.bridgeName())):
                raise NetworkInUse(config.name)
            network.destroy()
            active = False
        _nft(config.name, ruleset(config))
        if active:
            return
        # Transient: it goes with the machine, like the rules, and `bin/up` makes both.
        connection.networkCreateXML(network_xml(config))
    log.info("network %s serves guests at %s", config.name, config.subnet)


def remove_network(config: NetworkConfig, *, uri: str = "qemu:///system") -> None:
    """Take the guest network away, then its firewall. Does nothing if it is missing."""
    with _libvirt(config.name, uri) as connection:
        network = _find(connection, config.name)
        if network is not None and network.isActive():
            network.destroy()
    table = table_name(config.name)
    _nft(
        config.name,
        "".join(
            f"add table {family} {table}\ndelete table {family} {table}\n"
            for family in ("bridge", "inet")
        ),
    )


def network_is_ready(config: NetworkConfig, *, uri: str = "qemu:///system") -> bool:
    """Tell whether the network is active, with both of its tables of rules."""
    table = table_name(config.name)
    listing = json.loads(_run(config.name, ["nft", "-j", "list", "tables"]))["nftables"]
    families = {
        entry["table"]["family"]
        for entry in listing
        if "table" in entry and entry["table"]["name"] == table
    }
    if families != {"bridge", "inet"}:
        return False
    with _libvirt(config.name, uri) as connection:
        network = _find(connection, config.name)
        return network is not None and bool(network.isActive())


def free_subnet(
    candidates: Iterable[IPv4Network], *, uri: str = "qemu:///system"
) -> IPv4Network:
    """Return the first candidate that meets no route and no libvirt network of the host.

    Raises:
        NoFreeSubnet: each of them does.
    """
    asked = tuple(candidates)
    taken = [*_routed_subnets(), *_libvirt_subnets(uri)]
    for candidate in asked:
        if not any(candidate.overlaps(subnet) for subnet in taken):
            return candidate
    raise NoFreeSubnet(asked)


def _routed_subnets() -> Iterator[IPv4Network]:
    routes = json.loads(_run("routes", ["ip", "-4", "-j", "route", "show", "table", "all"]))
    for route in routes:
        if route["dst"] != "default" and route.get("type") != "broadcast":
            yield IPv4Network(route["dst"], strict=False)


def _libvirt_subnets(uri: str) -> list[IPv4Network]:
    """Return the subnets of all libvirt networks, started or not."""
    with _libvirt("subnets", uri) as connection:
        found = []
        for network in connection.listAllNetworks():
            for ip in _parsed(network.XMLDesc()).iter("ip"):
                address, mask = ip.get("address"), ip.get("netmask") or ip.get("prefix")
                if address and mask and ip.get("family") != "ipv6":
                    found.append(IPv4Network(f"{address}/{mask}", strict=False))
        return found


class Shape(NamedTuple):
    """What of a network cannot be changed under its guests."""

    bridge: str | None
    address: str | None
    netmask: str | None
    isolated: str | None


def _parsed(xml: str) -> ET.Element:
    return ET.fromstring(xml)  # noqa: S314 - libvirt's own, or ours


def _shape(xml: str) -> Shape:
    network = _parsed(xml)

    def attribute(tag: str, name: str) -> str | None:
        element = network.find(tag)
        return None if element is None else element.get(name)

    return Shape(
        attribute("bridge", "name"),
        attribute("ip", "address"),
        attribute("ip", "netmask"),
        attribute("port", "isolated"),
    )


def _differs(network: "libvirt.virNetwork", config: NetworkConfig) -> bool:
    return _shape(network.XMLDesc()) != _shape(network_xml(config))


def _taps(bridge: str) -> list[str]:
    links = json.loads(_run(bridge, ["ip", "-j", "link", "show", "master", bridge]) or "[]")
    return [link["ifname"] for link in links]


def _find(connection: "libvirt.virConnect", name: str) -> "libvirt.virNetwork | None":
    try:
        return connection.networkLookupByName(name)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_NETWORK:
            return None
        raise


@contextmanager
def _libvirt(name: str, uri: str) -> Iterator["libvirt.virConnect"]:
    # libvirt's own handler prints each error to stderr; ours are raised.
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    try:
        connection = libvirt.open(uri)
        try:
            yield connection
        finally:
            connection.close()
    except libvirt.libvirtError as error:
        raise NetworkNotReady(name, error.get_error_message()) from error


def _nft(name: str, script: str) -> None:
    _run(name, ["nft", "-f", "-"], script)


def _run(name: str, command: list[str], stdin: str = "") -> str:
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkNotReady(name, str(error)) from error
    if done.returncode != 0:
        # nft quotes the whole faulty line, which may hold thousands of elements.
        raise NetworkNotReady(name, f"{command[0]}: {done.stderr.strip()[:500]}")
    return done.stdout
