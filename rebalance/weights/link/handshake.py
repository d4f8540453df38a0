"""Handshake: both sides of a connection prove that they have the deployment's secret.

    client                                   server
      | <------ protocol, nonce ---------------- |   or: connection limit reached
      | ------- nonce, proof of the secret ----> |
      | <------ proof, origin, version --------- |   or: the secrets differ
      | ------- request -----------------------> |
      | <------ response, then the record ------ |   or the reason of a refusal

Every kind of listener has its own protocol name, which ends in a version.
"""

from __future__ import annotations

import hmac
import secrets

from eplb.errors import MigrationError
from rebalance.weights.link.wire import Message, Wire

PROTOCOL = "eplb-hosts-1"  # of host caches; each kind of listener has its own
MAX_PROOF_BYTES = 512  # a nonce and a proof take 150
MAX_HELLO_BYTES = 2**16  # the side that is asked names its records beside its proof


def client_handshake(wire: Wire, secret: bytes, *, protocol: str = PROTOCOL) -> Message:
    """Authenticate to a server and check its proof.

    Returns:
        The server's hello message.

    Raises:
        RefusedError: the server's connection limit is reached.
        MigrationError: the secrets differ, or the protocol is another one.
    """
    theirs = wire.receive_answer(max_bytes=MAX_PROOF_BYTES)
    if theirs.get("protocol") != protocol:
        raise MigrationError(f"protocol {theirs.get('protocol')!r}, expected {protocol!r}")
    nonces = secrets.token_hex(16), str(theirs.get("nonce"))
    wire.send({"nonce": nonces[0], "proof": _proof(secret, protocol, "asks", nonces)})
    found = wire.receive(max_bytes=MAX_HELLO_BYTES)
    if "error" in found:
        raise MigrationError(str(found["error"]))
    proof = _proof(secret, protocol, "gives", nonces)
    if not hmac.compare_digest(str(found.get("proof")), proof):
        raise MigrationError(
            "authentication failed: no proof of the deployment's secret from the server"
        )
    return found


def server_handshake(
    wire: Wire, secret: bytes, hello: Message, *, protocol: str = PROTOCOL
) -> None:
    """Authenticate a client, then send the hello message.

    Raises:
        MigrationError: the client has no proof of the secret.
    """
    own = secrets.token_hex(16)
    wire.send({"protocol": protocol, "nonce": own})
    found = wire.receive(max_bytes=MAX_PROOF_BYTES)
    nonces = str(found.get("nonce")), own
    proof = _proof(secret, protocol, "asks", nonces)
    if not hmac.compare_digest(str(found.get("proof")), proof):
        refusal = (
            "authentication failed: the secrets differ, expected the deployment's on both sides"
        )
        wire.send({"error": refusal})
        raise MigrationError(
            "authentication failed: no proof of the deployment's secret from the client"
        )
    wire.send({"proof": _proof(secret, protocol, "gives", nonces)} | hello)


def _proof(secret: bytes, protocol: str, role: str, nonces: tuple[str, str]) -> str:
    """Bound to the role, so that a proof cannot be replayed to its sender."""
    return hmac.new(secret, "|".join((protocol, role, *nonces)).encode(), "sha256").hexdigest()
