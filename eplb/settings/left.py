"""Settings of earlier releases that left, and what each is refused with."""

from __future__ import annotations

_NO_LINKS = (
    "experts do not travel between hosts, expected none: a host brings an expert from a GPU of its "
    "own, from its host cache or from disk"
)
_NO_LINK_TLS = (
    "no bytes of experts leave a host, expected none: http.tls_certificate_file is for HTTP"
)
_RECORDS_ALONE = (
    "expected host_cache.records alone: the records to keep, those used last; 0 or none keeps all"
)

# By full name and by the name that stood for it, or the name of a whole section.
SETTINGS_THAT_LEFT = {
    "transport": _NO_LINKS,
    "host_link": _NO_LINKS,
    "host_cache.other_hosts": _NO_LINKS,
    "other_hosts": _NO_LINKS,
    "network.host_cache_port": _NO_LINKS,
    "host_cache_port": _NO_LINKS,
    "network.rank_port": _NO_LINKS,
    "rank_port": _NO_LINKS,
    "staging.network_bytes_per_second": _NO_LINKS,
    "network_bytes_per_second": _NO_LINKS,
    "network.tls_certificate_file": _NO_LINK_TLS,
    "network.tls_key_file": _NO_LINK_TLS,
    "network.tls_ca_file": _NO_LINK_TLS,
    "tls_ca_file": _NO_LINK_TLS,
    "host_cache.mode": _RECORDS_ALONE,
    "host_cache_mode": _RECORDS_ALONE,
}
