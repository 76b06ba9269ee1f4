"""Encrypted connections: what the controller shows, and whom agents and commands trust."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from synergy_core.errors import InputError
from synergy_exec.settings import Settings

AUTHORITY = "SYNERGY_AUTHORITY"
"""The environment variable that names the file of certificates that agents and commands trust."""


@dataclass(frozen=True, slots=True)
class Tls:
    """What a controller shows of itself. authority: the file that agents and commands are told to trust."""

    certificate: Path
    key: Path
    authority: Path
    _shown: ssl.SSLContext = field(
        default_factory=lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), compare=False, repr=False
    )

    def shown(self) -> ssl.SSLContext:
        """What it answers with: always the same, with the files as they are now, for connections from then on.

        Raises InputError for files that are no certificate and its key; what was there stays, then.
        """
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        trusting(str(self.authority))
        self._load(self._shown)
        return self._shown

    def _load(self, context: ssl.SSLContext) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key, password=self._no_password)
        except OSError as error:
            raise InputError(
                f"tls_certificate={self.certificate} tls_key={self.key}: they cannot be used "
                f"({error.strerror or error}); expected a certificate and its key, in PEM."
            ) from error

    def _no_password(self) -> str:
        raise InputError(f"tls_key={self.key}: it has a password; expected a key without, which only its owner reads.")


def tls_of(settings: Settings) -> Tls | None:
    """As the keys say; None where connections are not encrypted."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    certificate = Path(settings.tls_certificate).resolve()
    authority = certificate if settings.tls_authority is None else Path(settings.tls_authority).resolve()
    return Tls(certificate, Path(settings.tls_key).resolve(), authority)


def trusting(authority: str) -> ssl.SSLContext:
    """Whom agents and commands trust: what is in that file; "": what this machine trusts. Raises InputError."""
    try:
        return ssl.create_default_context(cafile=authority or None)
    except OSError as error:
        raise InputError(
            f"{authority}: no certificates can be read ({error.strerror or error}); {AUTHORITY} names it."
        ) from error
