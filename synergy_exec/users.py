"""Who may ask a controller what: a file of users, each with a token.

    - name: ann
      role: user                    # reader: looks; user: submits, and changes what is hers; admin: all
      token: 7pXv…                  # or token_sha256: what `printf %s TOKEN | sha256sum` prints
      virtual_cluster: vision       # where her jobs go; none: where their files say
      most_priority: 5              # what her jobs may ask for; 0 unless it is said

The token in the run's folder is an admin's, and the agents'. Without a file of users it is the only one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml  # type: ignore[import-untyped]

from synergy_core.errors import InputError, unknown
from synergy_exec.job_file import MOST_NAME, MOST_PRIORITY
from synergy_exec.plain import MOST_SHOWN, plain

Role = Literal["reader", "user", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
FEWEST_CHARACTERS = 20
"""Of a token: fewer can be guessed, and their hash tried out."""
_HASH = re.compile(r"[0-9a-f]{64}")
_KEYS = ("name", "role", "token", "token_sha256", "virtual_cluster", "most_priority")


@dataclass(frozen=True, slots=True)
class User:
    """Somebody with a token. virtual_cluster: where all jobs of a user go; "": where their files say."""

    name: str
    role: Role
    virtual_cluster: str = ""
    most_priority: int = 0


OWNER = User("", "admin")
"""Whoever has the token in the run's folder."""


class Users:
    """All users, by what SHA-256 makes of their tokens."""

    def __init__(self, known: Mapping[bytes, User]) -> None:
        self._known = dict(known)

    def __len__(self) -> int:
        return len(self._known)

    def of(self, token: bytes) -> User | None:
        """Whose token it is; all are compared, each in constant time."""
        given, found = hashlib.sha256(token).digest(), None
        for digest, user in self._known.items():
            if hmac.compare_digest(digest, given):
                found = user
        return found


def read_users(path: Path | None) -> Users:
    """The users in the file; nobody, where there is none. Raises InputError, which shows no token."""
    if path is None:
        return Users({})
    known: dict[bytes, User] = {}
    for number, entry in enumerate(_entries(path), start=1):
        digest, user = _user(entry, f"{path}: entry {number}")
        if user.name in {each.name for each in known.values()}:
            raise InputError(f"{path}: entry {number}: {user.name} stands there twice; expected each user once.")
        if digest in known:
            raise InputError(f"{path}: {known[digest].name} and {user.name} have the same token; give each its own.")
        known[digest] = user
    return Users(known)


def _entries(path: Path) -> Sequence[Any]:
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            text = stream.read()
    except OSError as error:
        raise InputError(f"{path}: the file of users cannot be read ({error.strerror}).") from error
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (0, os.geteuid()):
        raise InputError(
            f"{path}: others than its owner may read or write the file of users, or it is another's. "
            f"Type: chmod 600 {path}"
        )
    try:
        entries = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # What stands there is not shown: it may be a token.
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise InputError(f"{path}{where}: the file of users is not YAML.") from None
    if not isinstance(entries, list):
        raise InputError(f"{path}: expected a list of users, each with name, role and token.")
    return entries


def _user(entry: Any, where: str) -> tuple[bytes, User]:
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: expected a mapping with name, role and token.")
    for key in entry:
        if key not in _KEYS:
            raise unknown(f"key in {where}", plain(str(key), MOST_SHOWN), _KEYS)
    name = _text(entry, "name", where)
    if not name:
        raise InputError(f"{where}: name is missing.")
    where = f"{where} ({name})"
    role: Role | None = next((each for each in ROLES if each == entry.get("role")), None)
    if role is None:
        raise InputError(f"{where}: role={plain(str(entry.get('role')), 60)}; expected {', '.join(ROLES)}.")
    priority = entry.get("most_priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority <= MOST_PRIORITY:
        raise InputError(f"{where}: most_priority: expected a whole number from 0 to {MOST_PRIORITY}.")
    return _digest(entry, where), User(name, role, _text(entry, "virtual_cluster", where), priority)


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key, "")
    if not isinstance(value, str) or len(value) > MOST_NAME or not value.isprintable() or value != value.strip():
        raise InputError(f"{where}: {key}: expected a text of at most {MOST_NAME} characters on one line.")
    return value


def _digest(entry: Mapping[str, Any], where: str) -> bytes:
    """What SHA-256 makes of the token."""
    token, digest = entry.get("token"), entry.get("token_sha256")
    if (token is None) == (digest is None):
        raise InputError(f"{where}: expected token, or token_sha256.")
    if digest is not None:
        if not isinstance(digest, str) or not _HASH.fullmatch(digest):
            raise InputError(f"{where}: token_sha256: expected 64 digits, 0 to 9 and a to f, in quotes.")
        return bytes.fromhex(digest)
    if not isinstance(token, str) or len(token) < FEWEST_CHARACTERS or not token.isascii() or " " in token:
        raise InputError(
            f"{where}: token: expected {FEWEST_CHARACTERS} characters or more, ASCII and without spaces. One is made "
            "by: python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return hashlib.sha256(token.encode()).digest()
