"""Which IP addresses are on the public internet.

The networks are listed here, because the answers of Python's ipaddress differ between its versions, and it does not
know addresses of clouds. Sources: IANA's special-purpose address registries for IPv4 and IPv6 (of 2025-05), its
registry of multicast addresses, and the documentation of the clouds named below.
"""

import ipaddress

_NOT_PUBLIC_IPV4 = [
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host on this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by carriers; 100.100.100.200 is Alibaba Cloud's metadata service
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's platform service, at a public address
        "169.254.0.0/16",  # link-local; 169.254.169.254 is the metadata service of most clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; 192.0.0.192 is Oracle Cloud's metadata service
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays, withdrawn
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
]

# Global unicast is 2000::/3. All else is not public: loopback, unique local (fd00:ec2::254 is AWS's metadata service),
# link-local, site-local, multicast, discard-only (100::/64), local NAT64 (64:ff9b:1::/48), segment routing (5f00::/16),
# IPv4-compatible (::/96) and IPv4-translated (::ffff:0:0:0/96) addresses.
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_IPV6 = [
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, which leads to any IPv4 address, benchmarking, ORCHID, ...
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
]

# IPv6 network -> place of the IPv4 address in it, in bits from the right. That address is where packets go.
_WITH_IPV4 = {
    ipaddress.IPv6Network("::ffff:0:0/96"): 0,  # mapped
    ipaddress.IPv6Network("64:ff9b::/96"): 0,  # NAT64
    ipaddress.IPv6Network("2002::/16"): 80,  # 6to4
}


def is_public(address: str) -> bool:
    """Whether an IP address is on the public internet: unicast, and globally reachable.

    Raises:
        ValueError: the text is not an IP address.
    """
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv4Address):
        return not any(ip in network for network in _NOT_PUBLIC_IPV4)
    for network, place in _WITH_IPV4.items():
        if ip in network:
            return is_public(str(ipaddress.IPv4Address(int(ip) >> place & 0xFFFFFFFF)))
    return ip in _GLOBAL_UNICAST and not any(ip in network for network in _NOT_PUBLIC_IPV6)
