"""The part of ``eplb check`` that looks at certificates before a peer refuses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from api.deploy.checks.finding import Finding, as_finding
from api.deploy.deployment import Deployment
from eplb.errors import ConfigError, EplbError


def check_certificates(deployment: Deployment, host: int) -> Iterator[Finding]:
    """Check each certificate that a host shows."""
    if deployment.settings.network.tls is not None:
        yield _finding("TLS of links", lambda: check_link_certificate(deployment, host))
    if (certificate := deployment.settings.http.certificate) is not None:
        yield _finding("TLS of HTTP", certificate.check)


def check_link_certificate(deployment: Deployment, host: int) -> str:
    """Refuse a certificate that other hosts would refuse; returns the end of its validity.

    Raises:
        ConfigError: it cannot be used.
    """
    tls = deployment.settings.network.tls
    if tls is None:
        return ""
    try:
        return tls.check(deployment.hosts[host])
    except ConfigError as exc:
        raise ConfigError(f"TLS of links: {exc}") from exc


def _finding(component: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(component, f"the certificate is valid until {check()}")
    except EplbError as exc:
        return as_finding(component, exc)
