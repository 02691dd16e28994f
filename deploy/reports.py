"""The report pages of a folder of runs, served read-only: an index and each run's report, nothing else."""

import html
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

REPORT = "report.html"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""A report is one self-contained page: it may load nothing from anywhere."""


def serve_reports(runs: Path, host: str, port: int) -> None:
    """Serve until interrupted."""
    with report_server(runs, host, port) as server:
        server.serve_forever()


def report_server(runs: Path, host: str, port: int) -> ThreadingHTTPServer:
    """A server that answers GET / and GET /RUN/report.html."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "perennial", ""

        def do_GET(self) -> None:
            page = _page(runs, unquote(self.path.split("?")[0]))
            status = HTTPStatus.NOT_FOUND if page is None else HTTPStatus.OK
            body = b"not found\n" if page is None else page
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer((host, port), Handler)


def _page(runs: Path, path: str) -> bytes | None:
    """The page at a path, or None. Only names that the folder itself lists are ever opened."""
    reports = {found.parent.name: found for found in sorted(runs.glob(f"*/{REPORT}"))}
    if path == "/":
        items = "".join(
            f'<li><a href="/{quote(name)}/{REPORT}">{html.escape(name)}</a></li>' for name in reports
        )
        return f"<!doctype html><title>Perennial</title><h1>Runs</h1><ul>{items}</ul>".encode()
    found = reports.get(path.strip("/").removesuffix(f"/{REPORT}"))
    return None if found is None or not path.endswith(f"/{REPORT}") else found.read_bytes()
