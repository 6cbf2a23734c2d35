"""Public and other IP addresses: the same answers on every Python."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.http.addresses import is_public

PUBLIC = (
    *("8.8.8.8", "1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255"),
    *("128.0.0.0", "168.63.129.15", "168.63.129.17", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0"),
    *("191.255.255.255", "192.0.1.0", "192.0.3.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0"),
    *("203.0.112.255", "203.0.114.0", "223.255.255.255", "2606:4700::1111", "2001:4860:4860::8888", "2001:200::1"),
    *("2400::1", "3ffe::1", "3fff:1000::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1", "2620:fe::fe"),
)
OTHERS = (
    *("0.0.0.0", "0.255.255.255", "10.0.0.0", "10.255.255.255", "100.64.0.0", "100.100.100.200", "100.127.255.255"),
    *("127.0.0.1", "127.255.255.255", "168.63.129.16", "169.254.0.0", "169.254.169.254", "169.254.170.2"),
    *("172.16.0.0", "172.31.255.255", "192.0.0.0", "192.0.0.8", "192.0.0.9", "192.0.0.170", "192.0.0.192"),
    *("192.0.0.255", "192.0.2.1", "192.88.99.1", "192.168.0.0", "192.168.255.255", "198.18.0.0", "198.19.255.255"),
    *("198.51.100.1", "203.0.113.255", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:0:8.8.8.8", "::ffff:169.254.169.254", "::ffff:192.0.0.192"),
    *("64:ff9b::a9fe:a9fe", "64:ff9b::a83f:8110", "64:ff9b:1::1", "64:ff9b:1:808:8:800::", "100::1", "100:0:0:1::1"),
    *("2001::1", "2001:0:808:808::f7f7:f7f7", "2001:1::1", "2001:2::1", "2001:10::1", "2001:20::1", "2001:30::1"),
    *("2001:1ff:ffff::1", "2001:db8::1", "2002:7f00:1::", "2002:a9fe:a9fe::", "2002:c000:c0::1", "2002:a83f:8110::"),
    *("3fff::1", "3fff:fff:ffff::1", "5f00::1", "4000::1", "fc00::1", "fd00:ec2::254", "fd20:ce::254", "fe80::1"),
    *("fe80::1%2", "fec0::1", "ff02::1", "ff0e::1"),
)


@pytest.mark.parametrize("address", PUBLIC)
def test_sec_01_public_addresses(address):
    assert is_public(address)


@pytest.mark.parametrize("address", OTHERS)
def test_sec_01_addresses_that_are_not_public(address):
    assert not is_public(address)


@given(st.ip_addresses())
def test_sec_01_python_agrees_about_every_public_address(ip):
    """Newer versions of Python know more networks, but none that is public here."""
    if is_public(str(ip)) and not any(ip in ipaddress.ip_network(n) for n in ("64:ff9b::/96", "2002::/16")):
        assert getattr(ip, "ipv4_mapped", None) or ip.is_global


@given(st.ip_addresses(v=4))
def test_sec_01_an_ipv4_address_within_ipv6_is_checked(ip):
    number = int(ip)
    within = [ipaddress.IPv6Address(0xFFFF << 32 | number), ipaddress.IPv6Address((0x64FF9B << 96) | number)]
    within.append(ipaddress.IPv6Address(0x2002 << 112 | number << 80))
    assert {is_public(str(address)) for address in within} == {is_public(str(ip))}
