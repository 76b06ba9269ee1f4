"""Requests to a running controller, which is found by the files in its run's folder."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.folders import once
from synergy_exec.worker.processes import lives

PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Client:
    """A client of one controller. url: without a path; https if a proxy is in front of it. token: the controller's."""

    url: str
    token: str

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Returns the JSON of the controller's answer. Raises InputError with its error, or why there is no answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        # The controller is on this machine, or named by the user: HTTP_PROXY is not meant for it.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=PATIENCE_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise InputError(_sentence(error)) from None
        except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise InputError(f"no controller answers at {self.url} ({reason}).") from None


def _sentence(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError):
        return f"the controller answered {error.code} {error.reason}."


def client_for(folder: Path, url: str | None) -> Client:
    """A client of the controller below `folder` or at `url`, with the token below `folder` or in SYNERGY_TOKEN."""
    token = os.environ.get("SYNERGY_TOKEN", "")
    if url is not None and token:
        return Client(url.rstrip("/"), token)
    found = _controllers(folder)
    if not found:
        raise InputError(
            f"no controller runs below {folder}. Start one: python -m synergy_exec serve=true "
            f"results_dir={folder}; or say where it is with --dir or --url."
        )
    if len(found) > 1:
        places = ", ".join(str(path) for path, _ in found)
        raise InputError(f"{len(found)} controllers run below {folder}; take one with --dir: {places}.")
    path, values = found[0]
    try:
        token = (path / "token").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InputError(f"{path / 'token'}: the token cannot be read ({error.strerror}).") from error
    return Client((url or values["url"]).rstrip("/"), token)


def running(folder: Path) -> bool:
    """Whether a controller runs below the folder."""
    return bool(_controllers(folder))


def _controllers(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Folders of running controllers, with the contents of their controller.json."""
    found = []
    for work in once((folder, *folder.glob("*"), *folder.glob("*/*"))):
        path = work / "controller.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            elsewhere = values["host"] != os.uname().nodename
            if elsewhere or lives(int(values["pid"]), int(values["began"])):
                found.append((path.parent, values))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
