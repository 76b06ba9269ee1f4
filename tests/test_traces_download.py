"""The downloader against a server on this machine that resumes, refuses to, breaks off, or sends something else."""

from __future__ import annotations

import errno
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from synergy_core.cli import run
from synergy_core.errors import InputError
from synergy_runs.traces import _download, command
from synergy_runs.traces._download import Source, download

# Bytes that do not compress, so that the archive is longer than the tests' breaks.
JOBS = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(200))
MACHINES = b"machineId,number of GPUs,single GPU mem\n"


@dataclass
class Server:
    """What the server holds and how it behaves; `asked` are the Range headers it saw."""

    body: bytes = b""
    ranges: bool = True
    breaks_after: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    redirect: str = ""
    url: str = ""
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            state.asked.append(wanted)
            if state.redirect:
                self.send_response(302)
                self.send_header("Location", state.redirect)
                self.end_headers()
                return
            if state.statuses:
                self.send_error(state.statuses.pop(0))
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.ranges else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(state.body) - 1}/{len(state.body)}")
            self.send_header("Content-Length", str(len(state.body) - start))
            self.end_headers()
            end = start + state.breaks_after.pop(0) if state.breaks_after else len(state.body)
            self.wfile.write(state.body[start:end])

        def log_message(self, format: str, *values: object) -> None:
            """Nothing."""

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{listening.server_address[1]}/trace.tar.gz"
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield state
    listening.shutdown()
    listening.server_close()
    thread.join()


def archive(files: dict[str, bytes], link: str = "") -> bytes:
    """Packed; link: a name that leads elsewhere."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        if link:
            member = tarfile.TarInfo(link)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(member)
    return buffer.getvalue()


WHOLE = archive({"data/cluster_gpu_util": b"no", "data/cluster_job_log": JOBS, "data/cluster_machine_list": MACHINES})


def source(server: Server, **changes: object) -> Source:
    server.body = server.body or WHOLE
    told = {"name": "philly", "what": "", "page": "https://example.org", "licence": "", "url": server.url,
            "archive": "philly.tar.gz", "size_bytes": len(server.body),
            "sha256": hashlib.sha256(server.body).hexdigest(),
            "wanted": ("cluster_job_log", "cluster_machine_list")}  # fmt: skip
    return Source(**told | changes)  # type: ignore[arg-type]


def fetched(from_: Source, folder: Path) -> list[Path]:
    return download(from_, folder, wait_s=0.0)


def part_of(folder: Path) -> Path:
    return folder / "philly.tar.gz.part"


def test_a_trace_is_fetched_verified_and_unpacked_once(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "traces"
    assert [path.read_bytes() for path in fetched(source(server), folder)] == [JOBS, MACHINES]
    assert {path.name for path in folder.iterdir()} == {"cluster_job_log", "cluster_machine_list", "philly.tar.gz"}
    fetched(source(server), folder)
    (folder / "cluster_job_log").unlink()
    fetched(source(server), folder)
    assert server.asked == [""]


@pytest.mark.parametrize(
    ("behaviour", "part", "asked"),
    [
        ({}, 1_000, ["bytes=1000-"]),
        ({"breaks_after": [500, 700]}, 0, ["", "bytes=500-", "bytes=1200-"]),
        ({"breaks_after": [500], "ranges": False}, 0, ["", "bytes=500-"]),
        ({"statuses": [503, 429]}, 0, ["", "", ""]),
        ({"statuses": [416]}, 10, ["bytes=10-", ""]),
    ],
)
def test_a_download_that_breaks_resumes_or_starts_anew(
    server: Server, tmp_path: Path, behaviour: dict[str, object], part: int, asked: list[str]
) -> None:
    from_ = source(server)
    if part:
        part_of(tmp_path).write_bytes(server.body[:part])
    for name, value in behaviour.items():
        setattr(server, name, value)
    assert fetched(from_, tmp_path)[0].read_bytes() == JOBS
    assert server.asked == asked


def test_a_server_that_always_breaks_off_is_given_up_and_the_part_stays(server: Server, tmp_path: Path) -> None:
    from_ = source(server)
    server.ranges, server.breaks_after = False, [500] * 100
    with pytest.raises(InputError, match=r"stopped after 500 of [\d,]+ bytes.*it resumes.*By hand"):
        fetched(from_, tmp_path)
    assert part_of(tmp_path).stat().st_size == 500
    assert not (tmp_path / "philly.tar.gz").exists()
    assert len(server.asked) == _download.MAX_FRUITLESS_CONNECTIONS + 1


@pytest.mark.parametrize(
    ("body", "changes", "says", "left"),
    [
        (b"", {"sha256": "0" * 64}, r"with sha256 .*, expected .* with 000", []),
        (b"version https://git-lfs", {"size_bytes": 1_000}, "the server offers 23 bytes, expected 1,000", []),
        (b"", {"size_bytes": 10**18}, "bytes free, 1,000,000,000,000,000,000 needed", []),
        (b"", {"url": "http://127.0.0.1:9/trace.tar.gz"}, r"cannot be reached.*By hand: fetch", []),
        (b"", {"sha256": "", "page": "https://example.org/a"}, r"no checksum .*example\.org/a", []),
        (b"<html>not found</html>", {}, "cannot be unpacked", ["philly.tar.gz"]),
        (archive({"cluster_machine_list": MACHINES}), {}, "has no cluster_job_log", None),
    ],
)
def test_what_cannot_be_the_published_file_is_refused(
    server: Server, tmp_path: Path, body: bytes, changes: dict[str, object], says: str, left: list[str] | None
) -> None:
    server.body = body
    with pytest.raises(InputError, match=says):
        fetched(source(server, **changes), tmp_path)
    assert left is None or [path.name for path in tmp_path.iterdir()] == left


def test_what_is_there_already_is_checked(server: Server, tmp_path: Path) -> None:
    from_ = source(server)
    part_of(tmp_path).write_bytes(b"x" * 1_000)
    with pytest.raises(InputError, match="run the same command to fetch it again"):
        fetched(from_, tmp_path)
    server.statuses = [404]
    with pytest.raises(InputError, match=r"answered 404.*By hand: fetch"):
        fetched(from_, tmp_path)
    (tmp_path / "philly.tar.gz").write_bytes(server.body)  # by hand
    server.asked.clear()
    assert fetched(from_, tmp_path)[0].read_bytes() == JOBS
    assert not server.asked
    (tmp_path / "cluster_job_log").unlink()
    (tmp_path / "philly.tar.gz").write_bytes(server.body[:-1])
    with pytest.raises(InputError, match="Remove it and run the same command"):
        fetched(from_, tmp_path)


def test_a_full_disk_is_an_error_and_the_command_can_be_repeated(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path("/dev/full").exists():
        part_of(tmp_path).symlink_to("/dev/full")
        with pytest.raises(InputError, match=r"the disk is full after 0 of .*--to.*it resumes"):
            fetched(source(server), tmp_path)
        part_of(tmp_path).unlink()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(_download.shutil, "copyfileobj", full)
        with pytest.raises(InputError, match=r"cannot unpack into it .No space left"):
            fetched(source(server), tmp_path)
    assert not (tmp_path / "cluster_job_log").exists()
    fetched(source(server), tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        fetched(source(server), tmp_path / "cluster_job_log" / "traces")


def test_paths_and_links_in_an_archive_are_never_followed(server: Server, tmp_path: Path) -> None:
    files = dict.fromkeys(("../../cluster_job_log", "/cluster_machine_list"), b"ok")
    server.body = archive(files, link="cluster_job_log")
    folder = tmp_path / "a" / "b"
    assert [path.read_bytes() for path in fetched(source(server), folder)] == [b"ok", b"ok"]
    assert not (tmp_path / "cluster_job_log").exists()
    assert not (folder / "cluster_job_log").is_symlink()


def test_a_redirect_is_followed_but_never_from_https_to_http() -> None:
    handler = _download._StaySecure()
    request = _download.urllib.request.Request("https://example.org/a")
    with pytest.raises(InputError, match="which is not https"):
        handler.redirect_request(request, None, 302, "Found", {}, "http://example.org/a")
    assert handler.redirect_request(request, None, 302, "Found", {}, "https://example.org/b") is not None


def test_the_command_says_how_to_replay_what_came_and_after_ctrl_c_how_to_go_on(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SOURCES", {"philly": source(server)})
    typed = ["download", "philly", "--to", str(tmp_path)]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    server.breaks_after = [500]
    with monkeypatch.context() as patched:
        patched.setattr(_download.time, "sleep", interrupt)
        with pytest.raises(SystemExit) as left:
            run("error", lambda: command.main(typed), interrupted="go on")
    assert left.value.code == 130
    assert "interrupted; go on" in capsys.readouterr().err
    assert part_of(tmp_path).stat().st_size == 500
    assert command.main(typed) == 0
    said = capsys.readouterr()
    assert f"+trace=philly trace.path={tmp_path / 'cluster_job_log'}" in said.out
    assert said.err == ""
